"""What the numbers of a model allow a sampler to promise.

A call that scores several slots computes wider matrix products than a call that scores one. Wide and narrow products
round differently. In float32 and float64 the difference is too small to be met in practice. Below float32 it decides
near-ties: slots where two tokens are almost equally good under the slot's noise. Quantised activations whose scale is
taken from all rows of a call are worse: there the law of a slot depends on what else the call scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from visual_spec.models.core.protocol import modules_of


def low_precision_of(model: Any) -> str | None:
    """Return the narrowest floating type below float32 that `model` computes in, such as "bfloat16", or None.

    Autocast counts, as do weights that are stored in fewer bits.
    """
    modules = modules_of(model)
    found = {part.dtype for module in modules for part in module.parameters() if part.is_floating_point()}
    devices = {part.device.type for module in modules for part in module.parameters()}
    found |= {torch.get_autocast_dtype(kind) for kind in devices if _autocasts(kind)}
    low = [dtype for dtype in found if dtype.itemsize < torch.float32.itemsize]
    return str(min(low, key=lambda dtype: dtype.itemsize)).removeprefix("torch.") if low else None


def scales_by_batch(model: Any) -> bool:
    """Return whether the model quantises its activations by what all rows of a call hold.

    That is so of PyTorch's dynamic quantisation (one scale for the whole input), of bitsandbytes' int8 (the columns of
    outliers are those of the whole input), and of torchao's types with one activation scale per tensor.
    """
    return any(_by_batch(layer) for module in modules_of(model) for layer in module.modules())


def _autocasts(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _by_batch(layer: nn.Module) -> bool:
    kind = type(layer)
    if ".nn.quantized.dynamic." in f"{kind.__module__}." or kind.__name__ == "Linear8bitLt":
        return True
    # torchao's weights know how activations are quantised beside them.
    how = getattr(getattr(layer, "weight", None), "act_quant_kwargs", None)
    return how is not None and type(getattr(how, "granularity", None)).__name__ == "PerTensor"
