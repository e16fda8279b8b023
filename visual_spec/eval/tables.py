"""Tables as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_SPECIAL |= {letter: f"\\{letter}" for letter in "&%$#_{}"}

_WORDS = (
    "set",
    "sampler",
    "tokens per call",
    "columns per call",
    "accuracy of",
)  # headers of columns that hold words


Column = tuple[str, Callable[[Mapping[str, object]], str]]


def column(header: str, form: str, *keys: str, times: float = 1) -> Column:
    """A column that shows some entries of a row, and a dash where one of them is missing or None.

    Args:
        form: how they are written, a format string with a place for each.
        keys: of the entries; `ms_per_image.p50` is an entry of an entry.
        times: what numbers are multiplied by.
    """

    def show(row: Mapping[str, object]) -> str:
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


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[Column]) -> str:
    """Markdown: one line a row."""
    return markdown(*cells(rows, columns))


def cells(
    rows: Sequence[Mapping[str, object]], columns: Sequence[Column]
) -> tuple[list[str], list[list[str]]]:
    """The headers, and the cells of each row."""
    return [header for header, _ in columns], [[show(row) for _, show in columns] for row in rows]


def latex(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A `tabular` for `booktabs`. Intervals stay as they are: `36.0 (34.1--38.0)`."""
    ranges = [[re.sub(r"(?<=\d)-(?=\d)", "--", escaped(cell)) for cell in line] for line in lines]
    rows = [" & ".join(line) + r" \\" for line in [[escaped(name) for name in header], *ranges]]
    columns = "".join("l" if name in _WORDS else "r" for name in header)
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", rows[0], r"\midrule", *rows[1:]]
        + [r"\bottomrule", r"\end{tabular}", ""]
    )


def escaped(text: str) -> str:
    """Text as LaTeX shows it."""
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


def csv_text(lines: Sequence[Sequence[object]]) -> str:
    """Lines as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


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
