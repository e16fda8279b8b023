"""What the numbers of a model allow a sampler to promise.

A call that scores several slots computes wider matrix products than a call that scores one. Wide and narrow products
round differently. In float32 and float64 the difference is too small to be met in practice. Below float32 it decides
near-ties: slots where two tokens are almost equally good under the slot's noise. Activations that are rounded to int8
do the same in a model whose weights and logits are float32: a difference in the last bit moves one of them to the next
step. Weights do not say so, so the operations of a model are watched once (`watched`). Quantised activations whose
scale is taken from all rows of a call are worse: there the law of a slot depends on what else the call scores.

`EXACT_WIDTH` is the remedy below float32. If all calls of all samplers have one shape, the same kernels run in all of
them, and a position's logits depend on the tokens that it sees and on nothing else: not on its place in the call, nor
on what the other positions hold. Scoring only the near-ties again, one at a time, would not do: the keys and values
that earlier wide calls wrote differ in their last bits too, so the second scores are not plain decoding's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from visual_spec.kernels.law import largest_reference
from visual_spec.models.core.protocol import modules_of, owner_of
from visual_spec.samplers.core.law import TokenLaw

# Positions of every call under the setting `exact_width`. One number for all samplers: their tokens are compared.
EXACT_WIDTH = 32
_TF32 = "tf32"
_TF32_EPS = 2.0**-10
_QUANTISED = " activations"  # ends the name of a type that is no floating one
_ROUNDED = f"rounded{_QUANTISED}"
_FLOAT4_EPS = 2.0**-1
_INT8_EPS = 2.0**-7  # steps of 1/127 of the largest value
# Operations of these name spaces say by their dtypes what they compute in; of other operations it is not known.
_KNOWN = {"aten", "prim", "prims", "mkldnn", "mkldnn_prepacked", "c10d", "_c10d_functional", "profiler"}
_ROUNDING = tuple("round floor ceil trunc fix fake_quantize _fake_quantize quantize_per _int_mm".split())
# Of each model: what its weights and modules were when it was watched, and the narrowest type that was met.
_WATCHED: WeakKeyDictionary[object, tuple[object, str | None]] = WeakKeyDictionary()


def low_precision_of(model: object) -> str | None:
    """Return the narrowest type below float32 that `model` computes in, such as "bfloat16", or None.

    Autocast counts, as do weights that are stored in fewer bits. So do matrix products of float32 that PyTorch was
    allowed to compute in fewer bits (`torch.set_float32_matmul_precision`, `allow_tf32`): "tf32". So does what the
    model was seen to do while it was `watched`, such as "int8 activations".
    """
    now = _types_of(model)
    return max(filter(None, (now[0], *(_seen(model, now) or ()))), key=rounding_unit, default=None)


def was_watched(model: object) -> bool:
    """Whether it is known what the model computes in, since its types last changed; or it is no module of PyTorch."""
    return not modules_of(model) or _seen(model, _types_of(model)) is not None


@contextmanager
def watched(model: object) -> Iterator[None]:
    """Watch what `model` computes inside, for `low_precision_of`. Once for a model: see `was_watched`.

    Seen are conversions of floating numbers to narrower types (also inside a model whose weights are float32), numbers
    that are rounded, and operations of other packages, of which nothing is known: all count as quantised activations.
    """
    watch = _Watch()
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            # Compiled functions hide what they compute, and what a watched call skips is not compiled later.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(watch)
        yield
    # Of equal units that which says more: int8, and not that something was rounded.
    narrowest = max(watch.found, key=lambda name: (rounding_unit(name), name != _ROUNDED, name), default=None)
    _WATCHED[owner_of(model)] = _types_of(model), narrowest


def _seen(model: object, now: object) -> tuple[str | None] | None:
    """The narrowest type that was met while the model was watched; None if it was not, as it is `now`."""
    kept = _WATCHED.get(owner_of(model)) if modules_of(model) else None
    return (kept[1],) if kept is not None and kept[0] == now else None


class _Watch(TorchDispatchMode):
    """Collects in `found` the names of the narrow types that floating numbers are converted to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a tensor of another package: what it does itself is watched
        answer = func(*args, **kwargs)
        inputs, outputs = (
            [part for part in tree_leaves(tree) if isinstance(part, Tensor)]
            for tree in ((args, kwargs), answer)
        )
        if any(part.is_floating_point() and part.dtype.itemsize >= 4 for part in inputs):
            self.found |= {name for part in outputs if (name := _narrow(part.dtype))}
            space, name = func.name().split("::")
            if space not in _KNOWN:
                self.found.add(f"{space}::{name.split('.')[0]}{_QUANTISED}")
            elif name.startswith(_ROUNDING):
                self.found.add(_ROUNDED)
        return answer


def _narrow(dtype: torch.dtype) -> str | None:
    """The name of a type that numbers are rounded to coarsely; None for float32, float64, truth values and indices."""
    if dtype.itemsize > 2 and not str(dtype).startswith("torch.q") or dtype == torch.bool:
        return None
    name = str(dtype).removeprefix("torch.")
    return name if dtype.is_floating_point else name + _QUANTISED


def _types_of(model: object) -> tuple[str | None, frozenset[object]]:
    """What changes with the types that a model computes in, looked up once a decode.

    Returns:
        The narrowest floating type of weights, autocast and products of float32; and the types of all layers and
        tensors.
    """
    kinds: set[object] = set()
    weights: set[tuple[torch.dtype, str]] = set()
    for layer in (layer for module in modules_of(model) for layer in module.modules()):
        kinds.add(type(layer))
        # Not `parameters()`, which makes the names of all.
        own = [part for part in layer._parameters.values() if part is not None]
        weights |= {(part.dtype, part.device.type) for part in own}
        own += [part for part in layer._buffers.values() if part is not None]
        kinds |= {(type(part), part.dtype) for part in own}
    dtypes = {dtype for dtype, _ in weights if dtype.is_floating_point}
    devices = {device for _, device in weights}
    dtypes |= {
        torch.get_autocast_dtype(kind)
        for kind in devices
        if kind != "meta" and torch.is_autocast_enabled(kind)
    }
    low = [dtype for dtype in dtypes if dtype.itemsize < torch.float32.itemsize]
    stored = None
    if low:
        stored = str(min(low, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    elif torch.float32 in dtypes and any(map(_shortens_products, devices)):
        stored = _TF32
    return stored, frozenset(kinds)


def rounding_unit(low_precision: str) -> float:
    """Return the spacing of numbers near 1 in the type that `low_precision_of` named.

    Of quantised activations one step of int8 is taken, as a share of the largest number.
    """
    if low_precision.endswith(_QUANTISED):
        return _INT8_EPS
    if low_precision.startswith("float4"):  # PyTorch knows none of its limits
        return _FLOAT4_EPS
    return _TF32_EPS if low_precision == _TF32 else torch.finfo(getattr(torch, low_precision)).eps


def up_to_rounding(low_precision: str | None) -> str:
    """Say how near the numbers of a faster computation are, with the type where that is coarser than float32."""
    return "up to rounding" if low_precision is None else f"up to rounding ({low_precision})"


def rounding_of(logits: Tensor, law: TokenLaw, guided: bool, unit: float) -> Tensor:
    """Return by how much rounding may move a score, [B, ...]: one unit in the last place of the largest logit.

    Of both rows, as far as guidance enlarges them, and divided by the temperature, as the scores are.

    Args:
        logits: [R, ..., V], raw.
        unit: from `rounding_unit`.
    """
    if law.allowed is not None:
        logits = logits[..., slice(*law.allowed)]
    return largest_reference(logits, guided, law.guidance_scale) * unit / (law.temperature or 1.0)


def near_ties_of(scores: Tensor, noise: Tensor | None, rounding: Tensor) -> Tensor:
    """Return the near-ties among draws that take the largest of probability over exponential noise, bool [...].

    Args:
        scores: [..., V], logarithms of probabilities up to a constant.
        noise: [..., V]; None: the largest score is taken.
        rounding: [...], by how much rounding may move a score, see `rounding_of`.
    """
    best = (scores if noise is None else scores.to(noise) - noise.log()).topk(2, -1).values
    return best[..., 0] - best[..., 1] < 2 * rounding.to(best)


def scales_by_batch(model: object) -> bool:
    """Return whether the model quantises its activations by what all rows of a call hold.

    That is so of PyTorch's dynamic quantisation (one scale for the whole input), of bitsandbytes' int8 (the columns of
    outliers are chosen over the whole input), and of torchao's types with one activation scale per tensor.
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


def _by_batch(layer: nn.Module) -> bool:
    kind = type(layer)
    if ".nn.quantized.dynamic." in f"{kind.__module__}." or kind.__name__ == "Linear8bitLt":
        return True
    # torchao's weights know how activations are quantised beside them.
    how = getattr(getattr(layer, "weight", None), "act_quant_kwargs", None)
    return how is not None and type(getattr(how, "granularity", None)).__name__ == "PerTensor"
