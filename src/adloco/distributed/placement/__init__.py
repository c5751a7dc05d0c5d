"""Which workers live in this process, and how they run: one process, or the ranks of a process
group.
"""
