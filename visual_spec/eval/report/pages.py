"""What a comparison shows: a contact sheet of pictures, and one self-contained page for every medium."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from visual_spec.eval.files import data_url, render_page
from visual_spec.eval.report.drawing import (
    GOOD,
    INK,
    MUTED,
    PAPER,
    RUN_COLOURS,
    draw_text,
    fit_square,
    labelled_strip,
    mel_picture,
    text_width,
    wrap_text,
)
from visual_spec.eval.report.maps import legend_strip
from visual_spec.eval.report.rows import ComparisonRow
from visual_spec.files.pictures import png_bytes
from visual_spec.files.whole import write_atomically
from visual_spec.pipelines.audio_files import audio_bytes
from visual_spec.pipelines.video_files import video_bytes
from visual_spec.records import MEDIA

_SHEET_WIDTH = 1000


def contact_sheet(rows: Sequence[ComparisonRow]) -> Image.Image:
    """One picture of all prompts: plain | accelerated | map, with calls, tokens per call and seconds.

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
    titles = "reference" if rows[0].reference else "plain", _kind(rows[0]), rows[0].map_title
    for x, title in zip(columns, titles, strict=True):
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
        verdict, tone = row.verdict
        for place, line in enumerate(wrap_text(verdict, 16, side, most=2)):
            colour = GOOD if tone == "same" else MUTED
            draw_text(draw, (margin, top + panel - 28 + 20 * place), line, 16, colour)
        for x, picture in zip(columns, (row.plain, row.fast), strict=False):
            sheet.paste(fit_square(picture, panel), (x, top))
        drawn = row.draw_map().picture(panel)
        sheet.paste(drawn, (columns[2] + (panel - drawn.width) // 2, top + (panel - drawn.height) // 2))
        for x, words in zip(columns, (*row.costs(), [row.map_caption]), strict=True):
            draw_text(draw, (x, top + panel + 5), ", ".join(words), 15, MUTED)
    sheet.paste(_legend(rows[0], 3 * panel + 2 * gap), (columns[0], sheet.height - footer + 6))
    return sheet


def _legend(row: ComparisonRow, width: int) -> Image.Image:
    (first, _), (second, _), *_ = RUN_COLOURS
    if row.scales is not None:
        return labelled_strip(width, [(first, "first model"), (second, "second model")])
    if row.drafts:
        return legend_strip(width)
    return labelled_strip(width, [(first, "drawn first"), (RUN_COLOURS[0][1], "drawn last")])


def write_html(
    rows: Sequence[ComparisonRow],
    path: str | Path,
    title: str | None = None,
    facts: Mapping[str, object] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write one self-contained page: samples inline, its own style, light and dark, no scripts.

    Players of clips are mp4 where PyAV is installed, and moving gifs otherwise.

    Args:
        rows: the comparisons, one section each.
        path: the page; written under a temporary name and renamed.
        title: heading of the page; None: the usual one of the medium.
        facts: name -> value, shown as a table (model, sampler, device, seed, ...).
        overwrite: replace an existing page.

    Raises:
        ValueError: if `rows` is empty.
        FileExistsError: if `path` exists and `overwrite` is not set.
    """
    _check_rows(rows)
    first = rows[0]
    show = {"image": _pictures, "video": _clips, "audio": _sounds}[first.medium]
    page = render_page(
        "comparison.html.jinja",
        title=title or f"Plain and accelerated {_TITLES[first.medium]}",
        facts=dict(facts or {}),
        first=first,
        kind=_kind(first),
        sections=[{"row": row, "map": row.svg(), **show(row)} for row in rows],
        tiles=_tiles(rows),
        colours=RUN_COLOURS[:2],
    )
    return write_atomically(path, page, overwrite=overwrite)


_TITLES = {"image": "decoding", "video": "video", "audio": "music"}


def _kind(row: ComparisonRow) -> str:
    """Return what the other decoding is called."""
    return "masked" if row.entry_call is not None or row.reference else "accelerated"


def _tiles(rows: Sequence[ComparisonRow]) -> list[tuple[str, str, str]]:
    """The figures at the top of a page: what each is, its value, and what it compares with."""
    first, count = rows[0], len(rows)
    sample = MEDIA[first.medium].samples.removesuffix("s")
    plain_calls, calls = sum(row.plain_calls for row in rows), sum(row.fast_calls for row in rows)
    plain_seconds, seconds = sum(row.plain_seconds for row in rows), sum(row.fast_seconds for row in rows)
    if first.reference:
        cost = f"calls, {plain_seconds / count:.2f} s"
        return [
            (f"model calls a {sample}", f"{calls / count:g}", ""),
            (f"seconds a {sample}", f"{seconds / count:.2f}", ""),
            (f"reference: one {first.unit} a call", f"{plain_calls / count:g}", cost),
        ]
    tiles = [("model calls", str(calls), f"instead of {plain_calls}")]
    if first.scales is None:
        committed = sum(len(row.commit_call) for row in rows)
        tiles.insert(0, (f"{first.unit}s per call", f"{committed / calls:.2f}", ""))
    if all(row.speed_up for row in rows):
        tiles.append(("wall clock of decoding", f"{plain_seconds / seconds:.2f}x", "as fast"))
    same = sum(row.identical for row in rows)
    if not first.drafts and first.scales is None and same < count:
        return [*tiles, ("law", "its own", first.output_law)]
    codes = "codes" if first.medium == "audio" else "tokens"
    return [*tiles, (f"same {codes} as plain", str(same), f"of {count}")]


def _pictures(row: ComparisonRow) -> dict[str, object]:
    plain, fast = (
        {"kind": "image", "url": _picture_url(picture.convert("RGB"))} for picture in (row.plain, row.fast)
    )
    return {"plain": plain, "fast": fast}


def _clips(row: ComparisonRow) -> dict[str, object]:
    strip = Image.fromarray(np.concatenate(list(row.fast), 1))
    players = {"plain": _player(row.plain, row.rate), "fast": _player(row.fast, row.rate)}
    return {**players, "strip": _picture_url(strip)}


def _player(frames: np.ndarray, frame_rate: float) -> dict[str, str]:
    try:
        return {"kind": "video", "url": data_url("video/mp4", video_bytes(frames, frame_rate, "mp4"))}
    except ImportError:
        return {"kind": "image", "url": data_url("image/gif", video_bytes(frames, frame_rate, "gif"))}


def _sounds(row: ComparisonRow) -> dict[str, object]:
    rate, seconds = int(row.rate), row.fast.shape[-1] / row.rate
    plain, fast = (
        {"kind": "audio", "url": data_url("audio/wav", audio_bytes(wave, rate))}
        for wave in (row.plain, row.fast)
    )
    return {
        "plain": None if row.identical else plain,
        "fast": fast,
        "mel": _picture_url(mel_picture(row.fast, rate, _SHEET_WIDTH, 220)),
        "ticks": [f"{tick * seconds / 4:.3g} s" for tick in range(5)],
    }


def _picture_url(picture: Image.Image) -> str:
    return data_url("image/png", png_bytes(picture))


def _check_rows(rows: Sequence[ComparisonRow]) -> None:
    if not rows:
        raise ValueError("no rows to draw; pass at least one ComparisonRow")
