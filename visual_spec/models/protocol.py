"""What a next-token sampler knows of a model: its grid, its vocabulary, how to score a window of tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor


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
        row advances at its own pace. Column `w` sees itself, the columns before it, and the slots before
        `slots[b, 0]`. No host synchronisation.

        Args:
            state: what `prefill` returned.
            tokens: long [B, W].
            slots: long [B, W], consecutive in a row. They may run past the grid, up to
                num_tokens + window - 1 (scratch room in the cache; those logits are ignored).

        Returns:
            logits [R, W, V]; column `w` predicts slot `slots[b, w] + 1`.
        """
        ...


class TreeModel(NextTokenModel, Protocol):
    """A next-token model that also scores several continuations of one text in one call.

    The columns of a tree call are nodes. Column 0 is the root: the newest committed token, at its slot. Every other
    column holds a draft, one slot behind its parent's; several columns may share a slot.
    """

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor, visible: Tensor | None = None) -> Tensor:
        """Without `visible`: as `NextTokenModel`. With it: score a tree.

        Args:
            tokens, slots: long [B, N], N <= the window of the prefill.
            visible: bool [B, N, N]; [b, n, m] is true where column m is n itself or one of its ancestors. A column
                also sees all slots before the root's, so these must have been fed, or kept.

        Returns:
            logits [R, N, V]; column n predicts slot `slots[b, n] + 1` behind the path to n. The cache by slot is
            left as it was: `keep` brings the accepted columns there.
        """
        ...

    def keep(self, state: Any, columns: Tensor, slots: Tensor) -> None:
        """Make columns of the last tree call what is cached at slots.

        Args:
            columns, slots: long [B, D]. Name the root and the accepted path; a row with a shorter path repeats a
                pair, or names any column for slots that it will feed again.
        """
        ...


class OrderModel(NextTokenModel, Protocol):
    """A next-token model that also feeds slots out of raster order, each column with its own view of the text."""

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor, *, seen: Tensor | None = None) -> Tensor:
        """Without `seen`: as `NextTokenModel`. With it: feed any slots, in any order.

        The cache is written by slot, and what a slot holds is what was fed there last. A slot that holds nothing yet,
        or something that a column should not know, is a slot that the column does not see.

        Args:
            tokens: long [B, W], W <= the window of the prefill.
            slots: long [B, W], the slots of a row all different. They may run past the grid, up to
                num_tokens + window - 1: scratch room for columns that are not needed, whose logits are ignored.
            seen: bool [B, W, num_tokens], the grid slots that a column attends to. A slot fed in the same call
                counts with its new token. Every column also sees the condition, and itself.

        Returns:
            logits [R, W, V]; column w predicts slot `slots[b, w] + 1` given what it sees.
        """
        ...
