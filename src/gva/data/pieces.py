"""A long text in pieces, for tokenizers of which it is sure that they cut it there themselves.

A model of a tokenizer sees one word at a time, and what is a word its pre-tokenizer says. With the patterns below no
word goes on from a letter or a number to a space, a line end or a full stop: their alternatives that hold letters or
numbers end with them. Nor does a word depend on more than itself and one character after white space. So a text that is
cut there has the words of the whole, and the tokens of its pieces, joined, are its tokens.
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

LONG = 2**16  # characters of a piece, before a place is looked for

# As regular expressions of tokenizers write it: GPT-2's, which its ByteLevel has built in; Llama 3's and Qwen's.
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_PATTERNS = {_HEAD + r"\p{N}{1,3}" + _TAIL, _HEAD + r"\p{N}" + _TAIL}
_PLACE = re.compile(r"[^\W_](?=[ \n.,;:!?。，、；：！？])")
# Letters and numbers of an old Unicode and of Python's are those of what a tokenizer was built with too.
_category = unicodedata.ucd_3_2_0.category


def pieces(text: str) -> Iterator[str]:
    """Pieces of a little over LONG characters; the whole text if it is shorter, or nowhere surely cut."""
    start = 0
    while (end := _place(text, start + LONG)) < len(text):
        yield text[start:end]
        start = end
    yield text[start:]


def _place(text: str, first: int) -> int:
    """The first sure place from `first` on, or the end."""
    sure = (m.end() for m in _PLACE.finditer(text, first) if _category(m.group())[0] in "LN")
    return next(sure, len(text)) if first < len(text) else len(text)


def is_cut_by_words(tokenizer: dict[str, Any]) -> bool:
    """Whether a tokenizer.json surely cuts at the places of `pieces`."""
    steps = tokenizer["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    *before, last = steps
    plain = (tokenizer["normalizer"] or {"type": "NFC"})["type"] == "NFC"
    plain &= tokenizer["model"].get("dropout") is None and all(map(_is_a_word, tokenizer["added_tokens"]))
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return False
    if last["use_regex"]:
        return plain and all(step["type"] == "Digits" for step in before)
    return plain and len(before) == 1 and _splits(before[0])


def _splits(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer makes words of the matches of one of the patterns."""
    known = step.get("pattern", {}).get("Regex") in _PATTERNS
    return step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"] and known


def _is_a_word(token: dict[str, Any]) -> bool:
    """Whether an added token is found in a piece as in the whole: special ones are text like any other, the rest must
    not lie across a place, nor look beyond their ends."""
    looks = token["single_word"] or token["lstrip"] or token["rstrip"]
    return token["special"] or not (looks or _PLACE.search(token["content"]))
