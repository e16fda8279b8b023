"""What the numbers of a model allow a sampler to promise.

A call that scores several slots computes wider matrix products than a call that scores one. Wide and narrow products
round differently. In float32 and float64 the difference is too small to be met in practice. Below float32 it decides
near-ties: slots where two tokens are almost equally good under the slot's noise. Quantised activations whose scale is
taken from all rows of a call are worse: there the law of a slot depends on what else the call scores.

`EXACT_WIDTH` is the remedy below float32. If all calls of all samplers have one shape, the same kernels run in all of
them, and a position's logits depend on the tokens that it sees and on nothing else: not on its place in the call, nor
on what the other positions hold. Scoring only the near-ties again, one at a time, would not do: the keys and values
that earlier wide calls wrote differ in their last bits too, so the second scores are not those of plain decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from visual_spec.models.core.protocol import modules_of
from visual_spec.samplers.core.law import TokenLaw

# Positions of every call under the setting `exact_width`. One number for all samplers: their tokens are compared.
EXACT_WIDTH = 32
_TF32 = "tf32"
_TF32_EPS = 2.0**-10


def low_precision_of(model: Any) -> str | None:
    """Return the narrowest floating type below float32 that `model` computes in, such as "bfloat16", or None.

    Autocast counts, as do weights that are stored in fewer bits. So do matrix products of float32 that PyTorch was
    allowed to compute in fewer bits (`torch.set_float32_matmul_precision`, `allow_tf32`): "tf32".
    """
    modules = modules_of(model)
    found = {part.dtype for module in modules for part in module.parameters() if part.is_floating_point()}
    devices = {part.device.type for module in modules for part in module.parameters()}
    found |= {torch.get_autocast_dtype(kind) for kind in devices if _autocasts(kind)}
    low = [dtype for dtype in found if dtype.itemsize < torch.float32.itemsize]
    if not low:
        return _TF32 if torch.float32 in found and any(map(_shortens_products, devices)) else None
    return str(min(low, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")


def rounding_unit(low_precision: str) -> float:
    """Return the spacing of numbers near 1 in the type that `low_precision_of` named."""
    return _TF32_EPS if low_precision == _TF32 else torch.finfo(getattr(torch, low_precision)).eps


def rounding_of(logits: Tensor, law: TokenLaw, guided: bool, unit: float) -> Tensor:
    """Return by how much rounding may move a score, [B, ...]: one unit in the last place of the largest logit.

    Of both rows, as far as guidance enlarges them, and divided by the temperature, as the scores are.

    Args:
        logits: [R, ..., V], raw.
        unit: from `rounding_unit`.
    """
    if law.allowed is not None:
        logits = logits[..., slice(*law.allowed)]
    largest = logits.masked_fill(logits.isinf(), 0).abs().amax(-1).float()  # [R, ...]
    if guided:
        conditional, unconditional = largest.chunk(2)
        scale = law.guidance_scale
        largest = scale * conditional + abs(scale - 1) * unconditional
    return largest * unit / (law.temperature or 1.0)


def scales_by_batch(model: Any) -> bool:
    """Return whether the model quantises its activations by what all rows of a call hold.

    That is so of PyTorch's dynamic quantisation (one scale for the whole input), of bitsandbytes' int8 (the columns of
    outliers are those of the whole input), and of torchao's types with one activation scale per tensor.
    """
    return any(_by_batch(layer) for module in modules_of(model) for layer in module.modules())


def _shortens_products(device_type: str) -> bool:
    """Whether products of float32 matrices may be computed in fewer bits on this kind of device."""
    if device_type == "cuda":
        try:
            return bool(torch.backends.cuda.matmul.allow_tf32)
        except RuntimeError:  # set by the newer switches, which newer versions have
            return torch.backends.cuda.matmul.fp32_precision in ("tf32", "bf16")
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return torch.backends.mkldnn.matmul.fp32_precision in ("tf32", "bf16")  # type: ignore[attr-defined]


def _autocasts(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _by_batch(layer: nn.Module) -> bool:
    kind = type(layer)
    if ".nn.quantized.dynamic." in f"{kind.__module__}." or kind.__name__ == "Linear8bitLt":
        return True
    # torchao's weights know how activations are quantised beside them.
    how = getattr(getattr(layer, "weight", None), "act_quant_kwargs", None)
    return how is not None and type(getattr(how, "granularity", None)).__name__ == "PerTensor"
