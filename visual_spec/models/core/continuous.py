"""The interface between samplers and models of continuous tokens: their calls, their heads, and the chains of a token.

A token is a vector of d numbers. A trunk gives each slot a condition z; a head draws the slot's token from z by a chain
of normal laws (`LevelSchedule`), one head call a level. There are two kinds of models. A causal one
(`CausalContinuousModel`) feeds tokens in its own order into a cache. A masked one (`MaskedContinuousModel`) sees any
set of known tokens, and has no cache. A model of maps (`FlowScaleModel`) has no head: a network draws a map at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import Within, read_fields

Eta = Annotated[float | None, Within(0, 1, none="the chain that the head was published with")]


@dataclass(frozen=True)
class ChainSettings:
    """The chain by which a model draws a token, unless a sampler sets another. It is part of the model's law.

    Attributes:
        head_steps: levels of the chain, 1 to 1000.
        eta: None: the chain that the head was published with, MAR's ancestral one or Euler steps. A number: the chain
            of the same marginals whose steps have that share of the ancestral noise (Song et al. 2021, equation 16; of
            flow matching its counterpart). 0 is deterministic but for its start.
        final_noise: standard deviation of the noise that the last level adds; 0 as published. Rules that compare
            densities of chains need some: without it, two chains never end at the same point.

    Raises:
        ValueError: a value out of its range.
    """

    head_steps: Annotated[int, Within(1, 1000)] = 100
    eta: Eta = None
    final_noise: Annotated[float, Within(0)] = 0.0

    def __post_init__(self) -> None:
        read_fields(self)


class LevelSchedule(Protocol):
    """A chain of normal laws, steered by what a head returns.

    Level i takes a point to the next; a chain starts at level `num_steps - 1` and ends after level 0. All points may
    have leading axes, `[..., d]`.

    Attributes:
        num_steps: how many levels it has.
        times: [num_steps], what the head reads at each level.
        deterministic: whether no level adds noise.
        laws: float64 [num_steps, 5] on the CPU, the numbers `LAW_NUMBERS` of `visual_spec.kernels.head_step`, which are
            `kernel` as one linear form.
    """

    num_steps: int
    times: Tensor
    deterministic: bool
    laws: Tensor

    def predict(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """The token [..., d] that a head's output [..., outputs] at points `x [..., d]` foretells, and what follows
        the prediction in the output, [..., rest].

        Args:
            index: the level: one for all points, or long with one axis less than `x`, which broadcasts.
        """
        ...

    def toward(self, x: Tensor, index: int | Tensor, token: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each [..., d], of the next point, where `predict` gave this token and rest."""
        ...

    def kernel(self, x: Tensor, index: int | Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """The same, from the head's output."""
        ...


class DenoisingHead(Protocol):
    """What draws a token from its condition."""

    def modulations(self, z: Tensor, times: Tensor) -> Tensor:
        """All that `denoise` needs beside the point: [T, N, M], for conditions `z [N, dim]` at times [T]."""
        ...

    def denoise(self, x: Tensor, modulations: Tensor) -> Tensor:
        """The output [..., N, outputs] at points `x [..., N, d]`, with modulations that broadcast to [..., N, M]."""
        ...


class ContinuousModel(Protocol):
    """What both kinds of models have.

    Attributes:
        token_dim: d.
        dtype: of the tokens that it is fed.
        chain: how it draws a token by default.
    """

    token_dim: int

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def grid(self) -> TokenGrid: ...

    @property
    def chain(self) -> ChainSettings: ...

    @property
    def head(self) -> DenoisingHead: ...

    def schedule(self, num_steps: int, eta: float | None = None) -> LevelSchedule:
        """The chain that the head steers, of so many levels, where the model is; see `ChainSettings`."""
        ...


class CausalContinuousModel(ContinuousModel, Protocol):
    """Feeds tokens in one fixed order. `places` long [L + 1]: where each slot stands on the grid, and one more.

    The cache is written by slot, so a rejected token is simply written again. A model that draws patches of tokens has
    one slot a patch, `patch`, its side, and `condition_dim`. With `starts_unguided` linear guidance begins at 1, and
    what the unconditional rows draw there is set as `first` [B, d] of the state, to be fed to them at slot 0.
    """

    @property
    def places(self) -> Tensor: ...

    def prefill(self, condition: Any, *, batch_size: int, guided: bool, window: int) -> Any:
        """Run the condition, and allocate the cache.

        Args:
            condition: whatever the model is conditioned on, such as labels long [B], or None.
            guided: whether to hold unconditional rows as well.
            window: the largest number of slots that one call will score.

        Returns:
            A state whose `conditions [R, dim]` are of slot 0. R = B, or 2B when guided: the unconditional rows last.

        Raises:
            TypeError, ValueError: the condition does not fit the model, or the cache of the batch does not fit the GPU.
        """
        ...

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor) -> Tensor:
        """Feed tokens [B, W, d] at slots [B, W]; conditions [R, W, dim], column w of slot `slots[b, w] + 1`."""
        ...


class MaskedContinuousModel(ContinuousModel, Protocol):
    """Sees the tokens that are known, whichever they are."""

    def prepare(self, condition: Any, *, batch_size: int, guided: bool) -> Any:
        """A state that can `select` samples, and holds one that is named twice twice; see `HidingModel.prepare`."""
        ...

    def __call__(self, state: Any, tokens: Tensor, known: Tensor, room: int | None = None) -> Tensor:
        """Conditions [R, L, dim] of every slot, from tokens [B, L, d] of which bool [B, L] are known.

        Args:
            room: the most known tokens of a row, where the caller knows it.
        """
        ...


AnyContinuousModel = CausalContinuousModel | MaskedContinuousModel


class FlowNetwork(Protocol):
    """What draws a whole map from the conditions of its places, by flow matching."""

    def inputs(self, z: Tensor, side: int) -> Any:
        """What all levels of a map need of conditions `z [R, n * n, dim]`; `first(rows)` of it keeps the first rows."""
        ...

    def __call__(self, x: Tensor, times: Tensor, inputs: Any) -> Tensor:
        """Velocities, noise minus token, of points `x [R, n * n, d]` at shares of noise `times [R or 1]`."""
        ...


class FlowScaleModel(Protocol):
    """Predicts a picture's latents map after map, each the whole picture at its size; a map is drawn at once.

    Attributes:
        scales: places per side of each map, coarse to fine; the last is the grid's.
        offsets: the first slot of each map, then the number of slots.
        token_dim, condition_dim: numbers of a token, and of the condition of a place.
    """

    scales: tuple[int, ...]
    offsets: tuple[int, ...]
    token_dim: int
    condition_dim: int

    @property
    def grid(self) -> TokenGrid: ...

    @property
    def flownet(self) -> FlowNetwork: ...

    def prefill(self, condition: Any, *, batch_size: int, guided: bool) -> Any:
        """A state whose `conditions [R, n * n, dim]` are of the first map; see `CausalContinuousModel.prefill`."""
        ...

    def __call__(self, state: Any, map: Tensor, scale: int) -> Tensor:
        """Feed the map [B, d, m, m] before number `scale`; conditions [R, n * n, dim] of that one."""
        ...

    def enlarged(self, map: Tensor) -> Tensor:
        """A map [B, d, n, n] at the size of the grid."""
        ...


def guided(output: Tensor, scale: float | Tensor, token_dim: int) -> Tensor:
    """Classifier-free guidance of a head's output `[..., 2 N, outputs]`, conditional rows first: `[..., N, outputs]`.

    The prediction is u + scale (c - u); what follows it (the share of variance) is the conditional row's.

    Args:
        scale: one for all, or [N, 1].
    """
    conditional, unconditional = output.chunk(2, -2)
    prediction, rest = conditional[..., :token_dim], conditional[..., token_dim:]
    other = unconditional[..., :token_dim]
    return torch.cat([other + scale * (prediction - other), rest], -1)
