"""What a pipeline returns."""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils.outputs import BaseOutput

from visual_spec.samplers.trace import DecodeTrace


@dataclass
class ImagePipelineOutput(BaseOutput):
    """Pictures, the tokens they were decoded from, and the record of the decoding.

    Args:
        images: as `output_type` asked: PIL pictures, numpy [B, H, W, 3] in [0, 1], tensor [B, 3, H, W] in [0, 1],
            or (`latent`) the token grid, LongTensor [B, h, w].
        tokens: LongTensor [B, h * w] in raster order.
        trace: target calls, the call that committed each token, seconds.
    """

    images: Any
    tokens: torch.Tensor
    trace: DecodeTrace
