"""What the rows of an evaluation say about a setting."""

from pathlib import Path

import numpy as np
import pytest
import torch

from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.figures import Judged, picture_sheet, setting_figures, thumbnails
from visual_spec.eval.settings import parse_setting
from visual_spec.eval.timing import facts_of, promises_plain
from visual_spec.samplers.core.law import TokenLaw


def judged(promises: list[bool]) -> Judged:
    """Of two samples with the content of this file."""
    lines, here = tuple({"calls": 2} for _ in range(2)), Path(__file__)
    times = [{"samples": 2, "length": 4, "promises": one} for one in promises] or [{"length": 4}]
    return Judged(SampleFiles(here.parent, (here.name,) * 2, lines), times, torch.zeros(0), {})


@pytest.mark.parametrize(
    ("text", "promises", "identical"),
    [
        ("speculative-jacobi", [True, True], True),
        ("speculative-jacobi", [True, False], False),  # in bfloat16
        ("speculative-jacobi", [], True),  # of an older version
        # Its tokens are those of plain decoding with exact_width, which the plain setting has not.
        ("speculative-jacobi:exact_width=true", [True, True], False),
        ("speculative-jacobi:coupling=gumbel,acceptance=exact", [False, False], False),
    ],
)
def test_identical_follows_the_precision_of_the_draws(text, promises, identical):
    plain, setting = (parse_setting(one, TokenLaw(), 0) for one in ("autoregressive", text))
    found = setting_figures(setting, plain, judged(promises), judged([True, True]))
    assert found["identical"] is identical
    # The count is told in any precision.
    same = None if "exact," in text or "acceptance" in text else 2
    assert found["identical_samples"] == same


@pytest.mark.parametrize(
    ("plain", "text", "kind", "identical"),
    [
        ("any-order", "any-order:order=raster", "lossy", False),
        ("any-order", "any-order:guidance_start=1.0", "lossy", False),
        ("any-order", "speculative-any-order:order=raster", "lossy", False),
        ("any-order:order=raster", "speculative-any-order:order=raster", "lossless", True),
        ("continuous", "continuous:steps=16", "lossy", False),
        ("reusing-continuous:steps=16", "reusing-continuous:steps=16,local_levels=0.5", "control", True),
        ("continuous:steps=16", "reusing-continuous:steps=16,reuse=1,local_levels=0.5", "lossy", False),
        ("continuous:steps=16", "head-speculation:steps=16", "lossless", False),
        ("continuous", "head-speculation:steps=16", "lossy", False),
        ("scale-wise:ramp=false", "scale-wise", "lossy", False),
    ],
)
def test_a_setting_is_held_to_its_promise_beside_the_same_law(plain, text, kind, identical):
    first, setting = (parse_setting(one, TokenLaw(), 0) for one in (plain, text))
    found = setting_figures(setting, first, judged([]), judged([]))
    assert (found["kind"], found["identical"]) == (kind, identical)
    assert found["lossless"] == (kind != "lossy")
    assert found["identical_samples"] == (2 if identical else None)
    assert facts_of(setting, first)["lossless"] == found["lossless"]
    assert promises_plain(setting, first) == identical


def test_what_the_draws_say_of_the_law_counts_before_the_settings():
    """A number that is given may be the model's own."""
    first, setting = (parse_setting(one, TokenLaw(), 0) for one in ("continuous", "continuous:steps=64"))
    drawn = judged([])
    for line in drawn.samples.lines:
        line["law_settings"] = {"steps": 64}  # type: ignore[index]
    found = setting_figures(setting, first, drawn, drawn)
    assert (found["kind"], found["identical"], found["identical_samples"]) == ("control", True, 2)


def test_clips_show_four_frames_on_the_sheet(tmp_path):
    clips = np.arange(2 * 16, dtype=np.uint8).reshape(2, 16, 1, 1, 1) * np.ones((4, 5, 3), np.uint8)
    np.savez(tmp_path / "clips.npz", arr_0=clips)
    found = thumbnails(SampleFiles.open(tmp_path / "clips.npz"), 2)
    assert found.shape == (2, 8, 10, 3)
    assert found[1, ::4, ::5, 0].tolist() == [[16, 21], [26, 31]]  # frames 0, 5, 10 and 15 of the second clip
    assert (found[1, :4, 5:] == 21).all()
    assert picture_sheet({"true scenes": found}).width > 0
