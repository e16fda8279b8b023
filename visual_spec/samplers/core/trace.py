"""What a decode did: the tokens, the calls they took, and where the time went."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

MEASURE = "measure"  # the phase in which a lossy sampler finds out how far it is off


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
        seconds: wall time of the decode, without the phase `MEASURE`, which generates nothing.
        phase_seconds: the parts of it: "prefill", "model", "verify"; of calls that were replayed as graphs, "step",
            which is "model" and "verify" together.
        peak_memory: bytes, the most that was allocated on the CUDA device; None on the CPU.
        divergence: measured distance to the target law a tested slot; None for a lossless sampler, which has none.
        moved_mass: float [B], the same, summed over the slots of each sample. See `DivergenceMeter` for both.
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
    moved_mass: Tensor | None = None

    @property
    def tokens_per_call(self) -> Tensor:
        """Committed tokens over target calls, bonus tokens included: float [B]."""
        return self.commit_call.shape[1] / self.target_calls.float()

    @property
    def output_law(self) -> str:
        """What the output law is, in words."""
        if self.identical:
            return "same tokens as autoregressive sampling"
        if self.lossless:
            return "lossless"
        return "lossy" if self.divergence is None else f"lossy, measured divergence {self.divergence:.4f}"

    def summary(self) -> str:
        """One line: tokens, calls, tokens per call, time, and what the output law is."""
        samples, length = self.commit_call.shape
        memory = "" if self.peak_memory is None else f", {self.peak_memory / 2**20:.0f} MiB peak"
        return (
            f"{self.sampler}: {samples} x {length} tokens, {self.target_calls.float().mean():.1f} target calls "
            f"({self.tokens_per_call.mean():.2f} tokens per call), {self.seconds:.2f} s{memory}, {self.output_law}"
        )


@dataclass
class SampleResult:
    """tokens long [B, L], on the model's device, and the trace of the decode."""

    tokens: Tensor
    trace: DecodeTrace


class DivergenceMeter:
    """How far a lossy acceptance rule takes a decode from the target law, measured on the way at no cost.

    A slot is tested when its draft is the first refused one, or comes before it. Given all that was committed earlier,
    its draft x follows the draft law, so (accept(x) - target(x) / draft(x))+ is an unbiased estimate of

        moved = sum over x of (draft(x) * accept(x) - target(x))+ ,

    the mass that the rule adds to tokens beyond what the target law gives them: at most the total variation distance
    (TVD) between the law of the committed token and the target law at this slot, and equal to it for rules that keep
    no draft less often than the exact one and replace refused drafts from the plain residual. Slots that are not tested
    (the first, and the one behind a window that is kept whole) follow the target law.

    So where moved is the TVD, `divergence` estimates the mean TVD of the tested slots, and the expectation of
    `moved_mass`, the sum over the slots of a sample, bounds the TVD between the law of whole samples and that of
    autoregressive sampling. It counts every change as a loss, even that of a token for one which looks the same.

    A slot with several siblings is counted by `siblings.moved_mass`, which see for what is then known.

    Attributes:
        moved: float [B], the sum of the estimates.
        tested: long [B], tested slots.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.moved = torch.zeros(batch_size, device=device)
        self.tested = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._samples = torch.arange(batch_size, device=device)

    def select(self, samples: Tensor) -> None:
        """Go on with some of the samples only, long [N]; what was counted for the others stays."""
        self._samples = self._samples[samples]

    def add(self, probability: Tensor, exact: Tensor, tested: Tensor) -> None:
        """Count the drafts of one call. No host synchronisation.

        Args:
            probability, exact: [B, N], with which the rule, and the exact rule, keep each draft.
            tested: BoolTensor [B, N].
        """
        # The cap of `exact` at 1 takes nothing off.
        self.count((probability - exact).clamp(min=0), tested)

    def count(self, moved: Tensor, tested: Tensor) -> None:
        """Count estimates [B, N] of what was moved at slots, where tested, bool [B, N]. No host synchronisation."""
        # Chosen, not multiplied: what is not tested may be nan.
        excess = torch.where(tested, moved, 0).sum(1)
        precise = torch.promote_types(self.moved.dtype, excess.dtype)
        self.moved = self.moved.to(precise).index_add(0, self._samples, excess.to(precise))
        self.tested.index_add_(0, self._samples, tested.sum(1))

    def mean(self) -> float:
        """The mean over tested slots, 0 when there are none. Synchronises."""
        return float(self.moved.sum() / self.tested.sum().clamp(min=1))


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
            if torch.cuda.is_current_stream_capturing():  # nothing is computed now
                return
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
        """Seconds since construction but for `MEASURE`, and the seconds of each phase. Synchronises on CUDA."""
        seconds = dict(self._seconds)
        if self._events:
            self._events[-1][1].synchronize()
        for (_, begin), (phase, end) in pairwise(self._events):
            seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1000
        return time.perf_counter() - self._start - seconds.get(MEASURE, 0.0), seconds

    def peak_memory(self, device: torch.device) -> int | None:
        """The most bytes that PyTorch had allocated on a CUDA device since construction; None on the CPU."""
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
