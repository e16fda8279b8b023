"""What all charts have in common: matplotlib without a screen, files that are the same every time, parts of a page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_spec.files.extras import extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GOOD, LOSSY = "#1c1e24", "#686a72", "#187642", "#b4430f"
WHITE, LINE, BAND = "#ffffff", "#b9b5aa", "#f0eee8"
# What these colours are called in the style of a page, which has them light and dark.
_PAGE_COLOURS = {
    INK: "--ink",
    MUTED: "--muted",
    GOOD: "--good",
    LOSSY: "--lossy",
    WHITE: "--card",
    LINE: "--axis",
    BAND: "--band",
}

_UNDATED: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}

Point = tuple[str, float, float, float, float]  # name, x, y, low, high


def figure_class() -> type[Figure]:
    """matplotlib's `Figure`; ImportError where it is missing (extra `eval`), as from all that draws a chart."""
    with extra("eval", "charts need matplotlib"):
        from matplotlib.figure import Figure
    return Figure


def chart_ending(path: Path, option: str) -> str:
    """The kind of a chart's file, "png", "svg" or "pdf"; ValueError for a name of another ending."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{option} {path} given; the name must end in .png, .svg or .pdf")
    return path.suffix[1:]


def image_bytes(figure: Any, kind: str) -> bytes:
    """A figure as a file, "svg", "pdf" or "png"; the same results give the same file, without date and random names."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "visual-spec"}):
        figure.savefig(buffer, format=kind, metadata=_UNDATED.get(kind), dpi=160)
    return buffer.getvalue()


def inline_svg(figure: Figure, prefix: str) -> str:
    """A figure as a part of a page: as wide as the page, in the page's colours, its ids made unique by `prefix`."""
    drawing = image_bytes(figure, "svg").decode()
    content = re.sub(r"<metadata>.*?</metadata>", "", drawing[drawing.index("<svg") :], flags=re.DOTALL)
    content = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", content, count=1)
    content = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", content, count=1)
    content = re.sub(r'( id="|href="#|url\(#)', rf"\1{prefix}", content)
    for colour, variable in _PAGE_COLOURS.items():
        content = content.replace(colour, f"var({variable})")
    return content


def draw_points(points: Sequence[Point], across: str, up: str) -> Figure:
    """Numbered points at (x, y) with a bar from low to high, as a figure; without a bar where it has no end."""
    figure = figure_class()(figsize=(6.4, 3.6), layout="constrained")
    panel = figure.subplots()
    for number, (_, x, y, low, high) in enumerate(points, 1):
        bounds = [[y - low], [high - y]] if math.isfinite(low) and math.isfinite(high) else None
        panel.errorbar(x, y, yerr=bounds, fmt="o", color=GOOD, markersize=7, elinewidth=2)
        panel.annotate(str(number), (x, y), (7, 5), textcoords="offset points", color=INK, fontweight="bold")
    panel.margins(0.12)
    panel.set_xlabel(across, color=INK)
    panel.set_ylabel(up, color=INK)
    panel.tick_params(color=MUTED, labelcolor=MUTED)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(MUTED)
    panel.patch.set_visible(False)
    figure.patch.set_visible(False)
    return figure
