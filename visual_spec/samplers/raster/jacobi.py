"""Speculative Jacobi decoding: one call scores a window of drafts, and the kept ones are committed at once.

A slot that the last call scored is drafted from the result of that call. A slot that enters the window gets an initial
draft. So drafts are refined from call to call until they are committed. Every draft is labelled with the law that it
was drawn from, and tested by it (`core.verification`). This is the published family; acceptance "identical", the
default, needs no labels and has a file of its own, `jacobi_identical`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from visual_spec.kernels.law import POINT_LAW
from visual_spec.models.core.protocol import NextTokenModel
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
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.raster import jacobi_identical
from visual_spec.samplers.raster.jacobi_identical import (
    CHOSEN,
    DRAFTS,
    PICTURED,
    REPAIRED,
    UNKNOWN,
    USUAL,
    IdenticalState,
    opened,
)

if TYPE_CHECKING:
    from visual_spec.samplers.core.verification import Verdict


@dataclass
class JacobiState(IdenticalState):
    """A batch between two calls, with `label`: the laws that the drafts were drawn from."""

    label: Label | None = None


class SpeculativeJacobiSampler(ChainSampler[NextTokenModel]):
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
            acceptance "identical" fewer in batches, so that a call has at most 128 positions in all rows; in more than
            32 rows 4 slots on a GPU, and 1 on a processor, where no more would pay.
        coupling: how the drafts of a slot in successive rounds depend on each other: "gumbel", "independent" or
            "maximal".
        acceptance: "identical" (needs coupling "gumbel"), "exact", "grouped", "clustered" or "lantern".
        initial_draft: the draft of a slot that enters the window: "uniform" over the allowed ids, a copy of the
            token to the "left" or "up", a draw from the law of the last scored slot, "last_law"; in clips also a copy
            from the "previous_frame", where each block of it moved ("moved_frame"), or where a pan moved it as a whole
            ("panned_frame").
        relaxation: the numbers of a relaxed acceptance, by name, such as {"delta": 0.2}; see `Relaxation`.
        graph: replay the calls as a CUDA graph, see `visual_spec.samplers.core.graph`; the tokens are the same. "auto"
            replays them wherever possible. Completed samples then stay in the batch until it ends. A number: so many
            calls a graph, after which the host looks whether the samples are complete.
        exact_width: keep the promise of acceptance "identical" below float32 too. Every call of the model then has 32
            positions, whatever the window, and completed samples stay in the batch, so that all calls run the same
            kernels. `AutoregressiveSampler(exact_width=True)` draws the same tokens for the same batch. A window
            below 32 saves nothing; "auto" is 32.
        drafts: who drafts a slot after a token that has changed since the slot's draft was drawn: "carried" (nobody:
            the old draft stays, as published), "repaired" (a copy of the last token with the same two neighbours;
            with acceptance "identical" it replaces what two calls in a row have drawn only while copies were right
            more often in the picture), or "chosen" (a drafter, where it beats the old draft); or "pictured": a drafter
            draws the whole sample beforehand, in its own order and with the noise of the slots. Its tokens enter the
            window in place of `initial_draft`, and stand in for
            stale drafts where their neighbours agree; elsewhere copies do. Only with acceptance "identical". The
            tokens are the same, or their law; see `visual_spec.samplers.raster.jacobi_identical`. None: "repaired"
            with acceptance "identical", else "carried".
        redrafts: how many slots, from the first open one on, may be drafted anew; at least 1. With "chosen" each
            costs a drafter call.
    """

    reads_text = gives_logprobs = True
    state_kind: type[JacobiState] = JacobiState

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
            self.reads_text = False

    def check(self, model: NextTokenModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        if self.needs_drafter:
            from visual_spec.samplers.core.drafters import check_drafter  # where there is one

            drafter = parts.get("drafter")
            check_drafter(self, model, drafter)
            if self.config.drafts == PICTURED and hasattr(drafter, "follow"):
                raise ValueError(
                    "drafts='pictured' needs a drafter that draws whole samples, and "
                    f"{type(drafter).__name__} reads the target's features; pass a model of the same tokens, such as "
                    "a near-to-far one, or drafts='chosen'."
                )
            if self.config.drafts == PICTURED:
                from visual_spec.samplers.orders.ordered import OrderedSampler

                OrderedSampler().check(parts["drafter"], law, batch_size, {})

    def plan(self, run: Run) -> None:
        super().plan(run)
        most = widest(self.config.window, run.fixed_width)
        if self.config.acceptance == "identical" and self.config.window is None and run.fixed_width is None:
            most = jacobi_identical.widest(run)
        run.window = min(most, run.model.grid.num_tokens)
        if self.config.window == AUTO and run.fixed_width is None:
            from visual_spec.samplers.raster.window import adaptive  # where it is asked for

            run.pace = adaptive

    @property
    def redrafting(self) -> Redrafting:
        """How drafts follow from the last call."""
        config = self.config
        return Redrafting(
            config.coupling, config.acceptance == "identical", config.initial_draft, labelled=True
        )

    @property
    def coupled(self) -> bool:
        return self.config.coupling == "maximal"

    @property
    def needs_laws(self) -> bool:
        return self.config.initial_draft == LAST_LAW

    def prepare(self, run: Run) -> IdenticalState:
        if self.config.acceptance == "identical":
            return jacobi_identical.prepare(self.config, run)
        return self.labelled(run, run.window)

    def step(self, run: Run, state: Any) -> None:
        if self.config.acceptance == "identical":
            jacobi_identical.step(self.config, run, state)
        else:
            super().step(run, state)

    # -- the published family: every draft has a label

    def labelled(self, run: Run, window: int) -> JacobiState:
        """Return the state after the prefill, with labelled drafts in a window."""
        drafts = self.config.get("drafts")  # a subclass may have no such setting
        state = self.state_kind.begin(run, scratch=window, window=window)
        if drafts in (REPAIRED, CHOSEN):
            state.inputs = torch.full_like(state.tokens, UNKNOWN)
        if drafts == CHOSEN:
            from visual_spec.samplers.core.drafters import start_drafter

            state.drafter_cache = start_drafter(run, window=window)
            state.fed = torch.zeros_like(state.lengths)
        slots, logits = torch.zeros_like(state.lengths)[:, None], run.view.first(run.cache.logits)
        first = run.view.laws(run.law, logits, slots, run.guided)  # [B, K, V]
        self.redraft(run, state, first.repeat(1, window, 1), torch.ones_like(state.lengths), width=1)
        return state

    def propose(self, run: Run, state: JacobiState) -> Draft:
        """Return the drafts of the last call, with others in place of stale ones where a second source is asked for."""
        slots = state.next_slots(state.window - 1)
        carried = Draft(run.view.read(state.tokens, slots), state.label, "last call")
        if state.inputs is None:
            return carried
        assert carried.label is not None
        count = self.config.redrafts
        if state.drafter_cache is not None:
            from visual_spec.samplers.raster.redrafting import Chosen, redrafted  # where there is a drafter

            source = Chosen(run, state, slots, state.window, self.config.coupling == "gumbel", None)
            draft = redrafted(state, slots, carried, count, source)
            run.lap("draft")
        else:
            now = opened(state, state.window, count, run.model.grid)
            fed, replaced = now.fed, now.replaced
            assert replaced is not None
            # A copy is a function of earlier tokens.
            rows, size = carried.label.rows, replaced.shape[1]
            rows = torch.cat([rows[:, :size].masked_fill(replaced, POINT_LAW), rows[:, size:]], 1)
            draft = Draft(
                fed[:, 1:], Label(carried.label.laws, rows, carried.label.allowed), carried.provenance
            )
        if self.redrafting.redraws:  # `settle` leaves kept drafts where they are
            state.tokens.scatter_(1, slots, draft.tokens)
        return draft

    def settle(self, run: Run, state: JacobiState, slots: Tensor, verdict: Verdict) -> None:
        if hasattr(run.drafter, "observe"):
            run.drafter.observe(state.drafter_cache, state.cache.features, slots - 1)
        tokens = verdict.tokens
        if self.redrafting.redraws:  # the drafts after the replacement are drawn below
            place = torch.arange(tokens.shape[1], device=tokens.device) // run.view.codebooks
            final = place <= verdict.kept[:, None]
            tokens = torch.where(final, tokens, run.view.read(state.tokens, slots))
        run.view.write(state.tokens, slots, tokens)
        state.commit(slots, verdict.advance, run.num_tokens, verdict.near)
        self.redraft(run, state, verdict.laws, verdict.advance, slots.shape[1], verdict.drawn)

    def redraw(self, state: JacobiState) -> tuple[int, int | Tensor] | None:
        rule = self.redrafting
        return rule.noise(state.round) if rule.redraws and rule.initial != LAST_LAW else None

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
        slots = state.next_slots(state.window - 1)
        # The position that scored a slot.
        source = advance[:, None] + torch.arange(slots.shape[1], device=slots.device)
        # If the last column is forced and the next is not, "last_law" drafts token 0 with certainty: a poor draft,
        # correctly labelled.
        reached, rows = source < width, view.places(source.clamp(max=width - 1))

        def copies(drafts: Tensor) -> Tensor:
            if view.carries_drafts:
                view.write(state.tokens, slots, drafts)
            newest = (state.lengths - advance + width - 1)[:, None]  # [B, 1], the last slot the call reached
            direction, grid = self.config.initial_draft, run.model.grid
            return view.read(state.tokens, copied_slots(direction, slots, newest, grid, state.tokens))

        drafts, label = self.redrafting.drafts(
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
