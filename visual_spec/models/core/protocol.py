"""What a sampler knows of a model: its grid, its vocabulary, how to score a window of tokens or a scale of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from visual_spec.models.core.cache import on_host


@dataclass(frozen=True)
class TokenGrid:
    """The geometry of the tokens, in raster order: frames, then rows, then columns.

    Args:
        height, width: tokens a frame has vertically and horizontally.
        frames: number of frames (1 for an image).
        codebooks: tokens stacked at one slot (1 unless the tokenizer is a multi-codebook one).

    Raises:
        ValueError: a size that is not an integer of at least 1.
    """

    height: int
    width: int
    frames: int = 1
    codebooks: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"TokenGrid {field.name}={size!r}; pass an integer of at least 1.")

    @property
    def num_tokens(self) -> int:
        """Slots to decode: frames * height * width."""
        return self.frames * self.height * self.width

    def coordinates(self, index: int) -> tuple[int, int, int]:
        """(frame, row, column) of a slot.

        Raises:
            IndexError: a slot outside the grid.
        """
        if not 0 <= index < self.num_tokens:
            raise IndexError(f"slot {index} is outside the grid; it has slots 0 to {self.num_tokens - 1}.")
        frame, rest = divmod(index, self.height * self.width)
        return frame, *divmod(rest, self.width)

    def left(self, index: int) -> int | None:
        """The slot to the left, or None in column 0."""
        return index - 1 if self.coordinates(index)[2] else None

    def up(self, index: int) -> int | None:
        """The slot above in the same frame, or None in row 0."""
        return index - self.width if self.coordinates(index)[1] else None

    def previous_frame(self, index: int) -> int | None:
        """The slot at the same place one frame earlier, or None in frame 0."""
        return index - self.height * self.width if self.coordinates(index)[0] else None


@dataclass
class DecodeState:
    """One batch in the course of decoding. A model subclasses it with its caches.

    Attributes:
        logits: [R, V], the prediction of slot 0. R = B, or 2B when guided: the conditional rows, then the
            unconditional ones.
        guided: whether the unconditional rows are there.
        window: the largest number of slots that one call will score.
    """

    logits: Tensor
    guided: bool
    window: int

    def rows(self, samples: Tensor) -> Tensor:
        """The rows of some samples, long [N]; when guided, their unconditional ones come behind."""
        return torch.cat([samples, samples + self.logits.shape[0] // 2]) if self.guided else samples

    def select(self, samples: Tensor) -> None:
        """Keep only some samples, long [N], in this order: those that are complete need no more room.

        Raises:
            NotImplementedError: by states that always hold the whole batch.
        """
        raise NotImplementedError

    def buffers(self) -> list[Tensor]:
        """What calls read and write in place, in a fixed order: all that one state has to take over from another of the
        same shape to go on as that one.

        Raises:
            NotImplementedError: by states whose calls cannot be recorded as CUDA graphs.
        """
        raise NotImplementedError


def modules_of(model: Any) -> list[nn.Module]:
    """The model itself, or what an adapter runs."""
    if isinstance(model, nn.Module):
        return [model]
    return [value for value in vars(model).values() if isinstance(value, nn.Module)]


def owner_of(model: Any) -> Any:
    """What lives as long as the weights, to remember things by: adapters are made anew for every request."""
    modules = modules_of(model)
    return modules[0] if modules else model


class NextTokenModel(Protocol):
    """A model that predicts the next token of a grid in raster order."""

    @property
    def grid(self) -> TokenGrid: ...

    @property
    def vocab_size(self) -> int: ...

    def prefill(self, condition: Any, *, batch_size: int, guided: bool, window: int) -> Any:
        """Run the condition and allocate the static cache.

        Args:
            condition: whatever the model is conditioned on, `batch_size` rows of it, or None.
            guided: also hold unconditional rows.
            window: the largest number of slots that one call will score.

        Returns:
            A `DecodeState` (of the model's own subclass).
        """
        ...

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor) -> Tensor:
        """Feed tokens and score the slots that follow them.

        The cache is written by slot: a rejected token is undone by feeding another one at its slot, and each
        row advances at its own pace. Position `w` of the window sees itself, the positions before it, and the slots
        before `slots[b, 0]`. No host synchronisation.

        Args:
            state: what `prefill` returned.
            tokens: long [B, W].
            slots: long [B, W], consecutive in a row. They may run past the grid, up to
                num_tokens + window - 1 (scratch room in the cache; those logits are ignored).

        Returns:
            logits [R, W, V]; position `w` predicts slot `slots[b, w] + 1`.
        """
        ...


class TreeModel(NextTokenModel, Protocol):
    """A next-token model that also scores several continuations of one text in one call.

    A tree call feeds nodes. Node 0 is the root: the newest committed token, at its slot. Every other node holds a
    draft, one slot behind its parent's; several nodes may share a slot.
    """

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor, visible: Tensor | None = None) -> Tensor:
        """Without `visible`: as `NextTokenModel`. With it: score a tree.

        Args:
            tokens, slots: long [B, N], N <= the window of the prefill.
            visible: bool [B, N, N]; [b, n, m] is true where node m is n itself or one of its ancestors. A node also
                sees all slots before the root's, so these must have been fed, or kept.

        Returns:
            logits [R, N, V]; node n predicts slot `slots[b, n] + 1` behind the path to n. The cache by slot is left
            as it was: `keep` brings the accepted nodes there.
        """
        ...

    def keep(self, state: Any, nodes: Tensor, slots: Tensor) -> None:
        """Make nodes of the last tree call what is cached at slots.

        Args:
            nodes, slots: long [B, D]. Name the root and the accepted path; a row with a shorter path repeats a
                pair, or names any node for slots that it will feed again.
        """
        ...


class OrderModel(NextTokenModel, Protocol):
    """A next-token model that also feeds slots out of raster order, each position with its own view of the text.

    What a position predicts is what it is told. A model that was trained in raster order has one answer only, the law
    of the slot behind the one that is fed. Told to predict another slot of the grid, it raises ValueError on the CPU
    (`check_raster`); on a device it does not read what it is told, and its logits are those of the slot behind. So an
    order that asks for more is run on models that were trained for it.
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

        The cache is written by slot, and what a slot holds is what was fed there last. A slot that holds nothing yet,
        or something that a position should not know, is a slot that the position does not see.

        Args:
            tokens: long [B, W], W <= the window of the prefill.
            slots: long [B, W], the slots of a row all different. They may run past the grid, up to
                num_tokens + window - 1: scratch room for positions that feed nothing.
            seen: bool [B, W, num_tokens], the grid slots that a position attends to. A slot fed in the same call
                counts with its new token. Every position also sees the condition, and itself.
            predicted: long [B, W], with `seen` only: the slot that each position predicts. A place past the grid, up to
                num_tokens + window - 1, asks for nothing: those logits are ignored. None: `slots + 1`.

        Returns:
            logits [R, W, V]; position w predicts slot `predicted[b, w]` given what it sees.

        Raises:
            ValueError: slots to predict that the model has no law for, where that can be read without stalling.
        """
        ...


def check_raster(slots: Tensor, predicted: Tensor | None, num_tokens: int) -> None:
    """Refuse, for a model that was trained in raster order, to predict other slots than those behind `slots`.

    Values are read on the CPU only: elsewhere that would stall the device.

    Args:
        slots, predicted: long [B, W], as of `OrderModel.__call__`.

    Raises:
        ValueError: names the first such slot.
    """
    if predicted is None or not on_host(predicted):
        return
    wrong = ((predicted != slots + 1) & (predicted < num_tokens)).nonzero()
    if len(wrong):
        row, position = wrong[0].tolist()
        raise ValueError(
            f"asked to predict slot {int(predicted[row, position])} where slot {int(slots[row, position])} is fed; a "
            "model that was trained in raster order predicts the slot behind. Use a raster or row order, or a model "
            "that was trained for this one."
        )


# -- next-scale prediction -------------------------------------------------------------------------------------------
#
# A picture is a pyramid of token maps, coarse to fine; all tokens of one map are predicted at once, given the maps
# before it (Tian et al. 2024, section 3.2). A token's slot is its place in the maps, one behind the other in raster
# order: scale k has the slots from sum(n * n for n in scales[:k]) on.


# A map's side in tokens, or its (height, width) where they differ.
Side = int | tuple[int, int]


def shape_of(side: Side) -> tuple[int, int]:
    """Height and width of a map."""
    return (side, side) if isinstance(side, int) else side


def area_of(side: Side) -> int:
    """Places of a map."""
    height, width = shape_of(side)
    return height * width


def checked_stop(maps: Sequence[Tensor], stop: int | None, scales: Sequence[Side]) -> int:
    """The first scale that a prefill with `maps` is not asked for; None stands for one behind the last.

    Raises:
        ValueError: it does not lie behind the scale that the maps predict.
    """
    count = len(scales)
    stop = count if stop is None else stop
    if not len(maps) < stop <= count:
        raise ValueError(
            f"{len(maps)} maps and stop={stop} given; stop must lie behind scale {len(maps)}, which they predict, "
            f"and this model has {count} scales"
        )
    return stop


def sides_of(scales: Iterable[Side | Sequence[int]]) -> tuple[Side, ...]:
    """Sides in their one spelling, by which they can be compared: an int for a square, else a tuple."""
    pairs = [(side, side) if isinstance(side, int) else tuple(side) for side in scales]
    return tuple(height if height == width else (height, width) for height, width in pairs)


class ScaleTokenizer(Protocol):
    """Pictures as residual token maps of growing size: what is known of a picture is a canvas that each map adds to.

    All canvases of one decode have one shape, [B, D, h, w] with h, w the last map's unless a tokenizer says otherwise.

    A place of a map holds one token, unless the tokenizer has an attribute `tokens_per_place`, T: then it holds T
    tokens (the bits of a binary code), which are independent of each other, as those of all places are, given the maps
    before. They follow each other, every one has a slot of its own, and for n * n below read n * n * T.
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
        """V, the number of codes: of values that a token takes."""
        ...

    @property
    def codebook(self) -> Tensor:
        """The codes [V, D] by token id; [V, D / T] with T tokens a place, whose codes are joined in their order."""
        ...

    def begin(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The canvas before the first map: zeros [B, D, h, w]."""
        ...

    def accumulate(self, canvas: Tensor, scale: int, tokens: Tensor) -> Tensor:
        """The canvas with a map added to it. The canvas given is left as it was.

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
        """What a model is fed to predict scale `scale`, 1 or later: the canvas at its size, [B, D, n, n]."""
        ...

    def decode_canvas(self, canvas: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in [-1, 1]; of an unfinished canvas, what the picture looks like so far."""
        ...


@dataclass
class ScaleState:
    """One batch in the course of next-scale decoding. A model subclasses it with its caches.

    Attributes:
        logits: [R, n * n, V], the prediction of the scale that the prefill ended at; [R, n * n * T, V] over a tokenizer
            with T tokens a place. R = B, or 2B when guided: the conditional rows, then the unconditional ones.
        guided: whether the unconditional rows are there.
    """

    logits: Tensor
    guided: bool

    @property
    def cache_bytes(self) -> int:
        """Bytes that the cache of keys and values holds for the whole decode. 0 for a model without one."""
        return 0


class ScaleModel(Protocol):
    """A model that predicts all tokens of a scale at once, given the maps of the scales before it.

    What it is told of earlier scales are input maps, `ScaleTokenizer.next_map`. They are the same for every model over
    one tokenizer, so one model can go on where another stopped.
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
    ) -> Any:
        """Run the condition, and the scales that are known already, in one forward; allocate the static cache.

        Args:
            condition: whatever the model is conditioned on, `batch_size` rows of it, or None.
            guided: also hold unconditional rows.
            maps: the input maps [B, D, n, n] of the scales 1 .. k. A scale sees itself and the scales before it.
            stop: the first scale that will not be asked for, above k; None: all will be. Nothing is cached for
                scales behind the last one but one, whose keys and values nothing reads.

        Returns:
            A `ScaleState` (of the model's own subclass); its logits predict scale k = len(maps).
        """
        ...

    def __call__(self, state: Any, map: Tensor, scale: int) -> Tensor:
        """Feed the input map of a scale, and predict its tokens. No host synchronisation.

        The cache is written by slot: a scale may be fed again, and then what followed it has to be.

        Args:
            state: what `prefill` returned.
            map: [B, D, n, n], the same for conditional and unconditional rows.
            scale: 1 or later; the scales before it have been fed.

        Returns:
            logits [R, n * n, V].
        """
        ...


# -- several codebooks -----------------------------------------------------------------------------------------------
#
# A neural audio codec gives K tokens a frame. A codebook pattern (`patterns.CodebookPattern`) lays them out in steps of
# at most one token of each codebook. The tokens of one step, a column, are predicted together, and are independent of
# each other given the columns before it.


class ColumnModel(Protocol):
    """A model that predicts the next column of K tokens.

    A slot is a step of the pattern, without the initial empty one, which is the prefill's business. What a step holds
    no token of is forced: samplers put `special_id` there, never look at its logits, and feed it like any other token.
    """

    @property
    def grid(self) -> TokenGrid:
        """height 1, width S (steps), codebooks K."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, of one codebook, without the special token."""
        ...

    @property
    def valid(self) -> Tensor:
        """Where a step holds a token: bool [S, K], on any device. (`CodebookPattern.valid` is its transpose.)"""
        ...

    @property
    def special_id(self) -> int:
        """What is fed, and returned, where a step holds no token. It may be V, or an id of the vocabulary."""
        ...

    def prefill(self, condition: Any, *, batch_size: int, guided: bool, window: int) -> Any:
        """As `NextTokenModel.prefill`, but that the state's logits are [R, K, V]; they predict step 0."""
        ...

    def __call__(self, state: Any, tokens: Tensor, steps: Tensor) -> Tensor:
        """Feed columns and score the steps that follow them.

        The cache is written by step, as that of a `NextTokenModel` is by slot: a rejected column is undone by feeding
        another one at its step, and each row advances at its own pace. No host synchronisation.

        Args:
            state: what `prefill` returned.
            tokens: long [B, W, K], the special token where a step holds none.
            steps: long [B, W], consecutive in a row. They may run past the grid, up to num_tokens + window - 1
                (scratch room in the cache; all entries there are special, and those logits are ignored).

        Returns:
            logits [R, W, K, V]; column `w` predicts step `steps[b, w] + 1`.
        """
        ...


# -- hidden tokens ---------------------------------------------------------------------------------------------------
#
# A masked model sees all slots at once, some of them hidden, and predicts what the hidden ones hold. Several codebooks
# are decoded one after the other: stage k predicts codebook k, while those behind it are hidden. An image model has one
# codebook, and one stage.


@dataclass
class MaskedState:
    """One batch in the course of masked decoding. A model subclasses it with what it keeps of the condition.

    Attributes:
        guided: whether the unconditional rows are there.
        device: where tokens are fed and logits come out.
    """

    guided: bool
    device: torch.device


class MaskedModel(Protocol):
    """A model that predicts hidden tokens where they stand."""

    @property
    def grid(self) -> TokenGrid:
        """L = num_tokens slots of K codebooks."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, of one codebook, without the mask: a model whose head scores the mask too leaves it out."""
        ...

    @property
    def mask_id(self) -> int:
        """What is fed where a token is hidden. No token has this id."""
        ...

    def prepare(self, condition: Any, *, batch_size: int, guided: bool) -> Any:
        """Run what depends on the condition only.

        Args:
            condition: whatever the model is conditioned on, `batch_size` rows of it, or None.
            guided: also hold unconditional rows.

        Returns:
            A `MaskedState` (of the model's own subclass).
        """
        ...

    def __call__(self, state: Any, tokens: Tensor, stage: int) -> Tensor:
        """Score codebook `stage` at every slot. No host synchronisation, and nothing is kept: tokens may be hidden
        again.

        Args:
            state: what `prepare` returned.
            tokens: long [B, L, K], the mask id where a token is hidden.

        Returns:
            logits [R, L, V]; R = B, or 2B when guided: the conditional rows, then the unconditional ones.
        """
        ...


class Rescorer(Protocol):
    """An autoregressive model that says how probable the tokens of a whole clip are, such as MusicGen."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_frames(self) -> int:
        """T, frames of its clips."""
        ...

    @property
    def special_id(self) -> int:
        """What is fed where there is no token."""
        ...

    def teacher_forced(self, codes: Tensor, condition: Any) -> Tensor:
        """Logits [B, K, T, V] of every code of whole clips, long [B, K, T], given those before it in the model's
        order."""
        ...


class ClipModel(ColumnModel, Protocol):
    """A `ColumnModel` that tells which frames its columns make up."""

    @property
    def num_frames(self) -> int:
        """T, frames of its clips."""
        ...

    def codes(self, tokens: Tensor, condition: Any) -> Tensor:
        """Codes [B, K, T] of decoded columns [B, S, K], those that the condition gives in front."""
        ...
