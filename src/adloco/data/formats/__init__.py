"""File formats that data.path reads, a file each.

A format is a class with `suffixes` that is made from a file and the name of the text column, and is
a `DataFile`. `adloco.data.files` finds the classes of this folder, so that a new file is all that a
new format takes.

Why these are not read with the library `datasets`, which reads `data.dataset` (tried with 5.2):
a jsonl file with one broken line cannot be opened at all, and one bad byte or half a surrogate pair
ends the file, where here one line is left out; no error names a line; "\\r\\n" in a text becomes
"\\n"; and each reader leaves lock files in the home folder of a user who asked for no cache.
"""
