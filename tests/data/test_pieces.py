"""A text in pieces has the tokens of the whole, if its tokenizer is said to be cut by words; else it stays whole."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gva.data import pieces
from gva.data.tokenizer import TextTokenizer, train_bpe

TEXT = (
    "It's what WE'RE told, isn't it? 'Twas 1234567 days ago:  3.14159 of them;\n"
    "\tfoo(bar)[0] = 'x';\r\n\n  \n We'll see…"
    '  "so" they said!? naïve café, Straße, Ωμέγα. 漢字，仮名。한국어 e\u0301 ① ² ½ \u00a0 \u2028 x_y '
    "don't'd 'sS 's.t a'b ʼn 100,000.00 -- ***bold*** https://example.org/a?b=c&d=e \U0001f600 ok "
    "\U0001f468\u200d\U0001f469"
)


def made(pre_tokenizer, normalizer=None, added=()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(list(added))
    tokenizer.encode_special_tokens = True
    return tokenizer


def split(pattern, **more):
    step = pre_tokenizers.Split(Regex(pattern), "isolated", **more)
    return pre_tokenizers.Sequence([step, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
PATTERNS = sorted(pieces._PATTERNS)
CUT = {
    "gpt-2": made(BYTES),
    "digits": made(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])),
    "one number": made(split(PATTERNS[0]), normalizers.NFC()),
    "three numbers": made(split(PATTERNS[1])),
    "added": made(BYTES, added=["<think>", "..."]),
}
WHOLE = {
    "a space before": made(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "words of another kind": made(split(r"\w+ ?|\W")),
    "other way round": made(split(PATTERNS[0], invert=True)),
    "no words": made(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "metaspace": made(pre_tokenizers.Metaspace()),
    "another normalizer": made(BYTES, normalizers.Lowercase()),
    "an added token of two words": made(BYTES, added=["so they"]),
    "an added token that takes space": made(BYTES, added=[AddedToken("foo", lstrip=True)]),
}


def ids(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    return [i for encoded in tokenizer.encode_batch(texts, add_special_tokens=False) for i in encoded.ids]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(pieces, "LONG", 2)


@pytest.mark.parametrize("name", CUT)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pieces_have_the_tokens_of_the_whole(name, data):
    parts = st.one_of(
        st.sampled_from([*TEXT, *TEXT.split(" "), " ", "\n", ". ", "<|end|>", "<think>", "..."]), st.text(max_size=3)
    )
    pieces.LONG = 2
    for text in (TEXT, "".join(data.draw(st.lists(parts, max_size=40)))):
        cut = list(pieces.pieces(text))
        assert "".join(cut) == text
        assert ids(CUT[name], cut) == ids(CUT[name], [text])


def test_which_tokenizers_are_cut_by_words():
    for known, sure in ((CUT, True), (WHOLE, False)):
        for name, tokenizer in known.items():
            assert pieces.is_cut_by_words(json.loads(tokenizer.to_str())) is sure, name
            known_by = TextTokenizer(tokenizer, 0)
            assert known_by._is_cut_by_words is sure


def test_a_text_that_is_nowhere_surely_cut_stays_whole():
    assert list(pieces.pieces("x" * 100)) == ["x" * 100]
    assert list(pieces.pieces("")) == [""]
    assert len(list(pieces.pieces(TEXT))) > 40


def test_a_bpe_of_one_long_text_is_that_of_its_pieces(monkeypatch):
    in_pieces = train_bpe([TEXT * 20], 400).fingerprint
    monkeypatch.setattr(pieces, "LONG", 10**9)
    assert train_bpe([TEXT * 20], 400).fingerprint == in_pieces
