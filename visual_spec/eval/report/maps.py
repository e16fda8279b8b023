"""Maps of calls: which token cost a model call, which call drew which token, which model drew which scale.

A map is a list of shapes. It is written as SVG for pages, sharp at every width and on a ground of the page's own
colour, and as a picture for sheets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from visual_spec.eval.report.drawing import (
    MAP_GROUND,
    PAPER,
    RUN_COLOURS,
    SUPERSAMPLE,
    Colour,
    labelled_strip,
)
from visual_spec.models.core.protocol import TokenGrid

_CELL = 10  # units of a token
_INSET = 1  # between a bar and the edge of its cell
_BEAD = 2.9  # radius


@dataclass(frozen=True)
class Shape:
    """A filled rectangle with round corners, in units of its map."""

    left: float
    top: float
    right: float
    bottom: float
    colour: Colour
    radius: float = 0


@dataclass(frozen=True)
class Map:
    """Shapes on a ground, later ones over earlier ones.

    Attributes:
        width, height: in units.
        stretched: whether it may be drawn with other proportions.
        ground: colour of the ground of a picture.
    """

    width: int
    height: int
    shapes: tuple[Shape, ...]
    stretched: bool = False
    ground: Colour = MAP_GROUND

    def svg(self, label: str) -> str:
        """The map for a page; `label` is what readers hear who do not see it."""
        escaped = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
        form = ' preserveAspectRatio="none" shape-rendering="crispEdges"' if self.stretched else ""
        start = f'<svg viewBox="0 0 {self.width} {self.height}"{form} role="img" aria-label="{escaped}">'
        ground = f'<rect class="ground" width="{self.width}" height="{self.height}"/>'
        return f"{start}{ground}{''.join(map(_rect, self.shapes))}</svg>"

    def picture(self, size: int) -> Image.Image:
        """The map with `size` pixels on its longer side."""
        pixels = size / max(self.width, self.height)
        width, height = round(self.width * pixels), round(self.height * pixels)
        scale = pixels * SUPERSAMPLE
        canvas = Image.new("RGB", (width * SUPERSAMPLE, height * SUPERSAMPLE), self.ground)
        draw = ImageDraw.Draw(canvas)
        for shape in self.shapes:
            left, top = shape.left * scale, shape.top * scale
            right, bottom = max(left, shape.right * scale - 1), max(top, shape.bottom * scale - 1)
            draw.rounded_rectangle((left, top, right, bottom), shape.radius * scale, fill=shape.colour)
        return canvas.resize((width, height), Image.Resampling.LANCZOS)


def token_map(commit_call: Tensor, grid: TokenGrid, *, drafts: bool = True) -> Map:
    """The tokens of a picture, or of frames from left to right. Those that a call committed together are bars.

    With drafts every call has a colour, and a dark bead marks the token that the call drew itself. Without, a bar is
    the darker, the later its call.

    Raises:
        ValueError: `commit_call` does not fit `grid`.
    """
    calls = check_commit_call(commit_call, grid)
    call, paid = calls.tolist(), paid_slots(calls).tolist()
    rank = {number: rank for rank, number in enumerate(sorted(set(call)))}
    shapes = []
    for start, stop in _bars(call, grid.width):
        frame, row, column = grid.coordinates(start)
        left, top = (frame * grid.width + column) * _CELL, row * _CELL
        right, bottom = left + (stop - start) * _CELL, top + _CELL
        light, dark = RUN_COLOURS[rank[call[start]] % len(RUN_COLOURS)]
        if not drafts:
            light = _between(*RUN_COLOURS[0], rank[call[start]] / max(1, len(rank) - 1))
        upper, lower = top + _INSET, bottom - _INSET
        shapes.append(Shape(left + _INSET, upper, right - _INSET, lower, light, 4))
        # A bar that goes on in the row above or below runs into the edge there, so that one run reads as one.
        if column == 0 and start > 0 and call[start - 1] == call[start]:
            shapes.append(Shape(left, upper, left + _CELL / 2, lower, light))
        if stop < len(call) and call[stop] == call[start]:
            shapes.append(Shape(right - _CELL / 2, upper, right, lower, light))
        for slot in range(start, stop):
            if paid[slot] and drafts:
                x, y = left + (slot - start + 0.5) * _CELL, top + _CELL / 2
                shapes.append(Shape(x - _BEAD, y - _BEAD, x + _BEAD, y + _BEAD, dark, _BEAD))
    return Map(grid.width * grid.frames * _CELL, grid.height * _CELL, tuple(shapes))


def scale_map(sides: Sequence[int], drafted: int) -> Map:
    """Token maps of growing size one after the other, cell by cell, those from `drafted` on in another colour.

    Args:
        sides: tokens per side of each map.
        drafted: the number of maps that the first model drew.

    Raises:
        ValueError: no maps.
    """
    places, columns, rows = _lay_out(sides)
    shapes = []
    for index, (side, (left, top)) in enumerate(zip(sides, places, strict=True)):
        light, dark = RUN_COLOURS[0 if index < drafted else 1]
        x, y, size = left * _CELL, top * _CELL, side * _CELL
        shapes.append(Shape(x, y, x + size, y + size, light))
        for line in range(side + 1):
            at = min(line * _CELL, size - 1)
            shapes.append(Shape(x + at, y, x + at + 1, y + size, dark))
            shapes.append(Shape(x, y + at, x + size, y + at + 1, dark))
    return Map(columns * _CELL, rows * _CELL, tuple(shapes), ground=PAPER)


def strip_map(commit_call: Tensor) -> Map:
    """The columns of a clip, from left to right: runs in their colours, what a call drew itself dark.

    Args:
        commit_call: long [S], the call at which each column was committed.
    """
    calls, paid = commit_call.tolist(), paid_slots(commit_call).tolist()
    rank = {call: rank for rank, call in enumerate(sorted(set(calls)))}
    marks = [RUN_COLOURS[rank[call] % len(RUN_COLOURS)][own] for call, own in zip(calls, paid, strict=True)]
    return Map(len(calls), 1, tuple(_row_shapes(marks, 0)), stretched=True)


def entry_map(entry_call: Tensor) -> Map:
    """Which call filled in which code of a clip, a row for each codebook, the first one on top.

    Args:
        entry_call: long [S, K], the call at which each code was kept; -1: it was given, and gets no colour.
    """
    count, books = entry_call.shape
    shapes: list[Shape] = []
    for book, calls in enumerate(entry_call.T.tolist()):
        marks = [None if call < 0 else RUN_COLOURS[call % len(RUN_COLOURS)][0] for call in calls]
        shapes += _row_shapes(marks, book)
    return Map(count, books, tuple(shapes), stretched=True)


def acceptance_map(commit_call: Tensor, grid: TokenGrid, size: int, *, legend: bool = True) -> Image.Image:
    """Draw which token cost a model call: every run of slots is a bar, and its dark bead is the slot paid for.

    Args:
        commit_call: long `[L]`, the call at which each slot was committed (`DecodeTrace.commit_call[b]`).
        grid: geometry of the tokens; frames are laid out from left to right.
        size: pixels of the longer side of the map.
        legend: add a strip below the map that explains it and counts both kinds.

    Returns:
        An RGB picture, `size` pixels wide for a square grid, taller by the legend.

    Raises:
        ValueError: if `commit_call` does not fit `grid`, or `size` leaves less than 3 pixels for a slot.
    """
    drawn = token_map(commit_call, grid)
    columns, rows = drawn.width // _CELL, drawn.height // _CELL
    if size < 3 * max(columns, rows):
        raise ValueError(
            f"size={size} leaves {size / max(columns, rows):.1f} pixels for each of {columns} x {rows} slots; "
            f"pass at least {3 * max(columns, rows)}"
        )
    picture = drawn.picture(size)
    if not legend:
        return picture
    paid = int(paid_slots(commit_call).sum())
    strip = legend_strip(picture.width, paid, grid.num_tokens - paid)
    framed = Image.new("RGB", (picture.width, picture.height + strip.height), PAPER)
    framed.paste(picture, (0, 0))
    framed.paste(strip, (0, picture.height))
    return framed


def legend_strip(width: int, paid: int | None = None, free: int | None = None) -> Image.Image:
    """A strip that says what bead, bar and colour mean, on as many lines of 24 pixels as the width asks for."""
    light, dark = RUN_COLOURS[0]
    middle, end, edge = _CELL / 2, 3 * _CELL - _INSET, _CELL - _INSET
    bead = Shape(middle - _BEAD, middle - _BEAD, middle + _BEAD, middle + _BEAD, dark, _BEAD)
    hues = (
        Shape(_CELL * index + _INSET, _INSET, _CELL * index + edge, edge, RUN_COLOURS[index][0], 4)
        for index in range(3)
    )
    symbols = (
        (Map(_CELL, _CELL, (bead,)), f"{'' if paid is None else f'{paid} '}paid: cost a model call"),
        (
            Map(3 * _CELL, _CELL, (Shape(_INSET, _INSET, end, edge, light, 4),)),
            f"{'' if free is None else f'{free} '}free: accepted drafts",
        ),
        (Map(3 * _CELL, _CELL, tuple(hues)), "one colour: one call"),
    )
    entries = [(replace(one, ground=PAPER).picture(18 * one.width // _CELL), text) for one, text in symbols]
    return labelled_strip(width, entries)


def paid_slots(commit_call: Tensor) -> Tensor:
    """Which slots cost a model call: bool `[L]`, true at the last slot of each call's run.

    The number of true entries is the number of calls that committed anything.
    """
    calls = commit_call.reshape(-1).long().cpu()
    slots = torch.arange(len(calls))
    last = torch.full((int(calls.max()) + 1,), -1).scatter_reduce(0, calls, slots, "amax")
    return last[calls] == slots


def check_commit_call(commit_call: Tensor, grid: TokenGrid) -> Tensor:
    """The calls as integers, one a slot; ValueError where they do not fit the grid, or a slot has none."""
    calls = torch.as_tensor(commit_call).detach().cpu()
    if calls.shape != (grid.num_tokens,):
        raise ValueError(
            f"commit_call has shape {list(calls.shape)}, but the grid has {grid.num_tokens} slots; "
            "pass the trace of one sample, trace.commit_call[b]"
        )
    if calls.is_floating_point() or int(calls.min()) < 0:
        raise ValueError(
            "commit_call must hold call numbers >= 0 as integers; the decoding did not fill every slot"
        )
    return calls.long()


def _bars(call: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of slots with one call number, broken at the ends of grid rows."""
    for _, run in groupby(range(len(call)), key=lambda slot: (call[slot], slot // width)):
        slots = list(run)
        yield slots[0], slots[-1] + 1


def _row_shapes(marks: Sequence[Colour | None], row: int) -> Iterator[Shape]:
    x = 0
    for colour, run in groupby(marks):
        width = len(list(run))
        if colour is not None:
            yield Shape(x, row, x + width, row + 1, colour)
        x += width


def _lay_out(sides: Sequence[int]) -> tuple[list[tuple[int, int]], int, int]:
    """Left and top cell of each map, and the columns and rows of all: maps stand in lines, a cell between two."""
    if not sides:
        raise ValueError("no maps to draw; pass the sides of at least one")
    # As many columns as make the picture most square.
    widths = range(max(sides), sum(sides) + len(sides))
    columns = min(widths, key=lambda width: max(width, _lines(sides, width)[1]))
    places, rows = _lines(sides, columns)
    return places, columns, rows


def _lines(sides: Sequence[int], columns: int) -> tuple[list[tuple[int, int]], int]:
    """Left and top cell of squares that are set in lines like words, and the number of rows this takes."""
    places, left, top, line = [], 0, 0, 0
    for side in sides:
        if left and left + side > columns:
            left, top, line = 0, top + line + 1, 0
        places.append((left, top))
        left, line = left + side + 1, max(line, side)
    return places, top + line


def _between(light: Colour, dark: Colour, share: float) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(light, dark, strict=True))
    return red, green, blue


def _rect(shape: Shape) -> str:
    rounded = f' rx="{shape.radius:g}"' if shape.radius else ""
    colour = "#" + "".join(f"{part:02x}" for part in shape.colour)
    return (
        f'<rect x="{shape.left:g}" y="{shape.top:g}" width="{shape.right - shape.left:g}" '
        f'height="{shape.bottom - shape.top:g}"{rounded} fill="{colour}"/>'
    )
