"""Jacobi decoding with several drafts for the slots at the window's head: SJD-PAC, done exactly.

Half of the calls of speculative Jacobi decoding commit one token, because the first draft is refused. So the first D
slots hold K siblings each, the usual draft and K - 1 others, and one tree call scores every combination of them:

    root -+- draft of slot n -+- draft of slot n + 1 -- draft of slot n + 2 -- ...   the main branch, W columns
          |                   +- sibling
          +- sibling ---------+- draft of slot n + 1
                              +- sibling

The walk goes down from the root. At slot i it tests the siblings against the law of the node it stands on, by
recursive rejection: a kept sibling is the next node, and where all are refused the last residual gives the token, and
the walk ends. A walk that leaves the main branch and reaches the last level takes one more token from the law of its
leaf. Slots behind the walk's end are drafted as in `jacobi`, from the laws of the main branch.

Why it is lossless. Call N the randomness used at the slots before i, in all calls. When slot i is first tested is a
function of N, and so are the law of the node it is tested under and the law its main draft was drawn from, since the
laws of the call before depend on drafts of earlier slots only. Given N, then,

* the main draft follows its label: it was drawn from it afresh, or with Gumbel noise of the slot's own, or it came out
  of recursive rejection, whose output follows the law it was run against, and that law became its label;
* each other sibling is drawn, in this very call, from that label without the siblings before it, renormalised, which
  is the law it is labelled with. A label that leaves nothing (a copied token) leaves no siblings;
* the numbers that accept, and the noise of the residual, are addressed by slot, call and sibling, and serve no other
  purpose: in one call a slot is either walked over or drafted, and N decides which.

So recursive rejection is exact at slot i given N, and by induction the committed tokens follow the autoregressive law.
K-SEQ needs siblings that are independent given N: there all others are drawn from the label itself, each with numbers
of its own, and the same steps hold.

Siblings belong to slots, not to nodes: all nodes of a level share them, which no step above forbids. (The SJD-PAC
release draws the extra candidates from the residual of the last refusal and labels them with the law itself, which is
not exact.)

Source: Kang et al., "SJD-PAC: accelerating speculative Jacobi decoding via proactive drafting and adaptive
continuation", CVPR 2026. Its continuation is the maximal coupling of `jacobi`; its depth counts the root, and ours
does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.core.protocol import TreeModel
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.core.acceptance import (
    accepted_prefix,
    exact_acceptance,
    identical_acceptance,
    residual,
)
from visual_spec.samplers.core.base import columns_of, decode
from visual_spec.samplers.core.checks import CheckedLaw, check_count, check_request
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.siblings import (
    k_seq,
    recursive_rejection,
    sibling_stream,
    with_replacement,
    without,
    without_replacement,
)
from visual_spec.samplers.core.trace import SampleResult, Stopwatch
from visual_spec.samplers.jacobi import JacobiOptions, JacobiState, prepare, redraft

MOST_COLUMNS = 1024
RECURSIVE = "recursive"
K_SEQ = "k-seq"
SIBLING_RULES = (RECURSIVE, K_SEQ)


@dataclass(frozen=True)
class ProactiveOptions:
    """The configuration of the sampler, checked. See `ProactiveJacobiSampler`."""

    window: int
    siblings: int
    depth: int
    coupling: str
    acceptance: str
    initial_draft: str
    sibling_rule: str = RECURSIVE

    def __post_init__(self) -> None:
        JacobiOptions(self.window, self.coupling, self.acceptance, self.initial_draft)
        if self.sibling_rule not in SIBLING_RULES:
            raise ValueError(f"sibling_rule={self.sibling_rule!r}; pass one of {', '.join(SIBLING_RULES)}.")
        if self.sibling_rule == K_SEQ and self.acceptance == "identical":
            raise ValueError(
                "sibling_rule='k-seq' is a test against chance, and acceptance='identical' makes no such test; pass "
                "sibling_rule='recursive', or acceptance='exact'."
            )
        for name in ("siblings", "depth"):
            check_count(name, getattr(self, name))
        if self.depth >= self.window:
            raise ValueError(
                f"depth={self.depth} in a window of {self.window} slots, which has {self.window - 1} drafts; "
                f"pass a depth below the window."
            )
        # The power alone may be astronomical, so it is bounded first.
        nodes = self.siblings ** min(self.depth, 11)
        if self.siblings > 1 and (nodes > MOST_COLUMNS or self.tree.columns > MOST_COLUMNS):
            raise ValueError(
                f"siblings={self.siblings} over depth={self.depth} and window={self.window} make a tree of more than "
                f"{MOST_COLUMNS} columns a call; pass fewer siblings or less depth."
            )

    @property
    def jacobi(self) -> JacobiOptions:
        """How the main branch is drafted. Its laws are kept under identical acceptance too: siblings come from them."""
        return JacobiOptions(self.window, self.coupling, "exact", self.initial_draft)

    @cached_property
    def tree(self) -> HeadTree:
        """The shape of a call."""
        return HeadTree(self.window, self.siblings, self.depth)


@dataclass(frozen=True)
class HeadTree:
    """The columns of a call: the main branch, root first, then the other nodes, level by level.

    A node at level t (its token is that of slot n + t - 1; the root has level 0) is named by its path: the numbers of
    the siblings from the root to it, read in base K. Path 0 is the main branch, in column t; the others follow.
    """

    window: int
    siblings: int
    depth: int

    def first(self, level: int) -> int:
        """The column of path 1 of a level."""
        return self.window + sum(self.siblings**earlier - 1 for earlier in range(1, level))

    @property
    def columns(self) -> int:
        """Columns of a call."""
        return self.first(self.depth + 1)

    def column(self, level: int, path: Tensor) -> Tensor:
        """Where the node of each path is: long, of the shape of `path`."""
        return torch.where(path == 0, level, path + (self.first(level) - 1))

    def layout(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The level of every column [N], the sibling it holds [N], and who sees whom: bool [N, N]."""
        levels, numbers, ancestors = list(range(self.window)), [0] * self.window, []
        for column in range(self.window):
            ancestors.append(set(range(column + 1)))
        parents = [0]  # columns of the level above, by path
        for level in range(1, self.depth + 1):
            here = [level]
            for path in range(1, self.siblings**level):
                here.append(len(levels))
                levels.append(level)
                numbers.append(path % self.siblings)
                ancestors.append(ancestors[parents[path // self.siblings]] | {here[-1]})
            parents = here
        visible = torch.zeros(len(levels), len(levels), dtype=torch.bool)
        for column, seen in enumerate(ancestors):
            visible[column, list(seen)] = True
        return torch.tensor(levels, device=device), torch.tensor(numbers, device=device), visible.to(device)


def step(
    model: TreeModel,
    state: JacobiState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: ProactiveOptions,
    watch: Stopwatch,
    layout: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """One target call: score the tree, walk down it, replace the refused token, draft again.

    Updates `state`. Commits 1 to W tokens a row; a finished row stays as it is. No host synchronisation on CUDA.
    """
    device, batch_size = state.tokens.device, state.tokens.shape[0]
    window, count, depth, tree = options.window, options.siblings, options.depth, options.tree
    levels, numbers, visible = layout or tree.layout(device)
    assert state.draft_law is not None
    state.round += 1
    # [B, W]: the slots that the main branch scores; the newest committed token, then the main drafts.
    slots = state.lengths[:, None] + torch.arange(window, device=device)
    inputs = state.tokens.gather(1, slots - 1)
    siblings, sibling_laws = _head_siblings(state, inputs[:, 1:], slots, noise, options)

    place = (levels[window:] - 1) * count + numbers[window:]  # of the other nodes' tokens among the siblings
    tokens = torch.cat([inputs, siblings.flatten(1).index_select(1, place)], 1)  # [B, N]
    node_slots = (state.lengths - 1)[:, None] + levels
    logits = model(state.cache, tokens, node_slots, visible.expand(batch_size, -1, -1))  # [R, N, V]
    watch.lap("model", device)
    target = law(logits, node_slots + 1, state.cache.guided)  # [B, N, V]

    # A row that has left the walk goes on along the main branch: what comes out then is the slot's next draft.
    path = torch.zeros_like(state.lengths)
    walking = torch.ones_like(state.lengths, dtype=torch.bool)
    kept = torch.zeros_like(state.lengths)
    columns, laws, chosen = [], [], []
    for level in range(depth):
        columns.append(tree.column(level, path)[:, None])
        laws.append(columns_of(target, columns[-1]))  # [B, 1, V]
        at = slots[:, level, None]
        accepted, token = _verify(
            laws[-1], siblings[:, level], sibling_laws[level], noise, at, state.round, options
        )
        chosen.append(token)
        walking = walking & (accepted < count)
        kept = kept + walking
        path = torch.where(walking, path * count + accepted, 0)

    # Behind the tree the main branch goes on. At its first slot a walk that ends in another leaf takes its last token.
    columns.append(tree.column(depth, path)[:, None])
    laws += [columns_of(target, columns[-1]), target[:, depth + 1 : window]]
    chain = torch.cat(laws[-2:], 1)  # [B, W - D, V]
    drafts, at = inputs[:, depth + 1 :], slots[:, depth:]
    accept, candidates = _verify_chain(
        chain, drafts, state.draft_law[:, depth:], noise, at, state.round, options
    )
    kept = kept + torch.where(walking & (path == 0), accepted_prefix(accept), 0)

    rest = torch.arange(depth + 1, window, device=device).expand(batch_size, -1)
    model.keep(state.cache, torch.cat([*columns, rest], 1), slots - 1)
    state.tokens.scatter_(1, slots, torch.cat([*chosen, candidates], 1))
    state.commit_call.scatter_(1, slots, torch.zeros_like(slots) + state.round)
    num_tokens = model.grid.num_tokens
    state.target_calls += state.lengths < num_tokens
    state.lengths = (state.lengths + kept + 1).clamp_(max=num_tokens)
    redraft(model, state, torch.cat(laws, 1), kept + 1, law, noise, options.jacobi)
    watch.lap("verify", device)


def _head_siblings(
    state: JacobiState, drafts: Tensor, slots: Tensor, noise: CounterNoise, options: ProactiveOptions
) -> tuple[Tensor, list[Tensor]]:
    """The siblings of the first D slots, the main draft first: tokens [B, D, K], and the laws [B, K, V] of each slot.

    Under Gumbel coupling siblings that differ are the K best of the slot's own noise, which the main draft is the best
    of. Independent siblings have noise of their own.
    """
    assert state.draft_law is not None
    count, independent = options.siblings - 1, options.sibling_rule == K_SEQ
    own_noise = options.coupling == "gumbel" and not independent
    stream, round = (TOKEN, 0) if own_noise else (sibling_stream(DRAFT, 1), state.round)
    tokens, laws = [], []
    for level in range(options.depth):
        main, label = drafts[:, level, None], state.draft_law[:, level]  # [B, 1], [B, V]
        at = slots[:, level, None]
        if count == 0:
            others, other_laws = main[:, :0], label[:, None][:, :0]
        elif independent:
            others, other_laws = with_replacement(label, count, noise, at, round, stream)
        else:
            others, other_laws = without_replacement(without(label, main), count, noise, at, round, stream)
        tokens.append(torch.cat([main, others], 1))
        laws.append(torch.cat([label[:, None], other_laws], 1))
    return torch.stack(tokens, 1), laws


def _verify(
    target: Tensor,
    siblings: Tensor,
    laws: Tensor,
    noise: CounterNoise,
    slots: Tensor,
    round: int | Tensor,
    options: ProactiveOptions,
) -> tuple[Tensor, Tensor]:
    """The siblings [B, K] of a slot under the law [B, 1, V]: the kept one, long [B], K for none; the token, [B, 1]."""
    if options.acceptance == "identical":
        token = noise.categorical(target, slots, TOKEN)
        same = identical_acceptance(token, siblings)  # [B, K]
        return torch.where(same.any(1), same.long().argmax(1), options.siblings), token
    if options.sibling_rule == K_SEQ:
        accepted, left = k_seq(target[:, 0], siblings, laws[:, 0], noise, slots, round)
    else:
        accepted, left = recursive_rejection(target[:, 0], siblings, laws, noise, slots, round)
    replacement = noise.categorical(left[:, None], slots, RESIDUAL, round)
    found = siblings.gather(1, accepted[:, None].clamp(max=options.siblings - 1))
    return accepted, torch.where(accepted[:, None] < options.siblings, found, replacement)


def _verify_chain(
    target: Tensor,
    drafts: Tensor,
    laws: Tensor,
    noise: CounterNoise,
    slots: Tensor,
    round: int | Tensor,
    options: ProactiveOptions,
) -> tuple[Tensor, Tensor]:
    """One draft a slot, as in `jacobi.step`: which are kept, bool [B, C - 1], and the token of each of C slots.

    Args:
        target, laws: [B, C, V]; the last column has no draft.
        drafts: long [B, C - 1].
    """
    if options.acceptance == "identical":
        candidates = noise.categorical(target, slots, TOKEN)
        return identical_acceptance(candidates[:, :-1], drafts), candidates
    probability = exact_acceptance(target[:, :-1], laws[:, :-1], drafts)
    accept = noise.bernoulli(probability, slots[:, :-1], ACCEPT, round)
    replacement = noise.categorical(residual(target, laws), slots, RESIDUAL, round)
    return accept, torch.cat([torch.where(accept, drafts, replacement[:, :-1]), replacement[:, -1:]], 1)


class ProactiveJacobiSampler(SchedulerMixin, ConfigMixin):
    """Speculative Jacobi decoding with K siblings for each of the first D slots of the window, from the exact law.

    With one sibling it returns the tokens of `SpeculativeJacobiSampler` with the same coupling and acceptance. A call
    scores `window` columns of the main branch, and K + K**2 + ... + K**D - D more; models that decode one picture
    at a time have room for them. See the module for the method and why it is lossless.

    Args:
        window: slots of the main branch, at least 2.
        siblings: K, drafts for each slot at the head, at least 1.
        depth: D, slots that have siblings, at least 1 and below the window.
        coupling: as in `SpeculativeJacobiSampler`: "maximal", "independent" or "gumbel".
        acceptance: "exact", or "identical", which needs coupling "gumbel" and returns the tokens of
            `AutoregressiveSampler` for the same generator.
        initial_draft: as in `SpeculativeJacobiSampler`. A copied token has no siblings: a slot gets them once a call
            has scored it.
        sibling_rule: "recursive" (siblings that differ, tested by recursive rejection), or "k-seq" (independent
            siblings, K-SEQ of SpecTr). Both are exact; not for acceptance "identical". `siblings.sibling_gaps` tells
            how far each is from the best that any rule could keep.

    Raises:
        ValueError: a value that is not one of these, or a tree of more than 1024 columns.
    """

    config_name = "sampler_config.json"
    lossless = True

    @register_to_config
    def __init__(
        self,
        window: int = 32,
        siblings: int = 4,
        depth: int = 2,
        coupling: str = "maximal",
        acceptance: str = "exact",
        initial_draft: str = "left",
        sibling_rule: str = RECURSIVE,
    ) -> None:
        _ = self.options  # which refuses what is not allowed

    @property
    def options(self) -> ProactiveOptions:
        """The configuration as a checked record."""
        return ProactiveOptions(**{field.name: self.config[field.name] for field in fields(ProactiveOptions)})

    @property
    def identical(self) -> bool:
        """Whether the tokens are those of `AutoregressiveSampler` for the same generator."""
        return self.options.acceptance == "identical"

    @torch.no_grad()
    def __call__(
        self,
        model: TreeModel,
        condition: Any,
        *,
        law: TokenLaw,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
    ) -> SampleResult:
        """Decode a batch. Arguments and errors are those of `SpeculativeJacobiSampler.__call__`.

        Raises:
            TypeError: a model that cannot score trees.
            ValueError: more siblings than tokens, or what any next-token sampler refuses.
        """
        check_request(model, law, batch_size)
        options = self.options
        _check_tree(model, options)
        keys = draw_keys(generator, batch_size)
        num_tokens = model.grid.num_tokens
        watch = Stopwatch()
        cache = model.prefill(
            condition, batch_size=batch_size, guided=law.guided, window=options.tree.columns
        )
        device = cache.logits.device
        watch.lap("prefill", device)
        noise = CounterNoise(keys, device)
        checked = CheckedLaw(law, num_tokens, deferred=device.type == "cuda")
        state = prepare(model, cache, checked, noise, options.jacobi)
        layout = options.tree.layout(device)
        advance = partial(step, model, state, checked, noise, options, watch, layout)
        return decode(self, state, checked, noise, advance, watch, callback)


def _check_tree(model: TreeModel, options: ProactiveOptions) -> None:
    if not callable(getattr(model, "keep", None)):
        raise TypeError(
            f"{type(model).__name__} has no `keep`: it cannot score trees of drafts. Use SpeculativeJacobiSampler, "
            "or a model that implements TreeModel."
        )
    if options.sibling_rule == RECURSIVE and options.siblings > model.vocab_size:
        raise ValueError(
            f"siblings={options.siblings} for a vocabulary of {model.vocab_size} tokens; siblings differ from each "
            f"other, so pass at most {model.vocab_size}."
        )
