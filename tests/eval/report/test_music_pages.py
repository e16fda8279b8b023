"""Mel pictures, run strips and the page of music."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.refusals import refuses
from visual_spec.eval.report.drawing import mel_picture
from visual_spec.eval.report.pages import write_html
from visual_spec.eval.report.rows import ComparisonRow

RATE = 16_000


def tone(hertz: float, seconds: float = 1.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * RATE)) / RATE)[None]


def row(**changes) -> ComparisonRow:
    values: dict = dict(prompt="a <slow> organ", plain=tone(440), fast=tone(440), rate=RATE, identical=True)
    values |= dict(plain_calls=5, fast_calls=3, plain_seconds=2.0, fast_seconds=1.0)
    values["commit_call"] = torch.tensor([0, 1, 1, 1, 2])
    return ComparisonRow(**values | changes)


def brightest_row(picture: Image.Image, columns: slice) -> int:
    return int(np.asarray(picture, float).sum(-1)[:, columns].mean(1).argmax())


def test_high_tones_stand_above_low_ones_and_late_ones_to_the_right():
    heights = [
        brightest_row(mel_picture(tone(hertz), RATE, 200, 100), slice(None)) for hertz in (300, 1000, 4000)
    ]
    assert heights[0] > heights[1] > heights[2]
    both = np.concatenate([tone(300), tone(4000)], -1)
    picture = mel_picture(both, RATE, 200, 100)
    assert abs(brightest_row(picture, slice(10, 90)) - heights[0]) < 3
    assert abs(brightest_row(picture, slice(110, 190)) - heights[2]) < 3
    assert picture.size == (200, 100)
    silence = np.asarray(mel_picture(np.zeros(RATE), RATE, 20, 10))
    assert (silence == silence[0, 0]).all()
    refuses(ValueError, "nan.*infinity", mel_picture, np.array([0.0, np.nan]), RATE, 20, 10)


def test_the_page_holds_players_pictures_and_figures(tmp_path):
    differing = row(prompt="other", identical=False, plain=tone(500))
    path = write_html([row(), differing], tmp_path / "page.html", facts={"model": "tiny & small"})
    page = path.read_text()
    assert page.count("<audio") == 3 and page.count("data:image/png") == 2
    assert page.count("<svg") == 2 and page.count("3 columns paid, 2 free<br>") == 2
    assert re.findall(r"<span>([\d.]+ s)</span>", page)[:5] == ["0 s", "0.25 s", "0.5 s", "0.75 s", "1 s"]
    assert "a &lt;slow&gt; organ" in page and "tiny &amp; small" in page
    assert "1.67</dd>" in page and "6 <small>instead of 10" in page and "2.00x" in page
    assert "same codes, same samples" in page and "codes differ" in page and "http" not in page
    with pytest.raises(FileExistsError):
        write_html([row()], path)
    refuses(ValueError, "no rows", write_html, [], tmp_path / "none.html")


def test_a_filled_in_clip_is_shown_with_its_own_words(tmp_path):
    entry = torch.tensor([[0, 2], [1, 2], [0, 3], [-1, 7]])  # [S, K]
    own = dict(identical=False, drafts=False, output_law="a law of its own")
    filled = row(entry_call=entry, commit_call=entry.amax(-1), **own)
    page = write_html([filled], tmp_path / "page.html").read_text()
    assert "a law of its own" in page and "fills in hidden codes" in page and "a row is a codebook" in page
    assert "paid" not in page.split("<main>")[1] and "codes differ" not in page
