"""Text for a terminal."""

from collections.abc import Collection

# The control characters, among them the escape, those that turn the direction of what follows, and halves of a
# character, which no terminal can be given.
_RANGES = ((0, 32), (127, 160), (0x202A, 0x202F), (0x2066, 0x206A), (0xD800, 0xE000))
_COMMANDS = {chr(number) for first, end in _RANGES for number in range(first, end)}


def printable(text: str) -> str:
    """Text of a stranger for a terminal: line ends and tabs stay, what would command the terminal is shown instead."""
    return "".join(c if c in "\n\t" or c not in _COMMANDS else f"\\x{ord(c):02x}" for c in text)


def aligned(lines: list[list[str]], left: Collection[int] = (0,)) -> list[str]:
    """Cells as columns, those of `left` flush left and the others, which hold numbers, flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<" if i in left else ">" for i in range(len(widths))]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*cells).rstrip() for cells in lines]
