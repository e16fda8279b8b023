"""An any-order model small enough to know its law exactly: the table of one joint law over all tokens."""

import torch
from torch import Tensor, nn

from tests.helpers.tabular import TabularState, tables_of
from visual_spec.models.core.protocol import ANY_ORDER, TokenGrid


class TabularAnyOrderModel(nn.Module):
    """An `AnyOrderModel` whose conditionals all come from one seeded random joint law over V ** L grids of tokens.

    So decoding in every order has the same law. (Under guidance that no longer holds: guided conditionals of different
    orders agree with no common joint.)

    Args:
        grid: geometry of the tokens.
        vocab_size: V; there are (V + 1) ** L contexts, V standing for a token that is not seen.
        conditions: number of conditional tables; one more serves the unconditional rows.
        seed: seed of the joint. The same arguments give the same tables on every machine.
        scale: standard deviation of the logits of the joint; larger is more peaked.
    """

    trained_order = ANY_ORDER
    joint: Tensor
    marginals: Tensor

    def __init__(
        self, grid: TokenGrid, vocab_size: int, *, conditions: int = 1, seed: int = 0, scale: float = 1.2
    ) -> None:
        super().__init__()
        length, tables = grid.num_tokens, conditions + 1
        self.grid, self.vocab_size = grid, vocab_size
        generator = torch.Generator().manual_seed(seed)
        logits = scale * torch.randn(tables, vocab_size**length, generator=generator, dtype=torch.float64)
        joint = logits.softmax(1)
        marginals = joint.view(tables, *[vocab_size] * length)
        for slot in range(length):  # index V of a slot: its token summed out
            marginals = torch.cat([marginals, marginals.sum(1 + slot, keepdim=True)], 1 + slot)
        self.register_buffer("joint", joint)  # [tables, V ** L], slot 0 most significant
        self.register_buffer("marginals", marginals.flatten(1))  # [tables, (V + 1) ** L]

    @property
    def conditions(self) -> int:
        """Number of conditional tables."""
        return len(self.joint) - 1

    def prefill(
        self,
        condition: Tensor | None,
        *,
        batch_size: int,
        guided: bool,
        window: int,
        asked: Tensor,
        together: bool = False,
    ) -> TabularState:
        """Choose the table of every row. `condition`: None (table 0), or long [B] of table numbers.

        Raises:
            ValueError: the condition has another shape, dtype or range.
        """
        device, length = self.joint.device, self.grid.num_tokens
        tables = tables_of(condition, batch_size, self.conditions, guided).to(device)
        tokens = torch.zeros(batch_size, length + window, dtype=torch.long, device=device)
        state = TabularState(torch.empty(0), guided, window, tokens, tables)
        nothing = torch.zeros(*asked.shape, length, dtype=torch.bool, device=device)
        state.logits = self._scores(state, asked, nothing)
        return state

    def forward(
        self, state: TabularState, tokens: Tensor, slots: Tensor, *, seen: Tensor, together: bool = False
    ) -> Tensor:
        """Return logits [R, W, V] of the slots, see `AnyOrderModel.__call__`."""
        state.tokens.scatter_(1, slots[:, : tokens.shape[1]], tokens)
        return self._scores(state, slots, seen)

    def _scores(self, state: TabularState, slots: Tensor, seen: Tensor) -> Tensor:
        """Return the logarithms of marginals of the joint: the own slot takes each token, what is unseen is summed."""
        length, size = self.grid.num_tokens, self.vocab_size
        powers = (size + 1) ** torch.arange(length - 1, -1, -1, device=slots.device)  # [L]
        digits = state.tokens[:, None, :length].expand_as(seen).masked_fill(~seen, size)  # [B, W, L]
        slots = slots.clamp(max=length - 1)  # past the grid any finite logits will do
        digits = digits.scatter(2, slots[..., None], 0)
        contexts = (digits * powers).sum(-1)[..., None] + powers[slots][..., None] * torch.arange(
            size, device=slots.device
        )  # [B, W, V], one for each token of the own slot
        repeats = len(state.tables) // len(slots)
        return self.marginals[state.tables[:, None, None], contexts.repeat(repeats, 1, 1)].log()
