"""A small chart as SVG in the colours of the page: named points with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 16, 50

Point = tuple[str, float, float, float, float]  # name, x, y, low, high


def points_svg(points: Sequence[Point], across: str, up: str) -> str:
    """Points at (x, y) with a bar from low to high, numbered, and their names below.

    Both axes are linear and start and end at round numbers. What has no finite interval is drawn without a bar.
    """
    bounds = [value for _, _, *values in points for value in values if math.isfinite(value)]
    xs, ys = (
        _ticks(min(x for _, x, *_ in points), max(x for _, x, *_ in points)),
        _ticks(min(bounds), max(bounds)),
    )

    def place(x: float, y: float) -> tuple[float, float]:
        share, height = (x - xs[0]) / (xs[-1] - xs[0]), (y - ys[0]) / (ys[-1] - ys[0])
        return (
            _LEFT + share * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - height * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = []
    for y in ys:
        _, top = place(xs[0], y)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in xs:
        left, bottom = place(x, ys[0])
        parts.append(f'<text x="{left:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{x:g}</text>')
    for number, (name, x, y, low, high) in enumerate(points, 1):
        left, top = place(x, y)
        if math.isfinite(low) and math.isfinite(high):
            ends = [place(x, end)[1] for end in (low, high)]
            parts.append(
                f'<line class="bar" x1="{left:.1f}" x2="{left:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}"/>'
            )
        said = f"{escape(name)}: {x:.2f}, {y:.4g}"
        parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="5"><title>{said}</title></circle>')
        anchor, shift = ("end", -9) if left > _WIDTH - _RIGHT - 30 else ("start", 9)
        parts.append(
            f'<text class="number" x="{left + shift:.1f}" y="{top - 7:.1f}" text-anchor="{anchor}">{number}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>')
    half = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text x="14" y="{half:.0f}" text-anchor="middle" transform="rotate(-90 14 {half:.0f})">{escape(up)}</text>'
    )
    return f'<svg class="points" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers around low and high."""
    size = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * size else size or 1.0
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    start, end = math.floor(low / step), math.ceil(high / step)
    return [round(step * place, 12) for place in range(start, max(end, start + 1) + 1)]
