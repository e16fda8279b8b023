"""Next-token models: plain decoding, Jacobi decoding, drafts in chains and trees, columns, any order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.orders import AnyOrderModel
from visual_spec.models.core.protocol import ColumnModel, NextTokenModel
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import (
    ACCEPT,
    CHOICE,
    DRAFT,
    RESIDUAL,
    TOKEN,
    CounterNoise,
)

# The probability, [1, 1], of keeping a draft, from the laws [1, 1, V] of target and draft, and the draft [1, 1].
Keep = Callable[[Tensor, Tensor, Tensor], Tensor]


def slots_from(first: int, stop: int) -> Tensor:
    """The slots from `first` to `stop - 1`, long [1, N]."""
    return torch.arange(first, stop)[None]


def autoregressive(model: NextTokenModel, condition: object, law: TokenLaw, noise: CounterNoise) -> Tensor:
    """Plain decoding: one call a token, each drawn with its slot's own noise. Returns tokens [1, L]."""
    state = model.prefill(condition, batch_size=1, guided=law.guided, window=1)
    logits, tokens = state.logits[:, None], torch.zeros(1, 0, dtype=torch.long)
    for slot in range(model.grid.num_tokens):
        at = slots_from(slot, slot + 1)
        if slot:
            logits = model(state, tokens[:, -1:], at - 1)
        drawn = noise.categorical(law(logits, law.guided, at), at, TOKEN)
        tokens = torch.cat([tokens, drawn], 1)
    return tokens


def identical_jacobi(
    model: NextTokenModel, condition: object, law: TokenLaw, noise: CounterNoise, window: int = 32
) -> tuple[Tensor, int]:
    """Jacobi decoding with the noise of plain decoding: the tokens of `autoregressive`, in fewer calls.

    One call draws every slot of a window with the slot's own noise, given drafts of the slots before. The first draw is
    a token of plain decoding. So is every next one, as long as the drafts before it were the tokens that were drawn.
    The other draws are the drafts of the next call: a slot's noise stays, so they rarely change.

    The noise that two calls share is the Gumbel coupling of SCD / MC-SJD (So et al., ICML 2026); here it also decides
    which drafts stand. Returns tokens [1, L] and the number of calls.
    """
    state = model.prefill(condition, batch_size=1, guided=law.guided, window=window)
    zero, length = slots_from(0, 1), model.grid.num_tokens
    tokens, calls = noise.categorical(law(state.logits[:, None], law.guided, zero), zero, TOKEN), 1
    drafts = tokens[:, :0]
    while (done := tokens.shape[1]) < length:
        slots = slots_from(done, min(done + window, length))
        newest = torch.cat([tokens, drafts], 1)[:, -1:]  # repeated where no call has drawn a draft yet
        fed = torch.cat([tokens[:, -1:], drafts, newest.expand(1, window)], 1)[:, : slots.shape[1]]
        drawn = noise.categorical(law(model(state, fed, slots - 1), law.guided, slots), slots, TOKEN)
        kept = int((drawn[:, :-1] == fed[:, 1:]).long().cumprod(1).sum())
        tokens, drafts = torch.cat([tokens, drawn[:, : kept + 1]], 1), drawn[:, kept + 1 :]
        calls += 1
    return tokens, calls


def exact_keep(target: Tensor, draft: Tensor, token: Tensor) -> Tensor:
    """min(1, target / draft) at a token: the test of speculative sampling (Leviathan et al. 2023, algorithm 1)."""
    at = token[..., None]
    return (target.gather(-1, at) - draft.gather(-1, at)).exp().clamp(max=1)[..., 0]


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """(target - draft)+, normalised: what replaces a refused draft. The target itself where nothing is left."""
    left = (target.exp() - draft.exp()).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, (left / mass).log(), target)


def speculative_jacobi(
    model: NextTokenModel,
    condition: object,
    law: TokenLaw,
    noise: CounterNoise,
    window: int = 16,
    keep: Keep = exact_keep,
) -> tuple[Tensor, int]:
    """Speculative Jacobi decoding: Teng et al., "Accelerating auto-regressive text-to-image generation with
    training-free speculative Jacobi decoding", ICLR 2025.

    A slot that a call has scored is drafted from its law there; a slot that enters the window, uniformly. A call scores
    the window; drafts are tested in order, and the first refused one is replaced from the residual. What comes after
    is drafted again. Lossless with `exact_keep`. Returns tokens [1, L] and the number of calls.
    """
    state = model.prefill(condition, batch_size=1, guided=law.guided, window=window)
    zero, length, size = slots_from(0, 1), model.grid.num_tokens, model.vocab_size
    first = law(state.logits[:, None], law.guided, zero)
    tokens, calls = noise.categorical(first, zero, TOKEN), 1
    laws, uniform = first[:, :0], torch.full_like(first, -math.log(size))
    while (done := tokens.shape[1]) < length:
        slots = slots_from(done, min(done + window, length))
        drafted = slots[:, : window - 1]
        scored, entering = drafted[:, : laws.shape[1]], drafted[:, laws.shape[1] :]
        again = noise.categorical(laws[:, : scored.shape[1]], scored, DRAFT, calls - 1)
        fresh = (noise.uniform(entering, DRAFT, calls - 1, torch.float64) * size).long()
        drafts = torch.cat([again, fresh], 1)
        labels = torch.cat([laws[:, : scored.shape[1]], uniform.expand(1, entering.shape[1], -1)], 1)
        fed = torch.cat([tokens[:, -1:], drafts], 1)[:, : slots.shape[1]]
        target = law(model(state, fed, slots - 1), law.guided, slots)
        new = accepted(target, drafts, labels, slots, noise, calls, keep)
        tokens, laws, calls = torch.cat([tokens, new], 1), target[:, new.shape[1] :], calls + 1
    return tokens, calls


def accepted(
    target: Tensor, drafts: Tensor, labels: Tensor, slots: Tensor, noise: CounterNoise, call: int, keep: Keep
) -> Tensor:
    """Test a chain of drafts: the kept ones, then what replaces the first refused one, or one token more.

    Args:
        target: [1, N, V], of `slots`.
        drafts, labels: of the first of these slots, or of all.
        call: the number of the call, so that each call tests with noise of its own.
    """
    kept = drafts[:, :0]
    for place in range(slots.shape[1]):
        slot, left = slots[:, place : place + 1], target[:, place : place + 1]
        if place < drafts.shape[1]:
            draft, label = drafts[:, place : place + 1], labels[:, place : place + 1]
            if noise.bernoulli(keep(left, label, draft), slot, ACCEPT, call):
                kept = torch.cat([kept, draft], 1)
                continue
            left = residual(left, label)
        return torch.cat([kept, noise.categorical(left, slot, RESIDUAL, call)], 1)
    return kept


def grouped_speculative(
    model: NextTokenModel,
    condition: object,
    law: TokenLaw,
    noise: CounterNoise,
    window: int = 16,
    group_size: int = 14,
    gap: float = 0.15,
) -> tuple[Tensor, int]:
    """Grouped speculative decoding (GSD): So et al., ICCV 2025. Lossy.

    Speculative Jacobi decoding that tests a draft together with tokens of similar probability: it is kept with
    probability min(1, P(C) / Q(C)), where P and Q are the target and draft mass of its group C.
    """

    def keep(target: Tensor, draft: Tensor, token: Tensor) -> Tensor:
        p, q, x = target[0, 0].exp(), draft[0, 0].exp(), int(token)
        order = p.argsort(stable=True).tolist()  # the least probable first, of equal ones that of smaller id
        place = order.index(x)
        group = order[max(0, place - group_size // 2) : place + (group_size - 1) // 2 + 1]
        group = [y for y in group if p[y] > 0 and (y == x or abs(p[y] - p[x]) < gap)]
        kept = (p[group].sum() / q[group].sum()).clamp(max=1) if p[x] > 0 else p[x]
        return kept.view(1, 1)

    return speculative_jacobi(model, condition, law, noise, window, keep)


def speculative_chain(
    model: NextTokenModel,
    drafter: NextTokenModel,
    condition: object,
    law: TokenLaw,
    noise: CounterNoise,
    num_drafts: int = 5,
) -> tuple[Tensor, int]:
    """Speculative sampling: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding",
    ICML 2023, algorithm 1. Lossless.

    The drafter draws a chain of tokens, one call each; one call of the model scores them all. Returns tokens [1, L] and
    the number of the model's calls.
    """
    length, zero = model.grid.num_tokens, slots_from(0, 1)
    state = model.prefill(condition, batch_size=1, guided=law.guided, window=num_drafts + 1)
    small = drafter.prefill(condition, batch_size=1, guided=law.guided, window=length)
    tokens, calls = noise.categorical(law(state.logits[:, None], law.guided, zero), zero, TOKEN), 1
    while (done := tokens.shape[1]) < length:
        text, laws = tokens, []
        for slot in range(done, min(done + num_drafts, length)):
            # The whole text is fed again: what an earlier, refused draft wrote into the cache is written over.
            logits = drafter(small, text, slots_from(0, slot))[:, -1:]
            at = slots_from(slot, slot + 1)
            laws.append(law(logits, law.guided, at))
            text = torch.cat([text, noise.categorical(laws[-1], at, DRAFT, calls)], 1)
        slots = slots_from(done, min(done + num_drafts + 1, length))
        target = law(model(state, text[:, done - 1 :][:, : slots.shape[1]], slots - 1), law.guided, slots)
        new = accepted(target, text[:, done:], torch.cat(laws, 1), slots, noise, calls, exact_keep)
        tokens, calls = torch.cat([tokens, new], 1), calls + 1
    return tokens, calls


Merge = Callable[[Tensor, int], Tensor]


def speculative_tree(
    model: NextTokenModel,
    drafter: NextTokenModel,
    condition: object,
    law: TokenLaw,
    noise: CounterNoise,
    depth: int = 5,
    width: int = 8,
    num_nodes: int | None = None,
    merge: Merge = lambda target, token: target,
) -> tuple[Tensor, int]:
    """A tree of drafts: EAGLE-2 (Li et al., EMNLP 2024), tested by recursive rejection. Lossless unless `merge` is not.

    One call of the model scores all paths of the tree; here each is scored when the walk reaches it. The walk goes from
    a node to the child that is kept, and commits one token more. Returns tokens [1, L] and the number of such calls.

    Args:
        merge: the law that a draft is tested by, from the target law [1, 1, V] and the draft.
    """
    length, zero = model.grid.num_tokens, slots_from(0, 1)
    state = model.prefill(condition, batch_size=1, guided=law.guided, window=length)
    small = drafter.prefill(condition, batch_size=1, guided=law.guided, window=length)
    tokens, calls = noise.categorical(law(state.logits[:, None], law.guided, zero), zero, TOKEN), 1

    def after(network: NextTokenModel, cache: Any, path: list[int]) -> Tensor:
        """The law [1, 1, V] after the tokens so far and a path."""
        text = torch.cat([tokens, torch.tensor([path], dtype=torch.long)], 1)
        slots = slots_from(0, text.shape[1])
        return law(network(cache, text, slots)[:, -1:], law.guided, slots[:, -1:] + 1)

    while (done := tokens.shape[1]) < length:
        paths = best_paths(
            lambda path: after(drafter, small, path), min(depth, length - done), width, num_nodes
        )
        walked: list[int] = []
        kept: int | None = None
        while (slot := done + len(walked)) < length:
            children = [path[-1] for path in paths if path[:-1] == walked]
            at = slots_from(slot, slot + 1)
            kept, left = recursive_rejection(after(model, state, walked), children, at, noise, calls, merge)
            walked.append(int(noise.categorical(left, at, RESIDUAL, calls)) if kept is None else kept)
            if kept is None:
                break
        tokens, calls = torch.cat([tokens, torch.tensor([walked])], 1), calls + 1
    return tokens, calls


def best_paths(
    law_after: Callable[[list[int]], Tensor], depth: int, width: int, num_nodes: int | None
) -> list[list[int]]:
    """EAGLE-2's tree: each level has the `width` likeliest continuations of the last; the likeliest of all stay.

    Nothing is drawn, so the law of such a draft is a point.
    """
    level: list[tuple[float, list[int]]] = [(0.0, [])]
    nodes: list[tuple[float, list[int]]] = []
    for _ in range(depth):
        following = []
        for score, path in level:
            best = law_after(path)[0, 0].topk(width)
            following += [(score + float(p), [*path, int(x)]) for p, x in zip(*best, strict=True)]
        level = sorted(following, key=lambda node: -node[0])[:width]
        nodes += [node for node in level if node[0] > -math.inf]
    return [path for _, path in sorted(nodes, key=lambda node: -node[0])[:num_nodes]]


def recursive_rejection(
    target: Tensor, children: Sequence[int], slot: Tensor, noise: CounterNoise, call: int, merge: Merge
) -> tuple[int | None, Tensor]:
    """Test drafts of one slot in turn, each against what the refused ones before it left: SpecInfer (Miao et al.,
    ASPLOS 2024, section 4.3). Returns the one that is kept, or None; and the law of the token if none is."""
    left = target
    for number, child in enumerate(children):
        token, merged = torch.tensor([[child]]), merge(left, child)
        point = torch.full_like(left, -math.inf).scatter(-1, token[..., None], 0.0)
        if noise.bernoulli(exact_keep(merged, point, token), slot, ACCEPT + (number << 16), call):
            return child, left
        left = residual(merged, point)
    return None, left


def lantern(
    model: NextTokenModel,
    drafter: NextTokenModel,
    condition: object,
    law: TokenLaw,
    noise: CounterNoise,
    codebook: Tensor,
    delta: float = 0.1,
    neighbours: int = 64,
    **tree: Any,
) -> tuple[Tensor, int]:
    """LANTERN: Jang et al., ICLR 2025, section 4. Lossy.

    A tree of drafts whose test lends a draft the mass of the codes that look like it: the nearest ones, in order of
    distance, as many as hold at most `delta` together.

    Args:
        codebook: [V, D], the codes as the decoder sees them.
        tree: `depth`, `width` and `num_nodes` of `speculative_tree`.
    """
    apart = torch.cdist(codebook, codebook, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = apart.fill_diagonal_(math.inf).sort(dim=1, stable=True).indices[:, :neighbours]

    def merge(target: Tensor, token: int) -> Tensor:
        mass = target[0, 0].exp()
        if mass[token] == 0:  # a token that the model forbids stays forbidden
            return target
        near = nearest[token]
        lent = near[mass[near].cumsum(0) <= delta]
        mass[token] += mass[lent].sum()
        mass[lent] = 0
        return mass.log().view_as(target)

    return speculative_tree(model, drafter, condition, law, noise, merge=merge, **tree)


# -- several codebooks -------------------------------------------------------------------------------------------------


def column_jacobi(
    model: ColumnModel, condition: object, law: TokenLaw, noise: CounterNoise, window: int = 16
) -> tuple[Tensor, int]:
    """`identical_jacobi` of columns: the K tokens of a step are drawn together, and stand or fall together.

    Given the columns before, the tokens of a column are independent, and each has its own noise. A place of the
    codebook pattern without a token holds `special_id`. Returns tokens [1, S, K] and the number of calls.
    """
    length, books = model.grid.num_tokens, model.grid.codebooks
    state = model.prefill(condition, batch_size=1, guided=law.guided, window=window)

    def draw(logits: Tensor, steps: Tensor) -> Tensor:
        """Columns [1, N, K] of steps [1, N], from logits [R, N, K, V]."""
        laws = law(logits.flatten(1, 2), law.guided, steps.repeat_interleave(books, 1))
        entries = (steps[..., None] * books + torch.arange(books)).flatten(1)
        drawn = noise.categorical(laws, entries, TOKEN).view(1, -1, books)
        return torch.where(model.valid[steps], drawn, model.special_id)

    columns, calls = draw(state.logits[:, None], slots_from(0, 1)), 1
    drafts = columns[:, :0]
    while (done := columns.shape[1]) < length:
        steps = slots_from(done, min(done + window, length))
        newest = torch.cat([columns, drafts], 1)[:, -1:]
        fed = torch.cat([columns[:, -1:], drafts, newest.expand(1, window, books)], 1)[:, : steps.shape[1]]
        fed = torch.where(model.valid[steps - 1], fed, model.special_id)
        drawn = draw(model(state, fed, steps - 1), steps)
        kept = int((drawn[:, :-1] == fed[:, 1:]).all(-1).long().cumprod(1).sum())
        columns, drafts = torch.cat([columns, drawn[:, : kept + 1]], 1), drawn[:, kept + 1 :]
        calls += 1
    return columns, calls


# -- any order ---------------------------------------------------------------------------------------------------------


def any_order(
    model: AnyOrderModel, condition: object, law: TokenLaw, noise: CounterNoise, order: Tensor | None = None
) -> Tensor:
    """Decoding along an order: RandAR (Pang et al., 2412.01827), one token a call. Returns tokens [1, L] by slot.

    Args:
        order: long [1, L], the slots in the order of decoding; None: a random order, by the sample's own noise.
    """
    length = model.grid.num_tokens
    if order is None:
        order = noise.uniform(slots_from(0, length), CHOICE).argsort(dim=1, descending=True, stable=True)
    state = model.prefill(condition, batch_size=1, guided=law.guided, window=2, asked=order[:, :1])
    logits, tokens = state.logits, torch.zeros(1, 0, dtype=torch.long)
    rank = order.argsort(1)  # [1, L], the place of each slot in the order
    for place in range(length):
        if place:
            # Feed the last slot, which sees those before it; ask the next, which sees that one, too.
            seen = torch.stack([rank < place - 1, rank < place], 1)
            logits = model(state, tokens[:, -1:], order[:, place - 1 : place + 1], seen=seen)[:, 1:]
        at = slots_from(place, place + 1)
        tokens = torch.cat([tokens, noise.categorical(law(logits, law.guided, at), at, TOKEN)], 1)
    return torch.empty_like(tokens).scatter(1, order, tokens)
