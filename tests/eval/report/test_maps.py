"""Maps of calls as SVG: the same as the pictures, and on the page's own ground."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from visual_spec.eval.report.drawing import RUN_COLOURS
from visual_spec.eval.report.maps import acceptance_map, entry_map, scale_map, strip_map, token_map
from visual_spec.models.core.protocol import TokenGrid

TEMPLATES = Path(__file__).parents[3] / "visual_spec" / "eval" / "templates"


def shapes_of(svg: str):
    root = ElementTree.fromstring(svg)
    return root, [(shape.tag, shape.attrib) for shape in root]


def painted(svg: str, x: float, y: float) -> tuple[int, ...] | None:
    """The colour at a place, None for the ground: by the shapes alone, the last one wins."""
    found = None
    for tag, given in shapes_of(svg)[1]:
        number = {name: float(value) for name, value in given.items() if re.fullmatch(r"[\d.]+", value)}
        if given.get("class") == "ground":
            continue
        if tag == "rect":
            inside = 0 <= x - number["x"] < number["width"] and 0 <= y - number["y"] < number["height"]
        else:
            continue
        if inside:
            found = tuple(int(given["fill"][start : start + 2], 16) for start in (1, 3, 5))
    return found


@pytest.mark.parametrize(
    ("runs", "grid"), [([1, 4, 2, 9], TokenGrid(4, 4)), ([3, 3, 2], TokenGrid(2, 2, frames=2))]
)
def test_the_map_has_the_colours_of_the_picture_at_every_slot(runs, grid):
    calls = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))
    svg = token_map(calls, grid).svg('a "map" of <b>')
    picture = np.asarray(
        acceptance_map(calls, grid, 40 * max(grid.width * grid.frames, grid.height), legend=False)
    )
    root, _ = shapes_of(svg)
    assert root.get("viewBox") == f"0 0 {grid.width * grid.frames * 10} {grid.height * 10}"
    assert root.get("aria-label") == 'a "map" of <b>' and root.get("role") == "img"
    for slot in range(grid.num_tokens):
        frame, row, column = grid.coordinates(slot)
        column += frame * grid.width
        for x, y in [(0.5, 0.5), (0.5, 0.15), (0.93, 0.5), (0.07, 0.5)]:
            want = picture[int((row + y) * 40), int((column + x) * 40)].astype(int)
            got = painted(svg, 10 * (column + x), 10 * (row + y))
            assert abs(want - (got or (240, 238, 232))).max() <= 12, (slot, x, y)


def test_the_map_of_scales_has_the_colours_of_the_picture():
    drawn = scale_map((1, 2, 3, 4), 2)
    svg, picture = drawn.svg("scales"), drawn.picture(320)
    for x in range(8):
        for y in range(8):
            got = painted(svg, 10 * x + 5, 10 * y + 5)
            assert picture.getpixel((40 * x + 20, 40 * y + 20)) == (got or (251, 250, 247))


def test_without_drafts_nothing_is_paid_and_later_calls_are_darker():
    calls = torch.tensor([2, 0, 1, 0])
    (first, last), *_ = RUN_COLOURS
    svg = token_map(calls, TokenGrid(2, 2), drafts=False).svg("calls")
    found = [painted(svg, 10 * (slot % 2) + 5, 10 * (slot // 2) + 5) for slot in range(4)]
    assert found[0] == last and found[1] == found[3] == first
    assert found[2] not in (first, last, None) and len(shapes_of(svg)[1]) == 1 + 4  # the ground, and no beads


def test_the_strip_shows_runs_and_what_was_paid():
    svg = strip_map(torch.tensor([0, 1, 1, 1, 2])).svg("columns")
    (_, first), (free, paid), (_, last) = RUN_COLOURS[:3]
    assert [painted(svg, column + 0.5, 0.5) for column in range(5)] == [first, free, free, paid, last]


def test_a_filled_in_clip_has_a_row_for_each_codebook_in_the_colours_of_its_calls():
    svg = entry_map(torch.tensor([[0, 2], [1, 2], [0, 3], [-1, 7]])).svg("codes")  # [S, K]
    light = [colour for colour, _ in RUN_COLOURS]
    found = [[painted(svg, column + 0.5, book + 0.5) for column in range(4)] for book in range(2)]
    assert found == [[light[0], light[1], light[0], None], [light[2], light[2], light[3], light[1]]]


def test_pages_fit_a_narrow_screen_in_the_dark():
    """Tables scroll, pictures are as wide as there is room, and every colour of the text has one for the dark."""
    style = (TEMPLATES / "page.css").read_text()
    light, dark = (
        set(re.findall(r"--[\w-]+(?=:)", part)) for part in style.split("@media (prefers-color", 1)
    )
    assert light == dark - {"--scheme"} and "--ground" in dark
    for page in TEMPLATES.glob("*.jinja"):
        text = page.read_text()
        viewport = 'name="viewport" content="width=device-width'
        assert viewport in text or '{% extends "page.html.jinja" %}' in text or page.name.startswith("facts")
        assert text.count("<table") == len(re.findall(r'class="[^"]*scroll[^"]*">\s*<table', text)), page.name
        widths = [int(width) for width in re.findall(r"(?<!max-)(?<!min-)width: (\d+)px", style + text)]
        assert all(width <= 340 for width in widths), page.name
