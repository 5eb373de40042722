"""Text for a terminal."""

from gva.text import printable


def test_what_would_command_a_terminal_is_shown():
    assert printable("\x1b]0;title\x07\x1b[2J a\rb \x9b31m \u202eback") == (
        "\\x1b]0;title\\x07\\x1b[2J a\\x0db \\x9b31m \\x202eback"
    )


def test_text_stays_as_it_is():
    text = "Zwei\tSpalten,\n größer 漢字 👩‍🔬 — fine"
    assert printable(text) == text


def test_half_a_character_can_be_shown():
    """A server may send one, which nothing that writes UTF-8 can take."""
    assert printable("a\ud800").encode() == b"a\\xd800"
