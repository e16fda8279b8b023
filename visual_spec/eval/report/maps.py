"""Maps of calls for pages, as SVG: sharp at every width, and on a ground of the page's own colour, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from visual_spec.eval.report.drawing import RUN_COLOURS
from visual_spec.eval.report.pictures import bars, check_commit_call, lay_out, paid_slots
from visual_spec.models.core.protocol import TokenGrid

_CELL = 10  # units of a slot


def acceptance_svg(commit_call: Tensor, grid: TokenGrid, label: str) -> str:
    """Which token cost a model call, see `pictures.acceptance_map`.

    Raises:
        ValueError: `commit_call` does not fit `grid`.
    """
    call = check_commit_call(commit_call, grid).tolist()
    paid = paid_slots(commit_call).tolist()
    rank = {number: rank for rank, number in enumerate(sorted(set(call)))}
    inset, shapes = _CELL // 10, []
    for start, stop in bars(call, grid.width):
        frame, row, column = grid.coordinates(start)
        left, top = (frame * grid.width + column) * _CELL, row * _CELL
        right = left + (stop - start) * _CELL
        light, dark = (_hex(colour) for colour in RUN_COLOURS[rank[call[start]] % len(RUN_COLOURS)])
        shapes.append(_rect(left + inset, top + inset, right - inset, top + _CELL - inset, light, 4))
        # A bar that goes on in the row above or below runs into the edge there, so that one run reads as one.
        if column == 0 and start > 0 and call[start - 1] == call[start]:
            shapes.append(_rect(left, top + inset, left + _CELL / 2, top + _CELL - inset, light))
        if stop < len(call) and call[stop] == call[start]:
            shapes.append(_rect(right - _CELL / 2, top + inset, right, top + _CELL - inset, light))
        for slot in range(start, stop):
            if paid[slot]:
                x = left + (slot - start + 0.5) * _CELL
                shapes.append(f'<circle cx="{x:g}" cy="{top + _CELL / 2:g}" r="2.9" fill="{dark}"/>')
    return _svg(grid.width * grid.frames * _CELL, grid.height * _CELL, shapes, label)


def scales_svg(sides: Sequence[int], drafted: int, label: str) -> str:
    """Who drew which map of a next-scale model, see `pictures.scale_map`.

    Raises:
        ValueError: no maps.
    """
    places, columns, rows = lay_out(sides)
    shapes = []
    for index, (side, (left, top)) in enumerate(zip(sides, places, strict=True)):
        light, dark = (_hex(colour) for colour in RUN_COLOURS[0 if index < drafted else 1])
        x, y, size = left * _CELL, top * _CELL, side * _CELL
        lines = "".join(
            f"M{x + cell * _CELL} {y}v{size}M{x} {y + cell * _CELL}h{size}" for cell in range(side + 1)
        )
        shapes += [_rect(x, y, x + size, y + size, light), f'<path d="{lines}" stroke="{dark}" fill="none"/>']
    return _svg(columns * _CELL, rows * _CELL, shapes, label)


def runs_svg(commit_call: Tensor, label: str) -> str:
    """Which columns of a clip cost a model call, from left to right: runs in their colours, what was paid for dark.

    Args:
        commit_call: long [S], the call at which each column was committed.
    """
    calls, paid = commit_call.tolist(), paid_slots(commit_call).tolist()
    rank = {call: rank for rank, call in enumerate(sorted(set(calls)))}
    marks = [(rank[call] % len(RUN_COLOURS), paid[place]) for place, call in enumerate(calls)]
    shapes, x = [], 0
    for (hue, dark), run in groupby(marks):
        width = len(list(run))
        shapes.append(_rect(x, 0, x + width, 1, _hex(RUN_COLOURS[hue][dark])))
        x += width
    return _svg(len(calls), 1, shapes, label, stretched=True)


def entries_svg(entry_call: Tensor, label: str) -> str:
    """Which call filled in which code of a clip, a row for each codebook, the first one on top.

    Args:
        entry_call: long [S, K], the call at which each code was kept; -1: it was given, and gets no colour.
    """
    count, books = entry_call.shape
    shapes = []
    for book, calls in enumerate(entry_call.T.tolist()):
        x = 0
        for call, run in groupby(calls):
            width = len(list(run))
            if call >= 0:
                shapes.append(
                    _rect(x, book, x + width, book + 1, _hex(RUN_COLOURS[call % len(RUN_COLOURS)][0]))
                )
            x += width
    return _svg(count, books, shapes, label, stretched=True)


def _rect(left: float, top: float, right: float, bottom: float, fill: str, radius: float = 0) -> str:
    rounded = f' rx="{radius:g}"' if radius else ""
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}"{rounded} '
        f'fill="{fill}"/>'
    )


def _svg(width: int, height: int, shapes: Sequence[str], label: str, *, stretched: bool = False) -> str:
    escaped = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    form = ' preserveAspectRatio="none" shape-rendering="crispEdges"' if stretched else ""
    ground = f'<rect class="ground" width="{width}" height="{height}"/>'
    start = f'<svg viewBox="0 0 {width} {height}"{form} role="img" aria-label="{escaped}">'
    return f"{start}{ground}{''.join(shapes)}</svg>"


def _hex(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)
