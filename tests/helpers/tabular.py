"""A next-token model small enough to know its sequence law exactly: a table of logits by slot and prefix.

The exactness proofs run on it, and it is the cheapest model to try a sampler with.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.cache import seen_in_order
from visual_spec.models.core.masked_protocol import MaskedState
from visual_spec.models.core.protocol import DecodeState, TokenGrid


@dataclass
class TabularState(DecodeState):
    """Tokens fed so far, by slot: [B, num_tokens + window]; each row's table number: [R]; the last tree: [B, N]."""

    tokens: Tensor
    tables: Tensor
    tree: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples)
        self.logits, self.tables = self.logits[rows], self.tables[rows]
        self.tokens = self.tokens[samples]
        self.tree = None if self.tree is None else self.tree[samples]


@functools.lru_cache(16)  # of up to 60 MB: many tests make the same model
def _random_table(
    shape: tuple[int, ...], seed: int, scale: float, dtype: torch.dtype, dependence: float, contexts: int
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = dependence**0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if dependence < 1:
        shared = [1 if axis == contexts else size for axis, size in enumerate(shape)]
        table += (1 - dependence) ** 0.5 * torch.randn(shared, generator=generator, dtype=torch.float64)
    return (scale * table).to(dtype)


class Table(nn.Module):
    """A model whose logits are a seeded random table; its first axis is the condition, the last one unconditional."""

    grid: TokenGrid
    vocab_size: int
    logits: Tensor

    def fill(
        self,
        shape: Sequence[int],
        seed: int,
        scale: float,
        dtype: torch.dtype,
        dependence: float = 1.0,
        contexts: int = 2,
    ) -> None:
        """Make the table `logits`. Along the axis `contexts` varies a share `dependence` of the variance."""
        table = _random_table(tuple(shape), seed, scale, dtype, dependence, contexts)
        self.register_buffer("logits", table.clone())

    @property
    def conditions(self) -> int:
        """Number of conditional tables."""
        return len(self.logits) - 1

    def tables(self, condition: Tensor | None, batch_size: int, guided: bool) -> Tensor:
        """Return the table number of each row: long [R]. `condition`: None (table 0), or long [B] of table numbers."""
        return tables_of(condition, batch_size, self.conditions, guided).to(self.logits.device)


class TabularModel(Table):
    """Seeded random logits for every slot and every context of the last `order` tokens.

    Args:
        grid: geometry of the tokens.
        vocab_size: V.
        order: number of previous tokens that the law depends on; None is the whole prefix. A slot has V ** order rows.
        conditions: number of conditional tables; one more serves the unconditional rows.
        seed: seed of the tables. The same arguments give the same tables on every machine.
        scale: standard deviation of the logits; larger is more peaked.
        dependence: share, 0 to 1, of their variance that depends on the context; the rest depends on the slot.
        dtype: dtype of the logits.
    """

    def __init__(
        self,
        grid: TokenGrid,
        vocab_size: int,
        *,
        order: int | None = None,
        conditions: int = 1,
        seed: int = 0,
        scale: float = 1.2,
        dependence: float = 1.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        order = grid.num_tokens - 1 if order is None else order
        self.grid, self.vocab_size, self.order = grid, vocab_size, order
        shape = (conditions + 1, grid.num_tokens, vocab_size**order, vocab_size)
        self.fill(shape, seed, scale, dtype, dependence)  # [tables, L, V ** order, V]

    def prefill(
        self, condition: Tensor | None, *, batch_size: int, guided: bool, window: int
    ) -> TabularState:
        tables = self.tables(condition, batch_size, guided)
        tokens = tables.new_zeros(batch_size, self.grid.num_tokens + window)
        return TabularState(self.logits[tables, 0, 0], guided, window, tokens, tables)

    def forward(
        self,
        state: TabularState,
        tokens: Tensor,
        slots: Tensor,
        visible: Tensor | None = None,
        seen: Tensor | None = None,
        predicted: Tensor | None = None,
    ) -> Tensor:
        """Return logits [R, W, V] of the slots after `slots`, as `NextTokenModel`; with `visible` as `TreeModel`.

        With `seen`, as `OrderModel`: any slot may be `predicted`, from the `order` slots before it. A slot that a
        position does not see reads as the last id, V - 1 (not as 0, which slots never fed hold, so that a wrong read is
        noticed).
        """
        if visible is None:
            state.tokens.scatter_(1, slots, tokens)
            path = state.tokens[:, None].expand(-1, slots.shape[1], -1)  # [B, W, S], the tokens seen
            if seen is not None:
                path = path.masked_fill(~seen_in_order(slots, seen, state.window), self.vocab_size - 1)
        else:
            state.tree = tokens
            # Every node writes its ancestors and itself over a copy of the committed tokens.
            spare = torch.where(visible, slots[:, None], state.tokens.shape[1])  # [B, N, N]
            path = F.pad(state.tokens, (0, 1))[:, None].repeat(1, slots.shape[1], 1)
            path.scatter_(2, spare, tokens[:, None].expand_as(spare))
        following = slots + 1 if predicted is None else predicted
        # [B, W], the last tokens in base V, the newest least significant
        context = torch.zeros_like(slots)
        for back in reversed(range(self.order)):
            earlier = following - 1 - back
            token = path.gather(2, earlier.clamp(min=0)[..., None])[..., 0].masked_fill(earlier < 0, 0)
            context = context * self.vocab_size + token
        # Past the grid any finite logits will do: the caller ignores them.
        following = following.clamp(max=self.grid.num_tokens - 1)
        repeats = state.tables.shape[0] // slots.shape[0]
        return self.logits[state.tables[:, None], following.repeat(repeats, 1), context.repeat(repeats, 1)]

    def keep(self, state: TabularState, nodes: Tensor, slots: Tensor) -> None:
        """Write the tokens of the last tree's nodes at slots; see `TreeModel.keep`."""
        assert state.tree is not None
        state.tokens.scatter_(1, slots, state.tree.gather(1, nodes))

    def law_of_sequences(
        self, law: Callable[[Tensor, bool, Tensor], Tensor], *, condition: int = 0, guided: bool = False
    ) -> Tensor:
        """Return the exact probability of every sequence under autoregressive sampling.

        Args:
            law: a `TokenLaw`, or any function from (logits [R, 1, V], guided, slots [B, 1]) to log-probabilities
                [B, 1, V].
            condition: the number of the conditional table.
            guided: pass the unconditional rows to the law as well.

        Returns:
            [V ** L]; a sequence's index is its tokens read as a number in base V, the first most significant.
        """
        tables = torch.tensor([condition, self.conditions] if guided else [condition])
        probability = self.logits.new_ones(1)
        for slot in range(self.grid.num_tokens):
            # A prefix longer than `order` acts through its last `order` tokens only.
            prefixes = torch.arange(self.vocab_size**slot) % self.vocab_size**self.order
            logits = self.logits[tables, slot][:, prefixes]  # [1 or 2, V ** slot, V]
            slots = torch.full((len(prefixes), 1), slot)
            log_probs = law(logits.flatten(0, 1)[:, None], guided, slots)[:, 0]
            probability = (probability[:, None] * log_probs.exp()).flatten()
        return probability


class TabularOrderModel(Table):
    """A `TrainedOrderModel` as a table: logits for every head, slot, and set of tokens that are seen.

    The logits also depend on the place of the position that answers, so asking the wrong one makes a difference.

    Args:
        grid: geometry of the tokens.
        vocab_size: V; there are (V + 1) ** L contexts, V standing for a token that is not seen.
        trained_order: the order that the model claims to be trained for.
        heads: H, output heads; a slot's logits are the mean of those that answer.
        learned: K, learned tokens.
        first: the slots that the prefill predicts.
        conditions, seed, scale: as in `TabularModel`.
    """

    places: Tensor

    def __init__(
        self,
        grid: TokenGrid,
        vocab_size: int,
        trained_order: str,
        *,
        heads: int = 1,
        learned: int = 0,
        first: Sequence[int] = (0,),
        conditions: int = 1,
        seed: int = 0,
        scale: float = 1.2,
    ) -> None:
        super().__init__()
        length = grid.num_tokens
        shape = (conditions + 1, heads, (vocab_size + 1) ** length, length, vocab_size)
        self.grid, self.vocab_size = grid, vocab_size
        self.trained_order, self.learned, self.first = trained_order, learned, first
        generator = torch.Generator().manual_seed(seed)
        by_context = torch.randn(shape, generator=generator, dtype=torch.float64)
        by_place = torch.randn(
            heads, length + learned, length, vocab_size, generator=generator, dtype=torch.float64
        )
        self.register_buffer("logits", scale * by_context)  # [tables, H, (V + 1) ** L, L, V]
        self.register_buffer("places", scale * by_place)  # [H, L + K, L, V]

    def prefill(
        self, condition: Tensor | None, *, batch_size: int, guided: bool, window: int
    ) -> TabularState:
        """Choose the table of every row, and predict the first slots by the mean of all heads."""
        tables = self.tables(condition, batch_size, guided)
        tokens = tables.new_zeros(batch_size, self.grid.num_tokens + self.learned + window)
        # Nothing is seen: the last context. [R, V] or [R, P, V]
        logits = self.logits[tables, :, -1][:, :, self.first].mean(1).squeeze(1)
        return TabularState(logits, guided, window, tokens, tables)

    def forward(
        self,
        state: TabularState,
        tokens: Tensor,
        slots: Tensor,
        *,
        seen: Tensor | None = None,
        predicted: Tensor | None = None,
        answers: Tensor | None = None,
    ) -> Tensor:
        """Return logits [R, P, V] of the slots `predicted`, see `TrainedOrderModel.__call__`."""
        if seen is None or predicted is None or answers is None:
            raise ValueError("pass seen, predicted and answers: this model has no law in raster order.")
        state.tokens.scatter_(1, slots, tokens)
        length, size = self.grid.num_tokens, self.vocab_size
        seen = seen.scatter(2, slots[..., None], True)[..., :length]  # [B, W, L]
        path = state.tokens[:, None, :length].expand_as(seen).masked_fill(~seen, size)
        powers = (size + 1) ** torch.arange(length - 1, -1, -1, device=tokens.device)
        repeats = len(state.tables) // len(tokens)
        context, slots = ((path * powers).sum(-1)).repeat(repeats, 1), slots.repeat(repeats, 1)  # [R, W]
        # Past the grid any finite logits will do: the caller ignores them.
        slots = slots.clamp(max=self.places.shape[1] - 1)
        predicted = predicted.clamp(max=length - 1).repeat(repeats, 1)  # [R, P]
        tables = state.tables[:, None]  # [R, 1]
        total: Tensor | float = 0.0
        for head, position in enumerate(answers.T):  # [P]
            at = position.clamp(min=0)
            found = self.logits[tables, head, context[:, at], predicted]  # [R, P, V]
            found = found + self.places[head, slots[:, at], predicted]
            total = total + found * (position >= 0)[:, None]
        assert isinstance(total, Tensor)
        return total / (answers >= 0).sum(1)[:, None]


class TabularColumnState(TabularState):
    """Columns fed so far, by step: [B, S + window, K]; each row's table number: [R]."""


class TabularColumnModel(Table):
    """As `TabularModel`, for columns of K tokens: logits for every step, codebook, and context of the last columns.

    The special token is a digit of its own in a context, so feeding it makes a difference.

    Args:
        valid: bool [S, K], where a step holds a token (`CodebookPattern.valid`, transposed).
        vocab_size: V; the special token is V.
        order: number of previous columns that the law depends on; None is all. A step has (V + 1) ** (K * order)
            contexts.
        conditions, seed, scale, dependence, dtype: as in `TabularModel`.
    """

    valid: Tensor

    def __init__(
        self,
        valid: Tensor,
        vocab_size: int,
        *,
        order: int | None = None,
        conditions: int = 1,
        seed: int = 0,
        scale: float = 1.2,
        dependence: float = 1.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        steps, codebooks = valid.shape
        self.grid = TokenGrid(1, steps, codebooks=codebooks)
        self.vocab_size = self.special_id = vocab_size
        self.order = steps - 1 if order is None else order
        contexts = (vocab_size + 1) ** (codebooks * self.order)
        self.register_buffer("valid", valid.clone())
        shape = (conditions + 1, steps, contexts, codebooks, vocab_size)
        self.fill(shape, seed, scale, dtype, dependence)  # [tables, S, contexts, K, V]

    def prefill(
        self, condition: Tensor | None, *, batch_size: int, guided: bool, window: int
    ) -> TabularColumnState:
        tables = self.tables(condition, batch_size, guided)
        tokens = tables.new_zeros(batch_size, self.grid.width + window, self.grid.codebooks)
        return TabularColumnState(self.logits[tables, 0, 0], guided, window, tokens, tables)

    def forward(self, state: TabularColumnState, tokens: Tensor, steps: Tensor) -> Tensor:
        """Return logits [R, W, K, V] of the steps after `steps`; see `ColumnModel.__call__`."""
        state.tokens.scatter_(1, steps[..., None].expand_as(tokens), tokens)
        # [B, W], the last columns in base V + 1, the newest least significant
        context = torch.zeros_like(steps)
        for back in reversed(range(self.order)):
            earlier = steps - back
            at = earlier.clamp(min=0)[..., None].expand_as(tokens)
            column = state.tokens.gather(1, at).masked_fill((earlier < 0)[..., None], 0)  # [B, W, K]
            for token in column.unbind(-1):
                context = context * (self.vocab_size + 1) + token
        following = (steps + 1).clamp(max=self.grid.width - 1)
        repeats = state.tables.shape[0] // steps.shape[0]
        return self.logits[state.tables[:, None], following.repeat(repeats, 1), context.repeat(repeats, 1)]

    def law_of_sequences(
        self, law: Callable[[Tensor, bool, Tensor], Tensor], *, condition: int = 0, guided: bool = False
    ) -> Tensor:
        """Return the exact probability of every sequence under autoregressive sampling, column by column.

        Args:
            law: a `TokenLaw`, or any function from (logits [R, 1, V], guided, steps [B, 1]) to log-probabilities
                [B, 1, V].
            condition: the number of the conditional table.
            guided: pass the unconditional rows to the law as well.

        Returns:
            [V ** N] for N valid entries. A sequence's index is its valid tokens, ordered by step and then by codebook,
            read as a number in base V, the first most significant.
        """
        tables = torch.tensor([condition, self.conditions] if guided else [condition])
        probability = self.logits.new_ones(1)
        contexts = torch.zeros(1, dtype=torch.long)
        base = self.vocab_size + 1
        for step in range(self.grid.width):
            logits = self.logits[tables, step][:, contexts]  # [1 or 2, prefixes, K, V]
            steps = torch.full((len(contexts), 1), step)
            for codebook, valid in enumerate(self.valid[step].tolist()):
                token = torch.full((1,), self.special_id)
                if valid:
                    log_probs = law(logits[:, :, codebook].flatten(0, 1)[:, None], guided, steps)[:, 0]
                    # Tokens drawn at this step do not change the step's other codebooks.
                    count = len(probability) // len(contexts)
                    conditional = log_probs.exp().repeat_interleave(count, 0)
                    probability = (probability[:, None] * conditional).flatten()
                    token = torch.arange(self.vocab_size)
                grown = len(token)
                steps, logits = steps.repeat_interleave(grown, 0), logits.repeat_interleave(grown, 1)
                contexts = (contexts[:, None] * base + token).flatten()
            contexts = contexts % base ** (self.grid.codebooks * self.order)
        return probability


@dataclass
class TabularMaskedState(MaskedState):
    """Each row's table number: [R]."""

    tables: Tensor

    def select(self, samples: Tensor) -> None:
        self.tables = self.tables[self.rows(samples, len(self.tables))]


class TabularMaskedModel(Table):
    """A `MaskedModel` as a table: logits for every codebook, slot, and state of all entries, hidden or not.

    Args:
        grid: geometry of the tokens, including codebooks.
        vocab_size: V; the mask is V. There are (V + 1) ** (L * K) contexts.
        conditions, seed, scale, dtype: as in `TabularModel`.
    """

    def __init__(
        self,
        grid: TokenGrid,
        vocab_size: int,
        *,
        conditions: int = 1,
        seed: int = 0,
        scale: float = 1.2,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        entries = grid.num_tokens * grid.codebooks
        shape = (conditions + 1, grid.codebooks, (vocab_size + 1) ** entries, grid.num_tokens, vocab_size)
        self.grid = grid
        self.vocab_size = self.mask_id = vocab_size
        self.fill(shape, seed, scale, dtype)  # [tables, K, contexts, L, V]

    def prepare(self, condition: Tensor | None, *, batch_size: int, guided: bool) -> TabularMaskedState:
        return TabularMaskedState(guided, self.logits.device, self.tables(condition, batch_size, guided))

    def forward(self, state: TabularMaskedState, tokens: Tensor, stage: int) -> Tensor:
        """Return logits [R, L, V] of codebook `stage`, given tokens [B, L, K]; see `MaskedModel.__call__`."""
        # [B], all entries in base V + 1, the first most significant
        context = torch.zeros_like(tokens[:, 0, 0])
        for entry in tokens.flatten(1).unbind(1):
            context = context * (self.vocab_size + 1) + entry
        repeats = len(state.tables) // len(tokens)
        return self.logits[state.tables, stage, context.repeat(repeats)]


def tables_of(condition: Tensor | None, batch_size: int, conditions: int, guided: bool) -> Tensor:
    """Return the table number of each row: long [R]. The unconditional table is the last."""
    if condition is None:
        condition = torch.zeros(batch_size, dtype=torch.long)
    if condition.shape != (batch_size,) or condition.dtype != torch.long:
        raise ValueError(
            f"condition is {condition.dtype} of shape {tuple(condition.shape)}; "
            f"pass None or int64 table numbers of shape ({batch_size},)."
        )
    if condition.min() < 0 or condition.max() >= conditions:
        raise ValueError(f"condition={condition.tolist()}; pass numbers from 0 to {conditions - 1}.")
    if not guided:
        return condition
    return torch.cat([condition, torch.full_like(condition, conditions)])  # [2B]
