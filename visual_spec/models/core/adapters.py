"""Layers that PEFT adapted (LoRA), where a model reads a weight itself in place of calling its layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a layer, with what its active adapters add.

    While adapters are not fused, their product is computed at every call; `fuse_lora` adds it once.
    """
    weight: Any = layer.weight
    if _is_adapted(layer) and not layer.disable_adapters and not layer.merged:  # pyright: ignore
        for name in layer.active_adapters:  # pyright: ignore
            if name in layer.scaling:  # pyright: ignore
                weight = weight + layer.get_delta_weight(name).to(weight.dtype)  # pyright: ignore
    return weight


def adapter_state(modules: Iterable[nn.Module]) -> tuple[object, ...]:
    """What adapters add beside their weights: which are active, and how strongly. Equal tuples compute the same."""
    return tuple(
        (layer.disable_adapters, layer.merged, *layer.active_adapters, *layer.scaling.items())  # pyright: ignore
        for module in modules
        for layer in module.modules()
        if _is_adapted(layer)
    )


def has_adapters(model: nn.Module) -> bool:
    """Return whether adapters are attached to layers, active or not, fused or not."""
    return any(_is_adapted(layer) for layer in model.modules())


def _is_adapted(layer: object) -> bool:
    return hasattr(layer, "base_layer") and hasattr(layer, "scaling")
