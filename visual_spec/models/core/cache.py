"""Key and value caches of a decode: static by slot, evicting, compressed.

All of them hold keys and values [R, H, S, D] per layer, R rows (2B when guided), H heads, S places. They know the
position of every key: an operation that writes, drops or reorders keys does the same to their values and positions.

* `StaticCache` is allocated once and written by slot. The position of a key is its slot.
* `EvictingCache` grows by appended keys and is cut to a budget: the keys with the largest scores stay.
* `models.next_scale.scale_cache.CompressedCache` is an evicting cache with the scores and budgets of ScaleKV.

A model calls `causal` of a static cache to set where the next forward writes and to get the mask, and `update` to
write the keys and values of a layer and to get those that the layer reads. Rejected drafts are written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

# -- masks -----------------------------------------------------------------------------------------------------------


def on_host(tensor: Tensor) -> bool:
    """Return whether values can be read without stalling a device. If not, shapes must cover the worst case."""
    return tensor.device.type == "cpu"


def seen_up_to(slots: Tensor, num_slots: int, whole: bool = False) -> Tensor:
    """Return the mask of a window, bool [R, W, S]: a query sees all slots up to its own, for `slots` long [R, W].

    S is `num_slots`. On the host it is only as large as the call needs: reading the maximum needs no synchronisation
    there, and spares the unused tail. With `whole`, S is always `num_slots`.
    """
    size = int(slots.max()) + 1 if on_host(slots) and not whole else num_slots
    return torch.arange(size, device=slots.device) <= slots[..., None]


def seen_causally(seen: Tensor) -> Tensor:
    """Return the mask of a whole sequence, bool [R, N, N]: itself, and the positions before it of `seen` [R, N]."""
    places = torch.arange(seen.shape[1], device=seen.device)
    return ((places <= places[:, None]) & seen[:, None]) | (places == places[:, None])


def seen_in_tree(slots: Tensor, visible: Tensor, num_slots: int) -> Tensor:
    """Return the mask of a tree, bool [R, N, num_slots + M]: the slots before the root's, and the `visible` nodes.

    Args:
        slots: long [R, N], the root's slot first.
        visible: bool [R, N, M].
    """
    earlier = torch.arange(num_slots, device=slots.device) < slots[:, :1, None]  # [R, 1, S]
    return torch.cat([earlier.expand(-1, visible.shape[1], -1), visible], -1)


def seen_in_order(slots: Tensor, seen: Tensor, scratch: int) -> Tensor:
    """The mask of queries in any order, bool [R, W, S + scratch]: slots `seen` [R, W, S], and their own [R, W]."""
    return F.pad(seen, (0, scratch)).scatter(2, slots[..., None], True)


# -- allocated once --------------------------------------------------------------------------------------------------


def _nowhere() -> Tensor:
    return torch.empty(0, dtype=torch.long)


def common_run(slots: Tensor) -> slice | None:
    """Return the consecutive places that all rows of `slots` [R, W] write, in this order.

    None where there is no such run, and where reading would stall a device.
    """
    if not on_host(slots) or not slots.numel():
        return None
    first, width = int(slots[0, 0]), slots.shape[1]
    if slots.numel() == 1:
        return slice(first, first + 1)
    run = torch.arange(first, first + width).expand_as(slots)
    return slice(first, first + width) if torch.equal(slots, run) else None


@dataclass
class Places:
    """The places that the next forward writes, long [R, W] with their rows [R, 1], and how many places it reads.

    Attributes:
        run: the same places as one slice, where all rows write the same run: writing a slice is far cheaper.
    """

    rows: Tensor = field(default_factory=_nowhere)
    slots: Tensor = field(default_factory=_nowhere)
    size: int = 0
    run: slice | None = None

    def set(self, slots: Tensor, size: int) -> None:
        """Make the next forward write at slots [R, W], all different in a row, and read the first `size` slots."""
        self.rows = torch.arange(len(slots), device=slots.device)[:, None]
        self.slots, self.size, self.run = slots, size, common_run(slots)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the index of the places on a device: layers of one model may be on several devices."""
        if self.slots.device == device:
            return self.rows, self.slots
        return self.rows.to(device), self.slots.to(device)

    def write(self, held: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [R, W, H, D] into a layer's [R, H, S, D]. Returns views of what it reads."""
        # Compiled code would be made anew for every beginning of a slice.
        run = None if torch.compiler.is_compiling() else self.run
        for whole, new in zip(held, (keys, values), strict=True):
            if run is None:
                whole.transpose(1, 2)[self.on(whole.device)] = new
            else:
                whole.narrow(2, run.start, new.shape[1]).copy_(new.transpose(1, 2))
        return self.read(held)

    def read(self, held: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return views [R, H, size, D] of the keys and values that a layer reads."""
        return held[0].narrow(2, 0, self.size), held[1].narrow(2, 0, self.size)


def repeats(*parts: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return which rows of a prompt to run, and which of these stands for each row, where neighbours are equal.

    Samples of one prompt, and unconditional rows, have the same keys and values, which are then computed once. None
    where all neighbours differ, and on a device, where looking would stall it.

    Args:
        parts: all that a row of the prompt holds, each [R, ...].
    """
    if len(parts[0]) < 2 or torch.compiler.is_compiling() or not all(map(on_host, parts)):
        return None
    new = torch.ones(len(parts[0]), dtype=torch.bool)
    new[1:] = torch.stack([(part[1:] != part[:-1]).flatten(1).any(1) for part in parts]).any(0)
    return None if new.all() else (new.nonzero()[:, 0], new.cumsum(0) - 1)


class StaticCache:
    """Slots that are allocated once, written by slot and masked by position.

    Writing a slot again undoes it, and rows advance at their own pace. Nothing is copied from call to call: layers read
    views.

    Args:
        keys, values: [layers, R, H, S, D].
        places: where the next forward writes; shared by caches that hold one layer each.
    """

    def __init__(self, keys: Tensor, values: Tensor, places: Places | None = None) -> None:
        self.keys, self.values = keys, values
        self.places = Places() if places is None else places

    @classmethod
    def allocate(cls, like: Tensor, shape: Sequence[int], places: Places | None = None) -> Self:
        """Return an empty cache of shape [layers, R, H, S, D], with the device and dtype of `like`."""
        # Zeros, not empty: masked places still enter the product with the values, and 0 * nan is nan.
        return cls(like.new_zeros(shape), like.new_zeros(shape), places)

    @property
    def num_slots(self) -> int:
        """S, the number of slots."""
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def clear(self) -> None:
        """Fill all slots with zeros, as when they were allocated: nan that a decode left would spread."""
        self.keys.zero_()
        self.values.zero_()

    def at(self, slots: Tensor, size: int) -> None:
        """Make the next forward write at slots [R, W], all different in a row, and read the first `size` slots."""
        self.places.set(slots, size)

    def causal(self, slots: Tensor, whole: bool = False) -> Tensor:
        """Make the next forward write at slots [R, W]. Returns the mask, bool [R, W, size]: up to the own slot.

        Args:
            whole: read all slots in every call, so that all calls have one shape.
        """
        seen = seen_up_to(slots, self.num_slots, whole)
        self.at(slots, seen.shape[-1])
        return seen

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [R, W, H, D] of a layer. Returns all that the layer reads: views [R, H, size, D]."""
        return self.places.write(self.layer(layer), keys, values)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [R, H, S, D] of a layer."""
        return self.keys[index], self.values[index]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the contents of slots `sources` [R, D] to slots `targets` [R, D], in all layers."""
        device = self.keys.device
        rows = torch.arange(len(sources), device=device)[:, None]
        sources, targets = sources.to(device), targets.to(device)
        for held in (self.keys, self.values):
            by_slot = held.transpose(2, 3)  # [layers, R, S, H, D]
            by_slot[:, rows, targets] = by_slot[:, rows, sources]

    def select(self, rows: Tensor) -> None:
        """Keep only the rows long [N], in this order."""
        rows = rows.to(self.keys.device)
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def buffers(self) -> list[Tensor]:
        """Return what calls read and write in place; see `DecodeState.buffers`."""
        return [self.keys, self.values]


# -- cut to a budget -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one layer with the position of each key. They always move together.

    Attributes:
        keys, values: [R, H, S, D].
        positions: long [R, G, S, A]. G = H, or 1 if all heads hold the same keys. A axes (1 for a text, 3 for a clip:
            frame, row, column). With positions, keys are stored *before* the rotary embedding and rotated when they are
            read. Giving a key another position is then exact; rotating the stored key itself again and again drifts in
            half precision. None: nothing needs positions.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and positions."""
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[Tensor]:
        """Return keys, values and, if there are any, positions."""
        return [part for part in (self.keys, self.values, self.positions) if part is not None]

    def joined(self, *new: KeyValues) -> KeyValues:
        """Return a copy of these with new ones after them."""
        parts = zip(self.parts(), *(one.parts() for one in new), strict=True)
        return KeyValues(*(_joined(part) for part in parts))

    def kept(self, places: Tensor) -> KeyValues:
        """Return those at `places`, long [R, G, N], in this order; G = H, or 1 if all heads keep the same."""
        return KeyValues(*(_gathered(part, places) for part in self.parts()))

    def selected(self, rows: Tensor) -> KeyValues:
        """Return the rows long [N]."""
        return KeyValues(*(part[rows] for part in self.parts()))


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Join `parts` [R, H or 1, ., D] one after the other."""
    heads = max(part.shape[1] for part in parts)
    return torch.cat([part.expand(-1, heads, -1, -1) for part in parts], 2)


def _gathered(part: Tensor, places: Tensor) -> Tensor:
    """Return `part` [R, H or 1, S, D] at `places` [R, H or 1, N]."""
    heads = max(part.shape[1], places.shape[1])
    index = places.expand(-1, heads, -1)[..., None].expand(-1, -1, -1, part.shape[3])
    return part.expand(-1, heads, -1, -1).gather(2, index)


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the places of the `count` largest scores [..., S], long [..., count], ascending. Ties go to the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values


class EvictingCache:
    """Layers that grow by appended keys and are cut to a budget. The rows of a batch advance together.

    Only final keys are appended. Keys that may still change, such as a draft's or a block's that is being
    denoised, are `joined` for one call and never evicted.

    Args:
        num_layers: layers of the model; all are empty at first.

    Attributes:
        layers: the keys of each layer; None: none.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers: list[KeyValues | None] = [None] * num_layers

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(held.nbytes for held in self.layers if held is not None)

    def joined(self, layer: int, new: KeyValues) -> KeyValues:
        """Return the keys of a layer with new ones after them, without keeping the new ones."""
        held = self.layers[layer]
        return new if held is None else held.joined(new)

    def append(self, layer: int, new: KeyValues) -> KeyValues:
        """Append new keys to a layer. Returns all keys of the layer."""
        held = self.layers[layer]
        # The first keys are copied, too: they may be views of something larger.
        self.layers[layer] = joined = new.joined() if held is None else held.joined(new)
        return joined

    def keep(self, layer: int, places: Tensor) -> None:
        """Keep the keys of a layer at `places`, long [R, H or 1, N], in this order."""
        held = self.layers[layer]
        assert held is not None, f"layer {layer} holds nothing"
        self.layers[layer] = held.kept(places)

    def evict(self, layer: int, scores: Tensor, budget: int, *, sink: int = 0, recent: int = 0) -> None:
        """Keep `budget` keys of a layer, in their order: the first `sink`, the last `recent`, and the keys between them
        with the largest scores. Does nothing if the layer holds no more than `budget`.

        Args:
            scores: [R, H, S], or [R, 1, S] to keep the same keys in all heads. Ties go to the first.

        Raises:
            ValueError: the budget is below 1, or has no room for `sink` and `recent`.
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
        """Drop all keys of a layer."""
        self.layers[layer] = None

    def select(self, rows: Tensor) -> None:
        """Keep only the rows long [N], in this order."""
        self.layers = [None if held is None else held.selected(rows) for held in self.layers]

    def buffers(self) -> list[Tensor]:
        """All tensors held now. Shapes change from call to call, so such calls are not recorded as CUDA graphs."""
        return [part for held in self.layers if held is not None for part in held.parts()]
