"""Speculative Jacobi decoding: one call scores a window of drafts, and the kept ones are committed at once.

A slot that the last call scored is drafted from the result of that call. A slot that enters the window gets an initial
draft. So drafts are refined from call to call until they are committed. A correction makes the drafts after it stale;
a second source (`redrafting`) may draft these anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.protocol import DecodeState
from visual_spec.models.core.settings import AUTO, COUNT, Graph, OneOf, register_to_config
from visual_spec.samplers.core.acceptance import RelaxedAcceptance, RelaxedNumbers
from visual_spec.samplers.core.checks import WIDTHS, Coupling, ExactWidth, Window
from visual_spec.samplers.core.draft_chain import ChainSampler
from visual_spec.samplers.core.drafts import (
    INITIAL_DRAFTS,
    LAST_LAW,
    Draft,
    Label,
    Redrafting,
    copied_slots,
)
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import IDENTICAL
from visual_spec.samplers.core.verification import Verdict
from visual_spec.samplers.raster.redrafting import (
    CARRIED,
    CHOSEN,
    DRAFTS,
    PICTURED,
    REPAIRED,
    UNKNOWN,
    Chosen,
    Source,
    copies,
    pictured,
    redrafted,
)

USUAL, NARROWEST = 32, 4  # windows without a choice of the user's: of one picture, and of the largest batches
# Positions of such a call, in all rows of the batch. On two cores of a Xeon more of them cost more than their tokens
# save: 16 pictures of `shapes` at batch 4 and 8 decode fastest with windows 16 and 8. On an EPYC these gain little.
_POSITIONS = 128


@dataclass
class JacobiState(State):
    """A batch between two calls. `tokens` holds drafts for the W - 1 slots after the committed tokens.

    Attributes:
        label: the laws that the drafts were drawn from; None under acceptance "identical".
        width: slots that the next call scores, at most the window; None: the whole window.
        inputs: long [B, L + scratch], by slot: what the last call was fed there, `UNKNOWN` before any. Only with a
            second source, as are the following.
        steady: long [B, L + scratch], by slot: how many calls in a row left the draft as it was, at most 2. Only under
            acceptance "identical", with "chosen" drafts.
        drafter_cache: the drafter's own state, with "chosen" drafts, as the following.
        fed: long [B], the number of leading slots that the drafter has been fed in final form.
        picture: long [B, L + scratch], by slot: what the drafter drew beforehand, with "pictured" drafts.
    """

    label: Label | None = None
    width: int | None = None
    inputs: Tensor | None = None
    steady: Tensor | None = None
    drafter_cache: DecodeState | None = None
    fed: Tensor | None = None
    picture: Tensor | None = None


class SpeculativeJacobiSampler(ChainSampler):
    """Jacobi decoding with speculative acceptance: several tokens a call, from the autoregressive law or near it.

    SJD (Teng et al., "Accelerating auto-regressive text-to-image generation with training-free speculative Jacobi
    decoding", ICLR 2025) is coupling "independent" with acceptance "exact". Drawing the drafts of one
    slot with common randomness in successive rounds makes them agree more often: "gumbel" and "maximal" are the two
    couplings of SCD / MC-SJD (So et al., ICML 2026). Acceptance "identical" verifies with the slot's own Gumbel
    noise as well, and returns the tokens of `AutoregressiveSampler` for the same generator. These are lossless.

    The relaxed acceptances of `relaxed.py` are lossy: "grouped" (GSD, published with coupling "independent"),
    "clustered" (its static variant) and "lantern" (LANTERN, LANTERN++). They work with every coupling. The trace
    measures their cost.

    Args:
        window: slots scored by one call, at least 1; or "auto" with acceptance "identical": the window with the most
            tokens per second on this machine, by measured calls (`visual_spec.samplers.raster.window`). None: 32; with
            acceptance "identical" fewer in batches, so that a call has at most 128 positions in all rows, or 4 slots.
        coupling: how the drafts of a slot in successive rounds depend on each other: "gumbel", "independent" or
            "maximal".
        acceptance: "identical" (needs coupling "gumbel"), "exact", "grouped", "clustered" or "lantern".
        initial_draft: the draft of a slot that enters the window: "uniform" over the allowed ids, a copy of the
            token to the "left" or "up", a draw from the law of the last scored slot, "last_law"; in clips also a copy
            from the "previous_frame", where each block of it moved ("moved_frame"), or where a pan moved it as a whole
            ("panned_frame").
        relaxation: the numbers of a relaxed acceptance, by name, such as {"delta": 0.2}; see `Relaxation`.
        graph: replay the calls as a CUDA graph, see `visual_spec.samplers.core.graph`; the tokens are the same. "auto"
            replays them wherever possible. Completed samples then stay in the batch until it ends.
        exact_width: keep the promise of acceptance "identical" below float32 too. Every call of the model then has 32
            positions, whatever the window, and completed samples stay in the batch, so that all calls run the same
            kernels. `AutoregressiveSampler(exact_width=True)` draws the same tokens for the same batch. A window
            below 32 saves nothing; "auto" is 32.
        drafts: who drafts a slot after a token that has changed since the slot's draft was drawn: "carried" (nobody:
            the old draft stays, as published), "repaired" (a copy of the last token with the same two neighbours), or
            "chosen" (a drafter, where it beats the old draft); or "pictured": a drafter draws the whole sample
            beforehand, in its own order and with the noise of the slots. Its tokens enter the window in place of
            `initial_draft`, and stand in for stale drafts where their neighbours agree; elsewhere as "repaired". Only
            with acceptance "identical". The tokens are the same, or their law; see
            `visual_spec.samplers.raster.redrafting`. None: "repaired" with acceptance "identical", else "carried".
        redrafts: how many slots, from the first open one on, may be drafted anew; at least 1. With "chosen" each
            costs a drafter call.
    """

    reads_text = True
    state_kind: type[State] = JacobiState

    @register_to_config
    def __init__(
        self,
        window: Window | None = None,
        coupling: Coupling = "gumbel",
        acceptance: RelaxedAcceptance = "identical",
        initial_draft: Annotated[str, OneOf(INITIAL_DRAFTS)] = "left",
        relaxation: RelaxedNumbers = None,
        graph: Graph = AUTO,
        exact_width: ExactWidth = False,
        drafts: Annotated[str | None, OneOf(DRAFTS)] = None,
        redrafts: Annotated[int, COUNT] = 12,
    ) -> None:
        if drafts == PICTURED and acceptance != "identical":
            raise ValueError(
                f"drafts='pictured' with acceptance={acceptance!r}; a picture was drawn with the noise that tests it, "
                "which only acceptance 'identical' allows."
            )
        if drafts in (PICTURED, CHOSEN):
            self.takes, self.needs_drafter = ("codebook", "drafter", "drafter_condition"), True

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        if self.needs_drafter:
            from visual_spec.samplers.core.drafters import check_drafter  # where there is one

            drafter = parts.get("drafter")
            check_drafter(self, model, drafter)
            if self.drafts == PICTURED and hasattr(drafter, "follow"):
                raise ValueError(
                    "drafts='pictured' needs a drafter that draws whole samples, and "
                    f"{type(drafter).__name__} reads the target's features; pass a model of the same tokens, such as "
                    "a near-to-far one, or drafts='chosen'."
                )
            if self.drafts == PICTURED:
                from visual_spec.samplers.orders.ordered import OrderedSampler

                OrderedSampler().check(drafter, law, batch_size, {})

    def width(self, model: Any) -> int:
        """The most slots that a call drafts and scores: the window, or the grid if it is smaller."""
        return min(widest(self.config.window, self.fixed_width), model.grid.num_tokens)

    def window_of(self, model: Any) -> int:
        return self.width(model)

    @property
    def drafts(self) -> str:
        """Who drafts a slot whose draft is stale."""
        drafts = self.config.get("drafts", CARRIED)  # a subclass may have no such setting
        return drafts or (REPAIRED if self.keeps == IDENTICAL else CARRIED)

    @property
    def redrafting(self) -> Redrafting:
        """How drafts follow from the last call."""
        return Redrafting(
            self.config.coupling, self.keeps == IDENTICAL, self.config.initial_draft, self.labels
        )

    @property
    def labels(self) -> bool:
        """Whether drafts are labelled with the laws they were drawn from."""
        return self.keeps != IDENTICAL

    @property
    def coupled(self) -> bool:
        return self.config.coupling == "maximal"

    @property
    def needs_laws(self) -> bool:
        return self.config.initial_draft == LAST_LAW

    def paced(self, advance: Callable[[], None], run: Run, state: Any) -> Callable[[], None]:
        # Under the other acceptances the tokens of a seed depend on the window, so it may not depend on the batch.
        if self.fixed_width is not None or self.keeps != IDENTICAL or isinstance(self.config.window, int):
            return advance
        if self.config.window is None:
            return by_rows(advance, state, run.cache.guided)
        from visual_spec.samplers.raster.window import WindowPolicy, adaptive  # where it is asked for

        policy = WindowPolicy.of(run.model, (run.batch_size, run.law_given.guided, str(run.device)))
        return adaptive(advance, state, policy, run.num_tokens)

    def prepare(self, run: Run) -> Any:
        window = self.width(run.model)
        state: Any = self.state_kind.begin(run, scratch=window)
        if self.drafts != CARRIED:
            state.inputs = torch.full_like(state.tokens, UNKNOWN)
        if self.drafts == PICTURED:
            from visual_spec.samplers.orders.ordered import whole_picture

            state.picture = F.pad(whole_picture(run, state.tokens[:, 0]), (0, window))
            run.lap("draft")
        if self.drafts == CHOSEN:
            from visual_spec.samplers.core.drafters import start_drafter

            state.drafter_cache = start_drafter(run, window=window)
            state.fed = torch.zeros_like(state.lengths)
            state.steady = torch.zeros_like(state.tokens) if self.keeps == IDENTICAL else None
        slots, logits = torch.zeros_like(state.lengths)[:, None], run.view.first(run.cache.logits)
        first = run.view.laws(run.law, logits, slots, run.guided)  # [B, K, V]
        self.redraft(run, state, first.repeat(1, window, 1), torch.ones_like(state.lengths), width=1)
        return state

    def propose(self, run: Run, state: JacobiState) -> Draft:
        window = self.width(run.model)
        slots = state.next_slots(min(state.width or window, window) - 1)
        carried = Draft(run.view.read(state.tokens, slots), state.label, "last call")
        if self.drafts == CARRIED:
            return carried
        source: Source
        tokens, grid, count = state.tokens, run.model.grid, self.config.redrafts
        if self.drafts in (REPAIRED, PICTURED):
            source = copies(tokens, state.lengths, grid, slots[:, :count])
            if state.picture is not None:
                source = pictured(state.picture, tokens, grid, slots[:, :count], source)
        else:
            source = Chosen(run, state, slots, window, self.config.coupling == "gumbel", state.steady)
        draft = redrafted(state, slots, carried, count, source)
        if self.redrafting.redraws:  # `settle` leaves kept drafts where they are
            state.tokens.scatter_(1, slots, draft.tokens)
        if self.needs_drafter:
            run.lap("draft")
        return draft

    def settle(self, run: Run, state: JacobiState, slots: Tensor, verdict: Verdict) -> None:
        if hasattr(run.drafter, "observe"):
            run.drafter.observe(state.drafter_cache, state.cache.features, slots - 1)
        if state.steady is not None:
            same = state.tokens.gather(1, slots) == verdict.tokens
            age = (state.steady.gather(1, slots) + 1).clamp(max=2)
            state.steady.scatter_(1, slots, torch.where(same, age, 0))
        tokens = verdict.tokens
        if self.redrafting.redraws:  # the drafts after the replacement are drawn below
            place = torch.arange(tokens.shape[1], device=tokens.device) // run.view.codebooks
            final = place <= verdict.kept[:, None]
            tokens = torch.where(final, tokens, run.view.read(state.tokens, slots))
        run.view.write(state.tokens, slots, tokens)
        state.commit(slots, verdict.advance, run.num_tokens, verdict.near)
        self.redraft(run, state, verdict.laws, verdict.advance, slots.shape[1], verdict.drawn)

    def redraw(self, state: JacobiState) -> tuple[int, int | Tensor] | None:
        if not self.redrafting.redraws or self.config.initial_draft == LAST_LAW:
            return None
        return self.redrafting.noise(state.round)

    def redraft(
        self,
        run: Run,
        state: JacobiState,
        laws: Tensor | None,
        advance: Tensor,
        width: int,
        drawn: Tensor | None = None,
    ) -> None:
        """Draft the W - 1 slots after the committed tokens, and label each draft with the law it is drawn from.

        Args:
            laws: [B, C * K, V] of the last call, of which the first `width` slots count; None if nothing is drawn.
            advance: long [B], the number of its slots that were committed. Later slots are drafted from their own laws;
                slots that the call did not reach get an initial draft. Where a column waits for its replacement, its
                draft is already refused, so any draft will do: its label is `refused_law`.
            drawn: long [B, width], draws from the laws that a kernel has already made.
        """
        view = run.view
        slots = state.next_slots(self.width(run.model) - 1)
        # The position that scored a slot.
        source = advance[:, None] + torch.arange(slots.shape[1], device=slots.device)
        # If the last column is forced and the next is not, "last_law" drafts token 0 with certainty: a poor draft,
        # correctly labelled.
        reached, rows = source < width, view.places(source.clamp(max=width - 1))
        if (
            self.keeps == IDENTICAL
        ):  # an earlier, wider call may also have scored a slot: drafts need no label
            reached = reached | (state.commit_call.gather(1, slots) > 0)

        def copies(drafts: Tensor) -> Tensor:
            if state.picture is not None:
                return state.picture.gather(1, slots)
            if view.carries_drafts:
                view.write(state.tokens, slots, drafts)
            newest = (state.lengths - advance + width - 1)[:, None]  # [B, 1], the last slot the call reached
            direction, grid = self.config.initial_draft, run.model.grid
            return view.read(state.tokens, copied_slots(direction, slots, newest, grid, state.tokens))

        # A picture stands in for every kind of initial draft.
        rule = replace(self.redrafting, initial=PICTURED) if state.picture is not None else self.redrafting
        drafts, label = rule.drafts(
            run.noise,
            state.round,
            laws,
            rows,
            view.entries(slots),
            view.read(state.tokens, slots),
            reached.repeat_interleave(view.codebooks, 1),
            copies,
            run.law.law.allowed or (0, run.model.vocab_size),
            drawn=drawn,
        )
        drafts, state.label = view.forced(drafts, label, slots)
        view.write(state.tokens, slots, drafts)


def widest(window: int | str | None, fixed: int | None = None) -> int:
    """Return the most slots that a call scores; "auto" and None are `fixed` where all calls have that width."""
    if isinstance(window, int):
        return window
    return fixed or (USUAL if window is None else WIDTHS[-1])


def window_of_rows(rows: int) -> int:
    """Return the window of a batch of so many rows, guidance rows included: as wide as its call stays small."""
    fitting = [width for width in WIDTHS if NARROWEST <= width <= USUAL and rows * width <= _POSITIONS]
    return max(fitting, default=NARROWEST)


def by_rows(advance: Callable[[], None], state: Any, guided: bool) -> Callable[[], None]:
    """Return `advance`, one step on `state`, with the window of the rows that are left in every call.

    `state`: has `width`, which is set, and `lengths`, long `[B]`.
    """

    def step() -> None:
        state.width = window_of_rows(len(state.lengths) * (2 if guided else 1))
        advance()

    return step
