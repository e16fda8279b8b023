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

from visual_spec.eval.files import render_page
from visual_spec.eval.report.drawing import (
    GOOD,
    INK,
    MUTED,
    PAPER,
    RUN_COLOURS,
    draw_text,
    fit_square,
    keyed_strip,
    legend_strip,
    png_bytes,
    text_width,
    wrap_text,
)
from visual_spec.eval.report.maps import acceptance_svg, scales_svg
from visual_spec.eval.report.pictures import acceptance_map, check_commit_call, paid_slots, scale_map
from visual_spec.files.whole import write_atomically
from visual_spec.models.core.protocol import TokenGrid

_SHEET_WIDTH = 1000


@dataclass
class ComparisonRow:
    """One prompt decoded plainly and accelerated.

    `commit_call` `[L]` long: the call at which each slot of the accelerated picture was committed. `*_calls`: target
    calls of one sample, `*_seconds`: wall clock of its decoding. `identical`: the tokens of both are the same;
    `promised`: the sampler says so without a condition; `output_law`, `near_ties`: what else it says, see
    `DecodeTrace`. `head_calls`: of a model of continuous tokens, calls of its head that waited for each other, of both.

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
    head_calls: tuple[int, int] | None = None

    map_title = "what cost a model call"

    def __post_init__(self) -> None:
        check_commit_call(self.commit_call, self.grid)
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

    def draw_svg(self) -> str:
        """The same map for a page."""
        return acceptance_svg(self.commit_call, self.grid, f"{self.map_title}: {self.map_caption}")

    def draw_legend(self, width: int) -> Image.Image:
        """A strip that explains the map."""
        return legend_strip(width)


@dataclass
class ScaleComparisonRow(ComparisonRow):
    """One class drawn scale by scale: plainly by one model, and by several, or with another cache.

    `sides`: tokens per side of each map that was drawn; `grid` is all of their slots in a row. `plain_tokens`: tokens
    of the plain picture, more than the slots of the grid if the other one leaves out scales. `drafted`: how many of the
    maps the first model drew. `*_cache`: bytes of keys and values that were held, at most.
    """

    sides: tuple[int, ...] = ()
    plain_tokens: int = 0
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

    def draw_svg(self) -> str:
        """The same maps for a page."""
        return scales_svg(self.sides, self.drafted, f"{self.map_title}: {self.map_caption}")

    def draw_legend(self, width: int) -> Image.Image:
        """A strip that explains the colours."""
        return keyed_strip(width, [(RUN_COLOURS[0][0], "first model"), (RUN_COLOURS[1][0], "second model")])


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
        room = side - text_width(unit, 16) - 9
        size = next(size for size in range(44, 0, -2) if text_width(number, size) <= room or size < 16)
        draw_text(draw, (margin, top + panel - 48 - size), number, size, INK, bold=True)
        draw_text(draw, (margin + text_width(number, size) + 9, top + panel - 66), unit, 16, MUTED)
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
    sections = [
        {
            "row": row,
            "plain": _data_url(row.plain_image),
            "fast": _data_url(row.fast_image),
            "map": row.draw_svg(),
        }
        for row in rows
    ]
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
        scale_wise=isinstance(rows[0], ScaleComparisonRow),
    )
    return write_atomically(path, page, overwrite=overwrite)


def _check_rows(rows: Sequence[ComparisonRow]) -> None:
    if not rows:
        raise ValueError("no rows to draw; pass at least one ComparisonRow")


def _measured(calls: int, seconds: float) -> str:
    return f"{calls} calls" + (f", {seconds:.2f} s" if seconds > 0 else "")


def _data_url(picture: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png_bytes(picture.convert("RGB"))).decode()
