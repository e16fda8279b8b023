"""Tables as text: Markdown, and columns for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

_WORDS = (
    "sampler",
    "tokens per call",
    "columns per call",
    "accuracy of",
)  # headers of columns that hold words


Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def column(header: str, form: str, *keys: str, times: float = 1) -> Column:
    """A column that shows some entries of a row, and a dash where one of them is missing or None.

    Args:
        form: how they are written, a format string with a place for each.
        keys: of the entries; `ms_per_image.p50` is an entry of an entry.
        times: what numbers are multiplied by.
    """

    def show(row: Mapping[str, Any]) -> str:
        values = []
        for key in keys:
            value: Any = row
            for name in key.split("."):
                value = None if value is None else value.get(name)
            if value is None:
                return "-"
            values.append(value * times if times != 1 else value)
        return form.format(*values)

    return header, show


def interval(header: str, key: str, digits: int = 2, times: float = 1) -> Column:
    """A column that shows a figure with its interval: `36.0 (34.1-38.0)`."""
    form = f"{{:.{digits}f}} ({{:.{digits}f}}-{{:.{digits}f}})"
    return column(header, form, *(f"{key}.{name}" for name in ("value", "low", "high")), times=times)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    """Markdown: one line a row."""
    lines = [[show(row) for _, show in columns] for row in rows]
    return markdown([header for header, _ in columns], lines)


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
