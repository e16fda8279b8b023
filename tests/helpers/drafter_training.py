"""A short run that trains an EAGLE drafter for a tiny LlamaGen."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_spec.data.shapes import vocabulary
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.training.drafter import DrafterTraining, train_drafter

VOCAB, SIDE = 12, 4
TINY: dict[str, Any] = dict(
    pictures=24, held_out_pictures=8, shard_size=12, steps=40, batch_size=4, unroll=2, learning_rate=1e-2
)


def models() -> tuple[LlamaGenTransformer, CaptionEncoder]:
    torch.manual_seed(0)
    encoder = CaptionEncoder(vocabulary(), dim=8, num_layers=1, num_heads=2, max_words=20).eval()
    target = LlamaGenTransformer(
        vocab_size=VOCAB, dim=16, num_layers=2, num_heads=2, grid_size=SIDE, prefix_length=20, num_classes=None,
        caption_dim=8,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in target.parameters():  # larger than a fresh network's, so that the laws differ
            parameter.mul_(8) if parameter.ndim == 2 else None
    return target, encoder


def fresh(target: LlamaGenTransformer) -> EagleDrafter:
    torch.manual_seed(1)
    return EagleDrafter.for_target(target)


class Draw:
    """The target's own pictures; counts how often it was asked, and can fail."""

    def __init__(self, target: LlamaGenTransformer, encoder: CaptionEncoder) -> None:
        self.target, self.encoder, self.calls = target, encoder, 0

    def __call__(self, prompts: list[str], guidance: float, seed: int) -> Tensor:
        self.calls += 1
        law = TokenLaw(guidance_scale=guidance)
        generator = torch.Generator().manual_seed(seed)
        sampler = AutoregressiveSampler()
        return sampler(
            self.target, self.encoder(prompts), law=law, generator=generator, batch_size=len(prompts)
        ).tokens


def train_tiny_drafter(out: Path, **changes: Any) -> tuple[dict, EagleDrafter, Draw]:
    target, encoder = models()
    drafter, draw = fresh(target), Draw(target, encoder)
    every = changes.pop("every", 10)
    settings = DrafterTraining(**{**TINY, **changes})
    return train_drafter(drafter, target, draw, encoder, settings, out, every=every), drafter, draw
