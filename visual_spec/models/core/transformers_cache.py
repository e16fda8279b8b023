"""What the adapters to transformers' image generators share: prompts, and a cache that is written by place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Prompt:
    """The tokens before a picture, one row a sample, left-padded.

    Attributes:
        ids: long [B, T].
        mask: bool [B, T], true at tokens. Padding stands to the left, and no row is empty.
        positions: long [B, T], or [3, B, T] for rotary embeddings with three axes; None counts the tokens from 0.
        start: long [B], the position behind the prompt; None is the number of tokens.

    Raises:
        TypeError: ids that are no integers.
        ValueError: shapes that differ, or a row whose last column is masked.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor | None = None
    start: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ids.is_floating_point():
            raise TypeError(
                f"prompt ids are {self.ids.dtype}; pass the integers of the tokenizer, long [B, T]."
            )
        if self.ids.ndim != 2 or 0 in self.ids.shape or self.ids.shape != self.mask.shape:
            raise ValueError(
                f"prompt ids have shape {tuple(self.ids.shape)} and their mask {tuple(self.mask.shape)}; "
                "pass two tensors of one shape [B, T], T at least 1."
            )
        self.ids, self.mask = self.ids.long(), self.mask.bool()
        if not self.mask[:, -1].all():
            raise ValueError(
                "the last column of a prompt is masked; pad prompts on the left, and leave none empty."
            )

    @property
    def where(self) -> tuple[Tensor, Tensor]:
        """Positions of the tokens, and the position behind them."""
        counted = (self.mask.cumsum(-1) - 1).clamp_min(0)
        return (
            counted if self.positions is None else self.positions,
            self.mask.sum(-1) if self.start is None else self.start,
        )

    def repeat(self, times: int) -> Prompt:
        """Every row `times` times, the copies of a row beside each other."""
        batch = None if self.positions is None else self.positions.ndim - 2
        return Prompt(
            self.ids.repeat_interleave(times, 0),
            self.mask.repeat_interleave(times, 0),
            None if self.positions is None else self.positions.repeat_interleave(times, batch),
            None if self.start is None else self.start.repeat_interleave(times, 0),
        )


@dataclass
class ImagePrompt:
    """What a picture is conditioned on: the prompt, and for guidance the one that stands for no caption."""

    prompt: Prompt
    unconditional: Prompt | None = None

    def repeat(self, times: int) -> ImagePrompt:
        """Every row `times` times, the copies of a row beside each other."""
        other = self.unconditional
        return ImagePrompt(self.prompt.repeat(times), None if other is None else other.repeat(times))


def one_size(image_sizes: Any) -> tuple[int, int]:
    """Height and width in tokens, of (height, width) or of a list or tensor [B, 2] of one size.

    Raises:
        ValueError: no size, something else, or several sizes.
    """
    sizes = image_sizes.tolist() if isinstance(image_sizes, Tensor) else image_sizes
    pairs = list(sizes) if isinstance(sizes, (list, tuple)) else []
    if pairs and isinstance(pairs[0], int):
        pairs = [pairs]
    given = [tuple(pair) if isinstance(pair, (list, tuple)) else pair for pair in pairs]
    if not given or not all(
        isinstance(pair, tuple) and [type(n) for n in pair] == [int, int] for pair in given
    ):
        raise ValueError(
            f"image_sizes={image_sizes}; pass (height, width) in tokens, one pair, or one a sample."
        )
    if len(set(given)) > 1:
        raise ValueError(
            f"image_sizes={sizes}; the pictures of a batch have one size, draw others in another batch."
        )
    return given[0]


def filled(ids: Tensor, drawn: Tensor, placeholder: int) -> Tensor:
    """Ids [B, T] with the image tokens `drawn` [n] at the placeholders.

    Raises:
        ValueError: another number of placeholders.
    """
    places = ids == placeholder
    if int(places.sum()) != len(drawn):
        raise ValueError(
            f"{int(places.sum())} placeholders in input_ids for {len(drawn)} image tokens; "
            "pass input_ids and pixel_values of one processor call."
        )
    return ids.masked_scatter(places, drawn.to(ids))


# -- the cache -------------------------------------------------------------------------------------------------------


@dataclass
class _Window:
    """Where the next forward writes, [R, W], and how many places it reads."""

    rows: Tensor
    places: Tensor
    size: int


class _SlotLayer(CacheLayerMixin):
    """Keys and values [R, H, S, D] of one layer."""

    is_compileable = True

    def __init__(self, num_places: int, window: _Window) -> None:
        super().__init__()
        self.num_places = num_places
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty: masked places still enter the product with the values, and 0 * nan is nan.
        self.keys, self.values = (
            x.new_zeros(*x.shape[:2], self.num_places, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [R, H, W, D] at the window's places; the first `size` places [R, H, size, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, places, size = self.window.rows, self.window.places, self.window.size
        assert self.keys is not None and self.values is not None
        if places.device != key_states.device:  # a model spread over devices
            rows, places = rows.to(key_states.device), places.to(key_states.device)
        self.keys.transpose(1, 2)[rows, places] = key_states.transpose(1, 2)
        self.values.transpose(1, 2)[rows, places] = value_states.transpose(1, 2)
        return self.keys[:, :, :size], self.values[:, :, :size]

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.window.size, 0

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0  # rows differ: positions are passed with every call

    def get_max_length(self) -> int:
        return self.num_places

    get_max_cache_shape = get_max_length  # its name before transformers 5


class SlotCache(Cache):
    """A static cache that is written by place, each row at places of its own.

    `at` says where the next forward writes; the mask passed to that forward says what is seen. So a place is undone by
    writing it again, and rows of a batch move at their own pace.

    Args:
        num_layers: layers of the decoder.
        num_places: keys that a row can hold. Allocated at the first forward, on the device of each layer.
    """

    def __init__(self, num_layers: int, num_places: int) -> None:
        nowhere = torch.zeros(0, dtype=torch.long)
        self.window = _Window(nowhere, nowhere, 0)
        super().__init__(layers=[_SlotLayer(num_places, self.window) for _ in range(num_layers)])

    def at(self, places: Tensor, size: int) -> None:
        """Have the next forward write at places [R, W], and read the first `size` places."""
        self.window.rows = torch.arange(len(places), device=places.device)[:, None]
        self.window.places, self.window.size = places, size

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, long [N]."""
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer) and layer.keys is not None and layer.values is not None
            here = rows.to(layer.keys.device)
            layer.keys, layer.values = layer.keys[here], layer.values[here]

    def buffers(self) -> list[Tensor]:
        """Keys and values of all layers, each [R, H, S, D]."""
        layers = [layer for layer in self.layers if isinstance(layer, _SlotLayer)]
        return [held for layer in layers for held in (layer.keys, layer.values) if held is not None]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy what stands at places `sources` [R, D] to places `targets` [R, D]."""
        rows = torch.arange(len(sources), device=sources.device)[:, None]
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer) and layer.keys is not None and layer.values is not None
            for held in (layer.keys, layer.values):
                by_place = held.transpose(1, 2)  # [R, S, H, D]
                at = [index.to(held.device) for index in (rows, sources, targets)]
                by_place[at[0], at[2]] = by_place[at[0], at[1]]
