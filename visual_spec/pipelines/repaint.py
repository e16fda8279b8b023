"""What a picture that is given leaves to draw: its tokens, hidden where a mask or a share of chance says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from visual_spec.files.pictures import unit_pixels
from visual_spec.models.core.offload import at_hand
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.pipelines.steps import Generators, check_each, listed
from visual_spec.samplers.core.checks import open_id
from visual_spec.samplers.core.noise import CHOICE, CounterNoise, draw_keys

Picture = Image.Image | np.ndarray | Tensor
Pictures = Picture | Sequence[Picture]


def check_repainting(
    pipe: Any,
    image: Pictures | None,
    mask: Pictures | None,
    strength: float | None,
    count: int,
    size: tuple[int, int],
) -> None:
    """Refuse what cannot be repainted, before any computation.

    Args:
        pipe: a `TokenImagePipeline`.
        image, mask, strength: as `known_tokens`.
        count: pictures that are drawn from different prompts or classes.
        size: height and width of the pictures that are drawn.

    Raises:
        ValueError: a mask or strength without an image, an image with neither, another size than the model's, another
            number of images than 1 or `count`, a mask that is white nowhere, a strength outside of (0, 1], or a sampler
            that cannot keep tokens.
        TypeError: something that is no picture.
    """
    if image is None:
        for name, value in (("mask", mask), ("strength", strength)):
            if value is not None:
                raise ValueError(f"{name} given without image; pass the picture whose tokens are to stay.")
        return
    if mask is None and strength is None:
        raise ValueError(
            "image given without mask and strength; pass a mask, white where it is to be painted anew, or a strength "
            "for a variation of it."
        )
    if strength is not None and not (isinstance(strength, Real) and 0 < strength <= 1):
        raise ValueError(
            f"strength={strength!r}; pass the share of tokens to draw anew, above 0 and at most 1."
        )
    if "known_tokens" not in getattr(pipe.sampler, "takes", ()):
        raise ValueError(
            f"{type(pipe.sampler).__name__} keeps no tokens of a picture; draw with a MaskedSampler and a masked "
            "model, such as shapes_masked, or with an AnyOrderSampler and an any-order model, such as shapes_any, or "
            "leave image out."
        )
    for name, value in (("image", image), ("mask", mask)):
        if value is None:
            continue
        pictures, white = listed(value), 0.0
        check_each(len(pictures), f"pictures as {name}", count, "prompts or classes")
        for picture in pictures:
            pixels = unit_pixels(picture, name, mask=name == "mask")
            own, white = pixels.shape[-2:], max(white, float(pixels.max()))
            if tuple(own) != size:
                raise ValueError(
                    f"{name} of {own[0]} x {own[1]} pixels, but {size[0]} x {size[1]} are drawn; resize it, or "
                    "place it on a canvas of that size and mask the rest."
                )
        if name == "mask" and white <= 0.5:
            raise ValueError(
                "all tokens are known, for the mask is white nowhere; make it white where the picture is drawn anew."
            )


def known_tokens(
    pipe: Any,
    image: Pictures,
    mask: Pictures | None,
    strength: float | None,
    generator: Generators,
    *,
    count: int,
    each: int,
    grid: TokenGrid,
) -> Tensor:
    """Return what a sampler takes as `known_tokens`: long [count * each, L], `open_id` where a token is to be drawn.

    Args:
        pipe: a `TokenImagePipeline` of a masked or an any-order model.
        image: one picture, or one for each prompt: PIL, numpy [H, W, 3] (uint8, or floats in [0, 1]), or a tensor
            [3, H, W] in [0, 1].
        mask: white, 1 or True where it is painted anew: PIL, numpy or tensor [H, W], see `unit_pixels`. A token is
            drawn if the mask touches its patch. None: everywhere.
        strength: the share of these tokens that is drawn, chosen at random; None: all.
        generator: of the draws; chooses the tokens too.
        count, each: prompts or classes, and the pictures of each.
        grid: of the pictures that are drawn.
    """
    vq_model = pipe.vq_model
    device = pipe.transformer.device
    with at_hand(vq_model):
        weights = next(vq_model.parameters())
        pictures = torch.stack([unit_pixels(picture, "image") for picture in listed(image)])
        tokens = vq_model.encode_tokens((2 * pictures - 1).to(weights.device, weights.dtype)).to(device)
    drawn = torch.ones(1, grid.num_tokens, dtype=torch.bool)
    if mask is not None:
        # [M, 1, H, W]
        white = torch.stack([unit_pixels(picture, "mask", mask=True) for picture in listed(mask)])
        drawn = (F.max_pool2d(white, vq_model.patch_size) > 0.5).flatten(1)  # [M, L]
    tokens, drawn = (part.to(device).expand(count, -1).repeat_interleave(each, 0) for part in (tokens, drawn))
    if strength is not None:
        keys = draw_keys(generator, count * each)
        slots = torch.arange(grid.num_tokens, device=device).expand(count * each, -1)
        chance = CounterNoise(keys, device).uniform(slots, CHOICE).masked_fill(~drawn, math.inf)
        drawn = chance.argsort(1).argsort(1) < drawn.sum(1, keepdim=True) * strength
    return torch.where(drawn, open_id(pipe.transformer), tokens)
