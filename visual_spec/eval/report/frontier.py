"""Speed-up against quality of all rows of an evaluation, as one self-contained page.

Plain decoding stands at (1, 1): speed-ups are over it, and qualities are shares of its own. A row that is worth
something lies to the right of it and not below; a lossy row below must be compared with plain decoding at a lower
temperature, the squares at speed-up 1, which any sampler could have been traded for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_spec.eval.charts import BAND, GOOD, INK, LINE, LOSSY, MUTED, WHITE, figure_class, inline_svg
from visual_spec.eval.files import data_url, render_page
from visual_spec.eval.words import words_of
from visual_spec.files.documents import json_text
from visual_spec.files.reading import read_object
from visual_spec.files.whole import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
_Point = tuple[float, float, str, str]  # x, y, number, colour
_KEY_COLUMNS = 2
_WIDE = 8  # speed-ups that differ by more than this factor are drawn on a logarithmic axis
# Where a number may stand, from its point; not straight above or below, where the bar is.
_PLACES = (
    (0.9, 0.9),
    (-0.9, 0.9),
    (0.9, -0.9),
    (-0.9, -0.9),
    (0.4, 1.2),
    (0.4, -1.2),
    (-0.4, 1.2),
    (-0.4, -1.2),
)


@dataclass(frozen=True)
class Style:
    """How rows of a kind are drawn: colour and shape, so that the kinds can be told apart in grey too."""

    label: str
    marker: str
    colour: str
    glyph: str


STYLES = {
    "plain": Style("plain decoding", "*", INK, "★"),
    "control": Style("plain decoding otherwise (control)", "s", MUTED, "■"),
    "lossless": Style("lossless", "o", GOOD, "●"),
    "lossy": Style("lossy", "^", LOSSY, "▲"),
}


@dataclass(frozen=True)
class Axis:
    """One axis of a chart. `read`: a row and the plain row to (value, low, high) relative to plain decoding, or None
    where the row was not measured. `absolute`: the value of plain decoding in `unit`; relative value 1 means this."""

    title: str
    read: Callable[[Row, Row], tuple[float, float, float] | None]
    absolute: Callable[[Row], float] | None = None
    unit: str = ""
    lower_is_better: bool = False


def _calls(row: Row, plain: Row) -> tuple[float, float, float]:
    figure = row["speed_up_calls"]
    return figure["value"], figure["low"], figure["high"]


def _cache(row: Row, plain: Row) -> tuple[float, float, float] | None:
    held, whole = row["cache"]["held"], plain["cache"]["held"]
    return None if not held or not whole else (whole / held,) * 3


def _clock(clock: str, key: str) -> Callable[[Row, Row], tuple[float, float, float] | None]:
    def read(row: Row, plain: Row) -> tuple[float, float, float] | None:
        figure = row[clock] and row[clock][key]
        return None if figure is None else (figure["p50"], figure["p20"], figure["p80"])

    return read


def _relative(of: Callable[[Row], Row]) -> Callable[[Row, Row], tuple[float, float, float]]:
    def read(row: Row, plain: Row) -> tuple[float, float, float]:
        figure, one = of(row), of(plain)["value"] or 1.0
        return figure["value"] / one, figure["low"] / one, figure["high"] / one

    return read


def axes_of(document: dict[str, Any], extractor: str) -> tuple[list[Axis], list[Axis]]:
    """The horizontal and the vertical axes of the charts."""

    def frechet(row: Row) -> Row:
        return row["features"][extractor]["frechet_to_real"]

    words = words_of(document)

    def accuracy(row: Row) -> Row:
        return row["accuracy"]["all_correct" if words.caches else "mean_attribute"]

    # On a processor its own seconds: the clock also counts what others did there meanwhile.
    first = document["rows"][0]
    clock = "wall_clock" if first["processor_time"] is None else "processor_time"
    unit = clock.replace("_", " ")
    alone = first[clock]["alone_speed_up"] is not None
    batch = 1 if alone else first[clock]["batch_size"]
    across = [
        # All settings of a next-scale model take one call a scale: what differs is how large models and caches are.
        Axis("times less cache", _cache) if words.caches else Axis("speed-up in model calls", _calls),
        Axis(
            f"speed-up in {unit}, batch {batch} (bars: p20 to p80)",
            _clock(clock, "alone_speed_up" if alone else "speed_up"),
        ),
    ]
    up = []
    if accuracy(first) is not None:
        up.append(
            Axis(
                f"{'class' if words.caches else 'prompt'} accuracy, plain = 1",
                _relative(accuracy),
                lambda row: 100 * accuracy(row)["value"],
                "classes right, %" if words.caches else "attributes right, %",
            )
        )
    if frechet(first) is not None:
        up.append(
            Axis(
                f"Frechet distance to true {words.truth}, plain = 1",
                _relative(frechet),
                lambda row: frechet(row)["value"],
                f"Frechet distance ({extractor} features), low is good",
                True,
            )
        )
    return across, up


def draw_frontier(document: dict[str, Any], extractor: str | None = None) -> Figure:
    """The charts of one evaluation as a matplotlib figure: two speed-ups by two qualities, better is up and right.

    Args:
        extractor: whose features measure distances; None: the first one.

    Raises:
        ImportError: matplotlib is missing (extra `eval`).
        ValueError: no quality was measured: nobody knows what is true of the prompts.
    """
    make = figure_class()
    rows = document["rows"]
    across, up = axes_of(document, extractor or next(iter(rows[0]["features"])))
    if not up:
        raise ValueError(
            "these results have no quality to draw: the parser knows none of their prompts, and there are no true "
            "samples. Pass results of held-out captions, or the sets to visual-spec score --clip."
        )
    lines = -(-len(rows) // _KEY_COLUMNS)
    figure = make(figsize=(12.4, 9.6 + 0.26 * lines), layout="constrained")
    panels = figure.subplots(
        len(up) + 1, len(across), squeeze=False, height_ratios=[*[4.6] * len(up), 0.26 * lines]
    )
    drawn = [
        (panel, _draw_panel(panel, rows, horizontal, vertical))
        for line, vertical in zip(panels, up, strict=False)
        for panel, horizontal in zip(line, across, strict=True)
    ]
    for panel in panels[-1]:
        panel.remove()
    _draw_key(figure.add_subplot(panels[-1][0].get_gridspec()[-1, :]), rows, lines)
    kinds = [kind for kind in STYLES if any(row["kind"] == kind for row in rows)]
    handles = [
        panels[0][0].plot([], [], STYLES[kind].marker, color=STYLES[kind].colour, markersize=10)[0]
        for kind in kinds
    ]
    labels = [STYLES[kind].label for kind in kinds]
    figure.legend(handles, labels, loc="outside upper center", ncols=len(kinds), frameon=False, fontsize=12)
    figure.draw_without_rendering()  # settles the layout, and with it where points lie in pixels
    for panel, points in drawn:
        _number_points(panel, points)
    return figure


def _draw_key(panel: Axes, rows: Sequence[Row], lines: int) -> None:
    """The numbers of the points and what they stand for, in columns."""
    panel.set_axis_off()
    for number, row in enumerate(rows):
        column, line = divmod(number, lines)
        x, y = column / _KEY_COLUMNS, 1 - (line + 0.5) / lines
        colour = STYLES[row["kind"]].colour
        # A point of no size shows the shape in front of the text.
        panel.plot([x + 0.004], [y], STYLES[row["kind"]].marker, color=colour, markersize=7)
        panel.text(x + 0.022, y, f"{number}", fontsize=10, fontweight="bold", color=colour, va="center")
        panel.text(x + 0.046, y, _shortened(row["name"]), fontsize=9.5, color=INK, va="center")
    panel.set(xlim=(0, 1), ylim=(0, 1))


def _shortened(name: str, most: int = 66) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _draw_panel(panel: Any, rows: Sequence[Row], horizontal: Axis, vertical: Axis) -> list[_Point]:
    """Draw the points of a panel with their bars; returns those it has room for numbers beside."""
    plain = rows[0]
    panel.axhline(1, color=LINE, linewidth=1, zorder=0)
    panel.axvline(1, color=LINE, linewidth=1, zorder=0)
    # What plain decoding itself is known to: quality within the band is not told apart from it.
    band = vertical.read(plain, plain)
    assert band is not None
    panel.axhspan(band[1], band[2], color=BAND, zorder=-1)
    points: list[_Point] = []
    for number, row in enumerate(rows):
        x, y = horizontal.read(row, plain), vertical.read(row, plain)
        if x is None or y is None:
            continue
        style = STYLES[row["kind"]]
        panel.errorbar(
            x[0],
            y[0],
            xerr=[[max(0.0, x[0] - x[1])], [max(0.0, x[2] - x[0])]],
            yerr=[[max(0.0, y[0] - y[1])], [max(0.0, y[2] - y[0])]],
            fmt=style.marker,
            color=style.colour,
            markersize=17 if row["kind"] == "plain" else 9,
            markeredgecolor=WHITE,
            markeredgewidth=1,
            elinewidth=1.2,
            alpha=0.95,
            zorder=5 if row["kind"] == "plain" else 3,
        )
        points.append((x[0], y[0], str(number), style.colour))
    across = [x for x, *_ in points]
    # One row that is far away would push all others together.
    if across and max(across) > _WIDE * min(across):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
    panel.margins(0.12)
    if vertical.lower_is_better:
        panel.invert_yaxis()
    panel.set_xlabel(horizontal.title, fontsize=11)
    panel.set_ylabel(vertical.title + (" (axis turned)" if vertical.lower_is_better else ""), fontsize=11)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=10, color=LINE)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(LINE)
    if vertical.absolute is not None:
        one = vertical.absolute(plain)
        other = panel.secondary_yaxis("right", functions=(lambda y: y * one, lambda y: y / (one or 1.0)))
        other.set_ylabel(vertical.unit, fontsize=10, color=MUTED)
        other.tick_params(labelsize=9, colors=MUTED)
        other.spines["right"].set_visible(False)
    return points


def _number_points(panel: Axes, points: Sequence[_Point]) -> None:
    """Write each point's number near it, where it covers least, with a line to the point where it had to move off."""
    scale = panel.figure.dpi / 72
    marks = [panel.transData.transform((x, y)) for x, y, *_ in points]
    taken = [(mx - 6 * scale, my - 6 * scale, mx + 6 * scale, my + 6 * scale) for mx, my in marks]
    for place, ((x, y, text, colour), (mx, my)) in enumerate(zip(points, marks, strict=True)):
        width, height = (7 * len(text) + 2) * scale, 11 * scale
        choices = []
        for reach in (12, 20, 29):
            for dx, dy in _PLACES:
                cx, cy = mx + dx * reach * scale, my + dy * reach * scale
                box = (cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2)
                overlap = sum(_common(box, other) for i, other in enumerate(taken) if i != place)
                away = [math.dist((cx, cy), mark) for mark in marks]
                # A number nearer to another point than to its own would be read as that one's.
                doubtful = sum(distance < 1.3 * away[place] for distance in away) - 1
                choices.append((overlap, doubtful, reach, (dx * reach, dy * reach), box))
        *_, reach, offset, box = min(choices, key=lambda choice: choice[:3])
        taken.append(box)
        panel.annotate(
            text,
            (x, y),
            xytext=offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=10.5,
            fontweight="bold",
            color=colour,
            zorder=6,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkB": 5}
            if reach > 12
            else None,
        )


def _common(a: Sequence[float], b: Sequence[float]) -> float:
    """Area that two boxes (left, bottom, right, top) share."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, width) * max(0.0, height)


def read_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The documents of evaluations. Documents of one model, law, prompts and judge are joined; each row is kept once.

    Raises:
        ValueError: a file that is not a result of `visual-spec eval`, or lacks a part of one.
    """
    results: dict[str, dict[str, Any]] = {}
    for path in paths:
        try:
            document = read_object(path, most=2**30)
        except ValueError as error:
            raise ValueError(f"{error}; pass results.json of visual-spec eval") from error
        if document.get("kind") != "quality":
            raise ValueError(f"{path} holds no evaluation; pass results.json of visual-spec eval")
        _check_complete(document, path)
        document["sheet"] = _sheet(path)
        # Wall clock of another batch, device or type of numbers does not compare: that is another section.
        key = json_text(document["settings"], sort_keys=True)
        if key in results:
            names = {row["name"] for row in results[key]["rows"]}
            results[key]["rows"] += [row for row in document["rows"] if row["name"] not in names]
        else:
            results[key] = document
    return list(results.values())


def _check_complete(document: dict[str, Any], path: Path) -> None:
    """Refuse, by ValueError, a document without all that the page shows: write its table, read the charts' values."""
    from jinja2 import UndefinedError

    try:
        first, *_ = rows = document["rows"]
        section = _section(document | {"sheet": None}, charts=[])
        for extractor in section["extractors"]:
            across, up = axes_of(document, extractor)
            for row in rows:
                _ = STYLES[row["kind"]], [axis.read(row, first) for axis in (*across, *up)]
        json_text(document["settings"], sort_keys=True)
        render_page("frontier.html.jinja", title="", sections=[section], styles=STYLES)
    except KeyError as error:
        raise ValueError(f"{path} is incomplete: it lacks {error}; evaluate again") from error
    except (UndefinedError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is incomplete: {error}; evaluate again") from error


def _section(document: dict[str, Any], charts: list[tuple[str, str]]) -> dict[str, Any]:
    """Return what the template shows of a document."""
    extractors = list(document["rows"][0]["features"])
    return {"document": document, "words": words_of(document), "extractors": extractors, "charts": charts}


def _sheet(path: Path) -> str | None:
    """The picture beside a result, as a data URL."""
    sheet = path.parent / "pictures.png"
    if not sheet.exists():
        return None
    return data_url("image/png", sheet.read_bytes())


def write_page(
    documents: Sequence[dict[str, Any]], path: Path, title: str, *, overwrite: bool = False
) -> Path:
    """Write the page: a section for each document, with its charts, its table and what it was measured on.

    Raises:
        ValueError: no documents.
        FileExistsError: `path` exists and `overwrite` is not set.
    """
    if not documents:
        raise ValueError("no results to draw; pass results.json of visual-spec eval")
    sections = []
    for document in documents:
        charts = []
        for extractor in document["rows"][0]["features"]:
            if not axes_of(document, extractor)[1]:
                continue
            drawn = inline_svg(draw_frontier(document, extractor), f"chart{len(sections)}-{len(charts)}-")
            charts.append((extractor, drawn))
        sections.append(_section(document, charts))
    page = render_page("frontier.html.jinja", title=title, sections=sections, styles=STYLES)
    return write_atomically(path, page, overwrite=overwrite)
