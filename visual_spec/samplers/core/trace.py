"""The record of a decode: its tokens, the calls they took, the time of each phase, and what it keeps of plain decoding.

A rule keeps the tokens or the law of plain decoding *with the same settings of the law*, such as an order, or the steps
of a denoising chain. So what a run keeps follows from what its rule keeps, from the law settings of the run
(`Sampler.law_settings`), and from those of the plain decoding that it is compared with: `kept` decides it, and traces,
comparisons, scores and evaluations read it there. `DecodeTrace.promise` adds what a model's precision leaves of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import pairwise
from reprlib import repr as shortened
from typing import Any, Self

import torch
from torch import Tensor

MEASURE = "measure"  # the phase in which a lossy sampler measures its divergence

# What a run keeps of plain decoding.
IDENTICAL = "identical"  # the tokens of plain decoding with the same generator
NEAR_TIES = "near-ties"  # the same, but for near-ties that rounding decides
LOSSLESS = "lossless"  # its law
LOSSY = "lossy"  # another law, which the rule makes of it
OTHER = "another law"  # another law, because settings of the law are others
UNKNOWN = "not known"

# Gives the plain decoding of the model that a pipeline decodes with; None: plain decoding with its default settings.
PLAIN: ContextVar[Callable[[], Any] | None] = ContextVar("PLAIN", default=None)


def changed(law: Mapping[str, object], plain: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a law that are not those of plain decoding. A setting that is not there is None."""
    return {name: law.get(name) for name in dict.fromkeys((*law, *plain)) if law.get(name) != plain.get(name)}


def promised(sampler: Any, plain: Any = None) -> str:
    """Return what a sampler keeps of a plain decoding; None: of plain decoding with its defaults.

    A sampler that is not ours says only whether it is `identical` or `lossless`.
    """
    if hasattr(sampler, "promise"):
        return sampler.promise(plain)
    return IDENTICAL if getattr(sampler, "identical", False) else LOSSLESS if sampler.lossless else LOSSY


def named(law: Mapping[str, object], plain: Mapping[str, object]) -> str:
    """Return the settings that `changed` tells, in words."""
    return ", ".join(
        f"{name}={value if isinstance(value, str) else shortened(value)}"
        for name, value in changed(law, plain).items()
    )


def kept(keeps: str, law: Mapping[str, object], plain: Mapping[str, object]) -> str:
    """Return what a run keeps of plain decoding.

    Args:
        keeps: what its rule keeps where both have the same law settings, in the words of this module.
        law, plain: law settings of the run, and of plain decoding.
    """
    return OTHER if keeps != LOSSY and changed(law, plain) else keeps


@dataclass
class DecodeTrace:
    """The record of one decode of B samples of L tokens. Tensors are on the CPU.

    Attributes:
        sampler: class name of the sampler.
        keeps: what the rule of the sampler keeps of plain decoding with the same law settings: see `core.trace`.
        law_settings, plain_settings: settings of the law (`Sampler.law_settings_in`) of this run, and of the plain
            decoding of the model that it is compared with.
        target_calls: long [B], target calls until the sample was complete, including the prefill, which yields slot 0.
        commit_call: long [B, L], the call at which each slot was committed (the prefill is call 0); -1 at slots that
            were not committed before a callback ended the decode, and after an end that came early
            (`TokenLaw.end`).
        seconds: wall time of the decode, without the phase `MEASURE`, which generates nothing.
        phase_seconds: seconds of each phase: "prefill", "model", "verify"; for calls replayed as graphs "step", which
            is "model" and "verify" together.
        peak_memory: most bytes allocated on the CUDA device; None on the CPU.
        divergence: measured distance to the target law per tested slot; None for a lossless sampler.
        at_least, at_most: whether `divergence` is only a lower or an upper bound of that distance.
        stopped: whether a callback ended the decode before it was complete.
        moved_mass: float [B], the same, summed over the slots of each sample. See `DivergenceMeter` for both.
        low_precision: what the model rounds to where that is coarser than float32, such as "bfloat16" or "int8
            activations", and the sampler scores several slots a call: rounding then decides near-ties. None: it
            decides nothing.
        near_ties: long [B], committed slots (columns) where rounding may exchange the two best tokens, so that plain
            decoding may take the other one, or if this is plain decoding, a loop that computes the same in other
            products, such as a model's own `generate`; None where they are not counted. The first slot is not
            counted: its logits equal plain decoding's.
        known: long [B], tokens that were known before the decode; None: none.
        logprobs: float32 [B, L], of columns [B, S, K]: log-probability of each token under the law of its slot
            (guidance, temperature, top-k and top-p included), given what the call saw that committed it; nan at slots
            that no call committed. None where `output_logprobs` was not asked for.
        model_logprobs: float32, the same under the model itself, without guidance, at temperature 1.
        logprobs_law: "drawn" where the tokens were drawn from the law of `logprobs`; "target" of a lossy rule, which
            moves mass away from it: then `logprobs` are those of plain decoding's law. None without `logprobs`.
        exact_width: whether all calls had one width, so that rounding decides nothing between samplers with that
            setting; None of a sampler without the setting.
        quantised: types of quantised weights of the model, such as "Int8Tensor": the target is the quantised model, and
            all that is said of plain decoding is said of its plain decoding. None: no weight is quantised.
        scales_by_batch: whether the model quantises activations by scales of a whole call, and the sampler scores
            several slots a call: the law of a slot then depends on what else the call scores.
    """

    sampler: str
    keeps: str
    target_calls: Tensor
    commit_call: Tensor
    seconds: float
    phase_seconds: dict[str, float]
    peak_memory: int | None = None
    divergence: float | None = None
    moved_mass: Tensor | None = None
    low_precision: str | None = None
    scales_by_batch: bool = False
    quantised: str | None = None
    at_least: bool = False
    at_most: bool = False
    stopped: bool = False
    near_ties: Tensor | None = None
    exact_width: bool | None = None
    known: Tensor | None = None
    logprobs: Tensor | None = None
    model_logprobs: Tensor | None = None
    logprobs_law: str | None = None
    law_settings: Mapping[str, object] = field(default_factory=dict)
    plain_settings: Mapping[str, object] = field(default_factory=dict)

    def beside(self, law_settings: Mapping[str, object]) -> Self:
        """Return the same record beside plain decoding with other law settings, such as those of its trace."""
        return replace(self, plain_settings=law_settings)

    @property
    def _kept(self) -> str:
        return kept(self.keeps, self.law_settings, self.plain_settings)

    @property
    def identical(self) -> bool:
        """Whether the tokens are those of plain decoding with the same generator, as far as `low_precision` and
        `scales_by_batch` allow."""
        return self._kept == IDENTICAL

    @property
    def lossless(self) -> bool:
        """Whether the output law equals the law of plain decoding."""
        return self._kept in (IDENTICAL, LOSSLESS)

    @property
    def promises_tokens(self) -> bool:
        """Whether every token equals the token of autoregressive sampling with the same generator, near-ties too.

        With `exact_width`, that is autoregressive sampling with `exact_width`.
        """
        exact = self.low_precision is None or bool(self.exact_width)
        return self.identical and exact and not self.scales_by_batch

    @property
    def promise(self) -> str:
        """What this run keeps of plain decoding, in the words of `core.trace`."""
        if self.promises_tokens or self._kept == OTHER:
            return self._kept
        if self.scales_by_batch:
            return UNKNOWN
        return NEAR_TIES if self.identical else self._kept

    @property
    def tokens_per_call(self) -> Tensor:
        """Committed tokens per target call, bonus tokens included and known ones not: float [B]."""
        committed = (self.commit_call >= 0).sum(1)
        return (committed if self.known is None else committed - self.known) / self.target_calls.float()

    @property
    def output_law(self) -> str:
        """The output law in words."""
        target = "" if self.quantised is None else f", of the quantised model ({self.quantised})"
        return f"{self.law_in_words}{target}"

    @property
    def law_in_words(self) -> str:
        others = named(self.law_settings, self.plain_settings)
        if self._kept == OTHER:
            return f"another law than plain decoding's ({others})"
        if self.scales_by_batch:
            return "not known: the scales of quantised activations depend on the window"
        if self.identical:
            return f"same tokens as autoregressive sampling{self._condition}"
        if self.lossless:
            return "lossless"
        if self.divergence is None:
            return "lossy"
        bound = "at least " if self.at_least else "at most " if self.at_most else ""
        moved = f"lossy, measured divergence {bound}{self.divergence:.4f}"
        return f"{moved} from a law other than plain decoding's ({others})" if others else moved

    @property
    def _condition(self) -> str:
        """Under which condition the tokens are the same, in words."""
        if self.low_precision is None:
            return ""
        if self.exact_width:
            return f" with exact_width ({self.low_precision})"
        repair = "" if self.exact_width is None else "; none with exact_width=True"
        return f" up to near-ties ({self.low_precision}{repair})"

    @property
    def output_text(self) -> str:
        """The output law in words, and the number of near-ties where they were counted."""
        return with_near_ties(self.output_law, None if self.near_ties is None else int(self.near_ties.sum()))

    def summary(self) -> str:
        """Return one line: tokens, calls, tokens per call, time, and the output law."""
        samples, length = self.commit_call.shape
        memory = "" if self.peak_memory is None else f", {self.peak_memory / 2**20:.0f} MiB peak"
        committed = int((self.commit_call >= 0).sum())
        size = f"{samples} x {length} tokens"
        if self.stopped:
            size += ", stopped early"
        elif committed < samples * length:  # rows that ended
            size = f"{committed} tokens in {samples} of at most {length}"
        return (
            f"{self.sampler}: {size}, "
            f"{self.target_calls.float().mean():.1f} target calls "
            f"({self.tokens_per_call.mean():.2f} tokens per call), {self.seconds:.2f} s{memory}, {self.output_text}"
        )


def with_near_ties(output_law: str, count: int | None) -> str:
    """Return an output law in words with the number of near-ties that were met; None: not counted."""
    if count is None:
        return output_law
    return f"{output_law}, {count} near-{'tie' if count == 1 else 'ties'} met"


def up_to_near_ties(claim: str, low_precision: str | None, count: int | None = None) -> str:
    """Return a claim of equal tokens in words, with its limit where a model rounds to a type coarser than float32."""
    if low_precision is None:
        return claim
    return with_near_ties(f"{claim} up to near-ties ({low_precision})", count)


@dataclass
class SampleResult:
    """The tokens, long [B, L] on the model's device, and the trace of the decode."""

    tokens: Tensor
    trace: DecodeTrace


class DivergenceMeter:
    """Measures, without extra model calls, how far a lossy acceptance rule takes a decode from the target law.

    A slot is tested if its draft is the first refused one, or comes before it. Given all earlier committed tokens, its
    draft x follows the draft law. So (accept(x) - target(x) / draft(x))+ is an unbiased estimate of

        moved = sum over x of (draft(x) * accept(x) - target(x))+ ,

    the mass that the rule gives to tokens beyond their target mass. This is at most the total variation distance (TVD)
    between the law of the committed token and the target law at this slot. It equals the TVD for rules that keep no
    draft less often than the exact rule and replace refused drafts from the plain residual. Slots that are not tested
    (the first, and the one after a window that is kept whole) follow the target law.

    So where moved is the TVD, `divergence` estimates the mean TVD of the tested slots. The expectation of `moved_mass`,
    the sum over the slots of a sample, bounds the TVD between the law of whole samples and the law of autoregressive
    sampling. Every change counts as a loss, even the change from one token to another that looks the same.

    For slots with several siblings see `siblings.moved_mass`.

    Attributes:
        moved: float [B], the sum of the estimates.
        tested: long [B], the number of tested slots.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.moved = torch.zeros(batch_size, device=device)
        self.tested = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._samples = torch.arange(batch_size, device=device)

    def select(self, samples: Tensor) -> None:
        """Continue with the samples long [N] only. The counts of the others stay."""
        self._samples = self._samples[samples]

    def add(self, probability: Tensor, exact: Tensor, tested: Tensor) -> None:
        """Count the drafts of one call. No host synchronisation.

        Args:
            probability, exact: [B, N], probabilities of keeping each draft under the rule and under the exact rule.
            tested: BoolTensor [B, N].
        """
        # The cap of `exact` at 1 changes nothing here: `probability` is at most 1.
        self.count((probability - exact).clamp(min=0), tested)

    def count(self, moved: Tensor, tested: Tensor) -> None:
        """Add estimates [B, N] of the moved mass at the slots where `tested`, bool [B, N]. No host synchronisation."""
        # `where`, not a product: untested values may be nan.
        excess = torch.where(tested, moved, 0).sum(1)
        precise = torch.promote_types(self.moved.dtype, excess.dtype)
        self.moved = self.moved.to(precise).index_add(0, self._samples, excess.to(precise))
        self.tested.index_add_(0, self._samples, tested.sum(1))

    def mean(self) -> float:
        """Return the mean over tested slots, 0 if there are none. Synchronises."""
        return float(self.moved.sum() / self.tested.sum().clamp(min=1))


class Stopwatch:
    """Measures the time of each phase of a decode, without synchronising the device in the loop.

    On CUDA, laps after the first are events that are read once, at the end. On the CPU, laps read the clock.
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
            if torch.cuda.is_current_stream_capturing():  # recording computes nothing
                return
            first = not self._events
            if first:
                torch.cuda.synchronize(device)
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            self._events.append((phase, event))
            if not first:
                return
            # The clock times the prefill: no event could be recorded before it, because no device was known.
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def read(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since construction without `MEASURE`, and each phase's. Synchronises on CUDA."""
        seconds = dict(self._seconds)
        if self._events:
            self._events[-1][1].synchronize()
        for (_, begin), (phase, end) in pairwise(self._events):
            seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1000
        return time.perf_counter() - self._start - seconds.get(MEASURE, 0.0), seconds

    def peak_memory(self, device: torch.device) -> int | None:
        """Return the most bytes that PyTorch allocated on a CUDA device since construction; None on the CPU."""
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
