"""A drafter as the second source of Jacobi decoding: it drafts the slots whose carried draft is stale.

The carried draft of a slot is what the target drew there in the last call, after the token that was fed before the
slot. If a correction has put another token there since, the carried draft is stale. So the first slots are walked in
order, and the drafter drafts those whose token before has changed. Under acceptance "identical" any draft is allowed,
and the drafter's token must win its race by the margin that the carried draft deserves, by how long that has stayed
the same (`NEEDED_MARGIN`). Under the others a draft carries its law. Whether a slot is drafted anew depends there on
earlier slots only, and never on the noise of the slot itself, so the labels stay true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visual_spec.samplers.core.drafts import Draft, Label
from visual_spec.samplers.core.noise import REDRAFT, TOKEN
from visual_spec.samplers.core.state import Run

# How far the drafter's best token must lead, in nats under the slot's noise, to replace a carried draft that 0, 1, and
# 2 or more calls in a row have left as it was. From a logistic regression on 24 prompts of `shapes`, without its small
# terms.
NEEDED_MARGIN = (0.0, 1.4, 2.0)

# Drafts one of the slots that it was made for, by their number, after the tokens long [B, 1] that are now before it.
# Returns tokens long [B, 1], their law [B, 1, V], and bool [B, 1], where they are wanted.
Source = Callable[[int, Tensor], tuple[Tensor, Tensor, Tensor]]


def redrafted(state: Any, slots: Tensor, draft: Draft, count: int, source: Source) -> Draft:
    """Return the draft with other tokens and labels where the source replaces a stale one, in the first `count` slots.

    Notes in `state.inputs` what each slot is about to be fed.

    Args:
        state: has `tokens` and `inputs`, long [B, S], by slot.
        slots: long [B, N], the slots of the draft.
        draft: the carried drafts; without a label under acceptance "identical".
    """
    inputs, newest = state.inputs, slots[:, :1] - 1
    before = state.tokens.gather(1, newest)  # [B, 1]
    fed = inputs.gather(1, slots - 1)  # [B, N], before each slot, in the last call
    rows = None if draft.label is None else draft.label.rows.clone()  # [B, N]
    laws = [] if draft.label is None else [draft.label.laws]
    tokens = [before]
    for place in range(min(count, slots.shape[1])):
        token, law, wanted = source(place, before)
        replaced = wanted & (fed[:, place, None] != before)
        before = torch.where(replaced, token, draft.tokens[:, place, None])
        tokens.append(before)
        if rows is not None:
            row = sum(part.shape[1] for part in laws)
            rows[:, place, None] = torch.where(replaced, row, rows[:, place, None])
            laws.append(law)
    now = torch.cat([*tokens, draft.tokens[:, len(tokens) - 1 :]], 1)  # [B, 1 + N]
    inputs.scatter_(1, torch.cat([newest, slots], 1), now)
    label = None
    if draft.label is not None and rows is not None:
        label = Label(torch.cat(laws, 1), rows, draft.label.allowed)
    return Draft(now[:, 1:], label, draft.provenance)


class Chosen:
    """The source that draws from the drafter's law, one drafter call a slot.

    Args:
        slots: long [B, n], those that are drafted.
        window: the most tokens that a target call commits.
        own_noise: draw with the noise of the slot itself, as the target does under coupling "gumbel".
        steady: long [B, S], by slot: how many calls in a row left the carried draft as it was. None, where that may not
            count: every stale draft is replaced.
    """

    def __init__(
        self, run: Run, state: Any, slots: Tensor, window: int, own_noise: bool, steady: Tensor | None
    ) -> None:
        from visual_spec.samplers.core.drafters import catch_up  # where there is a drafter

        self.run, self.state, self.slots, self.steady = run, state, slots, steady
        self.noise = (TOKEN, 0) if own_noise else (REDRAFT, state.round + 1)
        self.ahead: Tensor | None = catch_up(run, state, window)  # [R, 1, V]

    def __call__(self, place: int, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from visual_spec.samplers.core.drafters import ask_drafter, draft_law

        run, logits, slot = self.run, self.ahead, self.slots[:, place, None]
        if logits is None:
            logits = ask_drafter(run.drafter, self.state.drafter_cache, before, slot - 1)
        self.ahead = None
        law = draft_law(run.law, logits, slot, run.guided)  # [B, 1, V]
        if self.steady is None:
            return run.noise.categorical(law, slot, *self.noise), law, torch.ones_like(slot, dtype=torch.bool)
        tokens, margin = run.noise.race(law, slot, *self.noise)
        age = self.steady.gather(1, slot)
        fresh, once, twice = NEEDED_MARGIN
        needed = torch.where(age == 0, fresh, torch.where(age == 1, once, twice))
        return tokens, law, margin >= needed
