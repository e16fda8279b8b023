"""Maps of calls as pictures: which token cost a model call, and which model drew which scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw

from visual_spec.eval.report.drawing import (
    MAP_GROUND,
    PAPER,
    RUN_COLOURS,
    SUPERSAMPLE,
    draw_bar,
    legend_strip,
)
from visual_spec.models.core.protocol import TokenGrid


def acceptance_map(
    commit_call: torch.Tensor, grid: TokenGrid, size: int, *, legend: bool = True
) -> Image.Image:
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
    calls = check_commit_call(commit_call, grid)
    columns, rows = grid.width * grid.frames, grid.height
    cell = size / max(columns, rows)
    if cell < 3:
        raise ValueError(
            f"size={size} leaves {cell:.1f} pixels for each of {columns} x {rows} slots; "
            f"pass at least {3 * max(columns, rows)}"
        )
    scale = SUPERSAMPLE
    width, height = round(columns * cell), round(rows * cell)
    canvas = Image.new("RGB", (width * scale, height * scale), MAP_GROUND)
    draw = ImageDraw.Draw(canvas)
    paid = paid_slots(calls).tolist()
    call = calls.tolist()
    order = {number: rank for rank, number in enumerate(sorted(set(call)))}
    unit = cell * scale
    for start, stop in bars(call, grid.width):
        frame, y, x = grid.coordinates(start)
        left, top = (frame * grid.width + x) * unit, y * unit
        light, dark = RUN_COLOURS[order[call[start]] % len(RUN_COLOURS)]
        # A bar that goes on in the row above or below runs into the edge there, so that one run reads as one.
        from_above = x == 0 and start > 0 and call[start - 1] == call[start]
        goes_on = stop < len(call) and call[stop] == call[start]
        right = left + (stop - start) * unit
        draw_bar(draw, left, top, right, top + unit, light, square=(from_above, goes_on))
        for slot in range(start, stop):
            if paid[slot]:
                centre_x, centre_y = left + (slot - start + 0.5) * unit, top + 0.5 * unit
                radius = 0.29 * unit
                box = (centre_x - radius, centre_y - radius, centre_x + radius, centre_y + radius)
                draw.ellipse(box, fill=dark)
    picture = canvas.resize((width, height), Image.Resampling.LANCZOS)
    if not legend:
        return picture
    strip = legend_strip(width, sum(paid), len(paid) - sum(paid))
    framed = Image.new("RGB", (width, height + strip.height), PAPER)
    framed.paste(picture, (0, 0))
    framed.paste(strip, (0, height))
    return framed


def scale_map(sides: Sequence[int], drafted: int, size: int) -> Image.Image:
    """Draw token maps of growing size one behind the other, cell by cell, those from `drafted` on in another colour.

    Args:
        sides: tokens per side of each map.
        drafted: the number of maps that the first model drew.
        size: pixels of the longer side.

    Raises:
        ValueError: no maps, or a size that leaves less than 2 pixels for a cell.
    """
    places, columns, rows = lay_out(sides)
    cell = size / max(columns, rows)
    if cell < 2:
        raise ValueError(f"size={size} leaves {cell:.1f} pixels for each of {columns} x {rows} cells")
    unit = cell * SUPERSAMPLE
    canvas = Image.new("RGB", (round(columns * unit), round(rows * unit)), PAPER)
    draw = ImageDraw.Draw(canvas)
    for index, (side, (left, top)) in enumerate(zip(sides, places, strict=True)):
        light, dark = RUN_COLOURS[0 if index < drafted else 1]
        for y in range(side):
            for x in range(side):
                corner = ((left + x) * unit, (top + y) * unit)
                box = (corner[0], corner[1], corner[0] + unit, corner[1] + unit)
                draw.rectangle(box, fill=light, outline=dark, width=max(1, round(unit / 12)))
    return canvas.resize((round(columns * cell), round(rows * cell)), Image.Resampling.LANCZOS)


def lay_out(sides: Sequence[int]) -> tuple[list[tuple[int, int]], int, int]:
    """Left and top cell of each map, and the columns and rows of all: maps stand in lines, a cell between two of them.

    Raises:
        ValueError: no maps.
    """
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


def paid_slots(commit_call: torch.Tensor) -> torch.Tensor:
    """Which slots cost a model call: bool `[L]`, true at the last slot of each call's run.

    The number of true entries is the number of calls that committed anything.
    """
    calls = commit_call.reshape(-1).long().cpu()
    slots = torch.arange(len(calls))
    last = torch.full((int(calls.max()) + 1,), -1).scatter_reduce(0, calls, slots, "amax")
    return last[calls] == slots


def check_commit_call(commit_call: torch.Tensor, grid: TokenGrid) -> torch.Tensor:
    """The calls as integers, one a slot.

    Raises:
        ValueError: they do not fit the grid, or a slot has none.
    """
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


def bars(call: list[int], width: int) -> list[tuple[int, int]]:
    """Half-open ranges of slots with one call number, broken at the ends of grid rows."""
    bars, start = [], 0
    for slot in range(1, len(call) + 1):
        if slot == len(call) or call[slot] != call[start] or slot % width == 0:
            bars.append((start, slot))
            start = slot
    return bars
