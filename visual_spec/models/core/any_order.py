"""The interface of any-order models: trained on random orders, they predict the slot they are asked for.

RandAR (Pang et al., "RandAR: decoder-only autoregressive visual generation in random orders", 2412.01827) feeds a
position-instruction token before every image token, which names the slot to predict. What a call needs of such a model
is the same for other ways to name the target, such as sigma-GPT's two position embeddings a token (2404.09562).

Such a model has a law for every order of the slots: the product of its predictions along it. Masked models are asked
for hidden slots too, but their call sees all known tokens both ways, so one call cannot score a draft and the drafts
behind it (`visual_spec.models.core.masked_protocol`).
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid

ANY_ORDER = "any"  # what an any-order model declares as its `trained_order`


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

    def prefill(self, condition: Any, *, batch_size: int, guided: bool, window: int, asked: Tensor) -> Any:
        """Run the condition, ask the first slots in the same forward, and allocate the static cache.

        Args:
            condition: whatever the model is conditioned on, `batch_size` rows of it, or None.
            guided: whether to hold unconditional rows as well.
            window: the most positions of a call.
            asked: long [B, P], the slots to predict given the condition only.

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
            together: whether a position that is only asked also sees which slots were asked before it in this call.
                Passed where several are drawn in a call; a model that names slots in another way than by tokens of
                their own may ignore it.

        Returns:
            logits [R, W, V]; position w predicts slot `slots[b, w]` given what it sees, and not its own token.
        """
        ...
