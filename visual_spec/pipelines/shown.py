"""Pictures as pipelines show them: what a decoder computed, refused where it is no picture."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor


class ShownPictures(VaeImageProcessor):
    """diffusers' processor of decoded pictures, which refuses nan and infinity instead of showing them as black."""

    def __init__(self) -> None:
        super().__init__(do_resize=False)

    def postprocess(self, image: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As diffusers does, of float [B, 3, H, W] in [-1, 1].

        Raises:
            ValueError: pixels are nan or infinite; says how many.
        """
        check_pixels(image)
        return super().postprocess(image, *args, **kwargs)


def check_pixels(pixels: Tensor) -> None:
    """Refuse decoded pixels of any shape that are nan or infinite.

    Raises:
        ValueError: says how many, and what makes them so.
    """
    finite = torch.isfinite(pixels)
    if not finite.all():
        bad = int((~finite).sum())
        dtype = str(pixels.dtype).removeprefix("torch.")
        raise ValueError(
            f"the decoder made {bad} of {pixels.numel()} pixel values nan or infinite in {dtype}; its weights or the "
            "tokens are damaged, or the dtype overflows. Load the pipeline in float32, or draw with "
            "output_type='latent' to look at the tokens."
        )
