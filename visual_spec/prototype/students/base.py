"""Students that draw a whole picture from its noise in one call or two (Liu et al. 2024, arXiv 2412.17153).

A student of Distilled Decoding 1 was trained to map the noise of all slots to the tokens that its teacher's flow takes
that noise to. So one noise gives one picture. A second call draws the later slots anew, from the same noise, given the
tokens of the earlier ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.protocol import TokenGrid

_EPSILON = 1e-6  # of the head's LayerNorm


class DistilledState(NamedTuple):
    """What all calls of one decode read.

    Attributes:
        prefix: [B, T, dim], embeddings of the condition, which the picture follows.
        seen: bool [B, T], the positions of the prefix that others see; at least the last.
        table: what the model computed once for all calls, such as a rotary table.
    """

    prefix: Tensor
    seen: Tensor
    table: Tensor


class DistilledAnswer(NamedTuple):
    """What a call says of the slots from `known` on, in their order.

    Attributes:
        logits: [B, N, V], of slots that hold codes; at least float32.
        vectors: [B, M, D], the tokens of the slots after these.
    """

    logits: Tensor
    vectors: Tensor


class DistilledModel(Protocol):
    """A student. Slots below `first_continuous` take the code of the largest logit, the others any vector."""

    @property
    def grid(self) -> TokenGrid: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def token_dim(self) -> int:
        """D, numbers of a token, of a code and of the noise of a slot."""
        ...

    @property
    def first_continuous(self) -> int:
        """The first slot whose token is no code."""
        ...

    @property
    def restart(self) -> int:
        """The first slot that a second call draws anew, as trained."""
        ...

    @property
    def starts(self) -> tuple[int, ...]:
        """The first slot of every call of a teacher: all slots, or those that scales begin with."""
        ...

    def prefill(self, condition: Any, *, batch_size: int) -> DistilledState:
        """Embed the condition.

        Raises:
            TypeError, ValueError: the condition does not fit the model.
        """
        ...

    def __call__(self, state: DistilledState, vectors: Tensor, known: int) -> DistilledAnswer:
        """Draw the slots from `known` on. No host synchronisation.

        Args:
            state: from `prefill`.
            vectors: [B, L, D], the tokens of the first `known` slots, then noise.
            known: 0, or `restart`.

        Raises:
            ValueError: as in `check_call`.
        """
        ...


class ContinuousHead(nn.Module):
    """The head of tokens that are no codes: a LayerNorm that the class shifts and scales, and a projection."""

    def __init__(self, dim: int, token_dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, token_dim)
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)

    def forward(self, hidden: Tensor, classes: Tensor) -> Tensor:
        """Return tokens `[B, N, D]` of `hidden [B, N, dim]`, given class embeddings `[B, dim]`."""
        shift, scale = (self.scale_shift_table + classes[:, None]).unbind(1)  # [B, dim] each
        normed = F.layer_norm(hidden, hidden.shape[-1:], eps=_EPSILON)
        return self.linear(normed * (1 + scale[:, None]) + shift[:, None])


def check_call(model: DistilledModel, vectors: Tensor, known: int) -> None:
    """Refuse tokens of another picture, and a call that no student was trained for, by ValueError."""
    wanted = (model.grid.num_tokens, model.token_dim)
    if vectors.ndim != 3 or tuple(vectors.shape[1:]) != wanted:
        raise ValueError(
            f"tokens of shape {tuple(vectors.shape)} given; this model takes [B, {wanted[0]}, {wanted[1]}]."
        )
    if known not in (0, model.restart):
        raise ValueError(
            f"known={known} given; this student was trained to draw all slots (0), or those from slot {model.restart}."
        )
