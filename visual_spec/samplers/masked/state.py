"""What a masked decode holds between two calls, and what it measures and reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visual_spec.samplers.core.noise import ACCEPT, DRAFT
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import DecodeTrace, DivergenceMeter


@dataclass
class MaskedTrace(DecodeTrace):
    """A `DecodeTrace` of a masked decode. There is no prefill: call 0 is the first forward of the model.

    `commit_call` is the call at which the last codebook of a slot was kept, 0 for given slots. `tokens_per_call` counts
    decoded slots.

    Attributes:
        entry_call: long [B, L, K], the call at which each token was kept, -1 for given tokens.
        rescorer_calls: forwards of the rescoring model.
        reused_calls: the part of `target_calls` that went on from what an earlier one computed.
        whole_calls: calls of all slots that the slots which the model computed would fill.
        total_correlation: float [B], what `measure` found of the dependence that groups were drawn without, in nats a
            sample; None if it was not measured.
    """

    entry_call: Tensor = field(default_factory=lambda: torch.zeros(0))
    rescorer_calls: int = 0
    reused_calls: int = 0
    whole_calls: float = 0.0
    total_correlation: Tensor | None = None

    @property
    def tokens_per_call(self) -> Tensor:
        """Decoded slots per target call: float [B]."""
        return (self.entry_call >= 0).any(-1).sum(1) / self.target_calls.float()

    @property
    def output_law(self) -> str:
        """The output law in words."""
        if self.divergence is None:
            return "the law of masked decoding"
        return f"the law of masked decoding, {self.divergence:.4f} a slot from one token a call"


class Dependence(DivergenceMeter):
    """A `DivergenceMeter` of groups, which also estimates the dependence that they were drawn without.

    Attributes:
        correlation: [B], the total correlation of all groups, in nats.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        super().__init__(batch_size, device)
        self.correlation = torch.zeros(batch_size, device=device)

    def measure(self, run: Run, state: Any, logits: Tensor, kept: Tensor) -> None:
        """Estimate how far the group of a step is from its own chain of one token a call, in a random order.

        Along an order, token k of the group has some law given the tokens before it, and was drawn from another, which
        knows none of them. The sum over k of the total variation between both bounds the total variation of the group;
        the sum of the log ratios is an estimate of its (conditional) total correlation, a divergence in nats. One call
        estimates both: a random number of the n kept tokens is shown, and the mean over the others, times n, has the
        sum as its mean.

        Where the order looks at the draws, these are the figures of the draws that were kept.

        Args:
            state: a `MaskedRunState`.
            logits: [R, L, V], of the step.
            kept: bool [B, L], the group.
        """
        stage = state.stage
        slots, tokens = stage.entries, state.tokens[..., stage.codebook]
        count = kept.sum(1)  # [B]
        rank = run.noise.uniform(slots, DRAFT, stage.step).masked_fill(~kept, torch.inf).argsort(1).argsort(1)
        shown = (run.noise.uniform(slots[:, :1], ACCEPT, stage.step)[:, 0] * count).long()  # [B], below n
        left = kept & (rank >= shown[:, None])
        tested = state.tokens.clone()
        tested[..., stage.codebook] = tokens.masked_fill(left, run.model.mask_id)
        chained = state.calls(stage.cache, tested, stage.codebook)
        ignored = torch.where(left, slots, run.num_tokens)
        guided = run.law.law.guided
        used, wanted = (
            run.law(part if guided else part[: len(slots)], ignored, guided) for part in (logits, chained)
        )
        moved = (used.exp() - wanted.exp()).clamp(min=0).sum(-1)  # [B, L]
        at = tokens[..., None].clamp(max=run.model.vocab_size - 1)
        ratio = (used.gather(-1, at) - wanted.gather(-1, at))[..., 0]
        number = left.sum(1).clamp(min=1)
        mean = torch.where(left, moved, 0).sum(1) / number
        self.count(mean[:, None].expand_as(moved), kept)
        self.correlation += (torch.where(left, ratio, 0).sum(1) / number * count).to(self.correlation)


@dataclass
class MaskedRunState:
    """A batch between two calls.

    Attributes:
        cache: the model's own state.
        calls: the model, or what records its calls.
        tokens: long [B, L, K], the mask id where a token is hidden.
        entry_call: long [B, L, K], the call at which each token was kept; -1 for tokens not yet kept, and given ones.
        target_calls: long [B].
        plan: (codebook, step, steps of this codebook) of every call.
        round: index of the last call, -1 before the first.
        stage: state of the codebook that is being decoded.
        conditional: makes a state of the model without unconditional rows, for calls that need none; None: it has none.
        meter: what `measure` has found so far; None without it.
        reused_calls, whole_calls: see `MaskedTrace`.
        first: the counter of the first slot: above 0 for a part of a longer decode.
    """

    cache: Any
    calls: Any
    tokens: Tensor
    entry_call: Tensor
    target_calls: Tensor
    plan: list[tuple[int, int, int]]
    round: int = -1
    stage: CodebookStage | None = None
    conditional: Callable[[], Any] | None = None
    meter: Dependence | None = None
    reused_calls: int = 0
    whole_calls: float = 0.0
    first: int = 0

    @property
    def commit_call(self) -> Tensor:
        """The call at which the last codebook of a slot was kept, 0 for given slots: long [B, L]."""
        return self.entry_call.amax(-1).clamp(min=0)


@dataclass
class CodebookStage:
    """The decoding of one codebook.

    Attributes:
        codebook: its index.
        unknown: bool [B, L], the tokens to decode.
        hidden: bool [B, U], the units that are not kept yet.
        shares: hidden share of the tokens before every step.
        counts: long [B] each, the number of hidden units before every step, and 0 after the last.
        entries, units: long [B, L] and [B, U], counter slots.
        order: [B, U], scores that keep units in a fixed order; None if draws are scored.
        full: whether each step is a full call.
        room: places of the widest group; full calls keep so many scratch places, whatever group follows.
        step: index of the current step.
        score: [B, U], of the last full call; local calls keep their group in its order.
        places: long [B, n], the slots of the group, see `places_of`.
        newest: bool [B, L], the tokens that the last step kept.
        cache: the model's state in the last full call, and in the calls that reuse it.
        earned: [B, L, V], what tokens earned so far, see `LawByStep.credit`.
    """

    codebook: int
    unknown: Tensor
    hidden: Tensor
    shares: Sequence[float]
    counts: list[Tensor]
    entries: Tensor
    units: Tensor
    order: Tensor | None
    full: Sequence[bool]
    room: int
    step: int = 0
    score: Tensor | None = None
    places: Tensor | None = None
    newest: Tensor | None = None
    cache: Any = None
    earned: Tensor | None = None
