"""What the rows of an evaluation say about a setting."""

from pathlib import Path

import numpy as np
import pytest
import torch

from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.figures import Judged, picture_sheet, setting_figures, thumbnails
from visual_spec.eval.settings import parse_setting
from visual_spec.samplers.core.law import TokenLaw


def judged(promises: list[bool]) -> Judged:
    lines = tuple({"calls": 2, "crc32": 1, "bytes": 1} for _ in range(2))
    times = [{"samples": 2, "length": 4, "promises": one} for one in promises] or [{"length": 4}]
    return Judged(SampleFiles(Path(), (), lines), times, torch.zeros(0), {})


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


def test_clips_show_four_frames_on_the_sheet(tmp_path):
    clips = np.arange(2 * 16, dtype=np.uint8).reshape(2, 16, 1, 1, 1) * np.ones((4, 5, 3), np.uint8)
    np.savez(tmp_path / "clips.npz", arr_0=clips)
    found = thumbnails(SampleFiles.open(tmp_path / "clips.npz"), 2)
    assert found.shape == (2, 8, 10, 3)
    assert found[1, ::4, ::5, 0].tolist() == [[16, 21], [26, 31]]  # frames 0, 5, 10 and 15 of the second clip
    assert (found[1, :4, 5:] == 21).all()
    assert picture_sheet({"true scenes": found}).width > 0
