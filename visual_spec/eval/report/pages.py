"""Pictures that show what acceleration did: the acceptance map, the contact sheet and a self-contained page.

A *call* is one forward of the target model. Each call commits a run of slots: the drafts it accepted, then one token
it drew itself. So the last slot of a run is what the call was *paid* for, and the slots before it came *free*.

Of a next-scale model every call commits a whole map of tokens; there the map shows which model drew which.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from visual_spec.eval.files import render_page, write_atomically
from visual_spec.eval.report.drawing import (
    GOOD,
    INK,
    MAP_GROUND,
    MUTED,
    PAPER,
    RUN_COLOURS,
    SUPERSAMPLE,
    draw_bar,
    draw_text,
    fit_square,
    keyed_strip,
    legend_strip,
    png_bytes,
    text_width,
    wrap_text,
)
from visual_spec.models.core.protocol import TokenGrid

_SHEET_WIDTH = 1000


@dataclass
class ComparisonRow:
    """One prompt decoded plainly and accelerated.

    `commit_call` `[L]` long: the call at which each slot of the accelerated picture was committed. `*_calls`: target
    calls of one sample, `*_seconds`: wall clock of its decoding. `identical`: the tokens of both are the same;
    `promised`: the sampler says so without a condition; `output_law`, `near_ties`: what else it says, see
    `DecodeTrace`.

    Raises:
        ValueError: if `commit_call` does not have one non-negative entry for each slot of `grid`, or a count is < 1.
    """

    prompt: str
    plain_image: Image.Image
    fast_image: Image.Image
    commit_call: torch.Tensor
    grid: TokenGrid
    plain_calls: int
    fast_calls: int
    plain_seconds: float
    fast_seconds: float
    identical: bool
    promised: bool = False
    output_law: str = ""
    near_ties: int | None = None

    map_title = "what cost a model call"

    def __post_init__(self) -> None:
        _check_commit_call(self.commit_call, self.grid)
        if self.plain_calls < 1 or self.fast_calls < 1:
            raise ValueError(
                f"plain_calls={self.plain_calls}, fast_calls={self.fast_calls}; a decode has at least 1 call"
            )

    @property
    def tokens_per_call(self) -> float:
        """Committed tokens over target calls, the token each call draws itself included."""
        return self.grid.num_tokens / self.fast_calls

    @property
    def verdict(self) -> str:
        """What was found: the pixels are compared here, the tokens are as `identical` says."""
        if not self.identical:
            return "tokens differ"
        plain, fast = self.plain_image, self.fast_image
        same = plain.mode == fast.mode and plain.size == fast.size and plain.tobytes() == fast.tobytes()
        return "same tokens, same pixels" if same else "same tokens, other pixels"

    @property
    def speed_up(self) -> float:
        """Plain seconds over accelerated seconds; 0 when either was not timed."""
        return (
            self.plain_seconds / self.fast_seconds
            if self.plain_seconds > 0 and self.fast_seconds > 0
            else 0.0
        )

    @property
    def headline(self) -> tuple[str, str]:
        """The figure that matters most, and what it is."""
        return f"{self.tokens_per_call:.2f}", "tokens per call"

    @property
    def map_caption(self) -> str:
        """What the map shows, in numbers."""
        paid = int(paid_slots(self.commit_call).sum())
        return f"{paid} paid, {self.grid.num_tokens - paid} free"

    def draw_map(self, size: int) -> Image.Image:
        """The map beside the pictures, `size` pixels on its longer side, without a legend."""
        return acceptance_map(self.commit_call, self.grid, size, legend=False)

    def draw_legend(self, width: int) -> Image.Image:
        """A strip that explains the map."""
        return legend_strip(width)


@dataclass
class ScaleComparisonRow(ComparisonRow):
    """One class drawn scale by scale: plainly by one model, and by several, or with another cache.

    `sides`: tokens per side of each map; `grid` is all of their slots in a row. `drafted`: how many of the maps the
    first model drew. `*_cache`: bytes of keys and values that were held, at most.
    """

    sides: tuple[int, ...] = ()
    drafted: int = 0
    plain_cache: int = 0
    fast_cache: int = 0

    map_title = "who drew which scale"

    @property
    def headline(self) -> tuple[str, str]:
        """The speed-up; the cache, where the decoding was not timed."""
        if self.speed_up:
            return f"{self.speed_up:.2f}x", "as fast"
        return f"{self.fast_cache / 2**10:.0f}", "KiB of cache"

    @property
    def map_caption(self) -> str:
        """How many scales the first model drew, and the sizes of the caches."""
        cache = f"cache {self.plain_cache / 2**10:.0f} -> {self.fast_cache / 2**10:.0f} KiB"
        return f"{self.drafted} of {len(self.sides)} scales; {cache}"

    def draw_map(self, size: int) -> Image.Image:
        """All token maps in the order they were drawn in, coloured by their model."""
        return scale_map(self.sides, self.drafted, size)

    def draw_legend(self, width: int) -> Image.Image:
        """A strip that explains the colours."""
        return keyed_strip(width, [(RUN_COLOURS[0][0], "first model"), (RUN_COLOURS[1][0], "second model")])


def scale_map(sides: Sequence[int], drafted: int, size: int) -> Image.Image:
    """Draw token maps of growing size one behind the other, cell by cell, those from `drafted` on in another colour.

    Args:
        sides: tokens per side of each map.
        drafted: the number of maps that the first model drew.
        size: pixels of the longer side.

    Raises:
        ValueError: no maps, or a size that leaves less than 2 pixels for a cell.
    """
    if not sides:
        raise ValueError("no maps to draw; pass the sides of at least one")
    # As many columns as make the picture most square: maps go into lines, in cells with one between two maps.
    widths = range(max(sides), sum(sides) + len(sides))
    columns = min(widths, key=lambda width: max(width, _lay_out(sides, width)[1]))
    places, rows = _lay_out(sides, columns)
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


def _lay_out(sides: Sequence[int], columns: int) -> tuple[list[tuple[int, int]], int]:
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
    calls = _check_commit_call(commit_call, grid)
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
    for start, stop in _bars(call, grid.width):
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


def contact_sheet(rows: Sequence[ComparisonRow]) -> Image.Image:
    """One picture of all prompts: plain | accelerated | acceptance map, with calls, tokens per call and seconds.

    Returns:
        An RGB picture 1000 pixels wide, made to be read at that width.

    Raises:
        ValueError: if `rows` is empty.
    """
    _check_rows(rows)
    margin, gap, side, panel = 28, 16, 208, 230
    header, row_height = 62, panel + 44
    footer = 46
    sheet = Image.new("RGB", (_SHEET_WIDTH, header + row_height * len(rows) + footer), PAPER)
    draw = ImageDraw.Draw(sheet)
    columns = [margin + side + gap + i * (panel + gap) for i in range(3)]
    for x, title in zip(columns, ("plain", "accelerated", rows[0].map_title), strict=True):
        draw_text(draw, (x, 24), title, 18, INK, bold=True)
    for index, row in enumerate(rows):
        top = header + index * row_height
        if index:
            draw.line((margin, top - 12, _SHEET_WIDTH - margin, top - 12), fill=(226, 223, 215))
        y = top - 4
        for line in wrap_text(row.prompt, 18, side):
            draw_text(draw, (margin, y), line, 18, INK)
            y += 24
        number, unit = row.headline
        draw_text(draw, (margin, top + panel - 92), number, 44, INK, bold=True)
        draw_text(draw, (margin + text_width(number, 44) + 9, top + panel - 66), unit, 16, MUTED)
        verdict, colour = row.verdict, GOOD if row.identical else MUTED
        draw_text(draw, (margin, top + panel - 22), verdict, 16, colour)
        for x, picture in zip(columns, (row.plain_image, row.fast_image), strict=False):
            sheet.paste(fit_square(picture, panel), (x, top))
        drawn = row.draw_map(panel)
        sheet.paste(drawn, (columns[2] + (panel - drawn.width) // 2, top + (panel - drawn.height) // 2))
        captions = (
            _measured(row.plain_calls, row.plain_seconds),
            _measured(row.fast_calls, row.fast_seconds) + (f" ({row.speed_up:.2f}x)" if row.speed_up else ""),
            row.map_caption,
        )
        for x, text in zip(columns, captions, strict=True):
            draw_text(draw, (x, top + panel + 5), text, 15, MUTED)
    legend = rows[0].draw_legend(3 * panel + 2 * gap)
    sheet.paste(legend, (columns[0], sheet.height - footer + 6))
    return sheet


def write_html(
    rows: Sequence[ComparisonRow],
    path: str | Path,
    title: str = "Plain and accelerated decoding",
    facts: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write one self-contained page: every picture inline, its own style, light and dark, no scripts.

    Args:
        rows: the comparisons, one section each.
        path: the page; written under a temporary name and renamed.
        title: heading of the page.
        facts: name -> value, shown as a table (model, sampler, device, seed, ...).
        overwrite: replace an existing page.

    Raises:
        ValueError: if `rows` is empty.
        FileExistsError: if `path` exists and `overwrite` is not set.
    """
    _check_rows(rows)
    scale_wise = isinstance(rows[0], ScaleComparisonRow)
    sections = []
    for row in rows:
        # Of one slot 24 pixels, or of all scales together as many as a large picture has.
        size = 480 if scale_wise else 24 * max(row.grid.width * row.grid.frames, row.grid.height)
        drawn = row.draw_map(size)
        sections.append(
            {
                "row": row,
                "plain": _data_url(row.plain_image),
                "fast": _data_url(row.fast_image),
                "map": _data_url(drawn),
            }
        )
    plain_seconds, fast_seconds = (
        sum(row.plain_seconds for row in rows),
        sum(row.fast_seconds for row in rows),
    )
    totals = {
        "plain_calls": sum(row.plain_calls for row in rows),
        "fast_calls": sum(row.fast_calls for row in rows),
        "tokens_per_call": sum(row.grid.num_tokens for row in rows) / sum(row.fast_calls for row in rows),
        "speed_up": plain_seconds / fast_seconds if plain_seconds > 0 and fast_seconds > 0 else 0.0,
        "identical": sum(row.identical for row in rows),
    }
    page = render_page(
        "report.html.jinja",
        title=title,
        facts=dict(facts or {}),
        sections=sections,
        totals=totals,
        colours=RUN_COLOURS[:2],
        scale_wise=scale_wise,
    )
    return write_atomically(path, page, overwrite=overwrite)


def _check_rows(rows: Sequence[ComparisonRow]) -> None:
    if not rows:
        raise ValueError("no rows to draw; pass at least one ComparisonRow")


def _check_commit_call(commit_call: torch.Tensor, grid: TokenGrid) -> torch.Tensor:
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


def _bars(call: list[int], width: int) -> list[tuple[int, int]]:
    """Half-open ranges of slots with one call number, broken at the ends of grid rows."""
    bars, start = [], 0
    for slot in range(1, len(call) + 1):
        if slot == len(call) or call[slot] != call[start] or slot % width == 0:
            bars.append((start, slot))
            start = slot
    return bars


def _measured(calls: int, seconds: float) -> str:
    return f"{calls} calls" + (f", {seconds:.2f} s" if seconds > 0 else "")


def _data_url(picture: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png_bytes(picture.convert("RGB"))).decode()
