"""Speculative decoding with a drafter: a cheap model drafts a few tokens, one target call scores them all.

Between two steps there are no drafts: the state is the committed tokens and the caches of the two models. The drafter's
cache is written by slot, like the target's. Every step first feeds the drafter all tokens that the last target call may
have committed, in one call of fixed width (`catch_up`). This overwrites the cache entries of refused drafts, so
rollback is only a change of a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from visual_spec.kernels.law import NO_DRAFT
from visual_spec.models.core.protocol import DecodeState, NextTokenModel
from visual_spec.models.core.settings import AUTO, COUNT, SHARE, Graph, OneOf, register_to_config
from visual_spec.samplers.core.acceptance import RELAXED, AcceptanceRule, RelaxedNumbers
from visual_spec.samplers.core.checks import ExactWidth
from visual_spec.samplers.core.draft_chain import ChainSampler
from visual_spec.samplers.core.drafters import ask_drafter, catch_up, check_drafter, draft_law, start_drafter
from visual_spec.samplers.core.drafts import Draft, Label
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import DRAFT, TOKEN
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import IDENTICAL
from visual_spec.samplers.core.verification import Verdict
from visual_spec.samplers.raster.block import BLOCK


@dataclass
class DraftedState(State):
    """A batch between two calls, without drafts.

    Attributes:
        drafter_cache: the drafter's own state.
        fed: long [B], the number of leading slots that the drafter has been fed in final form.
    """

    drafter_cache: DecodeState
    fed: Tensor


DraftedT = TypeVar("DraftedT", bound=DraftedState)


def begin_drafted(
    run: Run, most: int, window: int, kind: type[DraftedT] = DraftedState, **settings: Any
) -> DraftedT:
    """Return the state after the prefills of both models: slot 0 is committed.

    Args:
        most: the most slots that one call commits.
        window: the most positions of a drafter call.
        kind: the class of the state.
        settings: further arguments of a feature drafter's `follow`.
    """
    cache = start_drafter(run, window=window, **settings)
    run.lap("prefill")
    fed = torch.zeros(run.batch_size, dtype=torch.long, device=run.device)
    return kind.begin(run, scratch=most, drafter_cache=cache, fed=fed)


class DraftedSampler(ChainSampler[NextTokenModel]):
    """Speculative decoding: a drafter draws a chain of tokens, the target keeps a prefix of it and adds one.

    Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023, algorithm 1;
    with an `EagleDrafter`, the chain of EAGLE (Li et al., ICML 2024). Lossless for any drafter over the model's tokens,
    except under the relaxed acceptances of `relaxed.py`, whose cost the trace measures.

    Early stop. A row stops drafting after the first draft to which the drafter gave a probability below `stop_below`,
    and keeps that draft. So whether slot i has a draft depends only on the tokens and laws of the earlier slots. Given
    those, a draft that exists follows the law on its label, and a slot without a draft is drawn from the target.
    Exactness needs nothing more. Dropping the improbable draft itself would not be exact: the remaining drafts would be
    tokens of high probability, and their labels would be wrong.

    Args:
        num_drafts: the most drafts before a target call, at least 1. Each costs a drafter call.
        stop_below: a probability; 0 never stops early. Shapes stay fixed, so on a GPU a stop saves no time. On the CPU
            drafting ends as soon as all rows have stopped, and fewer positions are scored.
        acceptance: "exact" (keep a draft with probability min(1, target / draft)), "block" (as lossless, and keeps more
            drafts: one test of the whole chain, see `visual_spec.samplers.raster.block`), "identical" (draft and verify
            with each slot's own noise: the tokens of `AutoregressiveSampler` for the same generator), or a relaxed
            rule: "grouped", "clustered" or "lantern".
        relaxation: the numbers of a relaxed rule, by name, such as {"delta": 0.2}; see `Relaxation`. Each rule
            documents its guarantee for drawn drafts.
        graph: as in `SpeculativeJacobiSampler`.
        exact_width: as in `SpeculativeJacobiSampler`, with acceptance "identical"; for at most 31 drafts.
    """

    takes = ("drafter", "drafter_condition", "codebook")
    needs_drafter = gives_logprobs = True

    @register_to_config
    def __init__(
        self,
        num_drafts: Annotated[int, COUNT] = 5,
        stop_below: Annotated[float, SHARE] = 0.0,
        acceptance: Annotated[str, OneOf(("identical", "exact", "block", *RELAXED))] = "exact",
        relaxation: RelaxedNumbers = None,
        graph: Graph = AUTO,
        exact_width: ExactWidth = False,
    ) -> None:
        pass

    def rule(self, model: NextTokenModel, parts: dict[str, Any], device: torch.device) -> AcceptanceRule:
        return BLOCK if self.config.acceptance == "block" else super().rule(model, parts, device)

    def check(self, model: NextTokenModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        check_drafter(self, model, parts.get("drafter"))

    def num_drafts(self, model: NextTokenModel) -> int:
        """The most drafts of a step, at most those that fit the grid."""
        return max(1, min(self.config.num_drafts, model.grid.num_tokens - 1))

    def plan(self, run: Run) -> None:
        super().plan(run)
        run.window = self.num_drafts(run.model) + 1

    def prepare(self, run: Run) -> DraftedState:
        return begin_drafted(run, run.window, run.window)

    def propose(self, run: Run, state: DraftedState) -> Draft:
        """Draft up to `num_drafts` slots, one drafter call each."""
        view, law, guided = run.view, partial(draft_law, run.law), state.drafter_cache.guided
        # The identical mode draws with the slot's own noise, so a draft equals the target's token if the laws agree.
        stream, round = (TOKEN, 0) if self.keeps == IDENTICAL else (DRAFT, state.round + 1)
        going = state.lengths < run.num_tokens  # [B], rows that still draft
        tokens, laws, drafted = [], [], []
        logits = catch_up(run, state, run.window)  # [R, 1, V], or [R, 1, K, V]
        for index in range(run.window - 1):
            slots = state.lengths[:, None] + index  # [B, 1]
            if index:
                fed = view.fed(tokens[-1], slots - 1)
                logits = ask_drafter(run.drafter, state.drafter_cache, fed, slots - 1)
            laws.append(view.laws(law, logits, slots, guided))  # [B, K, V]
            tokens.append(run.noise.categorical(laws[-1], view.entries(slots), stream, round))
            drafted += [going] * view.codebooks
            going = going & (slots[:, 0] + 1 < run.num_tokens)
            if self.config.get("stop_below"):
                # The improbable draft itself stays; the stop takes effect after it. See `DraftedSampler`.
                probability = laws[-1].gather(-1, tokens[-1][..., None])[:, 0, 0].exp()
                going = going & (probability >= self.config.stop_below)
            if nobody(going):
                break
        run.lap("draft")
        there = torch.stack(drafted, 1)  # [B, N * K]
        rows = torch.arange(len(drafted), device=there.device).where(there, NO_DRAFT)
        label = Label(torch.cat(laws, 1), rows, (0, run.model.vocab_size))
        return Draft(torch.cat(tokens, 1).where(there, -1), label, "drafter")

    def settle(self, run: Run, state: DraftedState, slots: Tensor, verdict: Verdict) -> None:
        if hasattr(run.drafter, "observe"):
            run.drafter.observe(state.drafter_cache, state.cache.features, slots - 1)
        super().settle(run, state, slots, verdict)


def nobody(going: Tensor) -> bool:
    """Whether no row drafts any more. Checked only on the CPU: elsewhere the check would stall the device."""
    return going.device.type == "cpu" and not going.any()
