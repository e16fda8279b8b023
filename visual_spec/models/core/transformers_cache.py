"""The parts that adapters to transformers' image generators share: prompts, and a cache that is written by place."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache as memoised

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from visual_spec.models.core.cache import Places, StaticCache, on_host


@dataclass
class Prompt:
    """The tokens before a picture, one row a sample, left-padded.

    Attributes:
        ids: long [B, T].
        mask: bool [B, T], true at tokens. Padding is on the left, and no row is empty.
        positions: long [B, T], or [3, B, T] for rotary embeddings with three axes; None counts the tokens from 0.
        start: long [B], the position after the prompt; None is the number of tokens.

    Raises:
        TypeError: the ids are not integers.
        ValueError: the shapes differ, or the last position of a row is masked.
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
                "the last position of a prompt is masked; pad prompts on the left, and leave none empty."
            )

    @property
    def where(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the tokens, and the position after them."""
        counted = (self.mask.cumsum(-1) - 1).clamp_min(0)
        return (
            counted if self.positions is None else self.positions,
            self.mask.sum(-1) if self.start is None else self.start,
        )

    def repeat(self, times: int) -> Prompt:
        """Repeat every row `times` times, with the copies of a row adjacent."""
        batch = None if self.positions is None else self.positions.ndim - 2
        return Prompt(
            self.ids.repeat_interleave(times, 0),
            self.mask.repeat_interleave(times, 0),
            None if self.positions is None else self.positions.repeat_interleave(times, batch),
            None if self.start is None else self.start.repeat_interleave(times, 0),
        )


@dataclass
class ImagePrompt:
    """The condition of a picture: the prompt, and for guidance the prompt that stands for no caption."""

    prompt: Prompt
    unconditional: Prompt | None = None

    def repeat(self, times: int) -> ImagePrompt:
        """Repeat every row `times` times, with the copies of a row adjacent."""
        other = self.unconditional
        return ImagePrompt(self.prompt.repeat(times), None if other is None else other.repeat(times))


_PROMPT_STEP = 32  # prompts are padded to multiples of this where shapes are fixed


def joined_prompts(
    condition: ImagePrompt, batch_size: int, guided: bool, device: torch.device, family: str
) -> Prompt:
    """Return the conditional prompts, and after them the unconditional ones when guided, padded to one length.

    Raises:
        TypeError: the condition is no `ImagePrompt`; names the family.
        ValueError: it has other than one prompt a sample, or none that guidance needs.
    """
    if not isinstance(condition, ImagePrompt):
        raise TypeError(f"condition is a {type(condition).__name__}; {family} takes an ImagePrompt.")
    parts = [condition.prompt]
    if guided:
        if condition.unconditional is None:
            raise ValueError(
                f"guidance asked of {family}, but the condition has no unconditional prompt; "
                "pass one, or guidance_scale=1."
            )
        parts.append(condition.unconditional)
    counts = [len(part.ids) for part in parts]
    if set(counts) != {batch_size}:
        raise ValueError(
            f"{' and '.join(map(str, counts))} prompts for a batch of {batch_size}; pass one a sample."
        )
    longest = max(part.ids.shape[1] for part in parts)
    # Few different lengths, so that later prompts can reuse recordings.
    if not on_host(parts[0].ids.to(device)):
        longest = -(-longest // _PROMPT_STEP) * _PROMPT_STEP

    def joined(tensors: list[Tensor]) -> Tensor:
        padded = [F.pad(tensor, (longest - tensor.shape[-1], 0)) for tensor in tensors]
        return torch.cat(padded, dim=padded[0].ndim - 2).to(device)

    places = [part.where for part in parts]
    return Prompt(
        ids=joined([part.ids for part in parts]),
        mask=joined([part.mask for part in parts]),
        positions=joined([positions for positions, _ in places]),
        start=torch.cat([start for _, start in places]).to(device),
    )


def one_size(image_sizes: object) -> tuple[int, int]:
    """Return height and width in tokens, from (height, width) or a list or tensor [B, 2] of one size.

    Raises:
        ValueError: there is no size, several sizes, or another kind of value.
    """
    sizes = image_sizes.tolist() if isinstance(image_sizes, Tensor) else image_sizes
    pairs = list(sizes) if isinstance(sizes, (list, tuple)) else []
    if pairs and isinstance(pairs[0], int):
        pairs = [pairs]
    sides = [tuple(pair) if isinstance(pair, (list, tuple)) else pair for pair in pairs]
    if not sides or not all(
        isinstance(pair, tuple) and [type(n) for n in pair] == [int, int] for pair in sides
    ):
        raise ValueError(
            f"image_sizes={image_sizes}; pass (height, width) in tokens, one pair, or one a sample."
        )
    if len(set(sides)) > 1:
        raise ValueError(
            f"image_sizes={sizes}; the pictures of a batch have one size, draw others in another batch."
        )
    return sides[0]


def filled(ids: Tensor, drawn: Tensor, placeholder: int) -> Tensor:
    """Return ids [B, T] with the image tokens `drawn` [n] in place of the placeholders.

    Raises:
        ValueError: the number of placeholders is not n.
    """
    places = ids == placeholder
    if int(places.sum()) != len(drawn):
        raise ValueError(
            f"{int(places.sum())} placeholders in input_ids for {len(drawn)} image tokens; "
            "pass input_ids and pixel_values of one processor call."
        )
    return ids.masked_scatter(places, drawn.to(ids))


# -- the cache -------------------------------------------------------------------------------------------------------

CACHES = ("cache", "past_key_values")  # from transformers 5.24 on, and before
CACHE = next(name for name in CACHES if name in BaseModelOutputWithPast.__dataclass_fields__)


def cache_argument(module: nn.Module) -> str:
    """Return what the forward of a module calls its cache. Code that comes with a checkpoint may use the older name."""
    return _cache_argument(type(module))


@memoised
def _cache_argument(kind: type[nn.Module]) -> str:
    taken = inspect.signature(kind.forward).parameters
    return next((name for name in CACHES if name in taken), CACHE)


def attention_mask(visible: Tensor, like: Tensor, attention: str) -> Tensor:
    """Return bool `visible` as "sdpa" takes it, or as "eager" adds it, in the dtype of `like`.

    On the host "sdpa" adds it, too, and would make numbers of it in every layer.
    """
    if attention != "eager" and not on_host(visible):
        return visible
    hidden = torch.finfo(like.dtype).min if attention == "eager" else -torch.inf
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill_(~visible, hidden)


class _SlotLayer(CacheLayerMixin):
    """Keys and values [R, H, S, D] of one layer: a static cache of its own, on the layer's device."""

    is_compileable = True

    def __init__(self, num_places: int, places: Places) -> None:
        super().__init__()
        self.num_places = num_places
        self.places = places
        self.held: StaticCache | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, head_dim = key_states.shape
        shape = (1, rows, heads, self.num_places, head_dim)
        self.hold(StaticCache.allocate(key_states, shape, self.places))

    def hold(self, held: StaticCache) -> None:
        """Take over a static cache; `keys` and `values` are views of it for transformers."""
        self.held = held
        self.keys, self.values = held.keys[0], held.values[0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [R, H, W, D] where `SlotCache.at` said. Returns the places that are read, [R, H, size, D]."""
        if self.held is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        return self.places.write(
            (self.keys, self.values), key_states.transpose(1, 2), value_states.transpose(1, 2)
        )

    def get_mask_sizes(self, *args: object, **kwargs: object) -> tuple[int, int]:
        return self.places.size, 0

    def get_seq_length(self, *args: object, **kwargs: object) -> int:
        return 0  # rows differ, so positions are passed with every call

    def get_max_length(self) -> int:
        return self.num_places

    get_max_cache_shape = get_max_length  # its name before transformers 5


class SlotCache(Cache):
    """`StaticCache` in the form of transformers: one per layer, allocated at the first forward on the layer's device.

    Args:
        num_layers: layers of the decoder.
        num_places: most keys of a row.
    """

    def __init__(self, num_layers: int, num_places: int) -> None:
        self.places = Places()
        super().__init__(layers=[_SlotLayer(num_places, self.places) for _ in range(num_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values; 0 before the first forward."""
        return sum(held.nbytes for _, held in self._held())

    def clear(self) -> None:
        """Fill all places with zeros, as when they were allocated."""
        for _, held in self._held():
            held.clear()

    def at(self, places: Tensor, size: int) -> None:
        """Make the next forward write at places [R, W], and read the first `size` places."""
        self.places.set(places, size)

    def select(self, rows: Tensor) -> None:
        """Keep only the rows long [N], in this order."""
        for layer, held in self._held():
            held.select(rows)
            layer.hold(held)

    def buffers(self) -> list[Tensor]:
        """Return keys and values of all layers, each [1, R, H, S, D]."""
        return [buffer for _, held in self._held() for buffer in held.buffers()]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the contents of places `sources` [R, D] to places `targets` [R, D]."""
        for _, held in self._held():
            held.copy(sources, targets)

    def _held(self) -> list[tuple[_SlotLayer, StaticCache]]:
        layers = [layer for layer in self.layers if isinstance(layer, _SlotLayer)]
        return [(layer, layer.held) for layer in layers if layer.held is not None]
