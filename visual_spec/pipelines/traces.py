"""Records of several decodes, one after the other, as one."""

import dataclasses
from typing import Any

import torch

from visual_spec.samplers.core.trace import DecodeTrace


def joined_traces(traces: list[DecodeTrace]) -> DecodeTrace:
    """One trace of the decodes of several grids, one after the other."""
    first: Any = traces[0]
    for trace in traces[1:]:
        # Of the batch: no sample begins a grid before all end the last one.
        calls = int(first.commit_call.max()) + 1
        phases = {
            name: first.phase_seconds.get(name, 0.0) + trace.phase_seconds.get(name, 0.0)
            for name in {**first.phase_seconds, **trace.phase_seconds}
        }
        merged: dict[str, Any] = dict(
            target_calls=first.target_calls + trace.target_calls,
            commit_call=torch.cat([first.commit_call, _later(trace.commit_call, calls)], 1),
            seconds=first.seconds + trace.seconds,
            phase_seconds=phases,
            stopped=first.stopped or trace.stopped,
        )
        if first.peak_memory is not None and trace.peak_memory is not None:
            merged["peak_memory"] = max(first.peak_memory, trace.peak_memory)
        if first.divergence is not None and trace.divergence is not None:
            sizes = first.commit_call.shape[1], trace.commit_call.shape[1]
            merged["divergence"] = (first.divergence * sizes[0] + trace.divergence * sizes[1]) / sum(sizes)
        if first.moved_mass is not None and trace.moved_mass is not None:
            merged["moved_mass"] = first.moved_mass + trace.moved_mass
        if first.near_ties is not None and trace.near_ties is not None:
            merged["near_ties"] = first.near_ties + trace.near_ties
        for name in ("logprobs", "model_logprobs"):
            before, after = getattr(first, name), getattr(trace, name)
            if before is not None and after is not None:
                merged[name] = torch.cat([before, after], 1)
        if (entered := getattr(trace, "entry_call", None)) is not None:  # of a `MaskedTrace`
            merged["entry_call"] = torch.cat([first.entry_call, _later(entered, calls)], 1)
        first = dataclasses.replace(first, **merged)
    return first


def _later(calls: torch.Tensor, shift: int) -> torch.Tensor:
    """Indices of calls, shifted; -1, which stands for none, stays."""
    return torch.where(calls < 0, -1, calls + shift)
