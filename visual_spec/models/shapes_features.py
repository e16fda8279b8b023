"""A small convolutional network that reads `shapes` pictures; its features measure distances between picture sets.

It replaces Inception, which the Frechet distance (Heusel et al. 2017) uses for photographs. A distance is only as good
as its features, and a network trained on this data has features for what matters in it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config


def _level(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


class ShapesFeatures(SavedModel):
    """Maps pictures to features, and features to the content of the picture.

    Called on uint8 pictures, it is a `feature` module of `torchmetrics.image.fid.FrechetInceptionDistance`. On true
    scenes every feature has mean 0 and standard deviation 1, so distances have a scale: two unrelated sets of pictures
    are at least `num_features` apart.

    Args:
        heads: name -> number of outputs of a linear head on the features.
        num_features: D.
        image_size: side in pixels to which pictures are resampled, a multiple of 8.
        channels: channels of the first level; deeper ones have two and four times as many.
    """

    @register_to_config
    def __init__(
        self, heads: dict[str, int], num_features: int = 96, image_size: Count = 64, channels: int = 16
    ):
        super().__init__()
        self.num_features = num_features
        self.levels = nn.Sequential(
            _level(3, channels, 2),
            _level(channels, 2 * channels, 2),
            _level(2 * channels, 4 * channels, 2),
            _level(4 * channels, 4 * channels, 1),
        )
        # No pooling over the whole picture: a sampler may get positions wrong, so they must count.
        self.squeeze = _level(4 * channels, 2 * channels, 2)
        self.project = nn.Linear(2 * channels * (image_size // 16) ** 2, num_features)
        self.readers = nn.ModuleDict({name: nn.Linear(num_features, count) for name, count in heads.items()})
        self.register_buffer("centre", torch.zeros(num_features))
        self.register_buffer("spread", torch.ones(num_features))

    def forward(self, pictures: Tensor) -> Tensor:
        """Return standardised features [B, D] of pictures, uint8 [B, 3, H, W].

        Raises:
            ValueError: the pictures have another dtype or shape.
        """
        if pictures.dtype != torch.uint8 or pictures.ndim != 4 or pictures.shape[1] != 3:
            raise ValueError(
                f"pictures are {pictures.dtype} of shape {list(pictures.shape)}; pass uint8 [B, 3, H, W], 0 to 255."
            )
        return (self.raw(pictures.to(self.centre.dtype)) - self.centre) / self.spread

    def raw(self, pictures: Tensor) -> Tensor:
        """Return features [B, D] before standardisation, of pictures as floats [B, 3, H, W] from 0 to 255."""
        size = self.config["image_size"]
        x = F.interpolate(pictures, size=(size, size), mode="area") / 127.5 - 1
        return self.project(self.squeeze(self.levels(x)).flatten(1))

    def read(self, raw: Tensor) -> dict[str, Tensor]:
        """The outputs [B, count] of every head on raw features [B, D]: logits, or numbers as the head was trained."""
        return {name: head(F.relu(raw)) for name, head in self.readers.items()}
