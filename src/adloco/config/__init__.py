"""Settings and recipes: the sections, how they are read from TOML and flags, and how they are
written out.
"""
