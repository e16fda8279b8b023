"""The interface between samplers and models: the grid, the vocabulary, and the calls that score tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from visual_spec.models.core.cache import on_host
from visual_spec.models.core.settings import Count, read_fields

# What a model declares as its `trained_order`: the order of `samplers.orders.tables` that it was trained for, or any.
RASTER_ORDER, ANY_ORDER = "raster", "any"


def wide(values: Tensor) -> Tensor:
    """Return values in at least float32, the precision of logits and of norms."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@dataclass(frozen=True)
class TokenGrid:
    """The geometry of the tokens, in raster order: frames, then rows, then columns.

    Args:
        height, width: tokens of a frame vertically and horizontally.
        frames: number of frames (1 for an image).
        codebooks: tokens at one slot (1 unless the tokenizer has several codebooks).

    Raises:
        ValueError: a size is not an integer of at least 1.
    """

    height: Count
    width: Count
    frames: Count = 1
    codebooks: Count = 1

    def __post_init__(self) -> None:
        read_fields(self)

    @property
    def num_tokens(self) -> int:
        """Number of slots to decode: frames * height * width."""
        return self.frames * self.height * self.width

    def coordinates(self, index: int) -> tuple[int, int, int]:
        """Return (frame, row, column) of a slot.

        Raises:
            IndexError: the slot is outside the grid.
        """
        if not 0 <= index < self.num_tokens:
            raise IndexError(f"slot {index} is outside the grid; it has slots 0 to {self.num_tokens - 1}.")
        frame, rest = divmod(index, self.height * self.width)
        return frame, *divmod(rest, self.width)

    def left(self, index: int) -> int | None:
        """Return the slot to the left, or None in column 0."""
        return index - 1 if self.coordinates(index)[2] else None

    def up(self, index: int) -> int | None:
        """Return the slot above in the same frame, or None in row 0."""
        return index - self.width if self.coordinates(index)[1] else None

    def previous_frame(self, index: int) -> int | None:
        """Return the slot at the same place one frame earlier, or None in frame 0."""
        return index - self.height * self.width if self.coordinates(index)[0] else None


@dataclass
class DecodeState:
    """One batch during decoding. A model subclasses it with its caches.

    Attributes:
        logits: [R, V], the prediction of slot 0; [R, P, V] where a prefill predicts P slots. R = B, or 2B when guided:
            the conditional rows, then the unconditional ones.
        guided: whether there are unconditional rows.
        window: the largest number of slots that one call will score.
        fixed: whether all calls must run the same kernels: then none may be shortened to what it needs.
    """

    logits: Tensor
    guided: bool
    window: int
    fixed: bool = field(default=False, kw_only=True)

    def narrow(self, width: int) -> None:
        """Forget what the last call computed at the positions after the first `width`, for those who read it."""

    def rows(self, samples: Tensor) -> Tensor:
        """Return the rows of the samples long [N]; when guided, followed by their unconditional rows."""
        return torch.cat([samples, samples + self.logits.shape[0] // 2]) if self.guided else samples

    def select(self, samples: Tensor) -> None:
        """Keep only the samples long [N], in this order, to free the room of completed ones.

        Raises:
            NotImplementedError: this state always holds the whole batch.
        """
        raise NotImplementedError

    def buffers(self) -> list[Tensor]:
        """Return what calls read and write in place, in a fixed order: copying it from another state of the same shape
        makes this state continue as that one.

        Raises:
            NotImplementedError: calls on this state cannot be recorded as CUDA graphs.
        """
        raise NotImplementedError


def trained_order(model: object) -> str:
    """Return the name of the order a next-token model was trained for: raster order, unless it declares another."""
    return getattr(model, "trained_order", RASTER_ORDER)


def modules_of(model: object) -> list[nn.Module]:
    """Return the model itself, or the modules that an adapter runs, also one around another adapter (`wrapped`)."""
    model = getattr(model, "wrapped", model)
    if isinstance(model, nn.Module):
        return [model]
    return [value for value in vars(model).values() if isinstance(value, nn.Module)]


def owner_of(model: object) -> object:
    """Return an object that lives as long as the weights, as a key of caches: each request makes a new adapter."""
    modules = modules_of(model)
    return modules[0] if modules else model


class NextTokenModel(Protocol):
    """A model that predicts the next token of a grid in raster order."""

    @property
    def grid(self) -> TokenGrid: ...

    @property
    def vocab_size(self) -> int: ...

    def prefill(self, condition: Any, *, batch_size: int, guided: bool, window: int) -> DecodeState:
        """Run the condition and allocate the static cache.

        Args:
            condition: whatever the model is conditioned on, `batch_size` rows of it, or None.
            guided: whether to hold unconditional rows as well.
            window: the largest number of slots that one call will score.

        Returns:
            A `DecodeState` (of the model's own subclass), whose logits [R, V] predict slot 0.

        Raises:
            TypeError, ValueError: the condition does not fit the model, or the cache of the batch does not fit the GPU.
        """
        ...

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor, /) -> Tensor:
        """Feed tokens and score the slots that follow them.

        The cache is written by slot: feeding another token at a slot undoes a rejected one, and each row advances at
        its own pace. Position `w` of the window sees itself, the positions before it, and the slots before `slots[b,
        0]`. No host synchronisation.

        Args:
            state: the state from `prefill`.
            tokens: long [B, W].
            slots: long [B, W], consecutive in a row. They may run past the grid, up to
                num_tokens + window - 1 (scratch room in the cache; those logits are ignored).

        Returns:
            logits [R, W, V]; position `w` predicts slot `slots[b, w] + 1`.
        """
        ...


class PromptModel(NextTokenModel, Protocol):
    """A next-token model whose prefill can be recorded, and can write where an earlier one wrote.

    Its `prefill` is in two parts: one looks at the condition, the other computes, on the device alone.
    """

    def prompt_of(self, condition: Any, *, batch_size: int, guided: bool) -> tuple[Tensor, ...]:
        """Check a condition, as `prefill` does, and return all that `run_prompt` reads of it.

        Prompts of different lengths should have few different shapes where reading a shape is no synchronisation.
        """
        ...

    def run_prompt(
        self, prompt: tuple[Tensor, ...], *, guided: bool, window: int, held: Any = None
    ) -> DecodeState:
        """Run a prompt. Returns the state as of `prefill`. No host synchronisation, and nothing of the host is read.

        Args:
            prompt: from `prompt_of`.
            held: an earlier state for a prompt of the same shapes, and for the same `guided` and `window`, which is not
                needed any more: its cache is cleared and written, in place of a new one.
        """
        ...


class TreeModel(NextTokenModel, Protocol):
    """A next-token model that also scores several continuations of one sequence in one call.

    A tree call feeds nodes. Node 0 is the root: the newest committed token, at its slot. Every other node holds a
    draft, one slot after its parent's; several nodes may share a slot.
    """

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor, visible: Tensor | None = None) -> Tensor:
        """Without `visible`: as `NextTokenModel`. With it: score a tree.

        Args:
            tokens, slots: long [B, N], N <= the window of the prefill.
            visible: bool [B, N, N]; [b, n, m] is true if node m is n itself or one of its ancestors. A node also
                sees all slots before the root's, so these must have been fed, or kept.

        Returns:
            logits [R, N, V]; node n predicts slot `slots[b, n] + 1` after the path to n. The cache by slot does not
            change: `keep` writes the accepted nodes there.
        """
        ...

    def keep(self, state: Any, nodes: Tensor, slots: Tensor) -> None:
        """Write the cache entries of nodes of the last tree call to slots.

        Args:
            nodes, slots: long [B, D]. Give the root and the accepted path; a row with a shorter path repeats a
                pair, or gives any node for slots that it will feed again.
        """
        ...


class OrderModel(NextTokenModel, Protocol):
    """A next-token model that also feeds slots out of raster order, each position with its own mask.

    The caller says which slot each position predicts. A model trained in raster order can predict only one, the slot
    after the fed one. If asked for another slot of the grid, it raises ValueError on the CPU (`check_raster`). On other
    devices it does not read the request and returns the logits of the slot after the fed one. So orders that need more
    require models that were trained for them.
    """

    def __call__(
        self,
        state: Any,
        tokens: Tensor,
        slots: Tensor,
        *,
        seen: Tensor | None = None,
        predicted: Tensor | None = None,
    ) -> Tensor:
        """Without `seen`: as `NextTokenModel`. With it: feed any slots, in any order.

        The cache is written by slot, and a slot holds the last token fed there. A position must not see slots that hold
        nothing yet, or something it should not know.

        Args:
            tokens: long [B, W], W <= the window of the prefill.
            slots: long [B, W], the slots of a row all different. They may run past the grid, up to
                num_tokens + window - 1: scratch room for positions that feed nothing.
            seen: bool [B, W, num_tokens], the grid slots that a position attends to. A slot fed in the same call
                counts with its new token. Every position also sees the condition, and itself.
            predicted: long [B, W], with `seen` only: the slot that each position predicts. A place past the grid, up to
                num_tokens + window - 1, means none: those logits are ignored. None: `slots + 1`.

        Returns:
            logits [R, W, V]; position w predicts slot `predicted[b, w]` given what it sees.

        Raises:
            ValueError: the model has no law for a slot to predict (checked only where reading does not stall).
        """
        ...


def check_labels(condition: object, batch_size: int, classes: int) -> None:
    """Refuse what is no LongTensor [B] (TypeError) of labels below `classes` (ValueError; meta tensors have none)."""
    if not isinstance(condition, Tensor) or condition.is_floating_point() or condition.is_complex():
        raise TypeError(f"{type(condition).__name__} given; this model takes class labels, a LongTensor [B]")
    allowed = condition.is_meta or bool(((condition >= 0) & (condition < classes)).all())
    if condition.shape != (batch_size,) or not allowed:
        raise ValueError(
            f"labels {condition.tolist()} given; allowed are {batch_size} labels of 0 to {classes - 1}"
        )


def check_ids(name: str, ids: Tensor, count: int, of: str = "") -> None:
    """Refuse ids that are not of 0 to count - 1, by ValueError; `name`: what they are, `of`: whose they should be."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(
            f"{name} from {int(ids.min())} to {int(ids.max())} given; pass 0 to {count - 1}{of}."
        )


def check_heads(dim: int, num_heads: int, multiple: int = 1) -> None:
    """Refuse heads that do not divide a width into multiples of a number, by ValueError."""
    if dim % (multiple * num_heads):
        factor = f"{multiple} times " if multiple > 1 else ""
        raise ValueError(
            f"dim={dim} and num_heads={num_heads} given; dim must be a multiple of {factor}num_heads."
        )


def check_raster(slots: Tensor, predicted: Tensor | None, num_tokens: int) -> None:
    """Refuse, by ValueError, to predict slots other than those after `slots`, for a model trained in raster order.

    `slots`, `predicted`: long [B, W], as in `OrderModel.__call__`. Values are read on the CPU only: elsewhere this
    would stall the device.
    """
    if predicted is None or not on_host(predicted):
        return
    wrong = ((predicted != slots + 1) & (predicted < num_tokens)).nonzero()
    if len(wrong):
        row, position = wrong[0].tolist()
        raise ValueError(
            f"asked to predict slot {int(predicted[row, position])} where slot {int(slots[row, position])} is fed; a "
            "model that was trained in raster order predicts the next slot. Use a raster or row order, or a model "
            "that was trained for this one."
        )


# -- next-scale prediction -------------------------------------------------------------------------------------------
#
# A picture is a pyramid of token maps, coarse to fine. All tokens of one map are predicted at once, given the maps
# before it (Tian et al. 2024, section 3.2). Slots count through the concatenated maps in raster order: scale k has
# the slots from sum(n * n for n in scales[:k]) on.


# A map's side in tokens, or its (height, width) if they differ.
Side = int | tuple[int, int]


def shape_of(side: Side) -> tuple[int, int]:
    """Return height and width of a map."""
    return (side, side) if isinstance(side, int) else side


def area_of(side: Side) -> int:
    """Return the number of places of a map."""
    height, width = shape_of(side)
    return height * width


def checked_stop(maps: Sequence[Tensor], stop: int | None, scales: Sequence[Side]) -> int:
    """Return the first scale that a prefill with `maps` need not prepare; None stands for one after the last.

    Raises:
        ValueError: `stop` does not come after the scale that the maps predict.
    """
    count = len(scales)
    stop = count if stop is None else stop
    if not len(maps) < stop <= count:
        raise ValueError(
            f"{len(maps)} maps and stop={stop} given; stop must lie after scale {len(maps)}, which they predict, "
            f"and this model has {count} scales"
        )
    return stop


def sides_of(scales: Iterable[Side | Sequence[int]]) -> tuple[Side, ...]:
    """Return sides in a canonical form that can be compared: an int for a square, else a tuple."""
    pairs = [(side, side) if isinstance(side, int) else tuple(side) for side in scales]
    return tuple(height if height == width else (height, width) for height, width in pairs)


class ScaleTokenizer(Protocol):
    """Pictures as residual token maps of growing size. A picture is a canvas to which each map adds.

    All canvases of one decode have one shape, [B, D, h, w], with h, w of the last map unless a tokenizer says
    otherwise.

    A place of a map holds one token. If the tokenizer has an attribute `tokens_per_place`, T, a place holds T tokens
    (the bits of a binary code). Like the tokens of all places, these are independent given the earlier maps. They
    follow each other and each has its own slot; below, read n * n * T for n * n.
    """

    @property
    def scales(self) -> tuple[Side, ...]:
        """Places per side of each map, coarse to fine."""
        ...

    @property
    def code_dim(self) -> int:
        """D, channels of a code, a canvas and an input map."""
        ...

    @property
    def codebook_size(self) -> int:
        """V, the number of codes, or of values of a token."""
        ...

    @property
    def codebook(self) -> Tensor:
        """The codes [V, D] by token id; with T tokens a place [V, D / T], joined in the order of the tokens."""
        ...

    def begin(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the canvas before the first map: zeros [B, D, h, w]."""
        ...

    def accumulate(self, canvas: Tensor, scale: int, tokens: Tensor) -> Tensor:
        """Return the canvas with a map added to it. The given canvas does not change.

        Args:
            canvas: [B, D, h, w].
            scale: index of the map.
            tokens: long [B, n * n] with n = scales[scale], in raster order.
        """
        ...

    def accumulate_codes(self, canvas: Tensor, scale: int, codes: Tensor) -> Tensor:
        """As `accumulate`, for a map of any codes [B, D, n, n], such as mixtures of several."""
        ...

    def next_map(self, canvas: Tensor, scale: int) -> Tensor:
        """The input of a model that predicts `scale`, 1 or later: the canvas at that scale's size, [B, D, n, n]."""
        ...

    def decode_canvas(self, canvas: Tensor) -> Tensor:
        """Return pictures [B, 3, H, W] in [-1, 1]; for an unfinished canvas, the picture so far."""
        ...


@dataclass
class ScaleState:
    """One batch during next-scale decoding. A model subclasses it with its caches.

    Attributes:
        logits: [R, n * n, V], the prediction of the scale at which the prefill ended; [R, n * n * T, V] for a tokenizer
            with T tokens a place. R = B, or 2B when guided: the conditional rows, then the unconditional ones.
        guided: whether there are unconditional rows.
    """

    logits: Tensor
    guided: bool

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key and value cache for the whole decode; 0 for a model without one."""
        return 0

    def drop_unconditional(self) -> None:
        """Go on without the unconditional rows, R = B: they leave the caches, and later calls do not compute them."""
        self.logits, self.guided = self.logits[: len(self.logits) // 2], False


class ScaleModel(Protocol):
    """A model that predicts all tokens of a scale at once, given the maps of the scales before it.

    Earlier scales are given as input maps, `ScaleTokenizer.next_map`. They are the same for every model of one
    tokenizer, so one model can continue where another stopped.

    A model may tell its `num_layers`. If it also has an attribute `prunes`, True, its `prefill` takes `pruning`, a
    `visual_spec.models.core.pruning.Pruning`, and then only parts of later maps go through its layers.
    """

    @property
    def scales(self) -> tuple[Side, ...]:
        """Places per side of each map, coarse to fine."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def code_dim(self) -> int:
        """Channels of an input map."""
        ...

    def prefill(
        self,
        condition: Any,
        *,
        batch_size: int,
        guided: bool,
        maps: Sequence[Tensor] = (),
        stop: int | None = None,
    ) -> ScaleState:
        """Run the condition, and the scales that are already known, in one forward; allocate the static cache.

        Args:
            condition: whatever the model is conditioned on, `batch_size` rows of it, or None.
            guided: whether to hold unconditional rows as well.
            maps: the input maps [B, D, n, n] of the scales 1 .. k. A scale sees itself and the scales before it.
            stop: the first scale that this model will not predict, above k; None: it predicts all. Nothing is cached
                for scales after the last but one of them, because nothing would read it.

        Returns:
            A `ScaleState` (of the model's own subclass); its logits predict scale k = len(maps).

        Raises:
            TypeError, ValueError: the condition does not fit the model, the maps have other shapes, or `stop` is not
                after them.
        """
        ...

    def __call__(self, state: Any, map: Tensor, scale: int) -> Tensor:
        """Feed the input map of a scale, and predict its tokens. No host synchronisation.

        The cache is written by slot: a scale may be fed again, and then all later scales must be fed again.

        Args:
            state: the state from `prefill`.
            map: [B, D, n, n], the same for conditional and unconditional rows.
            scale: 1 or later; the scales before it have been fed.

        Returns:
            logits [R, n * n, V].
        """
        ...


# -- several codebooks -----------------------------------------------------------------------------------------------
#
# A neural audio codec gives K tokens a frame. A codebook pattern (`patterns.CodebookPattern`) lays them out in steps of
# at most one token of each codebook. The tokens of one step, a column, are predicted together. They are independent of
# each other given the earlier columns.


class ColumnModel(NextTokenModel, Protocol):
    """A model that predicts the next column of K tokens.

    A slot is a step of the pattern, without the initial empty step, which belongs to the prefill. An entry without a
    token is forced: samplers put `special_id` there, ignore its logits, and feed it like any other token. The grid has
    height 1, width S (steps) and K codebooks; `vocab_size` is V, of one codebook, without the special token.
    """

    @property
    def valid(self) -> Tensor:
        """Return where a step holds a token: bool [S, K], on any device. (The transpose of `CodebookPattern.valid`.)"""
        ...

    @property
    def special_id(self) -> int:
        """The id fed and returned for entries without a token. It may be V, or an id of the vocabulary."""
        ...

    def prefill(self, condition: Any, *, batch_size: int, guided: bool, window: int) -> DecodeState:
        """As `NextTokenModel.prefill`, except that the state's logits are [R, K, V]; they predict step 0."""
        ...

    def __call__(self, state: Any, tokens: Tensor, steps: Tensor, /) -> Tensor:
        """Feed columns and score the steps that follow them.

        The cache is written by step, as a `NextTokenModel`'s by slot: feeding another column at a step undoes a
        rejected one, and each row advances at its own pace. No host synchronisation.

        Args:
            state: the state from `prefill`.
            tokens: long [B, W, K], the special token for entries without a token.
            steps: long [B, W], consecutive in a row. They may run past the grid, up to num_tokens + window - 1
                (scratch room in the cache; all entries there are special, and those logits are ignored).

        Returns:
            logits [R, W, K, V]; column `w` predicts step `steps[b, w] + 1`.
        """
        ...
