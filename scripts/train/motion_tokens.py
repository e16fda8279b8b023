"""Tokens of `motion` clips, put together from parts that the tokenizer of `shapes` has encoded once.

Encoded frame by frame, still parts of a clip would not keep their tokens: the tokenizer sees about 24 pixels around a
token, so a passing shape changes the codes of the background near it, between ones that look alike. Here the background
has one code for each column of its stripes, and a shape has the codes that it has in the middle of a large picture, in
the cells that it touches. So what does not move keeps its tokens, and what moves by whole tokens carries them along.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from visual_spec.data.motion import (
    FRAME_SIZE,
    NUM_FRAMES,
    SIZES,
    STRIPE_PERIOD,
    TEXTURES,
    Clip,
    paint_ground,
)
from visual_spec.data.shapes import BACKGROUND_COLOURS, CELL, OBJECT_COLOURS, SHAPES, paint_shape
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.training.tokens import to_signed

SIDE = FRAME_SIZE // CELL  # tokens per side of a frame
_HALF = 6  # tokens from the middle to the edge of the pictures that are encoded
_REACH = {
    size: -(-radius // CELL) for size, radius in SIZES.items()
}  # tokens from a shape's centre to its edge
_LARGEST = max(_REACH.values())


@dataclass(frozen=True)
class MotionTokens:
    """Codes of all parts of all clips.

    Attributes:
        ground: `[6, 2, 3]`, by background colour, texture, and column of tokens after the dark one.
        shapes: `[6, 2, 3, 6, 8, 2, 6, 6]`, by background colour, texture, phase of the stripes relative to the shape,
            shape, colour and size; then the tokens around the centre.
    """

    ground: np.ndarray
    shapes: np.ndarray

    def encode(self, clip: Clip, num_frames: int = NUM_FRAMES) -> np.ndarray:
        """Return the tokens of a clip, int16 `[T, 8, 8]`."""
        background = list(BACKGROUND_COLOURS).index(clip.background)
        texture = TEXTURES.index(clip.texture)
        paths = [item.path(num_frames) // CELL for item in clip.objects]
        columns = np.arange(SIDE)
        frames = np.empty((num_frames, SIDE, SIDE), np.int16)
        for frame in range(num_frames):
            phase = clip.stripe_phase(frame)
            frames[frame] = self.ground[background, texture, (columns - phase) % STRIPE_PERIOD]
            for item, points in reversed(list(zip(clip.objects, paths, strict=True))):
                (x, y), reach = points[frame], _REACH[item.size]
                kind = SHAPES.index(item.shape), list(OBJECT_COLOURS).index(item.colour)
                part = self.shapes[
                    background, texture, (phase - x) % STRIPE_PERIOD, *kind, list(SIZES).index(item.size)
                ]
                top, left = max(0, y - reach), max(0, x - reach)
                bottom, right = min(SIDE, y + reach), min(SIDE, x + reach)
                dy, dx = _LARGEST - y, _LARGEST - x
                frames[frame, top:bottom, left:right] = part[top + dy : bottom + dy, left + dx : right + dx]
        return frames


@torch.no_grad()
def encode_parts(vq_model: VQModel) -> MotionTokens:
    """Encode every part once; about 2300 pictures of 96 x 96 pixels, about a minute on a CPU core."""
    side = 2 * _HALF
    y, x = np.mgrid[0 : side * CELL, 0 : side * CELL].astype(np.float32) + 0.5
    middle = _HALF * CELL
    ground = np.empty((len(BACKGROUND_COLOURS), len(TEXTURES), STRIPE_PERIOD), np.int16)
    shapes = np.empty(
        (*ground.shape, len(SHAPES), len(OBJECT_COLOURS), len(SIZES), 2 * _LARGEST, 2 * _LARGEST), np.int16
    )

    def encode(pictures: list[np.ndarray]) -> Tensor:
        pixels = np.clip(np.rint(np.stack(pictures)), 0, 255).astype(np.uint8)
        tokens = [vq_model.encode_tokens(part.to(vq_model.device)) for part in to_signed(pixels).split(48)]
        return torch.cat(tokens).unflatten(1, (side, side)).cpu()

    kinds = list(product(SHAPES, OBJECT_COLOURS, SIZES))
    for (b, background), (t, texture) in product(enumerate(BACKGROUND_COLOURS), enumerate(TEXTURES)):
        for phase in range(STRIPE_PERIOD if texture == "striped" else 1):
            # The column of the centre is `_HALF`, a multiple of the period: phases count from there.
            canvas = paint_ground(background, texture, x, phase)
            if phase == 0:
                plain = encode([canvas])[0, _HALF]
                ground[b, t] = [
                    plain[_HALF + column - STRIPE_PERIOD : _HALF + column + 2 : STRIPE_PERIOD].mode().values
                    for column in range(STRIPE_PERIOD)
                ]
            pictures = [
                paint_shape(canvas, x - middle, y - middle, shape, colour, SIZES[size])
                for shape, colour, size in kinds
            ]
            inner = slice(_HALF - _LARGEST, _HALF + _LARGEST)
            part = encode(pictures)[:, inner, inner].numpy()
            shapes[b, t, phase] = part.reshape(shapes.shape[3:])
        if texture != "striped":
            shapes[b, t, 1:] = shapes[b, t, 0]
            ground[b, t] = ground[b, t, 0]
    return MotionTokens(ground, shapes)
