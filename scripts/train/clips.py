"""Clips of `motion` by class, as continuous tokens: small frames in squares. There is no tokenizer.

The class of a clip is the colour of its one shape and the way it moves. Shape, size, speed, place and background are
free, so every class has variety.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.train.mar import EncodedPictures
from scripts.train.motion_small import SCALE, sample_plain_clips, small_frames
from scripts.train.tokenizer import to_pixels
from visual_spec.data.motion import DIRECTIONS, FRAME_SIZE, Clip
from visual_spec.data.motion_finder import parse_clip
from visual_spec.data.motion_parser import CONSISTENT
from visual_spec.data.shapes import OBJECT_COLOURS

CLIP_CLASSES: tuple[tuple[str, str], ...] = tuple(product(OBJECT_COLOURS, DIRECTIONS))
SQUARE = 4  # places of a small frame on a side of a token
SIDE = FRAME_SIZE // SCALE // SQUARE  # tokens on a side of a frame
TOKEN_DIM = 3 * SQUARE * SQUARE
_SPREAD = 2.0  # of the tokens' numbers over the frames', to be of order one
_FEW = 0.1  # a place that differs less from the ground shows it


def moving_clips(count: int, seed: int, *, held_out: bool = False) -> list[Clip]:
    """Return clips of one shape that moves over a plain background; their captions are all held out, or none."""
    rng = np.random.default_rng(seed)
    clips: list[Clip] = []
    while len(clips) < count:
        some = sample_plain_clips(count, rng, held_out=held_out)
        clips += [clip for clip in some if clip.objects[0].direction is not None]
    return clips[:count]


def class_of_clip(clip: Clip) -> int:
    """Return the class of a moving clip: its index in `CLIP_CLASSES`."""
    return CLIP_CLASSES.index((clip.objects[0].colour, str(clip.objects[0].direction)))


def encoded_clips(count: int, seed: int, frames: int, *, held_out: bool = False) -> EncodedPictures:
    """Clips of so many frames as tokens [N, frames * 16, 48]."""
    clips = moving_clips(count, seed, held_out=held_out)
    tokens = torch.stack([tokens_of(small_frames(clip, 0, frames)) for clip in clips])
    ground = tokens[:, :1, :3].repeat(1, 1, TOKEN_DIM // 3)  # no shape reaches the corner
    return EncodedPictures(
        labels=torch.tensor([class_of_clip(clip) for clip in clips]),
        means=tokens,
        stds=torch.zeros(()).expand_as(tokens),
        objects=(tokens - ground).abs().amax(-1) > _SPREAD * _FEW,
    )


def tokens_of(latents: Tensor) -> Tensor:
    """Tokens [T * 16, 48] of small frames [3, T, 16, 16], frame after frame in raster order."""
    squares = latents.unflatten(3, (SIDE, SQUARE)).unflatten(2, (SIDE, SQUARE))
    return _SPREAD * squares.permute(1, 2, 4, 3, 5, 0).reshape(-1, TOKEN_DIM)


def clip_pixels(tokens: Tensor) -> np.ndarray:
    """Clips uint8 [B, T, 64, 64, 3] of tokens [B, T * 16, 48], by cubic interpolation of small frames."""
    squares = tokens.unflatten(2, (SQUARE, SQUARE, 3)).unflatten(1, (-1, SIDE, SIDE)) / _SPREAD
    small = squares.permute(0, 1, 6, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)  # [B, T, 3, 16, 16]
    large = F.interpolate(small.flatten(0, 1), scale_factor=SCALE, mode="bicubic")
    return to_pixels(large).reshape(*small.shape[:2], FRAME_SIZE, FRAME_SIZE, 3)


def score_clip(label: int, frames: np.ndarray) -> dict[str, bool]:
    """Return what a clip uint8 [T, 64, 64, 3] shows of its class, as the parser reads it.

    Keys: one_object: exactly one in the whole clip; colour, direction: of the object that fits best; kept: it keeps its
    shape, size and path in at least `CONSISTENT` of the frames; ground: it is plain, of a known colour.
    """
    facts, wanted = parse_clip(frames), CLIP_CLASSES[label]
    fits = [
        (thing.colour == wanted[0], thing.direction == wanted[1], thing.consistency >= CONSISTENT)
        for thing in facts.objects
    ]
    colour, direction, kept = max(fits, key=sum, default=(False, False, False))
    return {
        "one_object": len(fits) == 1,
        "colour": colour,
        "direction": direction,
        "kept": kept,
        "ground": facts.background is not None and facts.texture == "plain",
    }


def judged_clips(count: int, drawn: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
    """What clips of all classes in turn show, see `score_clip`; `drawn(labels, seed)` returns tokens of a batch.

    Returns:
        Shares of clips; class: one object of the right colour and direction.
    """
    labels, rows = torch.arange(count) % len(CLIP_CLASSES), []
    for start in range(0, count, 48):
        some = labels[start : start + 48]
        clips = clip_pixels(drawn(some, 1000 + start))
        rows += [score_clip(label, clip) for label, clip in zip(some.tolist(), clips, strict=True)]
    shares = {name: [row[name] for row in rows] for name in rows[0]}
    shares["class"] = [row["one_object"] and row["colour"] and row["direction"] for row in rows]
    return {"clips": count, **{name: round(float(np.mean(values)), 4) for name, values in shares.items()}}
