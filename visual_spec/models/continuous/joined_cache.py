"""Several caches of transformers as one, so that one call of the decoder serves the rows of all.

Guided speech is several texts that advance together: the prompt with its audio, the audio alone, and what decides when
to stop. transformers gives each a cache and a call of its own, and each call reads all the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

_LEAST = 256  # places that memory grows by, or a quarter of what it holds


class JoinedCache(Cache):
    """Dynamic caches of B rows each, side by side in memory [n B, H, S, D] that the decoder reads in one call.

    A call writes the next place of every row. `keep` makes that place part of a cache; a place that is not kept is
    written again by the next call. The caches stay usable by themselves: their layers hold views of the memory. One
    that was changed from outside, by a call of its own, is copied in again by `begin`.

    The memory has room for the longest cache in all rows.

    Args:
        caches: see `joinable`; all of the same rows and layers. The first holds at least one place.
    """

    def __init__(self, caches: Sequence[DynamicCache]) -> None:
        self.caches = list(caches)
        parts = zip(*(cache.layers for cache in self.caches), strict=True)
        super().__init__(layers=[_JoinedLayer(list(of_layer)) for of_layer in parts])

    @staticmethod
    def joinable(cache: object) -> bool:
        """Return whether a cache is dynamic, and keeps every place of every layer."""
        return (
            type(cache) is DynamicCache
            and not cache.offloading
            and all(type(layer) is DynamicLayer for layer in cache.layers)
        )

    @property
    def joined(self) -> list[_JoinedLayer]:
        return [layer for layer in self.layers if isinstance(layer, _JoinedLayer)]

    def begin(self) -> int:
        """Prepare a call. Returns how many places it reads, which is one more than the longest cache holds."""
        for layer in self.joined:
            layer.begin()
        return self.joined[0].size

    def keep(self, number: int) -> None:
        """Make the place that the last call wrote part of a cache."""
        for layer in self.joined:
            layer.keep(number)

    def release(self) -> None:
        """Give the first cache memory of its own, and forget the rest."""
        for layer in self.joined:
            layer.release()


class _JoinedLayer(CacheLayerMixin):
    """One layer: memory for keys and values [n B, H, S, D], and the layers whose content it is."""

    is_compileable = False
    is_sliding = False

    def __init__(self, parts: list[Any]) -> None:
        super().__init__()
        self.parts = parts
        self.views: list[tuple[Tensor, Tensor] | None] = [None] * len(parts)
        self.lengths = [0] * len(parts)
        self.size = 0

    def begin(self) -> None:
        self.lengths = [part.get_seq_length() for part in self.parts]
        self.size = max(self.lengths) + 1
        if self.keys is None or self.keys.shape[2] < self.size:
            self._grow(self.size + max(_LEAST, self.size // 4))
        for number, part in enumerate(self.parts):
            view = self.views[number]
            if self.lengths[number] and (view is None or part.keys is not view[0]):
                old = part.keys, part.values
                self._show(number, self.lengths[number])
                part.keys.copy_(old[0])
                part.values.copy_(old[1])

    def _grow(self, places: int) -> None:
        # Zeros, not empty: masked places still enter the product with the values, and 0 * nan is nan.
        like = [(part.keys, part.values) for part in self.parts if part.keys is not None][0]
        rows = like[0].shape[0] * len(self.parts)
        self.keys, self.values = (one.new_zeros(rows, one.shape[1], places, one.shape[3]) for one in like)
        self.views = [None] * len(self.parts)

    def _rows(self, number: int) -> slice:
        assert self.keys is not None
        batch = len(self.keys) // len(self.parts)
        return slice(number * batch, (number + 1) * batch)

    def _show(self, number: int, length: int) -> None:
        """Have a part hold the first places of its rows."""
        assert self.keys is not None and self.values is not None
        rows, part = self._rows(number), self.parts[number]
        view = self.keys[rows, :, :length], self.values[rows, :, :length]
        if not part.is_initialized:
            part.lazy_initialization(*view)
        part.keys, part.values = self.views[number] = view

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [n B, H, 1, D] after what each row holds. Returns what is read, [n B, H, size, D]."""
        assert self.keys is not None and self.values is not None
        for number, length in enumerate(self.lengths):
            rows = self._rows(number)
            self.keys[rows, :, length] = key_states[rows, :, 0]
            self.values[rows, :, length] = value_states[rows, :, 0]
        return self.keys[:, :, : self.size], self.values[:, :, : self.size]

    def keep(self, number: int) -> None:
        self._show(number, self.lengths[number] + 1)

    def release(self) -> None:
        first = self.parts[0]
        if self.views[0] is not None and first.keys is self.views[0][0]:
            first.keys, first.values = first.keys.clone(), first.values.clone()
        self.keys = self.values = None
        self.views = [None] * len(self.parts)

    def lazy_initialization(self, *args: object) -> None:
        """Nothing: memory comes with `begin`."""

    def get_mask_sizes(self, *args: object, **kwargs: object) -> tuple[int, int]:
        return self.size, 0

    def get_seq_length(self, *args: object, **kwargs: object) -> int:
        return self.size - 1

    def get_max_length(self) -> int:
        return -1


def joined_mask(masks: Sequence[Tensor], size: int) -> Tensor:
    """Masks [B, S_n] of several texts, as one [n B, size] that ends in zeros where a text is shorter."""
    return torch.cat([torch.nn.functional.pad(mask, (0, size - mask.shape[1])) for mask in masks])
