"""The states of samplers between two calls: their rows, what is scratch in them, and what tells them apart.

Scratch is scrubbed: wherever no token stands that was committed and fed, an absurd one is put: reading it shows.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.exactness.regions import hash_rows, quantised
from visual_spec.prototype.local_speculation.sampler import LocalSpeculationState
from visual_spec.prototype.self_speculative.sampler import SelfSpeculativeState
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.orders.along_order import AlongOrderState
from visual_spec.samplers.orders.ordered import OrderedState
from visual_spec.samplers.orders.rows import RowState
from visual_spec.samplers.raster.jacobi import widest
from visual_spec.samplers.scales.scales import ScaleDecodeState


def over_rows(
    parts: Sequence[Any], change: Callable[[list[Tensor]], Tensor], known: dict[int, Any] | None = None
) -> Any:
    """The same object with `change` of all parts' tensors, which have the samples first, in the place of each.

    Args:
        known: what became of objects that the first part holds; one that is held twice stays one.
    """
    first: Any = parts[0]
    known = {} if known is None else known
    if isinstance(first, Tensor):
        return change(list(parts)) if first.dim() else first
    if isinstance(first, list | tuple):
        return type(first)([over_rows(each, change, known) for each in zip(*parts, strict=True)])
    if not is_dataclass(first) or id(first) in known:
        return known.get(id(first), first)
    found = known[id(first)] = copy.copy(first)
    rows = -1
    if getattr(first, "guided", False):
        # A masked model's state has no logits; what it holds of the condition has a line for every row.
        held = [value for value in vars(first).values() if isinstance(value, Tensor)]
        rows = len(getattr(first, "logits", held[0]))

    def inside(tensors: list[Tensor]) -> Tensor:
        if len(tensors[0]) != rows:
            return change(tensors)
        # The rows of the samples, then their unconditional ones.
        halves = zip(*(tensor.chunk(2) for tensor in tensors), strict=True)
        return torch.cat([change(list(half)) for half in halves])

    for field in fields(first):
        value = over_rows([getattr(part, field.name) for part in parts], inside, known)
        object.__setattr__(found, field.name, value)
    return found


def select(state: Any, index: Tensor) -> Any:
    """Some rows of a state, copied."""
    return over_rows([state], lambda tensors: tensors[0][index])


def join(states: Sequence[Any]) -> Any:
    """The rows of several states."""
    return over_rows(states, torch.cat)


def _laws_key(log_probs: Tensor) -> Tensor:
    return quantised(log_probs.exp()).flatten(1)


def _whole_key(value: Any) -> Iterator[Tensor]:
    """All that a part of a state holds, bit by bit."""
    if isinstance(value, Tensor) and value.dim():
        exact = value.double().contiguous().view(torch.long) if value.is_floating_point() else value.long()
        yield exact.reshape(len(value), -1)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _whole_key(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _whole_key(getattr(value, field.name))


# Read by no later call of the same width.
_BOOKKEEPING = {"round", "target_calls", "commit_call", "meter", "width", "window"}
_CHAIN = {"cache", "drafter_cache", "tokens", "lengths", "label", "pending", "refused_law", "fed"}
_OF_DRAFTS = {"inputs", "steady"}  # by slot: what a second source looks at


def _scrub(values: Tensor, out: Tensor, absurd: int) -> Tensor:
    """long [N, S] or [N, S, K] with the absurd token where `out`, bool [N, S]."""
    return values.masked_fill(out if values.dim() == 2 else out[..., None], absurd)


def _before(stop: Tensor, size: int) -> Tensor:
    return torch.arange(size) < stop[:, None]


def _chain_key(sampler: Any, run: Run, state: Any, regions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Scrub states of chains (of tokens, of columns): the regions that still count, and what tells states apart.

    Behind the text such a state holds drafts, if it has labels, and the noise they were drawn with; else nothing: which
    text was committed says nothing about the noise of the slots after it. Of states with fields that are not known
    here, all noise is kept, and all that the fields hold tells states apart.
    """
    others = [field.name for field in fields(state) if field.name not in _CHAIN | _BOOKKEEPING | _OF_DRAFTS]
    books, length = run.view.codebooks, run.num_tokens
    held = widest(sampler.config.window) - 1 if hasattr(state, "label") or hasattr(state, "window") else 0
    horizon, absurd = (state.lengths + held).clamp(max=length), run.model.vocab_size - 1
    state.tokens = _scrub(state.tokens, ~_before(horizon, state.tokens.shape[1]), absurd)
    state.commit_call = torch.zeros_like(state.commit_call)
    drafter_fed = getattr(state, "fed", None)
    fed = {"cache": state.lengths - 1, "drafter_cache": drafter_fed}
    for cache, until in ((getattr(state, name, None), until) for name, until in fed.items()):
        if cache is not None:
            for part in (
                cache,
                getattr(cache, "inner", cache),
            ):  # a law that reads the text has notes of its own
                if hasattr(part, "tokens"):
                    part.tokens = _scrub(part.tokens, ~_before(until, part.tokens.shape[1]), absurd)
    noisy = torch.full_like(horizon, length) if others else horizon
    count = _before(noisy, length) & ~_before(state.lengths, length)
    count = count.repeat_interleave(books, 1)
    if books > 1:
        count &= run.view.valid[:length].flatten()  # the noise of a forced entry is of no consequence
    regions = regions.masked_fill(~count, 0)
    parts = [state.lengths, state.tokens, state.cache.tokens, regions]
    if getattr(state, "label", None) is not None and held:
        slots = state.next_slots(held)
        drafts = state.tokens[torch.arange(len(slots))[:, None], slots].flatten(1)
        outside = (slots >= length).repeat_interleave(books, 1)
        parts.append(_laws_key(state.label.dense(drafts).masked_fill(outside[..., None], -torch.inf)))
    if hasattr(state, "pending"):
        state.refused_law = state.refused_law.masked_fill(~state.pending[:, None, None], -torch.inf)
        parts += [state.pending, _laws_key(state.refused_law)]
    if drafter_fed is not None:
        parts += [drafter_fed, state.drafter_cache.tokens]
    for name in sorted(_OF_DRAFTS):
        if getattr(state, name, None) is not None:
            known = getattr(state, name)
            out = ~_before(horizon, known.shape[1]) | _before(state.lengths - 1, known.shape[1])
            setattr(state, name, known.masked_fill(out, 0))
            parts.append(getattr(state, name))
    for name in others:
        parts += _whole_key(getattr(state, name))
    return regions, parts


def _along_key(sampler: Any, run: Run, state: Any, regions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`_chain_key` along an order, for a cache by slot. Drafts count until the call that verifies them."""
    length, absurd = run.num_tokens, run.model.vocab_size - 1
    # The last group of a plain decode is fed by the next call, and so is the newest token of a speculative one.
    groups = hasattr(state, "bounds")
    fed = state.bounds[:, state.round] if groups else state.lengths - 1
    inner = state.cache.inner
    out = F.pad(state.cache.rank >= fed[:, None], (0, inner.tokens.shape[1] - length), value=True)
    inner.tokens = _scrub(inner.tokens, out, absurd)
    state.tokens = _scrub(state.tokens, ~_before(state.lengths, state.tokens.shape[1]), absurd)
    state.commit_call = torch.zeros_like(state.commit_call)
    regions = regions.masked_fill(_before(state.lengths, length), 0)
    parts = [state.lengths, state.tokens, inner.tokens, regions]
    if not groups:
        pending = state.round % 2 == 0
        gone = (state.next_slots(state.drafted.shape[1]) >= length) | (not pending)
        state.drafted = state.drafted.masked_fill(gone, absurd)
        state.laws = state.laws.masked_fill(gone[..., None], 0)
        parts += [torch.full_like(state.lengths, pending), state.drafted, _laws_key(state.laws)]
    return regions, parts


def _row_key(sampler: Any, run: Run, state: Any, regions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`_chain_key` for states of several open rows."""
    length, order = run.num_tokens, sampler.order(run.model.grid)
    slot = torch.arange(length)
    committed = slot % order.width < state.lengths[:, slot // order.width]
    out = F.pad(~committed, (0, state.cache.tokens.shape[1] - length), value=True)
    state.cache.tokens = _scrub(state.cache.tokens, out, run.model.vocab_size - 1)
    state.tokens[:, length:] = run.model.vocab_size - 1
    regions = regions.masked_fill(committed, 0)  # the noise of a drawn slot is spent
    parts = [state.lengths, state.row, state.tokens, state.cache.tokens, regions]
    if state.used is not None:
        parts.append(_laws_key(state.used.laws[:, :length]))
    if getattr(state, "label", None) is not None:
        plan = order.plan(state.lengths, state.row)
        draft = sampler._drafts(run, state, plan, order)
        parts += [draft.tokens, _laws_key(draft.label.dense(draft.tokens))]
    if hasattr(state, "held"):
        parts.append(state.held)
        if state.held_law is not None:
            parts.append(_laws_key(state.held_law.masked_fill(~state.held[..., None], -torch.inf)))
    return regions, parts


def _ordered_key(sampler: Any, run: Run, state: Any, regions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`_chain_key` for orders: of the tokens only those that are drawn count, and of the cache those that are fed."""
    length, absurd = run.num_tokens, run.model.vocab_size - 1
    drawn = sampler.committed(run, state)
    # A place that was fed another slot's token (a stand-in) may not be read again before its own token comes.
    steps = sampler.order_for(run.model).steps[: state.round + 1]
    fed = torch.zeros(state.cache.tokens.shape[1], dtype=torch.bool)
    for step in steps:
        fed[step.slots] = step.slots == step.sources
    state.tokens = state.tokens.where(F.pad(drawn, (0, state.tokens.shape[1] - length), value=True), absurd)
    state.cache.tokens = _scrub(state.cache.tokens, ~fed.expand_as(state.cache.tokens), absurd)
    state.commit_call = torch.zeros_like(state.commit_call)
    regions = torch.zeros_like(regions)  # the noise of a slot is drawn once
    return regions, [state.lengths, state.tokens, state.cache.tokens]


def _picture_key(sampler: Any, run: Run, state: Any, regions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`_chain_key` for whole pictures that are guessed and corrected. Every call feeds all tokens again."""
    state.cache.tokens = torch.full_like(state.cache.tokens, run.model.vocab_size - 1)
    return torch.zeros_like(regions), [state.tokens, state.open, _laws_key(state.label)]


def _group_key(sampler: Any, run: Run, state: Any, regions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`_chain_key` for groups: beside the text, where the group began, and its drafts if the next pass tests them."""
    length, start = run.num_tokens, torch.zeros_like(state.lengths)
    horizon = state.lengths
    if state.group is not None:
        start = torch.where(state.lengths < state.group.end, state.group.start, state.lengths)
        horizon = torch.maximum(horizon, state.group.end) if run.rule.identical else horizon
    state.tokens = _scrub(state.tokens, ~_before(horizon, state.tokens.shape[1]), run.model.vocab_size - 1)
    state.commit_call = torch.zeros_like(state.commit_call)
    regions = regions.masked_fill(_before(state.lengths, length), 0)
    return regions, [state.lengths, state.tokens, start, regions]


def _scale_key(sampler: Any, run: Run, state: Any, regions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`_chain_key` for pyramids: everything is a function of the tokens."""
    return torch.zeros_like(regions), [state.tokens]


def _other_key(sampler: Any, run: Run, state: Any, regions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """States of any other kind are the same where all that they hold is."""
    return regions, [regions, *_whole_key(state)]


_KEYS = {
    OrderedState: _ordered_key,
    RowState: _row_key,
    LocalSpeculationState: _picture_key,
    ScaleDecodeState: _scale_key,
    SelfSpeculativeState: _group_key,
    State: _chain_key,
}


def settled(sampler: Any, run: Run, state: Any, regions: Tensor) -> tuple[Tensor, Tensor]:
    """Scrub states: the regions that still count, and one number [N] a state, equal for equal states."""
    kind = next((_KEYS[kind] for kind in type(state).__mro__ if kind in _KEYS), _other_key)
    if isinstance(getattr(state, "cache", None), AlongOrderState):
        kind = _along_key
    regions, parts = kind(sampler, run, state, regions)
    return regions, hash_rows(torch.cat([part.long().reshape(len(part), -1) for part in parts], 1))
