"""Bookkeeping of a decode: the samples still decoded, what is counted of each, and values read without a stall."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import DecodeState

# Looks on while a sampler decodes, in this context only: called after every target call with a function that returns
# the result as if the decode ended there. What it returns ends the decode if it is `STOP`.
WATCHER: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("WATCHER", default=None)


def counted(state: Any) -> dict[str, Tensor]:
    """What a state counts beside its calls, by the names of the trace, each long [B]."""
    found = {name: getattr(state, name, None) for name in ("near_ties", "layer_calls")}
    return {name: here for name, here in found.items() if here is not None}


class ActiveSamples:
    """The samples of a batch that are still decoded. Completed samples leave, so that no call is spent on them.

    Args:
        state: a dataclass whose tensors all have samples as their first axis. Its other parts can `select` samples, or
            do not depend on them.
    """

    _RESULTS = ("tokens", "target_calls", "commit_call")

    def __init__(self, state: Any) -> None:
        self.state = state
        self.samples = torch.arange(len(state.tokens), device=state.tokens.device)
        self._whole: dict[str, Tensor] = {}

    @property
    def can_shrink(self) -> bool:
        """Whether all parts of the state can `select` samples."""
        return all(
            part is None or isinstance(part, Tensor | int | tuple) or _selects(part)
            for part in self._parts().values()
        )

    def leave(self, ended: Tensor, progress: Tensor, *others: Any) -> None:
        """Remove the samples where `ended` is true, bool [those still here] on the host, from `others` as well."""
        results = {name: getattr(self.state, name) for name in self._RESULTS} | {"progress": progress}
        results |= counted(self.state)
        self._whole = {name: self.whole(name, here) for name, here in results.items()}
        kept = (~ended).nonzero()[:, 0].to(self.samples.device)
        self.samples = self.samples[kept]
        for name, part in self._parts().items():
            if isinstance(part, Tensor):
                setattr(self.state, name, part[kept])
            elif hasattr(part, "select"):
                part.select(kept)
        for other in others:
            other.select(kept)

    def whole(self, name: str, here: Tensor) -> Tensor:
        """Return a result for all samples, from that of the samples still here and those that have left."""
        if not self._whole:
            return here
        return self._whole[name].index_copy_(0, self.samples, here)

    def _parts(self) -> dict[str, Any]:
        return {field.name: getattr(self.state, field.name) for field in fields(self.state)}


def _selects(part: Any) -> bool:
    return hasattr(type(part), "select") and type(part).select is not DecodeState.select


class HostCopy:
    """Copies a small tensor to the host. On CUDA it arrives one call late, because waiting would stall the device."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def __call__(self, value: Tensor) -> Tensor | None:
        """Return the value; on CUDA the value of the previous call, and None at the first call."""
        if value.device.type != "cuda":
            return value
        earlier = self._pending
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(value.device))
        self._pending = (host, event)
        if earlier is None:
            return None
        earlier[1].synchronize()
        return earlier[0]
