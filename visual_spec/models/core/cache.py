"""Keys and values that a decode keeps, as one family: static by slot, windowed with a sink, evicting, compressed.

All of them hold keys and values [R, H, S, D] a layer, R rows (2B when guided), H heads, S places, and know the position
of every key: what writes, drops or reorders keys does the same to their values and positions.

* `StaticCache` is allocated once and written by slot. The position of a key is its slot.
* `WindowCache` is allocated once, too, and forgets: it holds the first positions, the sink, and the last ones.
* `EvictingCache` grows by what is appended and is cut to a budget: the keys with the largest scores stay.
* `models.next_scale.scale_cache.CompressedCache` is an evicting cache with the scores and budgets of ScaleKV.

A model asks a static or a windowed cache alike: `causal` says where the next forward writes and returns what is seen,
`update` writes the keys and values of a layer and returns what that layer reads. Rejected drafts are written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

# -- what is seen ----------------------------------------------------------------------------------------------------


def on_host(tensor: Tensor) -> bool:
    """Whether values can be read without stalling a device. If not, shapes have to be those of the worst case."""
    return tensor.device.type == "cpu"


def seen_up_to(slots: Tensor, num_slots: int) -> Tensor:
    """What a window sees, bool [R, W, S]: every slot up to a query's own, for `slots` long [R, W].

    S is `num_slots`, or on the host what the call needs of it: reading the maximum costs no synchronisation there, and
    spares the unused tail.
    """
    size = int(slots.max()) + 1 if on_host(slots) else num_slots
    return torch.arange(size, device=slots.device) <= slots[..., None]


def seen_in_tree(slots: Tensor, visible: Tensor, num_slots: int) -> Tensor:
    """What the nodes of a tree see, bool [R, N, num_slots + M]: the slots before the root's, and `visible` nodes.

    Args:
        slots: long [R, N], the root's first.
        visible: bool [R, N, M].
    """
    earlier = torch.arange(num_slots, device=slots.device) < slots[:, :1, None]  # [R, 1, S]
    return torch.cat([earlier.expand(-1, visible.shape[1], -1), visible], -1)


def seen_in_order(slots: Tensor, seen: Tensor, scratch: int) -> Tensor:
    """What queries in any order see, bool [R, W, S + scratch]: the slots `seen` [R, W, S], and their own [R, W]."""
    return F.pad(seen, (0, scratch)).scatter(2, slots[..., None], True)


# -- allocated once --------------------------------------------------------------------------------------------------


def _nowhere() -> Tensor:
    return torch.empty(0, dtype=torch.long)


@dataclass
class Places:
    """Where the next forward writes, long [R, W] with their rows [R, 1], and how many places it reads."""

    rows: Tensor = field(default_factory=_nowhere)
    slots: Tensor = field(default_factory=_nowhere)
    size: int = 0

    def set(self, slots: Tensor, size: int) -> None:
        """Have the next forward write at slots [R, W], all different in a row, and read the first `size` slots."""
        self.rows = torch.arange(len(slots), device=slots.device)[:, None]
        self.slots, self.size = slots, size

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The index of the places: layers of one model may lie on several devices."""
        if self.slots.device == device:
            return self.rows, self.slots
        return self.rows.to(device), self.slots.to(device)


class StaticCache:
    """Slots that are allocated once, written by slot and seen by position.

    A slot is undone by writing it again, and rows move at their own pace. Nothing is copied from call to call: layers
    read views.

    Args:
        keys, values: [layers, R, H, S, D].
        places: where the next forward writes; given by caches that hold each layer apart and tell all of them at once.
    """

    def __init__(self, keys: Tensor, values: Tensor, places: Places | None = None) -> None:
        self.keys, self.values = keys, values
        self.places = Places() if places is None else places

    @classmethod
    def allocate(cls, like: Tensor, shape: Sequence[int], places: Places | None = None) -> Self:
        """An empty cache of shape [layers, R, H, S, D], with the device and type of `like`."""
        # Zeros, not empty: masked places still enter the product with the values, and 0 * nan is nan.
        return cls(like.new_zeros(shape), like.new_zeros(shape), places)

    @property
    def num_slots(self) -> int:
        """S."""
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def at(self, slots: Tensor, size: int) -> None:
        """Have the next forward write at slots [R, W], all different in a row, and read the first `size` slots."""
        self.places.set(slots, size)

    def causal(self, slots: Tensor) -> Tensor:
        """Have the next forward write at slots [R, W]; what each of them sees: bool [R, W, size], up to its own."""
        seen = seen_up_to(slots, self.num_slots)
        self.at(slots, seen.shape[-1])
        return seen

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [R, W, H, D] of a layer; all that it reads: views [R, H, size, D]."""
        held_keys, held_values = self.keys[layer], self.values[layer]
        at, size = self.places.on(held_keys.device), self.places.size
        held_keys.transpose(1, 2)[at] = keys
        held_values.transpose(1, 2)[at] = values
        return held_keys[:, :, :size], held_values[:, :, :size]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy what stands at slots `sources` [R, D] to slots `targets` [R, D], in all layers."""
        device = self.keys.device
        rows = torch.arange(len(sources), device=device)[:, None]
        sources, targets = sources.to(device), targets.to(device)
        for held in (self.keys, self.values):
            by_slot = held.transpose(2, 3)  # [layers, R, S, H, D]
            by_slot[:, rows, targets] = by_slot[:, rows, sources]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, long [N], in this order."""
        rows = rows.to(self.keys.device)
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def buffers(self) -> list[Tensor]:
        """What calls read and write in place; see `DecodeState.buffers`."""
        return [self.keys, self.values]


class WindowCache:
    """The first `sink` positions and the last `window` ones, in memory that does not grow (StreamingLLM, Xiao et al.
    2024, section 3.2).

    The places behind the sink are a ring: position p lies at sink + (p - sink) mod (S - sink), so that nothing moves
    when the window does. The ring has room for `width` - 1 positions more than the window: drafts that run ahead
    overwrite only what no query sees any more, and a rejected one is written again. Each place keeps its position
    beside it, -1 while it is empty; a query at p sees the sink and the positions above p - `window`, up to p.

    A prompt belongs to the sink, in front. Keys may be rotated before they are stored, or when they are read: by
    `positions`, or by others that the model derives from them, such as those of a sink that follows the window.

    Args:
        held: its S places are sink + window + width - 1 (`WindowCache.allocate`).
        sink: positions from 0 on that are always seen, 0 or more.
        window: positions up to a query's own that it sees, 1 or more.

    Attributes:
        positions: long [R, S], the position of the key at each place, the same in all layers; -1 where there is none.

    Raises:
        ValueError: a sink below 0, a window below 1, or fewer places than both together.
    """

    def __init__(self, held: StaticCache, sink: int, window: int) -> None:
        if sink < 0 or window < 1 or held.num_slots < sink + window:
            raise ValueError(
                f"sink={sink} and window={window} in {held.num_slots} places; pass a sink of at least 0, a window of "
                "at least 1, and places for both."
            )
        self.held, self.sink, self.window = held, sink, window
        rows = held.keys.shape[1]
        self.positions = torch.full((rows, held.num_slots), -1, device=held.keys.device)

    @classmethod
    def allocate(
        cls,
        like: Tensor,
        *,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        sink: int,
        window: int,
        width: int,
    ) -> Self:
        """An empty cache with the device and type of `like`, for calls of at most `width` positions.

        Raises:
            ValueError: as the class; a width below 1.
        """
        if width < 1:
            raise ValueError(f"width={width}; pass the positions of the widest call, at least 1.")
        shape = (layers, rows, heads, sink + window + width - 1, head_dim)
        return cls(StaticCache.allocate(like, shape), sink, window)

    @property
    def width(self) -> int:
        """The most positions of one call."""
        return self.held.num_slots - self.sink - self.window + 1

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and positions."""
        return self.held.nbytes + self.positions.nbytes

    def causal(self, slots: Tensor) -> Tensor:
        """Have the next forward write at positions [R, W], consecutive in a row; what each sees: bool [R, W, S].

        The first position of a row never goes back from call to call: what it has left behind may be overwritten.

        Raises:
            ValueError: more positions than the ring has room for.
        """
        if slots.shape[1] > self.width:
            raise ValueError(
                f"{slots.shape[1]} positions in one call of a cache made for {self.width}; feed them in parts."
            )
        ring = self.held.num_slots - self.sink
        places = torch.where(slots < self.sink, slots, self.sink + (slots - self.sink) % ring)
        self.positions.scatter_(1, places, slots)
        self.held.at(places, self.held.num_slots)
        held, own = self.positions[:, None], slots[..., None]
        near = (held < self.sink) | (held > own - self.window)
        return (held >= 0) & (held <= own) & near

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `StaticCache.update`; all S places are read."""
        return self.held.update(layer, keys, values)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, long [N], in this order."""
        self.held.select(rows)
        self.positions = self.positions[rows.to(self.positions.device)]

    def buffers(self) -> list[Tensor]:
        """What calls read and write in place; see `DecodeState.buffers`."""
        return [*self.held.buffers(), self.positions]


# -- cut to a budget -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one layer, and beside each key its position: they move together or not at all.

    Attributes:
        keys, values: [R, H, S, D].
        positions: long [R, G, S, A], G = H, or 1 where all heads hold the same keys; A axes (1 of a text, 3 of a clip:
            frame, row, column). With them keys are stored as they are *before* the rotary embedding, and turned when
            they are read: writing another position beside a key is then exact, where turning the stored key itself,
            again and again, drifts in half precision. None: nothing will ask for positions.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and positions."""
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[Tensor]:
        """Keys, values and, if there are any, positions."""
        return [part for part in (self.keys, self.values, self.positions) if part is not None]

    def joined(self, *new: KeyValues) -> KeyValues:
        """A copy of these, and of new ones behind them."""
        parts = zip(self.parts(), *(one.parts() for one in new), strict=True)
        return KeyValues(*(_joined(part) for part in parts))

    def kept(self, places: Tensor) -> KeyValues:
        """Those at `places`, long [R, G, N], in this order; G = H, or 1 where all heads keep the same."""
        return KeyValues(*(_gathered(part, places) for part in self.parts()))

    def selected(self, rows: Tensor) -> KeyValues:
        """Those of some rows, long [N]."""
        return KeyValues(*(part[rows] for part in self.parts()))


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """`parts` [R, H or 1, ., D], one behind the other."""
    heads = max(part.shape[1] for part in parts)
    return torch.cat([part.expand(-1, heads, -1, -1) for part in parts], 2)


def _gathered(part: Tensor, places: Tensor) -> Tensor:
    """`part` [R, H or 1, S, D] at `places` [R, H or 1, N]."""
    heads = max(part.shape[1], places.shape[1])
    index = places.expand(-1, heads, -1)[..., None].expand(-1, -1, -1, part.shape[3])
    return part.expand(-1, heads, -1, -1).gather(2, index)


def largest(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` largest scores [..., S], long [..., count], ascending. Of equal ones the first win."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values


class EvictingCache:
    """Layers that grow by what is appended and are cut to a budget. The rows of a batch advance together.

    Only what is final is appended. What may still change, such as a draft or a block that is being denoised, is
    `joined` for one call and never evicted.

    Args:
        num_layers: layers of the model; all begin empty.

    Attributes:
        layers: what each layer holds; None: nothing.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers: list[KeyValues | None] = [None] * num_layers

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(held.nbytes for held in self.layers if held is not None)

    def joined(self, layer: int, new: KeyValues) -> KeyValues:
        """What a layer holds with new keys behind it, which are not kept."""
        held = self.layers[layer]
        return new if held is None else held.joined(new)

    def append(self, layer: int, new: KeyValues) -> KeyValues:
        """What a layer holds with new keys behind it, which are kept."""
        held = self.layers[layer]
        # The first ones are copied, too: they may be views of something larger.
        self.layers[layer] = joined = new.joined() if held is None else held.joined(new)
        return joined

    def keep(self, layer: int, places: Tensor) -> None:
        """Keep the keys of a layer that stand at `places`, long [R, H or 1, N], in this order."""
        held = self.layers[layer]
        assert held is not None, f"layer {layer} holds nothing"
        self.layers[layer] = held.kept(places)

    def evict(self, layer: int, scores: Tensor, budget: int, *, sink: int = 0, recent: int = 0) -> None:
        """Keep `budget` keys of a layer, in their order: the first `sink`, the last `recent`, and of those between the
        ones with the largest scores. Nothing happens while there are no more.

        Args:
            scores: [R, H, S], or [R, 1, S]: all heads keep the same. Of equal ones the first win.

        Raises:
            ValueError: a budget with no room for `sink` and `recent`, or without keys.
        """
        if sink < 0 or recent < 0 or budget < max(1, sink + recent):
            raise ValueError(
                f"budget={budget}, sink={sink}, recent={recent}; pass a budget of at least 1 that has room for both."
            )
        count = scores.shape[-1]
        if count <= budget:
            return
        pinned = torch.arange(count, device=scores.device)
        pinned = (pinned < sink) | (pinned >= count - recent)
        self.keep(layer, largest(scores.masked_fill(pinned, torch.inf), budget))

    def drop(self, layer: int) -> None:
        """Let a layer hold nothing."""
        self.layers[layer] = None

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, long [N], in this order."""
        self.layers = [None if held is None else held.selected(rows) for held in self.layers]

    def buffers(self) -> list[Tensor]:
        """All that is held now. Shapes change from call to call: such calls are not recorded as CUDA graphs."""
        return [part for held in self.layers if held is not None for part in held.parts()]
