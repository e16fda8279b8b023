"""LlamaGen: a Llama-style transformer over raster-ordered image tokens (Sun et al. 2024, section 3.2).

One class serves the embedded size and the official class- and text-conditional checkpoints; parameter names are the
official keys. Models that were trained for other orders are its subclasses (`ORDERS`).

Decoding uses a static cache that is written by slot: each row of a batch advances at its own pace, and a rejected slot
is written again.
"""

from __future__ import annotations

import importlib
import math
from copy import copy
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.kernels.launch import fused
from visual_spec.models.core.cache import StaticCache, repeats, seen_causally, seen_in_order, seen_in_tree
from visual_spec.models.core.offload import check_cache_fits, decodes
from visual_spec.models.core.projections import in_one_order
from visual_spec.models.core.protocol import (
    ANY_ORDER,
    RASTER_ORDER,
    TokenGrid,
    check_heads,
    check_raster,
    wide,
)
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, Within, register_to_config, whole
from visual_spec.models.next_token.llamagen_blocks import (
    LlamaGenState,
    RMSNorm,
    Shared,
    TextCondition,
    TransformerBlock,
    Turns,
    condition_embedding,
    condition_of,
    entered,
    feed_forward_width,
    rotary_table,
    tensors_of,
    turns_of,
)

PRESETS: dict[str, dict[str, int]] = {
    "B": {"num_layers": 12, "num_heads": 12, "dim": 768},
    "L": {"num_layers": 24, "num_heads": 16, "dim": 1024},
    "XL": {"num_layers": 36, "num_heads": 20, "dim": 1280},
    "XXL": {"num_layers": 48, "num_heads": 24, "dim": 1536},
    "XXXL": {"num_layers": 48, "num_heads": 40, "dim": 2560},
    "1B": {"num_layers": 22, "num_heads": 32, "dim": 2048},
    "3B": {"num_layers": 24, "num_heads": 32, "dim": 3200},
    "7B": {"num_layers": 32, "num_heads": 32, "dim": 4096},
}

# Classes of the orders that a model can be trained for, by module.
ORDERS = {
    RASTER_ORDER: "llamagen:LlamaGenTransformer",
    "nar": "llamagen_near_to_far:LlamaGenNearToFar",
    "flashar": "llamagen_near_to_far:LlamaGenNearToFar",
    "par4": "llamagen_regions:LlamaGenRegions",
    "par16": "llamagen_regions:LlamaGenRegions",
    ANY_ORDER: "llamagen_any_order:LlamaGenAnyOrder",
    "queries": "llamagen_queries:LlamaGenQueries",
    "blocks2": "llamagen_shuffle:LlamaGenShuffle",
    "blocks4": "llamagen_shuffle:LlamaGenShuffle",
}
_OF_CLIPS = (RASTER_ORDER, "nar")  # orders of several frames


class LlamaGenTransformer(SavedModel):
    """A `NextTokenModel` over a square grid of image tokens, or over the frames of a clip.

    Args:
        vocab_size: number of image codes.
        dim, num_layers, num_heads: width, depth and attention heads; `PRESETS` lists the official sizes.
        grid_size: tokens per side (16, 24 or 32 for official 256, 384 and 512 pixel models).
        prefix_length: 1 for class labels, 120 for the official text-conditional models.
        num_classes: set for a class-conditional model (1000 in the official ones), else None.
        caption_dim: set for a text-conditional model (2048, flan-t5-xl, in the official ones), else None.
        norm_eps: epsilon of every RMSNorm.
        zero_prefix_keys: as in the official models, whose rotary table is zero over the prefix: its keys vanish, and
            image tokens see the mean of the prefix values. False leaves prefix keys unrotated, so image tokens can
            attend to single words; a small model then learns captions far sooner.
        order: the order the model was trained for, one of `ORDERS`, which names its class: an object of another order
            than "raster" is of that class.
        branch_layers, branch_start: of `LlamaGenNearToFar`.
        num_frames: frames of the grid. With several, the rotary table has a part for them (`rotary_table`), and
            learned embeddings of the frame, row and column of a token are added to it.
        rotary_size: side of the grid that the rotary table was made for, where it is another than `grid_size`: slot i
            of any picture stands at (i // rotary_size, i % rotary_size), as in ControlAR. None: the grid's own.

    Raises:
        ValueError: not exactly one of `num_classes` and `caption_dim` is given, the head size is not a multiple of 4,
            the order is unknown, has several frames or is of another class, a branch starts in no block of the trunk
            or of a model without one, or the rotary table is smaller than the grid or of frames.
    """

    one_order = False  # see `fuse_projections`
    ordered = ("norm", "output")  # what a kernel reads then
    _repeated_blocks = ["TransformerBlock"]
    _no_split_modules = ["TransformerBlock"]

    stored_as = (torch.float8_e4m3fn,)  # by `python scripts/train motion`
    # `__new__` makes an object of the class of its order.
    reads = tuple(sorted({place.partition(":")[2] for place in ORDERS.values()}))

    def __new__(cls, *args: Any, order: str = RASTER_ORDER, **settings: Any) -> Self:
        """Make an object of the class of its order: folders of every order may name this one."""
        kind: type[Self] = cls
        if cls is LlamaGenTransformer and order in ORDERS:
            module, name = ORDERS[order].split(":")
            kind = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return super().__new__(kind)

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 16384,
        dim: Count = 768,
        num_layers: int = 12,
        num_heads: Count = 12,
        grid_size: Count = 16,
        prefix_length: Count = 1,
        num_classes: Count | None = 1000,
        caption_dim: Count | None = None,
        norm_eps: float = 1e-5,
        zero_prefix_keys: bool = True,
        num_frames: Count = 1,
        order: str = RASTER_ORDER,
        branch_layers: int = 1,
        rotary_size: int | None = None,
        branch_start: int | None = None,
    ):
        super().__init__()
        self.trained_order, self.prefix_length = order, prefix_length
        classes = {place.partition(":")[2] for place in ORDERS.values()}
        own = next(base.__name__ for base in type(self).__mro__ if base.__name__ in classes)
        if ORDERS.get(order, ":").partition(":")[2] != own or (order not in _OF_CLIPS and num_frames > 1):
            raise ValueError(
                f"order={order!r} of {num_frames} frames of a {type(self).__name__}; pass {' or '.join(_OF_CLIPS)}, or "
                f"{', '.join(name for name in ORDERS if name not in _OF_CLIPS)} of one frame, to LlamaGenTransformer"
            )
        if rotary_size is not None and (num_frames > 1 or rotary_size < grid_size):
            raise ValueError(
                f"rotary_size={rotary_size} of {grid_size} x {grid_size} tokens and {num_frames} frames; pass at least "
                "grid_size, of one frame"
            )
        if branch_start is not None and not (self.num_answers > 1 and 0 <= branch_start <= num_layers):
            raise ValueError(
                f"branch_start={branch_start} of order {order!r} with {num_layers} blocks; pass 0 to {num_layers} to a "
                "model with a lower head, else None"
            )
        check_heads(dim, num_heads, 4)
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.cls_embedding: Any = condition_embedding(num_classes, caption_dim, dim, prefix_length)
        hidden = feed_forward_width(dim)
        self.layers = nn.ModuleList(
            TransformerBlock(dim, num_heads, hidden, norm_eps)
            for _ in range(num_layers + branch_layers * (self.num_answers - 1))
        )
        self.norm = RMSNorm(dim, norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.add_parts()
        self.grid = TokenGrid(grid_size, grid_size, num_frames)
        if num_frames > 1:
            self.place_embeddings = nn.ParameterList(
                nn.Parameter(torch.zeros(number, dim)) for number in (num_frames, grid_size, grid_size)
            )
        self.vocab_size = vocab_size
        self.initialise()

    def add_parts(self) -> None:
        """Make the parameters that only models of an order have."""

    def initialise(self) -> None:
        """Draw the initial weights, but for the unconditional caption's."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and "uncond" not in name:
                nn.init.normal_(parameter, std=0.02)

    @property
    def num_answers(self) -> int:
        """H, the heads that may predict a slot."""
        return 1

    @property
    def learned_tokens(self) -> int:
        """K, learned tokens whose ids and places follow the picture's."""
        return 0

    def rotary_table(self) -> Tensor:
        """The table of `rotary_table` for this grid: float32, or float64 for a float64 model."""
        head_dim = self.config["dim"] // self.config["num_heads"]
        dtype = torch.promote_types(self.dtype, torch.float32)
        side = self.config["rotary_size"] or self.grid.width
        table = rotary_table(side, head_dim, dtype=dtype, frames=self.config["num_frames"])
        return table[: self.grid.num_tokens]

    def first_frames(self, count: int) -> Self:
        """Return this model over the first `count` frames only, with the same weights.

        Raises:
            ValueError: the model has not so many frames; or fewer of a model of another order than raster order, in
                which tokens of early frames see some of later ones.
        """
        frames = self.config["num_frames"]
        whole("num_frames", count, Within(1 if self.trained_order == RASTER_ORDER else frames, frames))
        if count == self.grid.frames:
            return self
        shorter = copy(self)
        shorter.grid = replace(self.grid, frames=count)
        return shorter

    def with_grid(self, height: int, width: int) -> Self:
        """Return this model over a picture of `height x width` tokens, with the same weights.

        Raises:
            ValueError: another size than the grid's, of a model without `rotary_size` or with a table too small for it.
        """
        if (height, width) == (self.grid.height, self.grid.width):
            return self
        side = self.config["rotary_size"]
        if side is None or not 1 <= height * width <= side * side:
            allowed = f"{self.grid.height} x {self.grid.width}"
            if side is not None:
                allowed += f", or any other size of 1 to {side * side}"
            raise ValueError(f"{height} x {width} tokens asked for; this model draws {allowed}.")
        other = copy(self)
        other.grid = replace(self.grid, height=height, width=width)
        return other

    def embed(self, tokens: Tensor, slots: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return embeddings `[B, W, dim]` of `tokens [B, W]` at `slots [B, W]`; `hidden` ones show only their place."""
        embedded = self.tok_embeddings(tokens)
        if hidden is not None:
            embedded = embedded.masked_fill(hidden[..., None], 0.0)
        if self.config["num_frames"] == 1:
            return embedded
        # Places past the grid hold nothing that is read.
        slots = slots.clamp_max(self.grid.num_tokens - 1)
        side = self.grid.width
        places = slots // (side * side), slots // side % side, slots % side
        for table, index in zip(self.place_embeddings, places, strict=True):
            embedded = embedded + table[index]
        return embedded

    def check_condition(self, condition: TextCondition | Tensor, batch_size: int) -> None:
        """Refuse a condition that does not fit this model; errors as in `check_labels` and `check_captions`."""
        self.cls_embedding.check(condition, batch_size)

    # -- decoding: the NextTokenModel contract -----------------------------------------------------------------------

    @decodes
    def prefill(
        self,
        condition: TextCondition | Tensor,
        *,
        batch_size: int,
        guided: bool,
        window: int,
        side: Tensor | None = None,
    ) -> LlamaGenState:
        """Run the prefix, see `NextTokenModel.prefill`; `side` as in `entered`."""
        prompt = self.prompt_of(condition, batch_size=batch_size)
        return self.run_prompt(prompt, guided=guided, window=window, side=side)

    def prompt_of(
        self, condition: TextCondition | Tensor, *, batch_size: int, guided: bool = False
    ) -> tuple[Tensor, ...]:
        """Check a condition, and return its tensors, see `PromptModel`; guidance makes no difference."""
        self.check_condition(condition, batch_size)
        return tensors_of(condition)

    @decodes
    def run_prompt(
        self,
        prompt: tuple[Tensor, ...],
        *,
        guided: bool,
        window: int,
        held: LlamaGenState | None = None,
        side: Tensor | None = None,
    ) -> LlamaGenState:
        """Run the prefix of a checked condition, see `PromptModel`; `side` as in `prefill`."""
        hidden, prefix_mask, cache, table = self._begin(prompt, guided, window, held)
        (rows, prefix, _), own, words = hidden.shape, cache, prefix_mask
        plain = side is None and held is None and type(cache) is StaticCache
        shared = repeats(hidden, prefix_mask) if plain else None
        if shared is not None:
            hidden, words, rows = hidden[shared[0]], words[shared[0]], len(shared[0])
            layers, _, heads, _, size = cache.keys.shape
            own = StaticCache.allocate(hidden, (layers, rows, heads, prefix, size))
        own.at(torch.arange(prefix, device=hidden.device).expand(rows, -1), prefix)
        turns = turns_of(self.unturned(table).expand(1, prefix, -1, -1))
        mask = None if self._reads_windows(hidden) else seen_causally(words)[:, None]
        features, hidden = self.run(hidden, own, Shared(turns, own.places, mask, words), side)
        features = features[:, -1:]
        # The last position answers.
        first = torch.zeros(1, self.num_answers, dtype=torch.long, device=hidden.device)
        logits = self.logits(features, hidden[:, -1:], first)[:, 0]
        if shared is not None:
            cache.keys[..., :prefix, :] = own.keys[:, shared[1]]
            cache.values[..., :prefix, :] = own.values[:, shared[1]]
            logits, features = logits[shared[1]], features[shared[1]]
        return LlamaGenState(logits, guided, window, cache, table, prefix_mask, features, side)

    def _begin(
        self, prompt: tuple[Tensor, ...], guided: bool, window: int, held: LlamaGenState | None
    ) -> tuple[Tensor, Tensor, StaticCache, Tensor]:
        """Prefix `[R, T, dim]`, its mask, an empty cache and the rotary table, both of an earlier state if held."""
        hidden, prefix_mask = self.cls_embedding.prefix(condition_of(prompt), guided=guided)
        if held is not None:
            held.cache.clear()
            return hidden, prefix_mask, held.cache, held.rotary
        cache = self._allocate(hidden, len(hidden) // (1 + guided), window)
        return hidden, prefix_mask, cache, self.rotary_table().to(hidden.device)

    @decodes
    def forward(
        self,
        state: LlamaGenState,
        tokens: Tensor,
        slots: Tensor,
        visible: Tensor | None = None,
        seen: Tensor | None = None,
        predicted: Tensor | None = None,
        answers: Tensor | None = None,
    ) -> Tensor:
        """Feed `tokens [B, W]` at `slots [B, W]`; logits `[R, W, V]`, position w predicting slot `slots[b, w] + 1`.

        Writes the cache at those slots and attends to the prefix and to all slots up to each token's own. With
        `visible`, tokens are nodes of a tree, see `TreeModel`. With `seen`, slots come in any order, see `OrderModel`.
        A model that was trained for another order is called as a `TrainedOrderModel`. Errors as in `check_call`.
        """
        self.check_call(slots, seen, predicted, answers)
        if state.guided:
            tokens, slots = tokens.repeat(2, 1), slots.repeat(2, 1)
            visible = None if visible is None else visible.repeat(2, 1, 1)
            seen = None if seen is None else seen.repeat(2, 1, 1)
        cache, prefix = state.cache, state.prefix_mask.shape[1]
        hidden = self.embed(tokens, slots)
        first_scratch = prefix + self.grid.num_tokens
        places = prefix + slots
        if visible is not None:
            seen = seen_in_tree(places, visible, first_scratch)
            nodes = torch.arange(slots.shape[1], device=slots.device)
            cache.at(first_scratch + nodes.expand_as(slots), seen.shape[-1])
        elif seen is not None:
            seen = seen_in_order(places, F.pad(seen, (prefix, 0), value=True), state.window)
            cache.at(places, seen.shape[-1])
        elif isinstance(cache, StaticCache) and self._reads_windows(
            hidden
        ):  # not a ring, whose places are no order
            cache.at(places, cache.num_slots)
        else:
            seen = cache.causal(places, state.fixed)
        mask = None
        if seen is not None:
            seen[..., :prefix] &= state.prefix_mask[:, None]
            # Added to the scores: attention would turn a bool mask into this one in every layer.
            mask = hidden.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]  # [R, 1, W, S]
        turns = turns_of(state.rotary[slots.clamp_max(len(state.rotary) - 1)])
        shared = Shared(turns, cache.places, mask, state.prefix_mask)
        state.features, hidden = self.run(hidden, cache, shared, state.side, slots)
        return self.logits(state.features, hidden, answers)

    def check_call(
        self, slots: Tensor, seen: Tensor | None, predicted: Tensor | None, answers: Tensor | None
    ) -> None:
        """Refuse, by ValueError, a call that this model cannot answer: as in `check_raster`, or without `answers`."""
        if self.trained_order == RASTER_ORDER:
            check_raster(slots, predicted, self.grid.num_tokens)
        elif seen is None or answers is None:
            raise ValueError(
                f"this model was trained for order {self.trained_order!r}; pass seen and answers."
            )

    @torch.no_grad()
    def keep(self, state: LlamaGenState, nodes: Tensor, slots: Tensor) -> None:
        """Copy the cache entries of `nodes [B, D]` of the last tree call to `slots [B, D]`."""
        if state.guided:
            nodes, slots = nodes.repeat(2, 1), slots.repeat(2, 1)
        prefix = state.prefix_mask.shape[1]
        state.cache.copy(prefix + self.grid.num_tokens + nodes, prefix + slots)

    def run(
        self,
        hidden: Tensor,
        cache: StaticCache,
        shared: Shared,
        side: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what the head reads, and what the last block leaves, `[R, W, dim]` each.

        Args:
            side, slots: see `entered`.
        """
        change = None
        for index, block in enumerate(self.layers):
            if side is not None:
                hidden, change = hidden if change is None else hidden + change, None
                hidden = entered(hidden, side, index, self.config["num_layers"], slots)
            hidden, change = block(hidden, change, cache.layer(index), shared)
        if change is None and self.one_order and fused(hidden):
            change = torch.zeros_like(hidden)  # so that the norm, too, is a kernel with a program a row
        hidden, features = self.norm.after(hidden, change)
        return features, hidden

    def _allocate(self, hidden: Tensor, batch_size: int, window: int) -> StaticCache:
        """Return an empty cache for a prefix [R, T, dim] and the slots after it."""
        (rows, prefix, dim), heads = hidden.shape, self.config["num_heads"]
        shape = (len(self.layers), rows, heads, prefix + self.num_places(window), dim // heads)
        sample_bytes = 2 * math.prod(shape) * hidden.element_size() // batch_size
        check_cache_fits(sample_bytes, batch_size, hidden.device)
        return StaticCache.allocate(hidden, shape)

    def num_places(self, window: int) -> int:
        """Return the places of the cache after the prefix."""
        return self.grid.num_tokens + self.learned_tokens + window

    def _reads_windows(self, hidden: Tensor) -> bool:
        """Return whether attention takes the places of a window in place of a mask."""
        if not fused(hidden):
            return False
        from visual_spec.kernels.window_attention import takes  # on a GPU only

        return takes(hidden, self.config["dim"] // self.config["num_heads"])

    def unturned(self, table: Tensor) -> Tensor:
        """Return the row `[1, D / 2, 2]` of a rotary table for the prefix."""
        unturned = torch.zeros_like(table[:1])  # cosine 0 and sine 0: the key vanishes
        if not self.config["zero_prefix_keys"]:
            unturned[..., 0] = 1.0
        return unturned

    def _head(self, features: Tensor) -> Tensor:
        if self.one_order and fused(features):
            return wide(in_one_order(self.output, features))
        return wide(self.output(features))

    def logits(self, features: Tensor, hidden: Tensor, answers: Tensor | None) -> Tensor:
        """Return logits [R, P, V].

        Args:
            features: [R, W, dim], what the head reads.
            hidden: what `run` returns second.
            answers: long [P, H], the position that answers with each head, or -1; None: all, with the first head.
        """
        return self._head(features if answers is None else features[:, answers[:, 0]])

    # -- training ----------------------------------------------------------------------------------------------------

    def teacher_forced(
        self,
        tokens: Tensor,
        condition: TextCondition | Tensor,
        dropped: Tensor | None = None,
        hidden_tokens: Tensor | None = None,
        side: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[B, L, V]` for every slot of whole pictures, or of first frames, `tokens [B, L]`.

        Gradients flow.

        `dropped`, bool `[B]`: rows whose condition is replaced by the unconditional one. `hidden_tokens`, bool
        `[B, L - 1]`: inputs replaced by zero, so that the model must use the condition instead. `side`: see `entered`.

        Raises:
            ValueError: the model is trained for another order than raster order.
        """
        if self.trained_order != RASTER_ORDER:
            raise ValueError(
                f"teacher_forced scores raster order, and this model has order {self.trained_order!r}."
            )
        length = tokens.shape[1] - 1  # the last token predicts nothing
        slots = torch.arange(length, device=tokens.device)
        seen = slots[:, None] >= slots
        return self._head(
            self.norm(self.forced(tokens[:, :-1], slots, seen, condition, dropped, hidden_tokens, side))
        )

    def forced(
        self,
        tokens: Tensor,
        slots: Tensor,
        seen: Tensor,
        condition: TextCondition | Tensor,
        dropped: Tensor | None,
        hidden_tokens: Tensor | None = None,
        side: Tensor | None = None,
    ) -> Tensor:
        """Return the last block's output `[B, 1 + N, dim]`. Gradients flow.

        It is of the last prefix position and of `tokens [B, N]`, fed at `slots [N]`, seeing each other as
        `seen [N, N]` says; or at `slots [B, N]` and `seen [B, N, N]`, which differ from row to row. For the rest see
        `teacher_forced`.
        """
        hidden, turns, mask = self.sequence(tokens, slots, seen, condition, dropped, hidden_tokens)
        # The last position of the prefix predicts slot 0, and those before it none.
        at = F.pad(slots, (1, 0), value=-1)
        rest = hidden.shape[1] - at.shape[-1]
        at = F.pad(at, (rest, 0), value=self.grid.num_tokens).expand(len(hidden), -1)
        for index, block in enumerate(self.layers):
            assert isinstance(block, TransformerBlock)
            hidden = block.whole(entered(hidden, side, index, self.config["num_layers"], at), turns, mask)
        return hidden[:, -1 - slots.shape[-1] :]

    def sequence(
        self,
        tokens: Tensor,
        slots: Tensor,
        seen: Tensor,
        condition: TextCondition | Tensor,
        dropped: Tensor | None,
        hidden_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Turns, Tensor]:
        """Return what the first block reads `[B, T + N, dim]`, its turns and its mask; arguments as of `forced`."""
        prefix_embeddings, prefix_mask = self.cls_embedding.prefix(condition, dropped=dropped)
        prefix, length = prefix_mask.shape[1], slots.shape[-1]
        total = prefix + length
        embedded = self.embed(tokens, slots.expand(len(tokens), -1), hidden_tokens)
        table, slots = self.rotary_table().to(tokens.device), torch.atleast_2d(slots)
        unturned = self.unturned(table).expand(len(slots), prefix, -1, -1)
        turns = turns_of(torch.cat([unturned, table[slots]], 1))
        seen = seen.reshape(-1, length, length)
        mask = torch.ones(len(seen), total, total, dtype=torch.bool, device=tokens.device).tril()
        mask[:, prefix:, prefix:] = seen
        words = F.pad(prefix_mask, (0, length), value=True)
        mask = (mask & words[:, None]) | torch.eye(total, dtype=torch.bool, device=tokens.device)
        return torch.cat([prefix_embeddings, embedded], 1), turns, mask[:, None]
