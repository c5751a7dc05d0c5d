"""Which workers live in this process, and how they run: in one process, or over several ranks."""
