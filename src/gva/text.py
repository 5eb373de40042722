"""Text for a terminal."""

from collections.abc import Collection


def aligned(lines: list[list[str]], left: Collection[int] = (0,)) -> list[str]:
    """Cells as columns, those of `left` flush left and the others, which hold numbers, flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<" if i in left else ">" for i in range(len(widths))]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*cells).rstrip() for cells in lines]
