"""The interface between samplers and masked models, which predict the hidden tokens of a grid.

A masked model sees all slots at once, some of them hidden. Several codebooks are decoded one after the other: stage k
predicts codebook k while later ones are hidden. An image model has one codebook and one stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid


@dataclass
class MaskedState:
    """One batch during masked decoding. A model subclasses it with what it keeps of the condition.

    Attributes:
        guided: whether there are unconditional rows.
        device: device of tokens and logits.
        fixed: whether what calls keep stays at its address from call to call, if all keep as much.
    """

    guided: bool
    device: torch.device
    fixed: ClassVar[bool] = False

    def rows(self, samples: Tensor, count: int) -> Tensor:
        """Return the rows, out of `count`, of some samples, long [N]; when guided, both rows of each."""
        return torch.cat([samples, samples + count // 2]) if self.guided else samples

    def select(self, samples: Tensor) -> None:
        """Keep only some samples, long [N], in this order. One that is named twice is held twice.

        A model needs this only for samplers that score several rows of a sample in one call.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot select samples.")


class HidingModel(Protocol):
    """A model that is fed hidden tokens."""

    @property
    def grid(self) -> TokenGrid:
        """L = num_tokens slots of K codebooks; for a `FrameModel` frames of N = height * width slots, one codebook."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, of one codebook, without the mask. A model whose head also scores the mask drops that score."""
        ...

    @property
    def mask_id(self) -> int:
        """The id fed for a hidden token. No token has this id."""
        ...

    def prepare(self, condition: Any, *, batch_size: int, guided: bool) -> MaskedState:
        """Compute everything that depends on the condition only.

        Args:
            condition: whatever the model is conditioned on, `batch_size` rows of it, or None.
            guided: whether to hold unconditional rows as well.

        Returns:
            A `MaskedState` (of the model's own subclass). No frame is written yet.

        Raises:
            TypeError, ValueError: the condition does not fit the model or the batch, or the model has no guidance.
        """
        ...


class MaskedModel(HidingModel, Protocol):
    """A model that predicts hidden tokens at their own slots."""

    def __call__(self, state: Any, tokens: Tensor, stage: int) -> Tensor:
        """Score codebook `stage` at every slot. No host synchronisation. Keeps nothing, so tokens may be hidden again.

        Args:
            state: the state from `prepare`.
            tokens: long [B, L, K], the mask id for hidden tokens.

        Returns:
            logits [R, L, V]; R = B, or 2B when guided: the conditional rows, then the unconditional ones.
        """
        ...


class FrameModel(HidingModel, Protocol):
    """A model that predicts the hidden tokens of one frame after the other, given the frames before.

    Or of one group of frames after the other (`frame_groups`): "frame" then means such a group, frame after frame.
    """

    @property
    def frame_groups(self) -> list[list[int]]:
        """The frames that are drawn together, in the order in which they are drawn: each frame once."""
        ...

    def __call__(self, state: Any, tokens: Tensor) -> Tensor:
        """Score every slot of the next frame. No host synchronisation. Keeps nothing.

        Args:
            tokens: long [B, N], of this frame, the mask id for hidden ones.

        Returns:
            logits [R, N, V], the conditional rows first.
        """
        ...

    def write(self, state: Any, tokens: Tensor) -> None:
        """Make these tokens what later frames see of the next frame, and go on to the frame after it.

        Args:
            tokens: long [B, N], or [R, N] where conditional and unconditional rows see other ones; the mask id where
                later frames see no token.
        """
        ...


class TimedMaskedModel(MaskedModel, Protocol):
    """A masked model that reads how far the decode is."""

    def set_time(self, state: Any, past: float) -> None:
        """Hold the share of a codebook's steps that are over, from 0 at its first step, for the calls that follow."""
        ...


class ReusingMaskedModel(MaskedModel, Protocol):
    """A masked model whose calls can go on from what an earlier one computed."""

    def __call__(
        self,
        state: Any,
        tokens: Tensor,
        stage: int,
        *,
        keep: int | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """As `MaskedModel`, with reuse.

        Args:
            keep: a number n: hold the keys and values of all slots in the state, and the features before the head, for
                later calls of at most n places.
            places: long [B, n], after a call that kept: compute only these slots. They attend to each other, and to all
                others as the calls before left them. Their own keys and values replace those that are held. The slots
                of a row are all different; places past the grid, L and up, mean none, and their logits are ignored.

        Returns:
            logits [R, L, V], or [R, n, V] of the places.
        """
        ...

    def scores(self, state: Any, features: Tensor, stage: int) -> Tensor:
        """Return logits [R, L, V] of features [R, L, C], such as a call that kept left in `state.features`."""
        ...


class Rescorer(Protocol):
    """An autoregressive model that scores the tokens of a whole clip, such as MusicGen."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_frames(self) -> int:
        """T, frames of a clip."""
        ...

    @property
    def special_id(self) -> int:
        """The id fed where there is no token."""
        ...

    def teacher_forced(self, codes: Tensor, condition: Any) -> Tensor:
        """Logits [B, K, T, V] of every code of whole clips, long [B, K, T], given the earlier codes in the model's
        order."""
        ...
