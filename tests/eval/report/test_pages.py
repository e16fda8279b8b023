"""The acceptance map against a plain recomputation, read back from its pixels; the sheet; the page."""

import base64
import io
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from PIL import Image, ImageChops

from tests.helpers.pages import calls_of, row
from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_pipeline
from visual_spec.eval.report import drawing
from visual_spec.eval.report.drawing import MAP_GROUND, PAPER, RUN_COLOURS, text_width
from visual_spec.eval.report.maps import acceptance_map, paid_slots, scale_map
from visual_spec.eval.report.pages import contact_sheet, write_html
from visual_spec.eval.report.rows import ComparisonRow, Scales
from visual_spec.files import whole
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

RUNS = [[1, 4, 1, 1, 9], [16], [1] * 16, [1, 15], [3, 3, 3, 3, 3, 1], [7, 2, 7]]


def test_long_words_are_cut_to_the_width_without_measuring_every_length(monkeypatch):
    measured: list[str] = []

    def count(text: str, size: int) -> int:
        measured.append(text)
        return text_width(text, size)

    monkeypatch.setattr(drawing, "text_width", count)
    word = "abcdefgh" * 10_000
    (line,) = drawing.wrap_text(word, 18, 208)
    kept = line.removesuffix("...")
    assert word.startswith(kept) and line != kept
    assert text_width(line, 18) <= 208 < text_width(word[: len(kept) + 1] + "...", 18)
    assert sum(map(len, measured)) < 20_000
    assert len(drawing.wrap_text("word " * 100_000, 18, 208)) == 5


# -- which slots are paid ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", RUNS)
def test_the_last_slot_of_every_run_is_paid(runs):
    expected = [place == length - 1 for length in runs for place in range(length)]
    paid = paid_slots(calls_of(runs))
    assert paid.tolist() == expected
    assert int(paid.sum()) == len(runs)


def test_paid_slots_of_a_real_decoding_are_its_calls():
    pipe = tiny_pipeline(SpeculativeJacobiSampler(window=4))
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    trace = pipe(["a red circle", "a blue square"], generator=generators).trace
    for sample in range(2):
        assert int(paid_slots(trace.commit_call[sample]).sum()) == int(trace.target_calls[sample])


def test_calls_that_commit_out_of_raster_order_are_paid_at_their_last_slot():
    paid = paid_slots(torch.tensor([0, 1, 2, 1, 2, 2, 1]))
    assert paid.nonzero()[:, 0].tolist() == [0, 5, 6]


# -- the map ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("cell", [12, 23])
def test_the_map_shows_every_slot_in_the_colour_of_its_run(runs, cell):
    picture = acceptance_map(calls_of(runs), TokenGrid(4, 4), 4 * cell, legend=False)
    assert picture.size == (4 * cell, 4 * cell)
    expected = [(call, place == length - 1) for call, length in enumerate(runs) for place in range(length)]
    for slot, (call, paid) in enumerate(expected):
        y, x = divmod(slot, 4)
        assert_near(
            picture.getpixel((int((x + 0.5) * cell), int((y + 0.5) * cell))), RUN_COLOURS[call % 6][int(paid)]
        )


def test_a_run_that_goes_on_in_the_next_row_reaches_the_edges_and_another_does_not():
    picture = acceptance_map(calls_of([6, 2, 4, 4]), TokenGrid(4, 4), 80, legend=False)
    middle = [10 + 20 * y for y in range(4)]
    assert_near(picture.getpixel((79, middle[0])), RUN_COLOURS[0][0])  # slots 0 to 5: on in row 1
    assert_near(picture.getpixel((0, middle[1])), RUN_COLOURS[0][0])
    for x, y in [(79, middle[1]), (0, middle[2]), (79, middle[2]), (0, middle[3])]:
        assert_near(picture.getpixel((x, y)), MAP_GROUND, tolerance=8)  # the edge of a bar is near


def test_frames_lie_side_by_side():
    picture = acceptance_map(calls_of([3, 3]), TokenGrid(1, 3, frames=2), 120, legend=False)
    assert picture.size == (120, 20)
    for slot in range(6):
        assert_near(picture.getpixel((20 * slot + 10, 10)), RUN_COLOURS[slot // 3][int(slot % 3 == 2)])


def test_the_legend_adds_to_the_height_only():
    calls, grid = calls_of([8, 8]), TokenGrid(4, 4)
    bare, full = acceptance_map(calls, grid, 320, legend=False), acceptance_map(calls, grid, 320)
    assert full.width == bare.width and full.height > bare.height
    assert ImageChops.difference(full.crop((0, 0, *bare.size)), bare).getbbox() is None
    assert len(colours_of(full.crop((0, bare.height, *full.size)))) > 20  # something is written there


@pytest.mark.parametrize(
    ("calls", "size", "message"),
    [
        (torch.zeros(15, dtype=torch.long), 80, r"\[15\].*16.*trace\.commit_call\[b\]"),
        (torch.zeros(2, 16, dtype=torch.long), 80, r"trace\.commit_call"),
        (torch.full((16,), -1), 80, "every slot"),
        (torch.zeros(16), 80, "integers"),
        (torch.zeros(16, dtype=torch.long), 11, "least 12"),
    ],
)
def test_a_map_that_cannot_be_drawn_is_refused(calls, size, message):
    refuses(ValueError, message, acceptance_map, calls, TokenGrid(4, 4), size)


def colours_of(picture: Image.Image) -> dict:
    counted = picture.getcolors(maxcolors=1 << 20)
    assert counted is not None
    return {colour: count for count, colour in counted}


def assert_near(pixel, colour, tolerance=3):
    assert all(abs(a - b) <= tolerance for a, b in zip(pixel, colour, strict=True)), (pixel, colour)


# -- sheet and page ---------------------------------------------------------------------------------------------------


def test_the_sheet_holds_both_pictures_and_grows_by_row():
    rows = [row(), row("a blue square", runs=[16], fast=Image.new("RGB", (8, 8), (20, 40, 220)))]
    one, two = contact_sheet(rows[:1]), contact_sheet(rows)
    assert one.width == two.width == 1000
    assert two.height - one.height > 230
    colours = colours_of(two)
    assert colours[200, 30, 30] >= 3 * 225**2  # two plain pictures and an equal accelerated one
    assert colours[20, 40, 220] >= 225**2


def test_a_prompt_of_any_length_stays_in_its_column():
    text = "word " * 60 + "a" * 90
    long, short = contact_sheet([row(text)]), contact_sheet([row("word")])
    assert long.size == short.size
    changed = ImageChops.difference(long, short).getbbox()
    assert changed is not None and changed[2] <= 245  # left of the first picture


def test_pictures_that_are_not_square_keep_their_proportions():
    wide = Image.new("RGB", (16, 8), (200, 30, 30))
    sheet = contact_sheet([row(plain=wide, fast=wide)])
    colours = colours_of(sheet)
    assert colours[200, 30, 30] == pytest.approx(2 * 230 * 115, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, ("same tokens, same pixels", "same")),
        ({"identical": False}, ("tokens differ", "other")),
        ({"identical": False, "lossless": True}, ("tokens differ, the law is the same", "other")),
        (
            {"identical": False, "promised": True, "lossless": True},
            ("tokens differ, the same were promised", "differs"),
        ),
        ({"identical": False, "drafts": False}, ("another law", "other")),
        ({"fast": Image.new("RGB", (8, 8), (200, 30, 31))}, ("same tokens, other pixels", "differs")),
    ],
)
def test_only_a_broken_promise_and_other_pixels_are_an_alarm(changes, verdict):
    assert row(**changes).verdict == verdict


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags, self.images, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs)["src"])

    def handle_data(self, data):
        self.text += data


def test_the_page_is_self_contained_and_holds_the_very_pixels(tmp_path):
    rows = [row("a <b>red</b> & round circle"), row(runs=[2, 14], plain_seconds=0.0)]
    path = write_html(rows, tmp_path / "page.html", "A <title>", {"model": "shapes & co"})
    source = path.read_text()
    assert not re.search(r"<script|<link|@import|url\(|https?:|src=\"(?!data:image/png;base64,)", source)
    assert "prefers-color-scheme: dark" in source
    page = Page(source)
    assert len(page.images) == 4 and page.tags.count("svg") == 2
    assert "b" not in page.tags[page.tags.index("section") :][:3]
    decoded = [Image.open(io.BytesIO(base64.b64decode(src.partition(",")[2]))) for src in page.images]
    assert decoded[0].tobytes() == rows[0].plain.tobytes() and decoded[1].tobytes() == rows[0].fast.tobytes()
    assert all(one.svg() in source for one in rows)
    text = re.sub(r"\s+", " ", page.text)
    assert "a <b>red</b> & round circle" in text and "A <title>" in text and "shapes & co" in text
    assert "5 calls · 3.20 tokens per call · 0.50 s (4.00x)" in text
    assert "5 paid, 11 free" in text and "2 paid, 14 free" in text
    assert "4.57" in text  # 2 * 16 tokens over 5 + 2 calls
    # A plain decode that was not timed gives no ratio.
    assert "2 calls · 8.00 tokens per call · 0.50 s " in text


def test_the_page_is_not_overwritten_unasked_nor_left_half(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("mine")
    refuses(FileExistsError, "--overwrite", write_html, [row()], path)
    assert path.read_text() == "mine"

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(whole.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_html([row()], path, overwrite=True)
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_html([row()], path, overwrite=True)
    assert path.read_text().startswith("<!doctype html>") and list(tmp_path.iterdir()) == [path]


def test_no_rows_and_impossible_counts_are_refused(tmp_path):
    refuses(ValueError, "no rows", contact_sheet, [])
    refuses(ValueError, "no rows", write_html, [], tmp_path / "page.html")
    refuses(ValueError, "fast_calls=0", row, fast_calls=0)


# -- next-scale models ------------------------------------------------------------------------------------------------


def scale_row(**changes) -> ComparisonRow:
    picture = Image.new("RGB", (8, 8), (200, 30, 30))
    settings = dict(
        plain=picture, fast=Image.new("RGB", (8, 8)), grid=TokenGrid(1, 30),
        commit_call=torch.arange(4).repeat_interleave(torch.tensor([1, 4, 9, 16])), plain_calls=4, fast_calls=4,
        plain_seconds=3.0, fast_seconds=2.0, identical=False, scales=Scales((1, 2, 3, 4), 2, 30, 4096, 1024),
    )  # fmt: skip
    return ComparisonRow(prompt="red circle", **{**settings, **changes})


@pytest.mark.parametrize("drafted", [0, 1, 3, 4])
def test_the_map_of_scales_has_every_cell_in_the_colour_of_its_model(drafted):
    sides = (1, 2, 3, 4)
    drawn = scale_map(sides, drafted).picture(200)
    # Lines of 8 cells: 1, 2 and 3 with one between them, then 4; 3 + 1 + 4 rows.
    places = [(0, 0), (2, 0), (5, 0), (0, 4)]
    assert drawn.size == (200, 200)
    cell, inside = 25, set()
    for index, (side, (left, top)) in enumerate(zip(sides, places, strict=True)):
        light, dark = RUN_COLOURS[0 if index < drafted else 1]
        for x in range(side):
            for y in range(side):
                inside.add((left + x, top + y))
                centre = ((left + x) * cell + cell // 2, (top + y) * cell + cell // 2)
                assert drawn.getpixel(centre) == light
                edge: Any = drawn.getpixel((centre[0], (top + y) * cell))
                assert sum(abs(a - b) for a, b in zip(edge, dark, strict=True)) < 200
    for x in range(8):
        for y in range(8):
            if (x, y) not in inside:
                assert drawn.getpixel((x * cell + cell // 2, y * cell + cell // 2)) == PAPER
    refuses(ValueError, "no maps", scale_map, (), 0)


def test_rows_of_scales_on_the_sheet_and_on_the_page(tmp_path):
    rows = [scale_row(), scale_row(plain_seconds=0.0, fast_seconds=0.0)]
    assert rows[0].headline == ("1.50x", "as fast") and rows[1].headline == ("1", "KiB of cache")
    assert rows[0].map_caption == "2 of 4 scales; cache 4 -> 1 KiB"
    assert rows[0].verdict == ("tokens differ", "other")
    sheet = contact_sheet(rows)
    assert sheet.width == 1000
    drawn = sheet.crop((744, 62, 974, 292))
    assert ImageChops.difference(drawn, rows[0].draw_map().picture(230)).getbbox() is None
    page = write_html(rows, tmp_path / "page.html").read_text()
    assert page.count("who drew which scale</b> &middot; 2 of 4 scales; cache 4 -&gt; 1 KiB") == 2
    assert "tokens per call" not in page and "Every model call draws one map of tokens" in page


def test_what_draws_without_drafts_speaks_of_none(tmp_path):
    """A masked model alone is shown beside one token a call: what that costs is told, and no speed-up over it."""
    calls = torch.arange(16) % 4
    alone = row(
        commit_call=calls, fast_calls=4, identical=False, drafts=False, reference=True, plain_seconds=11.0
    )
    page = write_html([alone], tmp_path / "page.html").read_text().split("<main>")[1]
    assert not re.search(r"\b(paid|free|accepted)\b|\d x|\dx\b|as fast", page)
    assert "one token a call</dt><dd>16 <small>calls, 11.00 s" in page and "another law" in page
    assert alone.speed_up == 0 and alone.headline == ("4", "model calls")
    beside = row(commit_call=calls, fast_calls=4, identical=False, drafts=False)
    page = write_html([beside], tmp_path / "pair.html").read_text().split("<main>")[1]
    assert not re.search(r"\b(paid|free|accepted)\b", page) and "4.00x" in page and "its own" in page
