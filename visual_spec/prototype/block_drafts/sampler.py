"""Speculative decoding behind a drafter of blocks: one forward of a small network drafts the slots of the next call.

Under acceptance "identical" the call is one of Jacobi decoding: what it draws after a refused draft stays, as the
window's own draft. The drafter draws with the noise of the slots, as the target will, and any choice between its draft
and the window's is allowed: the window's stays where so many calls in a row drew it (`steady`). A corrector reads the
window's drafts beside.

Under "exact" every draft is the drafter's and is drawn with numbers of its own, so its law is its label. This holds for
a corrector, too: what it reads was drawn before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import NextTokenModel
from visual_spec.models.core.settings import AUTO, COUNT, Graph, OneOf, Within, register_to_config
from visual_spec.prototype.block_drafts.drafter import BlockDrafterState
from visual_spec.samplers.core.checks import ExactWidth
from visual_spec.samplers.core.draft_chain import ChainSampler
from visual_spec.samplers.core.drafters import draft_law
from visual_spec.samplers.core.drafts import Draft, Label, copied_slots
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import REDRAFT, TOKEN
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.verification import Verdict
from visual_spec.samplers.raster.jacobi_identical import UNKNOWN, USUAL, window_of_rows

MOST_CALLS = 9  # `steady` counts no further


@dataclass
class BlockWindow(State):
    """A batch between two calls. `tokens` holds the window's own drafts after the committed tokens.

    Attributes:
        block: the drafter's state.
        window: the most slots that a call scores.
        inputs: long [B, L + scratch], by slot: what the last call was fed there, `UNKNOWN` before any.
        steady: long [B, L + scratch], by slot: how many calls in a row drew the same there.
    """

    block: BlockDrafterState
    window: int
    inputs: Tensor
    steady: Tensor


class BlockDraftSampler(ChainSampler):
    """Drafts of a block at once: DFlash, DSpark, and correctors of a Jacobi window. Takes a `BlockDrafter`.

    Args:
        window: slots scored by one call, at least 1. None: as of `SpeculativeJacobiSampler`.
        acceptance: "identical" (the tokens of `AutoregressiveSampler` for the same generator) or "exact" (their law).
        drafted: slots that the drafter drafts before a call, at most. The other slots keep the window's own draft;
            under "exact" they have none, and the call scores so many fewer.
        steady: calls in a row that must have drawn the window's own draft for it to stay, under "identical", 1 to 9;
            None: none stays where the drafter has one.
        graph, exact_width: as of `SpeculativeJacobiSampler`.
    """

    takes = ("drafter",)
    needs_drafter = reads_text = True
    gives_logprobs = True

    @register_to_config
    def __init__(
        self,
        window: Annotated[int | None, COUNT] = None,
        acceptance: Annotated[str, OneOf(("identical", "exact"))] = "identical",
        drafted: Annotated[int, COUNT] = 15,
        steady: Annotated[int | None, Within(1, MOST_CALLS)] = 2,
        graph: Graph = AUTO,
        exact_width: ExactWidth = False,
    ) -> None:
        pass

    def check(self, model: NextTokenModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        drafter = parts.get("drafter")
        if not hasattr(drafter, "draft"):
            raise ValueError(
                f"{type(self).__name__} takes a BlockDrafter, and got a {type(drafter).__name__}; pass one that was "
                "trained for this model (python -m visual_spec.training.block_drafter) as drafter=, or name "
                "'drafted' for another kind of drafter."
            )

    def plan(self, run: Run) -> None:
        super().plan(run)
        run.window = min(self.config.window or run.fixed_width or USUAL, run.model.grid.num_tokens)

    def prefill(self, run: Run) -> Any:
        taps, target = run.drafter.taps, getattr(run.model, "wrapped", run.model)
        if taps and hasattr(target, "taps"):
            target.taps = taps
        return super().prefill(run)

    def prepare(self, run: Run) -> BlockWindow:
        window = run.window
        block = run.drafter.follow(run.model, run.cache, window=window, guidance=run.law_given.guidance_scale)
        made = BlockWindow.begin(run, scratch=window, block=block, window=window, inputs=None, steady=None)
        made.inputs, made.steady = torch.full_like(made.tokens, UNKNOWN), torch.zeros_like(made.tokens)
        self.enter(run, made, torch.zeros_like(made.lengths)[:, None])
        run.lap("prefill")
        return made

    def propose(self, run: Run, state: BlockWindow) -> Draft:
        """Return the drafts of a call: those of the drafter, and those of the window where it keeps its own."""
        config, drafter = self.config, run.drafter
        width = run.window
        if config.window is None and run.fixed_width is None:
            width = min(width, window_of_rows(len(state.lengths) * (2 if run.law_given.guided else 1)))
        count = min(config.drafted, drafter.most, width - 1)
        if config.acceptance == "exact":
            width = count + 1
        # The newest token's slot first.
        at = state.lengths[:, None] - 1 + torch.arange(width, device=run.device)
        own = state.tokens.gather(1, at)
        laws: list[Tensor] = []
        drawn = own[:, 1 : count + 1]
        if count:
            draw = partial(self.draw, run, state, laws)
            drawn = drafter.draft(
                state.block,
                own[:, : count + 1],
                state.inputs.gather(1, at[:, :count]),
                at[:, : count + 1],
                draw,
            )
        label = None
        if config.acceptance == "exact":
            rows = torch.arange(count, device=run.device).expand_as(drawn)
            label = Label(
                torch.cat(laws, 1) if laws else run.cache.logits.new_zeros(len(own), 0, run.model.vocab_size),
                rows,
                (0, run.model.vocab_size),
            )
        elif config.steady is not None:
            drawn = torch.where(
                state.steady.gather(1, at[:, 1 : count + 1]) >= config.steady, own[:, 1 : count + 1], drawn
            )
        tokens = torch.cat([drawn, own[:, count + 1 :]], 1)
        state.inputs.scatter_(1, at, torch.cat([own[:, :1], tokens], 1))
        run.lap("draft")
        return Draft(tokens, label, "drafter")

    def draw(self, run: Run, state: BlockWindow, laws: list[Tensor], logits: Tensor, slots: Tensor) -> Tensor:
        """Draw drafts long [B, N] of the slots from the drafter's logits [R, N, V], and note their laws."""
        if state.block.guided:
            given, free = logits.chunk(2)
            logits = free + state.block.guidance * (given - free)
        laws.append(draft_law(run.law, logits, slots, False))
        stream, round = (TOKEN, 0) if self.config.acceptance == "identical" else (REDRAFT, state.round + 1)
        return run.noise.categorical(laws[-1], slots, stream, round)

    def settle(self, run: Run, state: BlockWindow, slots: Tensor, verdict: Verdict) -> None:
        run.drafter.observe(state.block, state.cache, slots - 1)
        same = state.tokens.gather(1, slots) == verdict.tokens
        calls = (state.steady.gather(1, slots) + 1).clamp(max=MOST_CALLS)
        state.steady.scatter_(1, slots, torch.where(same, calls, 0))
        super().settle(run, state, slots, verdict)
        self.enter(run, state, slots[:, -1:])

    def enter(self, run: Run, state: BlockWindow, newest: Tensor) -> None:
        """Draft slots that no call has scored by copies; `newest`: long [B, 1], the last that one did."""
        slots = state.next_slots(run.window - 1)
        copies = state.tokens.gather(1, copied_slots("left", slots, newest, run.model.grid, state.tokens))
        scored = state.commit_call.gather(1, slots) > 0
        state.tokens.scatter_(1, slots, torch.where(scored, state.tokens.gather(1, slots), copies))
