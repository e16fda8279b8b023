"""The roofline of a machine and where the rows of a benchmark lie under it (Williams et al. 2009).

A call that does F operations and must read M bytes has the arithmetic intensity F / M. It reaches at most that times
the bandwidth, and at most what arithmetic alone reaches; both are measured. M is the bandwidth floor's: weights once,
and the cache. So a row under the sloping part could be faster by the distance to it, and windows move rows to the
right: more operations for the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_spec.eval.charts import figure_class, image_bytes
from visual_spec.eval.timing import median_ms
from visual_spec.files.whole import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#2160aa", "#c4670e", "#207a42", "#7c3891", "#ba3029", "#0f747a", "#686a72", "#8a5a2b")


@dataclass(frozen=True)
class Point:
    """A row under the roof.

    Attributes:
        name: of the row, with its batch and window.
        intensity: operations a byte.
        achieved: operations per second.
        roof: the most that this intensity allows.
    """

    name: str
    intensity: float
    achieved: float
    roof: float


def points_of(rows: Sequence[dict[str, Any]], bandwidth: float, peak: float) -> list[Point]:
    """The rows that tell their operations, in their order.

    Args:
        bandwidth: bytes per second.
        peak: operations per second.
    """
    points = []
    for row in rows:
        if row["flops_per_call"] is None:
            continue
        intensity = row["flops_per_call"] / (row["weight_bytes"] + row["cache_bytes"])
        points.append(
            Point(
                name=f"{row['name']}, batch {row['batch_size']}, window {row['window'] or 1}",
                intensity=intensity,
                achieved=row["flops_per_call"] / (median_ms(row) / 1000),
                roof=min(peak, intensity * bandwidth),
            )
        )
    return points


def draw_roofline(points: Sequence[Point], bandwidth: float, peak: float, title: str) -> Figure:
    """The chart as a matplotlib figure, both axes logarithmic: a numbered point a row, and the roof."""
    figure = figure_class()(figsize=(11.0, 6.2 + 0.17 * len(points)), layout="constrained")
    panel, key = figure.subplots(2, 1, height_ratios=[6.0, 0.17 * len(points) + 0.2])
    ridge = peak / bandwidth
    low = min([ridge, *(point.intensity for point in points)]) / 3
    high = max([ridge, *(point.intensity for point in points)]) * 3
    panel.loglog([low, ridge, high], [low * bandwidth, peak, peak], color="#1c1e24", linewidth=1.5)
    beside: dict[str, Any] = dict(textcoords="offset points")
    floor = f"copies {bandwidth / 1e9:.3g} GB/s"
    panel.annotate(floor, (low, low * bandwidth), xytext=(6, 0), va="top", **beside)
    ceiling = f"matrix products {peak / 1e12:.3g} TFLOP/s"
    panel.annotate(ceiling, (ridge, peak), xytext=(0, 5), ha="left", **beside)
    key.set_axis_off()
    key.set_xlim(0, 1)
    key.set_ylim(len(points), 0)
    for number, point in enumerate(points):
        colour = _COLOURS[number % len(_COLOURS)]
        panel.loglog([point.intensity], [point.achieved], "o", color=colour, markersize=6)
        panel.annotate(
            str(number + 1), (point.intensity, point.achieved), xytext=(5, 3), color=colour, **beside
        )
        share = f"{100 * point.achieved / point.roof:.0f} % of the roof"
        key.text(
            0.0, number + 0.5, f"{number + 1}  {point.name}: {share}", color=colour, fontsize=8.5, va="center"
        )
    panel.set_xlabel("arithmetic intensity, FLOP a byte that must be read")
    panel.set_ylabel("FLOP/s")
    panel.set_title(title)
    panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
    return figure


def write_roofline(document: dict[str, Any], path: Path, *, overwrite: bool = False) -> list[Point]:
    """Draw the rows of a benchmark's document to a .svg or .png file; returns what was drawn.

    Raises:
        FileExistsError: the file is there and `overwrite` is not set.
        ImportError: matplotlib is missing (extra `eval`).
    """
    environment = document["environment"]
    bandwidth, peak = environment["copy_bandwidth"], environment["matmul_flops"]
    points = points_of(document["rows"], bandwidth, peak)
    model = document["settings"]["model"]
    title = f"{model}, {environment['dtype']}, {environment['device_name']}"
    figure = draw_roofline(points, bandwidth, peak, title)
    write_atomically(path, image_bytes(figure, path.suffix[1:]), overwrite=overwrite)
    return points
