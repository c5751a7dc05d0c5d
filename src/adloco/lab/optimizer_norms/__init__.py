"""The norm test in the norm of the inner optimizer's steps."""
