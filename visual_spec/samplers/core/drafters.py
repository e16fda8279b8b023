"""Drafters: the two kinds, how each starts, and which fit a model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.protocol import DecodeState, NextTokenModel, TokenGrid
from visual_spec.samplers.core.checks import CheckedLaw, check_prefill, check_returned
from visual_spec.samplers.core.drafts import rows_of
from visual_spec.samplers.core.state import Run


class FeatureDrafter(Protocol):
    """A drafter that reads the target's features: the input of the target's output head at each slot.

    The other kind of drafter is any `NextTokenModel` (for trees: `TreeModel`; for columns: `ColumnModel`) over the same
    grid and vocabulary. The two kinds start differently and receive different data after a target call. They draft in
    the same way. A drafter of columns reads the features of all layers, and its state is not `guided`: it returns
    guided logits [B, W, K, V].
    """

    @property
    def grid(self) -> TokenGrid: ...

    @property
    def vocab_size(self) -> int: ...

    def follow(self, model: Any, state: Any, *, window: int, **settings: Any) -> DecodeState:
        """Allocate the drafter's cache beside a target that has just been prefilled.

        Args:
            model, state: the target and its state. `state.features` [R, 1, dim] predicted slot 0.
            window: the most positions of one drafter call.
            settings: `guidance_scale`, for a drafter of columns.

        Raises:
            ValueError: the drafter was made for another kind of target.
        """
        ...

    def observe(self, state: Any, features: Tensor, slots: Tensor) -> None:
        """Record the target's features [R, W, dim] at `slots` [B, W]. Each predicted the slot after its own."""
        ...

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor, visible: Tensor | None = None) -> Tensor:
        """As `TreeModel.__call__`, but a tree grows by one level a call: the nodes of the last call come first."""
        ...


def check_drafter(
    sampler: object, model: NextTokenModel, drafter: NextTokenModel | FeatureDrafter | None
) -> None:
    """Refuse a drafter whose drafts the model could not score."""
    grid, vocab_size = model.grid, model.vocab_size
    fits = f"{grid.frames} x {grid.height} x {grid.width} tokens out of {vocab_size}"
    if drafter is None:
        raise ValueError(
            f"{type(sampler).__name__} needs a drafter, and got none; pass drafter=..., an EagleDrafter trained for "
            f"this model, or any smaller next-token model that predicts {fits}."
        )
    if (drafter.grid, drafter.vocab_size) != (grid, vocab_size):
        other = drafter.grid
        raise ValueError(
            f"the drafter predicts {other.frames} x {other.height} x {other.width} tokens out of "
            f"{drafter.vocab_size}, but the model {fits}; pass a drafter for the model's tokens."
        )


def start_drafter(run: Run, *, window: int, **settings: Any) -> DecodeState:
    """Return the drafter's own cache, beside a target that has just been prefilled.

    A feature drafter needs no condition: the features already depend on it.

    Args:
        window: the most positions of one drafter call.
        settings: further arguments of a feature drafter's `follow`.
    """
    if hasattr(run.drafter, "follow"):
        return run.drafter.follow(run.model, run.cache, window=window, **settings)
    batch_size, guided = run.batch_size, run.cache.guided
    drafter, condition = run.drafter, run.drafter_condition
    cache = drafter.prefill(condition, batch_size=batch_size, guided=guided, window=window)
    return check_prefill(cache, batch_size, guided, drafter.vocab_size, "the drafter")


def ask_drafter(
    drafter: NextTokenModel | FeatureDrafter, cache: Any, tokens: Tensor, slots: Tensor, *visible: Tensor
) -> Tensor:
    """Call a drafter, and refuse answers of another shape. Returns logits [R, W, V], or [R, W, K, V] of columns.

    Args:
        cache: the drafter's own state.
        tokens: long [B, W], or [B, W, K] columns.
        slots: long [B, W].
    """
    logits = drafter(cache, tokens, slots, *visible)
    sizes = (*tokens.shape[1:], drafter.vocab_size)
    return check_returned(logits, len(tokens), cache.guided, *sizes, who="the drafter")


def catch_up(run: Run, state: Any, most: int) -> Tensor:
    """Feed the drafter the newly committed tokens. Returns its logits after the newest one: [R, 1, V], or [R, 1, K, V].

    Args:
        state: has `tokens`, `lengths`, `drafter_cache`, and `fed`, long [B]: how many leading slots the drafter has
            been fed in final form.
        most: the most slots that a target call commits.

    The call always has `most` positions. Those after the newest slot hold scratch, at slots that are written again
    before anything reads them. Where nothing was committed, the newest slot is fed again.
    """
    first = torch.minimum(state.fed, state.lengths - 1)[:, None]  # [B, 1]
    slots = first + torch.arange(most, device=first.device)  # [B, most]
    fed = run.view.fed(run.view.read(state.tokens, slots), slots)
    logits = ask_drafter(run.drafter, state.drafter_cache, fed, slots)  # [R, most, V], or [R, most, K, V]
    newest = state.lengths[:, None] - 1 - first
    state.fed = state.lengths
    rows = rows_of(logits.flatten(2), newest.repeat(len(logits) // len(newest), 1))
    return rows.unflatten(2, logits.shape[2:])


def draft_law(law: CheckedLaw, logits: Tensor, slots: Tensor, guided: bool) -> Tensor:
    """Return the drafter's law [B, W, V]: the target's `TokenLaw`, applied to the drafter's logits [R, W, V].

    Raises:
        FloatingPointError, ValueError: the logits define no law, or have another shape; the message says that they are
            the drafter's.
    """
    try:
        return law(logits, slots, guided)
    except (FloatingPointError, ValueError) as error:
        raise type(error)(f"in the drafter: {error}") from error
