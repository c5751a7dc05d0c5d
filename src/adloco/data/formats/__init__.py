"""File formats that data.path reads, one module for each.

A format is a `DataFile` class with `suffixes`, constructed from a file and the name of the text
column. `adloco.data.files` finds the classes in this folder, so a new format takes only a new file.

The library `datasets`, which reads `data.dataset`, is not used for these files (tried with 5.2):

- It cannot open a jsonl file with one broken line at all, and stops reading at one bad byte or half
  a surrogate pair, where the readers here leave out one line.
- None of its errors names a line.
- It turns "\\r\\n" in a text into "\\n".
- Each of its readers leaves lock files in the home folder of a user who asked for no cache.
"""
