"""Conditions of the slots that come next, from models of both kinds: causal with a cache, and masked without.

A slot counts tokens in the order of decoding; its place is where it stands on the grid. A context is the tokens of all
earlier slots. A causal model scores several contexts in one call, because each token of a window sees those before it.
A masked model sees tokens both ways, so each context is a row of its own of one batched call.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from visual_spec.models.core.continuous import (
    AnyContinuousModel,
    CausalContinuousModel,
)
from visual_spec.models.core.orders import guidance_scales, hidden_after
from visual_spec.samplers.core.checks import check_guided, check_returned

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def is_causal(model: object) -> TypeIs[CausalContinuousModel]:
    """Whether a model feeds tokens in one order (`CausalContinuousModel`); else it is a `MaskedContinuousModel`."""
    return hasattr(model, "prefill")


def starts_unguided(model: AnyContinuousModel) -> bool:
    """Whether linear guidance is 1 at slot 0, where unconditional rows draw a slot of their own (`BitDance`)."""
    return getattr(model, "starts_unguided", False)


def begin(model: AnyContinuousModel, condition: object, *, batch_size: int, guided: bool, window: int) -> Any:
    """A model's state before the first token."""
    if is_causal(model):
        cache = model.prefill(condition, batch_size=batch_size, guided=guided, window=window)
    else:
        cache = model.prepare(condition, batch_size=batch_size, guided=guided)
    check_guided(cache, guided)
    if is_causal(model):
        checked(model, cache.conditions[:, None], cache, batch_size, 1)
    return cache


def checked(model: AnyContinuousModel, z: Tensor, cache: Any, batch_size: int, count: int) -> Tensor:
    """Return conditions z [R, count, dim], refused if they have another shape."""
    dim = getattr(getattr(model, "config", None), "dim", None)  # of a model of one's own any
    dim = getattr(model, "condition_dim", dim)
    return check_returned(z, batch_size, cache.guided, count, dim)


def first_conditions(model: AnyContinuousModel, cache: Any, places: Tensor, count: int) -> Tensor:
    """Conditions [R, count, dim] of the first slots, which know nothing; a causal model has them from its prefill."""
    if is_causal(model):
        return cache.conditions[:, None]
    tokens = torch.zeros(*places.shape, model.token_dim, dtype=model.dtype, device=places.device)
    lengths = torch.zeros(len(places), dtype=torch.long, device=places.device)
    return step_conditions(model, cache, tokens, places, lengths, count, 0)


def step_conditions(
    model: AnyContinuousModel,
    cache: Any,
    tokens: Tensor,
    places: Tensor,
    lengths: Tensor,
    count: int,
    room: int | None,
) -> Tensor:
    """Conditions [R, count, dim] of the next slots, which all know the slots before `lengths`, long [B].

    Args:
        tokens: [B, S, d], by slot; places: long [B, S].
        room: of a masked model, at least the number of known slots of any sample; None: not known.
    """
    if is_causal(model):
        assert count == 1, "a causal model draws one token a call"
        slots = lengths[:, None] - 1
        fed = tokens.take_along_dim(slots[..., None], 1).to(model.dtype)
        return checked(model, model(cache, fed, slots), cache, len(slots), 1)
    length, device = model.grid.num_tokens, places.device
    by_slot = torch.arange(length, device=device) < lengths[:, None]  # [B, L]
    known = torch.zeros_like(by_slot).scatter(1, places[:, :length], by_slot)
    z = model(cache, on_grid(tokens, places, length).to(model.dtype), known, room)  # [R, L, dim]
    checked(model, z, cache, len(places), length)
    slots = (lengths[:, None] + torch.arange(count, device=device)).clamp_max(length - 1)
    at = places.gather(1, slots).repeat(len(z) // len(places), 1)
    return z.take_along_dim(at[..., None], 1)


def window_conditions(
    model: AnyContinuousModel,
    cache: Any,
    tokens: Tensor,
    places: Tensor,
    lengths: Tensor,
    width: int,
    *,
    again: int = 0,
) -> Tensor:
    """Conditions [R, width, dim] of the slots from `lengths`, long [B], on; each knows all slots before its own.

    Slots past the grid give conditions that mean nothing.

    Args:
        tokens: [B, S, d], by slot: committed tokens, then drafts.
        again: how many more tokens to feed a causal model, which it has not seen, or seen differently, in its cache.
    """
    steps = torch.arange(width, device=places.device)
    if is_causal(model):
        slots = lengths[:, None] - 1 + torch.arange(-again, width, device=places.device)
        slots = slots.clamp_min(0)
        fed = tokens.take_along_dim(slots[..., None], 1).to(model.dtype)
        return checked(model, model(cache, fed, slots), cache, *slots.shape)[:, again:]
    length, batch_size = model.grid.num_tokens, len(places)
    slots = (lengths[:, None] + steps).clamp_max(length - 1)  # [B, width]
    by_slot = torch.arange(length, device=places.device) < slots[..., None]  # [B, width, L]
    at = places[:, None, :length].expand_as(by_slot)
    known = torch.zeros_like(by_slot).scatter(2, at, by_slot).flatten(0, 1)
    rows = torch.arange(batch_size, device=places.device).repeat_interleave(width)
    state = copy.copy(cache)
    state.select(rows)
    z = model(state, on_grid(tokens, places, length)[rows].to(model.dtype), known)  # [R width, L, dim]
    checked(model, z, cache, len(rows), length)
    wanted = places.gather(1, slots).flatten().repeat(len(z) // len(rows))
    z = z[torch.arange(len(z), device=z.device), wanted]
    return z.unflatten(0, (-1, width))


def on_grid(tokens: Tensor, places: Tensor, length: int) -> Tensor:
    """Tokens [B, L, ...] by place, of tokens [B, S, ...] by slot."""
    by_slot = torch.zeros_like(tokens[:, :length])
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    by_slot[rows, places[:, :length]] = tokens[:, :length]
    return by_slot


def scales_of_slots(
    model: AnyContinuousModel, scale: float, steps: int, *, linear: bool, scratch: int
) -> Tensor:
    """The scale of guidance at each slot, float32 [L + scratch] on the CPU.

    Linear guidance grows with the share of the slots that are filled after a call (Li et al. 2024, appendix B), of a
    model that `starts_unguided` before it. `steps`: calls of a masked model.
    """
    length = model.grid.num_tokens
    if is_causal(model):
        first = 0 if starts_unguided(model) else 1
        grown = [1.0 + (scale - 1.0) * (slot + first) / length for slot in range(length)]
        by_slot = grown if linear else [scale] * length
    else:
        edges = step_edges(length, steps)
        of_steps = guidance_scales(scale, length, steps, linear=linear)
        by_slot = [
            one for one, low, high in zip(of_steps, edges, edges[1:], strict=False) for _ in range(low, high)
        ]
    return torch.tensor([*by_slot, *by_slot[-1:] * scratch])


def step_edges(length: int, steps: int) -> list[int]:
    """The first slot of each call, and the number of slots: 0, ..., L."""
    return [0, *(length - left for left in hidden_after(length, steps)[:-1]), length]


# -- the shapes of the calls of a plain decode, which depend on numbers alone: one graph is recorded for each

# Recorded calls of a masked model have room for a multiple of so many known tokens, so that few graphs serve all calls.
_ROOM = 64


class CallShape(NamedTuple):
    """What a call's tensors depend on.

    Attributes:
        count: N, tokens that it draws for a sample.
        room: of a masked model, known tokens that it has room for.
        levels: T, of the chains.
    """

    count: int
    room: int
    levels: int


def call_shapes(
    length: int,
    calls: int,
    *,
    levels: tuple[int, int],
    causal: bool,
    recorded: bool,
) -> tuple[CallShape, ...]:
    """Return the shape of each of the `calls` of a decode of `length` slots, the first included.

    Args:
        levels: of the chains of the first call and of the last one; between them they fall evenly.
        causal: whether the model feeds tokens in one order.
        recorded: whether calls are recorded.
    """
    edges, unit = step_edges(length, calls), _ROOM if recorded else 1
    shapes = []
    for call, (known, end) in enumerate(zip(edges, edges[1:], strict=False)):
        room = 0 if causal else min(-(-known // unit) * unit, length)
        chain = round(levels[0] + (levels[1] - levels[0]) * call / max(1, calls - 1))
        shapes.append(CallShape(end - known, room, chain))
    return tuple(shapes)
