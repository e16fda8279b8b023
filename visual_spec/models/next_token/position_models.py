"""What ARPG's and LPD's transformers share: a class, tokens by slot, and queries that ask for slots."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.offload import check_cache_fits, decodes
from visual_spec.models.core.position_queries import fed_and_asked, seen_by_queries
from visual_spec.models.core.protocol import (
    ANY_ORDER,
    DecodeState,
    TokenGrid,
    check_heads,
    check_labels,
    wide,
)
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Within, whole


@dataclass
class PositionState(DecodeState):
    """Attributes:
    cache: places of a row: the class, the slots of the grid and `window` more, and room for as many queries.
    """

    cache: StaticCache

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples)
        self.cache.select(rows)
        self.logits = self.logits[rows]

    def buffers(self) -> list[Tensor]:
        return self.cache.buffers()


class PositionModel(SavedModel):
    """An `AnyOrderModel` of classes. Position 0 is the class, and position 1 + i slot i, in tables and in the cache."""

    trained_order = ANY_ORDER
    head: nn.Linear

    def set_grid(self, vocab_size: int, dim: int, num_heads: int, grid_size: int, multiple: int) -> None:
        """Keep what calls read; refuse heads that are no multiple of a number, and a grid without slots."""
        check_heads(dim, num_heads, multiple)
        whole("grid_size", grid_size, Within(1, 1024))
        self.grid, self.vocab_size = TokenGrid(grid_size, grid_size), vocab_size

    @property
    @abstractmethod
    def official_sampler(self) -> str:
        """The sampler of the public code, as on the command line."""

    @property
    @abstractmethod
    def official_defaults(self) -> dict[str, Any]:
        """What a pipeline of official files takes beside the sampler."""

    @property
    def cached_layers(self) -> int:
        """Layers whose keys and values are held."""
        return self.config["num_layers"]

    @abstractmethod
    def class_rows(self, labels: Tensor) -> Tensor:
        """Return embeddings `[R, dim]` of labels `[R]`, of which `num_classes` is no class."""

    @abstractmethod
    def read(self, cache: StaticCache, fed: Tensor, at: Tensor, asked: Tensor, seen: Tensor) -> Tensor:
        """Run embeddings `fed [R, N, dim]` and queries, write the cache, and return what the head reads, `[R, Q, dim]`.

        Args:
            at: long `[R, N]`, positions of what is fed.
            asked: long `[R, Q]`, positions of the queries.
            seen: bool `[R, N + Q, 1 + L + window + Q]`, places that each sees; the last Q are the queries' own.
        """

    @abstractmethod
    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return embeddings `[R, N, dim]` of tokens `[R, N]`."""

    def check_condition(self, condition: object, batch_size: int) -> None:
        """Refuse what are no labels; errors as in `check_labels`."""
        check_labels(condition, batch_size, self.config["num_classes"])

    @decodes
    def prefill(
        self,
        condition: Tensor,
        *,
        batch_size: int,
        guided: bool,
        window: int,
        asked: Tensor | None = None,
        together: bool = False,
    ) -> PositionState:
        """Run the class and the queries of the slots `asked [B, P]` in one pass; see `AnyOrderModel`."""
        if asked is None:
            raise ValueError("this model decodes in any order; pass asked, the first slots to predict.")
        prompt = self.prompt_of(condition, batch_size=batch_size)
        return self.run_prompt(prompt, guided=guided, window=window, asked=asked, together=together)

    def prompt_of(self, condition: Tensor, *, batch_size: int, guided: bool = False) -> tuple[Tensor, ...]:
        """Check labels, and return them, see `PromptModel`; guidance makes no difference."""
        self.check_condition(condition, batch_size)
        return (condition,)

    @decodes
    def run_prompt(
        self,
        prompt: tuple[Tensor, ...],
        *,
        guided: bool,
        window: int,
        held: PositionState | None = None,
        asked: Tensor | None = None,
        together: bool = False,
    ) -> PositionState:
        """Run checked labels, see `PromptModel`; `asked` and `together` as in `prefill`."""
        assert asked is not None
        labels, asked = prompt[0].to(self.device), asked.to(self.device)
        if guided:
            none = torch.full_like(labels, self.config["num_classes"])
            labels, asked = torch.cat([labels, none]), asked.repeat(2, 1)
        first = self.class_rows(labels)[:, None]  # [R, 1, dim]
        if held is None:
            cache = self._allocate(first, window, len(labels) // (1 + guided))
        else:
            cache = held.cache
            cache.clear()
        nothing = torch.zeros(*asked.shape, self.grid.num_tokens, dtype=torch.bool, device=asked.device)
        begun = torch.ones_like(labels, dtype=torch.bool)[:, None]
        seen = seen_by_queries(begun, nothing, asked, 0, window, together)  # [R, P, S]
        own = F.pad(begun[:, None], (0, seen.shape[2] - 1))
        at = torch.zeros_like(labels)[:, None]
        features = self.read(cache, first, at, asked + 1, torch.cat([own, seen], 1))
        return PositionState(wide(self.head(features)), guided, window, cache)

    @decodes
    def forward(
        self,
        state: PositionState,
        tokens: Tensor,
        slots: Tensor,
        *,
        seen: Tensor | None = None,
        together: bool = False,
    ) -> Tensor:
        """Answer a call of `AnyOrderModel`: logits `[R, W, V]`; with `together`, zeros for the positions fed."""
        if seen is None:
            raise ValueError("this model decodes in any order; pass seen.")
        fed = tokens.shape[1]
        tokens, slots, seen, skipped = fed_and_asked(
            tokens, slots, seen, guided=state.guided, together=together
        )
        begun = torch.ones_like(slots[:, :1], dtype=torch.bool)
        seen = seen_by_queries(begun, seen, slots, fed, state.window, together)
        at = 1 + slots
        features = self.read(state.cache, self.embed_tokens(tokens), at[:, :fed], at[:, fed:], seen)
        return F.pad(wide(self.head(features)), (0, 0, skipped, 0))

    def _allocate(self, first: Tensor, window: int, batch_size: int) -> StaticCache:
        (rows, _, dim), heads = first.shape, self.config["num_heads"]
        places = 1 + 2 * (self.grid.num_tokens + window)
        shape = (self.cached_layers, rows, heads, places, dim // heads)
        sample_bytes = 2 * math.prod(shape) * first.element_size() // batch_size
        check_cache_fits(sample_bytes, batch_size, first.device)
        return StaticCache.allocate(first, shape)


def additive(seen: Tensor, like: Tensor) -> Tensor:
    """Return the mask `[R, 1, N, S]` that attention adds, of what is seen, bool `[R, N, S]`."""
    return like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]
