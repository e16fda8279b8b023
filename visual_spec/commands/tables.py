"""Tables as aligned columns, for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest


def plain_table(header: Sequence[str], lines: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Aligned columns for the terminal, the first to the left and the others to the right.

    Args:
        width: letters that a line may have. Cells are wrapped at words for it. Where that is not enough, the table is
            split by columns, and each part has the first column. None: any number.
    """
    table = [header, *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    if width is not None and _total(widths) > width:
        return _narrow_table(table, widths, width)
    text = [_joined(line, widths) for line in table]
    text.insert(1, "-" * _total(widths))
    return "\n".join(text)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _joined(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(wide) if column else cell.ljust(wide)
        for column, (cell, wide) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _narrow_table(table: Sequence[Sequence[str]], widths: Sequence[int], width: int) -> str:
    """The table in parts of at most `width` letters a line, with wrapped cells; one word may still be longer."""
    least = [
        max(len(word) for line in table for word in (*line[column].split(), ""))
        for column in range(len(widths))
    ]
    parts: list[list[int]] = []  # columns
    for column in range(1, len(widths)):
        if parts and _total([least[one] for one in (*parts[-1], column)]) <= width:
            parts[-1].append(column)
        else:
            parts.append([0, column])
    return "\n\n".join(_part(table, widths, least, columns, width) for columns in parts)


def _part(
    table: Sequence[Sequence[str]],
    widths: Sequence[int],
    least: Sequence[int],
    columns: Sequence[int],
    width: int,
) -> str:
    fitted = {column: widths[column] for column in columns}
    while _total([*fitted.values()]) > width:
        column = max(columns, key=lambda one: (fitted[one] > least[one], fitted[one]))
        if fitted[column] <= least[column]:
            break
        fitted[column] -= 1
    text = []
    for line in table:
        cells = [
            textwrap.wrap(
                line[column], max(1, fitted[column]), break_long_words=False, break_on_hyphens=False
            )
            for column in columns
        ]
        rows = zip_longest(*cells, fillvalue="")
        text += [_joined(row, [*fitted.values()]) for row in rows]
        if line is table[0]:
            text.append("-" * _total([*fitted.values()]))
    return "\n".join(text)
