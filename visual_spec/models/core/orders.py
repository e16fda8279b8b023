"""Orders of the slots: models trained for an order, any-order models, and the order in which MAR fills its slots.

RandAR (Pang et al., "RandAR: decoder-only autoregressive visual generation in random orders", 2412.01827) feeds a
position-instruction token before every image token, which names the slot to predict. What a call needs of such a model
is the same for other ways to name the target, such as sigma-GPT's two position embeddings a token (2404.09562).

Such a model has a law for every order of the slots: the product of its predictions along it. Masked models are asked
for hidden slots too, but their call sees all known tokens both ways, so one call cannot score a draft and the drafts
after it (`visual_spec.models.core.masked_protocol`).

A step of MAR (Li et al. 2024) leaves a share cos(pi / 2 * (s + 1) / N) of the slots hidden, as in MaskGIT (Chang et al.
2022, section 3.1), but takes at least one slot and leaves at least one to each step that follows. So N = L steps take
one slot each.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.protocol import DecodeState, NextTokenModel, TokenGrid
from visual_spec.models.core.settings import Within, whole

# Learned tokens that orders of regions feed in their first parallel step: one for each region but the first.
LEARNED_TOKENS = {"par4": 3, "par16": 15}


class TrainedOrderModel(NextTokenModel, Protocol):
    """A model of image tokens that was trained for an order of `samplers.orders.tables`.

    Its prefill predicts slot 0, or the P slots of the order's first step with logits [R, P, V]. A call feeds any slots,
    and gets the slots to predict, and the position whose head answers for each. Raster samplers refuse such a model;
    `OrderedSampler` decodes it.
    """

    @property
    def trained_order(self) -> str:
        """The name of the order, a key of `samplers.orders.tables.ORDERS`."""
        ...

    def __call__(
        self,
        state: Any,
        tokens: Tensor,
        slots: Tensor,
        *,
        seen: Tensor | None = None,
        predicted: Tensor | None = None,
        answers: Tensor | None = None,
    ) -> Tensor:
        """Feed tokens, and predict the slots asked for.

        The cache is written by slot, and the slot also gives the rotary index. A position sees the condition, itself,
        and the places in `seen`. K learned tokens (PAR's transition tokens) have the ids V to V + K - 1 and the places
        L to L + K - 1 after the grid.

        Args:
            tokens: long [B, W], W <= the window of the prefill.
            slots: long [B, W], all different in a row.
            seen: bool [B, W, L + K], the places that each position attends to. A slot fed in the same call counts
                with its new token.
            predicted: long [B, P], the slots to predict.
            answers: long [P, H], for each of them the position of the call that answers with head h; -1 for none. The
                model merges the heads that answer, NAR by their mean, FlashAR by a learned gate.

        Returns:
            logits [R, P, V].

        Raises:
            ValueError: `seen`, `predicted` or `answers` is missing.
        """
        ...


class AnyOrderModel(Protocol):
    """A model of image tokens that predicts any slot from the tokens of any others, fed in any order.

    A call has two kinds of positions: those that are fed, and those that are only asked. Both predict their own slot
    from what they see. What a slot was fed is seen by later positions, as `seen` says.
    """

    @property
    def grid(self) -> TokenGrid: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def trained_order(self) -> str:
        """`ANY_ORDER`. Samplers of raster order refuse such a model."""
        ...

    def prefill(
        self,
        condition: Any,
        *,
        batch_size: int,
        guided: bool,
        window: int,
        asked: Tensor,
        together: bool = False,
    ) -> DecodeState:
        """Run the condition, ask the first slots in the same forward, and allocate the static cache.

        Args:
            condition: whatever the model is conditioned on, `batch_size` rows of it, or None.
            guided: whether to hold unconditional rows as well.
            window: the most positions of a call.
            asked: long [B, P], the slots to predict given the condition only.
            together: as of a call.

        Returns:
            A `DecodeState` (of the model's own subclass), whose logits [R, P, V] predict the slots `asked`.
        """
        ...

    def __call__(
        self, state: Any, tokens: Tensor, slots: Tensor, *, seen: Tensor, together: bool = False
    ) -> Tensor:
        """Predict slots, and feed tokens at the first of them. No host synchronisation.

        The cache is written by slot: feeding another token at a slot undoes a rejected one.

        Args:
            state: the state from `prefill`.
            tokens: long [B, F], fed at the first F of the slots; F may be 0.
            slots: long [B, W], F <= W <= the window of the prefill, the slots of a row all different. They may run
                past the grid, up to num_tokens + window - 1 (scratch room; those logits are ignored).
            seen: bool [B, W, num_tokens], the slots that each position attends to; none may be its own. A slot fed in
                the same call counts with its new token. Every position also sees the condition.
            together: whether the asked slots are drawn together, as those fed were: then a position may also see
                others of its kind in this call, as its model was trained. A RandAR's asked ones see which slots were
                asked before; an LPD's see all that are asked, and those fed see each other; an ARPG's see those fed.

        Returns:
            logits [R, W, V]; position w predicts slot `slots[b, w]` given what it sees, and not its own token. With
            `together`, those of the positions that are fed are not read, and may be zeros.
        """
        ...


def hidden_after(num_tokens: int, num_steps: int) -> list[int]:
    """Return how many slots are still hidden after each step of the published schedule.

    The last number is 1, as published, although the last step takes all that is left: guidance reads it.

    Raises:
        ValueError: a number of steps that is not in 1 to `num_tokens`.
    """
    num_steps = whole("num_steps", num_steps, Within(1, num_tokens), ", the number of tokens")
    left, counts = num_tokens, []
    for step in range(num_steps):
        share = math.cos(math.pi / 2 * (step + 1) / num_steps)
        left = max(1, min(left - 1, math.floor(num_tokens * share)))
        counts.append(left)
    return counts


def check_order(order: Tensor) -> None:
    """Refuse rows that are no permutations of the slots, by ValueError."""
    if order.ndim != 2 or order.is_floating_point():
        raise ValueError(
            f"an order of shape {list(order.shape)} and {order.dtype}; pass whole numbers [B, L]."
        )
    wanted = torch.arange(order.shape[1], device=order.device)
    wrong = (order.sort(-1).values != wanted).any(-1).nonzero()
    if len(wrong):
        raise ValueError(
            f"row {int(wrong[0])} of the order is no permutation of the slots 0 to {order.shape[1] - 1}; "
            "name each once."
        )


def guidance_scales(scale: float, num_tokens: int, num_steps: int, *, linear: bool = True) -> list[float]:
    """The scale of guidance of each step: `scale`, or growing with the share of slots that the step leaves filled."""
    if not linear:
        return [scale] * num_steps
    return [
        1.0 + (scale - 1.0) * (num_tokens - left) / num_tokens for left in hidden_after(num_tokens, num_steps)
    ]
