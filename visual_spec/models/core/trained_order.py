"""Models that were trained for another order than raster order: what they declare, and how they are called."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from visual_spec.models.core.protocol import NextTokenModel

RASTER_ORDER = "raster"

# Learned tokens that orders of regions feed in their first parallel step: one for each region but the first.
LEARNED_TOKENS = {"par4": 3, "par16": 15}


def trained_order(model: Any) -> str:
    """Return the name of the order a next-token model was trained for: raster order, unless it declares another."""
    return getattr(model, "trained_order", RASTER_ORDER)


class TrainedOrderModel(NextTokenModel, Protocol):
    """A model of image tokens that was trained for an order of `samplers.orders.tables`.

    Its prefill predicts slot 0, or the P slots of the order's first step with logits [R, P, V]. A call feeds any slots,
    and is told which slots to predict, and which position's head answers for each. Raster samplers refuse such a model;
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
        L to L + K - 1 behind the grid.

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
