"""Tensors that have a CUDA device and no numbers: what reads them, or mixes them with the host's, is noticed."""

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from visual_spec.kernels import philox
from visual_spec.models.core import offload
from visual_spec.prototype.proactive import HeadTree
from visual_spec.samplers.core.trace import Stopwatch


class NoHost(TorchDispatchMode):
    """Refuses operations on what is not on the device. Reading the device fails by itself: there are no numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, Tensor) and value.device.type != "cuda":
                raise AssertionError(f"{func} of a {tuple(value.shape)} tensor on the {value.device}")
        return func(*args, **(kwargs or {}))


def without_numbers(value: Any) -> Any:
    """A copy with tensors of the same shapes on a CUDA device that need not be there. Call it in a FakeTensorMode."""
    memo: dict[int, Any] = {}
    seen: set[int] = set()

    def visit(item: Any) -> None:
        if isinstance(item, Tensor) and id(item) not in memo:
            fake = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cuda")
            memo[id(item)] = nn.Parameter(fake, False) if isinstance(item, nn.Parameter) else fake
        elif isinstance(item, dict):
            for part in item.values():
                visit(part)
        elif isinstance(item, (list, tuple)):
            for part in item:
                visit(part)
        elif hasattr(item, "__dict__") and not isinstance(item, type) and id(item) not in seen:
            seen.add(id(item))
            visit(vars(item))

    visit(value)
    return copy.deepcopy(value, memo)


def stand_in(monkeypatch: Any) -> None:
    """Do without kernels and clocks that need a GPU."""
    # What has no numbers must not stay.
    monkeypatch.setattr(HeadTree, "layout", cache(HeadTree.layout.__wrapped__))
    for kind in ("uniform", "normal"):
        monkeypatch.setattr(philox, f"philox_{kind}_triton", lambda out, *_: out)
    monkeypatch.setattr(Stopwatch, "lap", lambda *_, **__: None)
    monkeypatch.setattr(offload, "free_bytes", lambda device: None)
