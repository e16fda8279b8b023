"""What the loops of the samplers share: columns picked row by row, who is still decoded, and the result drawn up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.protocol import DecodeState
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.core.trace import DecodeTrace, DivergenceMeter, SampleResult, Stopwatch


def columns_of(values: Tensor, columns: Tensor) -> Tensor:
    """values [B, C, V] at columns [B, N]: [B, N, V]."""
    batch_size, count, vocab_size = values.shape
    first = torch.arange(0, batch_size * count, count, device=values.device)[:, None]
    # Whole rows by one index, not a gather of V indices each.
    rows = values.reshape(-1, vocab_size).index_select(0, (first + columns).flatten())
    return rows.view(*columns.shape, vocab_size)


class HostCopy:
    """Brings a small tensor to the host; on CUDA one call late, because asking at once would stall the device."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def __call__(self, value: Tensor) -> Tensor | None:
        """The value; on CUDA that of the call before, and None at the first call."""
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


class TextState(Protocol):
    """What `decode` reads of a sampler's state; see `JacobiState` and `DraftedState` for the meaning."""

    tokens: Tensor
    lengths: Tensor
    target_calls: Tensor
    commit_call: Tensor
    meter: DivergenceMeter | None


class Roster:
    """Which samples of a batch are still decoded; those that are complete leave, so that no call is spent on them.

    Args:
        state: a dataclass whose tensors all have the samples first, and whose other parts can `select`, or are no
            matter of samples.
    """

    _RESULTS = ("tokens", "lengths", "target_calls", "commit_call")

    def __init__(self, state: TextState) -> None:
        self.state = state
        self.samples = torch.arange(len(state.lengths), device=state.lengths.device)
        self._whole: dict[str, Tensor] = {}

    @property
    def can_shrink(self) -> bool:
        """Whether all parts of the state know how to let samples go."""
        return all(
            part is None or isinstance(part, Tensor | int) or _selects(part)
            for part in self._parts().values()
        )

    def leave(self, ended: Tensor, *others: Any) -> None:
        """Let samples go, ended bool [those still here] on the host; `others` select the same ones."""
        self._whole = {name: self.result(name) for name in self._RESULTS}
        kept = (~ended).nonzero()[:, 0].to(self.samples.device)
        self.samples = self.samples[kept]
        for name, part in self._parts().items():
            if isinstance(part, Tensor):
                setattr(self.state, name, part[kept])
            elif hasattr(part, "select"):
                part.select(kept)
        for other in others:
            other.select(kept)

    def result(self, name: str) -> Tensor:
        """A tensor of the state for all samples, those that have left included."""
        here = getattr(self.state, name)
        if not self._whole:
            return here
        return self._whole[name].index_copy_(0, self.samples, here)

    def _parts(self) -> dict[str, Any]:
        return {field.name: getattr(self.state, field.name) for field in fields(self.state)}  # pyright: ignore


def _selects(part: Any) -> bool:
    return getattr(type(part), "select", DecodeState.select) is not DecodeState.select


def decode(
    sampler: Any,
    state: TextState,
    law: CheckedLaw,
    noise: CounterNoise,
    advance: Callable[[], None],
    watch: Stopwatch,
    callback: Callback | None,
    *,
    shrinks: bool = True,
) -> SampleResult:
    """Call `advance`, one step on `state`, until every sample is complete, and draw up the result.

    Args:
        sampler: says what its output law is, by `lossless` and `identical`.
        state, law, noise: shrink as samples are completed, where the state can.
        callback: called after the prefill and after every step. On CUDA the end is noticed one call late, so it may be
            called once more after the last commit.
        shrinks: False keeps complete samples in the batch, for steps that were recorded for all of it.
    """
    num_tokens, device = law.num_tokens, state.tokens.device
    roster, call = Roster(state), 0
    shrinks, on_host = shrinks and roster.can_shrink, HostCopy()
    if callback is not None:
        callback(call, state.lengths.clone())
    while True:
        lengths = on_host(state.lengths)
        if lengths is not None:
            ended = lengths == num_tokens
            if ended.all():
                break
            # Leaving copies the caches, as much work as a call or two; so in groups, if the batch is a large one.
            if shrinks and 8 * int(ended.sum()) >= len(ended):
                roster.leave(ended, law, noise)
                on_host = HostCopy()
        advance()
        call += 1
        if callback is not None:
            callback(call, roster.result("lengths").clone())
    law.finish()
    seconds, phase_seconds = watch.read()
    trace = DecodeTrace(
        sampler=type(sampler).__name__,
        lossless=sampler.lossless,
        identical=sampler.identical,
        target_calls=roster.result("target_calls").cpu(),
        commit_call=roster.result("commit_call")[:, :num_tokens].cpu(),
        seconds=seconds,
        phase_seconds=phase_seconds,
        peak_memory=watch.peak_memory(device),
        divergence=None if state.meter is None else state.meter.mean(),
        moved_mass=None if state.meter is None else state.meter.moved.cpu(),
    )
    return SampleResult(roster.result("tokens")[:, :num_tokens].clone(), trace)
