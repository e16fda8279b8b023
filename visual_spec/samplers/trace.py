"""What a decode did: the tokens, the calls they took, and where the time went."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass
class DecodeTrace:
    """The record of one decode of B samples of L tokens. Tensors are on the CPU.

    Attributes:
        sampler: class name of the sampler.
        lossless: the output law is that of autoregressive sampling.
        identical: the tokens are those of autoregressive sampling with the same generator.
        target_calls: long [B], forwards of the target model until the sample was complete. The prefill is one of
            them: it yields slot 0.
        commit_call: long [B, L], the call at which each slot was committed (the prefill is call 0).
        seconds: wall time of the whole decode.
        phase_seconds: the parts of it: "prefill", "model", "verify".
        peak_memory: bytes, the most that was allocated on the CUDA device; None on the CPU.
        divergence: measured distance to the target law a slot; None for a lossless sampler, which has none.
    """

    sampler: str
    lossless: bool
    identical: bool
    target_calls: Tensor
    commit_call: Tensor
    seconds: float
    phase_seconds: dict[str, float]
    peak_memory: int | None = None
    divergence: float | None = None

    @property
    def tokens_per_call(self) -> Tensor:
        """Committed tokens over target calls, bonus tokens included: float [B]."""
        return self.commit_call.shape[1] / self.target_calls.float()

    def summary(self) -> str:
        """One line: tokens, calls, tokens per call, time, and what the output law is."""
        if self.identical:
            law = "same tokens as autoregressive sampling"
        elif self.lossless:
            law = "lossless"
        else:
            law = (
                f"lossy, measured divergence {self.divergence:.4f}"
                if self.divergence is not None
                else "lossy"
            )
        samples, length = self.commit_call.shape
        memory = "" if self.peak_memory is None else f", {self.peak_memory / 2**20:.0f} MiB peak"
        return (
            f"{self.sampler}: {samples} x {length} tokens, {self.target_calls.float().mean():.1f} target calls "
            f"({self.tokens_per_call.mean():.2f} tokens per call), {self.seconds:.2f} s{memory}, {law}"
        )


@dataclass
class SampleResult:
    """tokens long [B, L], on the model's device, and the trace of the decode."""

    tokens: Tensor
    trace: DecodeTrace


class Stopwatch:
    """Attributes the time of a decode to its phases, without synchronising the device in the loop.

    On CUDA, laps after the first are marked by events and read once, at the end; on the CPU by the clock.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event]] = []
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def lap(self, phase: str, device: torch.device) -> None:
        """Attribute the time since the last lap (or since construction) to `phase`."""
        if device.type == "cuda":
            if not self._events:
                # The prefill is timed by the clock: there was no event before it, as no device was known.
                torch.cuda.synchronize(device)
                self._add(phase)
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            self._events.append((phase, event))
        else:
            self._add(phase)

    def _add(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds since construction, and the seconds of each phase. Synchronises on CUDA."""
        seconds = dict(self._seconds)
        if self._events:
            self._events[-1][1].synchronize()
        for (_, begin), (phase, end) in pairwise(self._events):
            seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1000
        return time.perf_counter() - self._start, seconds

    def peak_memory(self, device: torch.device) -> int | None:
        """The most bytes that PyTorch had allocated on a CUDA device since construction; None on the CPU."""
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
