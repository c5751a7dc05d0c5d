"""Pieces of a long text, which have the tokens of the whole one after another: the tokens of a text
take many times its memory, and a tokenizer's own notes of them more.
"""

import re
from collections.abc import Iterator

PIECE = 1 << 20
"""Characters of a piece, or a little more."""
END_OF_WORD = re.compile(r"(?<=\S)(?=[ \t\r\n])")


def pieces_of_words(text: str) -> Iterator[str]:
    """Pieces that end with a word or punctuation, before a space, a tab or the end of a line.

    The byte-level tokenizers of GPT-2 divide a text into words, punctuation and white space, with
    a space before a word or punctuation, and no token crosses such a part. So none crosses these
    ends: nothing in a part is followed by white space but white space.
    """
    start = 0
    while found := END_OF_WORD.search(text, start + PIECE):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]
