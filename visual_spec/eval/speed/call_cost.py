"""What a call of a next-token model cannot but read and compute, whatever its window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visual_spec.eval import measure
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition


@dataclass(frozen=True)
class CallCost:
    """A model as its cost is counted.

    Attributes:
        model: what samplers decode with.
        module: what holds its weights.
        condition: batch size -> what `model.prefill` takes.
        prefix: places that the cache holds before the picture.
        length: places of the picture: its tokens, and where there are row ends, those.
        cached: numbers that the cache holds a place and row, keys and values of all layers.
        attended: numbers of the queries of a place, of all layers.
        read_apart: numbers that every call reads from a module that does not run: the image rows of a larger head.
    """

    model: Any
    module: nn.Module
    condition: Callable[[int], Any]
    prefix: int
    length: int
    cached: int
    attended: int
    read_apart: int

    def call_bytes(self, *, batch_size: int, guided: bool) -> tuple[int, int]:
        """Weight and cache bytes that one call cannot but read, whatever its window; of a filled model.

        The cache counts with the prefix and half of the picture, the mean over plain decoding.
        """
        condition = self.condition(batch_size)
        state = self.model.prefill(condition, batch_size=batch_size, guided=guided, window=1)
        tokens = torch.zeros(batch_size, 1, dtype=torch.long, device=state.logits.device)
        size = next(self.module.parameters()).element_size()
        weights = measure.weight_bytes_per_call(self.module, lambda: self.model(state, tokens, tokens))
        rows = len(state.logits)
        return (
            weights + self.read_apart * size,
            rows * (self.prefix + self.length // 2) * self.cached * size,
        )

    def call_flops(self, weight_bytes: int, *, batch_size: int, guided: bool, window: int) -> int:
        """Operations of one call: two a weight and fed token, four a cached place, query number and fed token."""
        fed = batch_size * (2 if guided else 1) * window
        size = next(self.module.parameters()).element_size()
        return fed * (2 * weight_bytes // size + 4 * (self.prefix + self.length // 2) * self.attended)


def cost_of(model: object) -> CallCost | None:
    """Of a model that is there; None for one of another architecture."""
    return CallCost(**of_llamagen(model)) if isinstance(model, LlamaGenTransformer) else None


def of_llamagen(model: LlamaGenTransformer) -> dict[str, Any]:
    """The fields of `CallCost`, of a LlamaGen."""
    width = model.config["num_layers"] * model.config["dim"]
    return dict(
        model=model,
        module=model,
        condition=lambda batch_size: random_condition(model, batch_size),
        prefix=model.config["prefix_length"],
        length=model.grid.num_tokens,
        cached=2 * width,
        attended=width,
        read_apart=0,
    )


def random_condition(model: LlamaGenTransformer, batch_size: int) -> TextCondition | Tensor:
    """Labels, or captions of full length with random features."""
    width = model.config["caption_dim"]
    if width is None:
        return torch.arange(batch_size, device=model.device) % model.config["num_classes"]
    length = model.config["prefix_length"]
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(batch_size, length, width, generator=generator).to(model.device, model.dtype)
    return TextCondition(features, torch.ones(batch_size, length, dtype=torch.bool, device=model.device))
