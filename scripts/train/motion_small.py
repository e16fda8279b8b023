"""Clips of `motion` for a small causal model: one shape on a plain background, frames at a quarter of their size."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.data.motion import Clip, MovingShape, caption, is_held_out, render, sample_clip

SCALE = 4  # pixels of a frame on a side of a latent one


def sample_plain_clips(count: int, rng: np.random.Generator, *, held_out: bool = False) -> list[Clip]:
    """Return clips of one shape on a plain background; their captions are all inside or all outside the held-out
    tenth."""
    clips: list[Clip] = []
    while len(clips) < count:
        clip = sample_clip(rng)
        plain = len(clip.objects) == 1 and clip.texture == "plain"
        if plain and is_held_out(caption(clip)) == held_out:
            clips.append(clip)
    return clips


def small_frames(clip: Clip, start: int, count: int) -> Tensor:
    """Return `count` frames of a clip, from frame `start` on, as latents [3, T, 16, 16] in -1 to 1."""
    item = clip.objects[0]
    look = item.shape, item.colour, item.size, clip.background
    return torch.stack([_small_frame(*look, x, y) for x, y in item.path(start + count)[start:].tolist()], 1)


@cache
def _small_frame(shape: str, colour: str, size: str, background: str, x: int, y: int) -> Tensor:
    """One frame, [3, 16, 16]; there are 14400."""
    still = Clip((MovingShape(shape, colour, size, x, y),), background, "plain")
    pixels = torch.from_numpy(render(still, 1)[0]).movedim(-1, 0).float()  # [3, 64, 64]
    return F.avg_pool2d(pixels / 127.5 - 1, SCALE)
