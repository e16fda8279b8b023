"""A row of a report's table."""

import torch
from PIL import Image

from visual_spec.eval.report.rows import ComparisonRow
from visual_spec.models.core.protocol import TokenGrid


def calls_of(runs: list[int]) -> torch.Tensor:
    return torch.tensor([call for call, length in enumerate(runs) for _ in range(length)])


def row(prompt="a red circle", runs=(1, 4, 1, 1, 9), size=8, **changes) -> ComparisonRow:
    picture = Image.new("RGB", (size, size), (200, 30, 30))
    settings = dict(plain=picture, fast=picture.copy(), commit_call=calls_of(list(runs)))
    settings |= dict(
        grid=TokenGrid(4, 4), plain_calls=16, fast_calls=len(runs), plain_seconds=2.0, fast_seconds=0.5
    )
    return ComparisonRow(prompt=prompt, **{**settings, "identical": True, **changes})
