"""Tables as text: Markdown, and columns for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

_WORDS = (
    "sampler",
    "tokens per call",
    "columns per call",
    "accuracy of",
)  # headers of columns that hold words


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, words to the left and numbers to the right."""
    widths = [max(3, *(len(line[i]) for line in [header, *lines])) for i in range(len(header))]
    words = [name in _WORDS for name in header]

    def join(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if left else c.rjust(w) for c, w, left in zip(cells, widths, words, strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = [
        ":" + "-" * (w - 1) if left else "-" * (w - 1) + ":" for w, left in zip(widths, words, strict=True)
    ]
    return "\n".join([join(header), "| " + " | ".join(rule) + " |", *map(join, lines)])


def plain_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns for the terminal, the first to the left and the others to the right."""
    table = [header, *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
    text.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(text)
