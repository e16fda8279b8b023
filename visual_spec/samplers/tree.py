"""Speculative decoding with a tree of drafts: one target call scores many continuations, one path is kept.

A step drafts the tree level by level, scores all of it in one tree call of the target, walks from the root to a child
that is kept, to one of its children, and so on, and commits the path and one token more. `prepare` and the state
are those of `drafted.py`: between two steps there are no drafts.

With siblings "top-k", `num_nodes` and acceptance "lantern" this is the walk of LANTERN (Jang et al., ICLR 2025) over
EAGLE-2's tree; with siblings drawn without replacement and a `factor`, that of LANTERN++ (Park et al., 2025). LANTERN's
release takes all K neighbours of a refused draft out of the target law; here only those that lent to it are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.core.protocol import TreeModel
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.core.acceptance import EXACT, AcceptanceRule
from visual_spec.samplers.core.base import columns_of, decode
from visual_spec.samplers.core.checks import ACCEPTANCES, CheckedLaw, check_count, check_request
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.drafters import check_drafter, draft_law, start_drafter
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import DRAFT, RESIDUAL, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.relaxed import RELAXED, Relaxable
from visual_spec.samplers.core.siblings import first_kept, moved_mass, sibling_tests, without
from visual_spec.samplers.core.trace import DivergenceMeter, SampleResult, Stopwatch
from visual_spec.samplers.drafted import DraftedState, catch_up, commit, prepare

WITHOUT_REPLACEMENT = "without-replacement"
TOP_K = "top-k"
SIBLINGS = (WITHOUT_REPLACEMENT, TOP_K)


@dataclass(frozen=True)
class TreeOptions:
    """The configuration of the sampler, checked. See `TreeSampler`.

    Acceptance is "identical" or "exact"; the latter tests by `rule`, which relaxed acceptances replace.
    """

    depth: int
    width: int
    num_nodes: int | None
    siblings: str
    acceptance: str
    expected_acceptance: float
    rule: AcceptanceRule = EXACT

    def __post_init__(self) -> None:
        for name in ("depth", "width"):
            check_count(name, getattr(self, name))
        for name, allowed in (("siblings", SIBLINGS), ("acceptance", ACCEPTANCES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}; pass one of {', '.join(allowed)}.")
        if not 0 < self.expected_acceptance <= 1:
            raise ValueError(
                f"expected_acceptance={self.expected_acceptance!r}; pass a probability above 0 and at most 1."
            )
        nodes, drafted = self.num_nodes, self.depth * self.width
        if nodes is None:
            return
        if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= drafted:
            raise ValueError(
                f"num_nodes={nodes!r}, but depth * width = {drafted} nodes are drafted; pass an integer from 1 to "
                f"{drafted}, or None (score all of them)."
            )
        if nodes < drafted and self.acceptance == "exact" and self.siblings == WITHOUT_REPLACEMENT:
            raise ValueError(
                f"num_nodes={nodes} would choose among drafts by what they turned out to be, and those that are left "
                "no longer follow the law they were drawn from: not exact. Pass num_nodes=None and a smaller width, "
                "siblings='top-k' (nothing is drawn), or acceptance='identical' (any draft will do)."
            )

    @property
    def columns(self) -> int:
        """Columns of the target call: the root, and the nodes that are scored."""
        return 1 + (self.num_nodes or self.depth * self.width)

    @property
    def drafter_columns(self) -> int:
        """The most columns of a drafter call: all levels but the last, or a text of depth + 1 tokens to catch up."""
        return max((self.depth - 1) * self.width, self.depth + 1)


@dataclass
class Tree:
    """Drafts of one step. Column 0 is the root, the newest committed token; parents stand before their children.

    Attributes:
        tokens: long [B, N].
        parents: long [B, N], the column of each node's parent; the root's is itself.
        ranks: long [B, N], the place of a node among its siblings, in the order they were drawn.
        depths: long [B, N], 0 for the root.
        scores: [B, N], logarithm of how likely the path to each node is to be kept (`worth_of_children`); -inf where
            there is no draft.
        laws: [B, 1 + (depth - 1) * width, V], the drafter's law behind each column; None where no rule needs it.
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    scores: Tensor
    laws: Tensor | None

    def columns(self, chosen: Tensor) -> Tree:
        """The tree of some columns [B, M], in ascending order and with each column's ancestors among them."""
        place = torch.zeros_like(self.parents)  # of each old column among the chosen
        place.scatter_(1, chosen, torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen))
        tokens, ranks, depths, scores = (
            values.gather(1, chosen) for values in (self.tokens, self.ranks, self.depths, self.scores)
        )
        return Tree(tokens, place.gather(1, self.parents.gather(1, chosen)), ranks, depths, scores, None)


def ancestry(parents: Tensor, depth: int) -> Tensor:
    """Which columns each column sees, itself and its ancestors: parents long [B, N] to bool [B, N, N]."""
    itself = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
    visible = itself.expand(len(parents), -1, -1)
    rows = parents[..., None].expand(-1, -1, parents.shape[1])
    for _ in range(depth):
        visible = itself | visible.gather(1, rows)
    return visible


def propose(
    model: TreeModel,
    drafter: Any,
    state: DraftedState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: TreeOptions,
) -> Tree:
    """Draft a tree of `width` nodes on each of `depth` levels; each level but the last costs a drafter call."""
    width, guided = options.width, state.cache.guided
    batch_size, device = len(state.lengths), state.tokens.device
    exact = options.acceptance == "exact"
    # Nodes of one level share a slot, and so its noise. Only one of them can be on the path that is kept, and which
    # one it is does not depend on this noise.
    stream, round = (DRAFT, state.round + 1) if exact else (TOKEN, 0)
    zero = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    newest = state.tokens.gather(1, state.lengths[:, None] - 1)
    logits = catch_up(drafter, state, options.depth + 1)  # [R, 1, V]
    precise = torch.promote_types(logits.dtype, torch.float32)
    tree = Tree(newest, zero, zero, zero, zero.to(precise), None)
    laws = []
    for level in range(1, options.depth + 1):
        first = tree.tokens.shape[1] - logits.shape[1]  # the column of the first node of the last level
        slots = state.lengths[:, None].expand(-1, logits.shape[1]) + level - 1
        draft = draft_law(law, logits, slots, guided)  # [B, nodes of the last level, V]
        best = draft.topk(min(width, draft.shape[-1]), -1)
        # How many children a node gets is settled before they are drawn. The sort is stable, so that among equally
        # worthy ones child k comes before child k + 1.
        worth = tree.scores[:, first:, None] + worth_of_children(draft, best.values, options)
        if options.siblings == TOP_K:
            children, ranked = best.indices, worth
        else:
            children = noise.ranking(draft, slots, best.values.shape[-1], stream, round)  # [B, nodes, K]
            # First draws of first draws are always there: a tree keeps no fewer drafts than the chain in it.
            ranked = worth.clone()
            ranked[:, 0, 0].fill_(torch.inf)
        order = ranked.flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, :width]  # [B, width]
        parents, ranks = order // best.values.shape[-1], order % best.values.shape[-1]
        tokens = children.flatten(1).gather(1, order)
        scores = worth.flatten(1).gather(1, order)
        # The grid ends here, and a law of fewer tokens than children runs out: what comes then is no draft.
        there = best.values.flatten(1).gather(1, order) > -torch.inf
        scores = torch.where(there & (slots[:, :1] < model.grid.num_tokens), scores, -torch.inf)
        tree = Tree(
            torch.cat([tree.tokens, tokens], 1),
            torch.cat([tree.parents, parents + first], 1),
            torch.cat([tree.ranks, ranks], 1),
            torch.cat([tree.depths, torch.full_like(tokens, level)], 1),
            torch.cat([tree.scores, scores], 1),
            None,
        )
        laws.append(draft)
        if level < options.depth:
            # The drafter's text ends with the root: its tree is the forest behind it.
            visible = ancestry(tree.parents, level)[:, 1:, 1:]
            places = state.lengths[:, None] - 1 + tree.depths[:, 1:]
            logits = drafter(state.drafter_cache, tree.tokens[:, 1:], places, visible)[:, -width:]
    if options.num_nodes is not None and options.num_nodes < options.depth * width:
        # EAGLE-2's second choice. A node is no more probable than its parent and the sort is stable, so no parent
        # is left out before its child.
        chosen = tree.scores.sort(dim=-1, descending=True, stable=True).indices[:, : options.columns]
        return tree.columns(chosen.sort(-1).values)
    if exact and options.siblings == WITHOUT_REPLACEMENT:
        tree.laws = torch.cat(laws, 1)
    return tree


def worth_of_children(draft: Tensor, best: Tensor, options: TreeOptions) -> Tensor:
    """Logarithm of how likely each child is to be kept once its parent is: an estimate, made before drawing any.

    The most probable tokens are kept about as often as the drafter's law says (EAGLE-2). For drawn children that is
    the wrong measure: a draw is kept with probability min(1, target / draft), whether it was a probable one or not.
    Where the laws differ by small independent errors of their logits, the first is refused about in proportion to
    1 - sum of draft(x)**2, which is 0 for a point and nearly 1 for a flat law. What is then left of the target lies
    where it exceeds the draft, and a further sibling hits it about one time in three.

    Args:
        draft: [B, N, V], the law behind each node.
        best: [B, N, K], its largest values, in descending order.

    Returns:
        [B, N, K], not increasing along K.
    """
    if options.siblings == TOP_K:
        return best
    spread = 1 - draft.exp().square().sum(-1, keepdim=True)
    # At most 3/4: above it a second child would be worth more than the first, without which it has no law.
    refused = ((1 - options.expected_acceptance) * spread).clamp_(0, 0.75)  # [B, N, 1]
    later = torch.arange(best.shape[-1] - 1, device=best.device)
    return torch.cat([(1 - refused).log(), (refused / 3).log() + later * math.log(2 / 3)], -1)


@dataclass
class Path:
    """What a walk down the tree kept.

    Attributes:
        columns: long [B, D + 1], the root, then the accepted nodes; behind the last one it is repeated.
        kept: long [B], how many nodes were accepted.
        replacement: long [B, 1], the token behind the path.
    """

    columns: Tensor
    kept: Tensor
    replacement: Tensor


def walk(
    tree: Tree,
    target: Tensor,
    lengths: Tensor,
    noise: CounterNoise,
    options: TreeOptions,
    round: int,
    meter: DivergenceMeter | None = None,
) -> Path:
    """From the root, test the children of the node reached, until none is kept or the tree ends.

    Args:
        target: [B, N, V], the target law behind every column.
        lengths: long [B], the slot behind the root.
        meter: counts every slot whose node has children.
    """
    at = torch.zeros_like(tree.tokens[:, :1])  # [B, 1], the column reached
    going = torch.ones_like(at, dtype=torch.bool)
    slots = lengths[:, None]
    columns, kept = [at], torch.zeros_like(lengths)
    left = columns_of(target, at)  # [B, 1, V], the law of the token behind the path
    identical = options.acceptance == "identical"
    count = min(options.width, tree.tokens.shape[1] - 1)
    for level in range(options.depth):
        # The children of the node reached, in the order they were drawn: [B, K].
        child = (tree.parents == at) & (tree.depths == level + 1) & (tree.scores > -torch.inf)
        children = tree.ranks.masked_fill(~child, options.width).topk(count, largest=False).indices
        there = child.gather(1, children) & going
        tokens = tree.tokens.gather(1, children)
        if identical:
            match = there & (tokens == noise.categorical(left, slots + level, TOKEN))
            accepted = torch.where(match.any(1), match.long().argmax(1), count)
        else:
            labels = _sibling_laws(tree, at, tokens, target)
            probability, refused = sibling_tests(left[:, 0], tokens, labels, there, options.rule)
            accepted = first_kept(probability, noise, slots + level, round)
            if meter is not None:
                drawn = None if tree.laws is None else labels
                moved = moved_mass(left[:, 0], tokens, drawn, probability, refused, there)
                meter.count(moved[:, None], there.any(1, keepdim=True))
            left = torch.where(going[..., None], refused[:, None], left)
        going = going & (accepted < count)[:, None]
        at = torch.where(going, children.gather(1, accepted.clamp(max=count - 1)[:, None]), at)
        kept = kept + going[:, 0]
        columns.append(at)
        left = torch.where(going[..., None], columns_of(target, at), left)
    stream = (TOKEN, 0) if identical else (RESIDUAL, round)
    return Path(torch.cat(columns, 1), kept, noise.categorical(left, slots + kept[:, None], *stream))


def _sibling_laws(tree: Tree, parent: Tensor, tokens: Tensor, like: Tensor) -> Tensor:
    """The law that each of the siblings [B, K] was drawn from, given the ones before it: [B, K, V]."""
    if tree.laws is None:  # the most probable ones: nothing is drawn
        points = like.new_full((*tokens.shape, like.shape[-1]), -torch.inf)
        return points.scatter_(-1, tokens[..., None], 0.0)
    # Nodes of the last level have no children, and no law.
    laws = [columns_of(tree.laws, parent.clamp(max=tree.laws.shape[1] - 1))]  # each [B, 1, V]
    for sibling in range(tokens.shape[1] - 1):
        laws.append(without(laws[-1], tokens[:, sibling, None, None]))
    return torch.cat(laws, 1)


def step(
    model: TreeModel,
    drafter: Any,
    state: DraftedState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: TreeOptions,
    watch: Stopwatch,
) -> None:
    """Draft a tree, score it in one target call, commit the path that is kept and one token more.

    Updates `state`. A finished row stays as it is. No host synchronisation on CUDA.
    """
    device, num_tokens = state.tokens.device, model.grid.num_tokens
    tree = propose(model, drafter, state, law, noise, options)
    watch.lap("draft", device)
    slots = state.lengths[:, None] + tree.depths  # [B, N], the slot that each column predicts
    logits = model(state.cache, tree.tokens, slots - 1, ancestry(tree.parents, options.depth))  # [R, N, V]
    watch.lap("model", device)
    target = law(logits, slots, state.cache.guided)  # [B, N, V]
    path = walk(tree, target, state.lengths, noise, options, state.round + 1, state.meter)
    places = state.lengths[:, None] - 1 + torch.arange(options.depth + 1, device=device)  # [B, D + 1]
    model.keep(state.cache, path.columns, places)
    if hasattr(drafter, "observe"):
        cache: Any = state.cache
        features = cache.features  # [R, N, dim]
        along = path.columns.repeat(len(features) // len(places), 1)
        drafter.observe(state.drafter_cache, columns_of(features, along), places)
    # The accepted drafts, then the replacement where the path ends.
    drafts = tree.tokens.gather(1, path.columns[:, 1:])
    committed = torch.cat([drafts, path.replacement], 1).scatter(1, path.kept[:, None], path.replacement)
    commit(state, committed, path.kept, num_tokens)
    watch.lap("verify", device)


class TreeSampler(Relaxable, SchedulerMixin, ConfigMixin):
    """Speculative decoding with a tree of drafts, verified by recursive rejection.

    Tree attention and multi-round rejection are SpecInfer's (Miao et al., ASPLOS 2024, section 4); the tree follows
    the drafter's confidence as in EAGLE-2 (Li et al., EMNLP 2024). Lossless for any drafter over the model's tokens,
    but under the relaxed acceptances of `relaxed.py`.

    Why it is. Let slot i be behind the path that has been kept. The tests that led there looked at the drafts of slots
    before i only, and so did the choice of how many children the node reached should have: it was made from
    path probabilities and from the law behind each node, before the children were drawn. Given all that, the
    children follow the laws on their labels, in the order drawn, and acceptance and residual noise are fresh; so
    recursive rejection commits a token of the target law at slot i. Choosing among drafts after they are drawn
    (`num_nodes`, the second choice of EAGLE-2) breaks this, unless nothing is drawn: the most probable
    tokens are a function of the text, and their labels are points.

    Relaxed acceptance. Every test of recursive rejection is made by the rule; `siblings.recursive_rejection` says what
    a refused sibling leaves to the next. LANTERN's `delta` bounds what one test of a "top-k" sibling moves, so a slot
    moves `delta` times the number of tests made for it, at most; with `bounded` the siblings of a slot share one
    `delta`, drawn or not (`relaxed.budget_behind`). The trace's divergence is the distance itself for "top-k", and an
    upper bound in the mean for drawn siblings (`siblings.moved_mass`).

    Args:
        depth: levels, at least 1: the most drafts that one call can accept.
        width: nodes of a level, at least 1, and the most children of a node.
        num_nodes: score only the most probable nodes; None scores all depth * width. Not for siblings that are drawn
            and verified exactly.
        siblings: "without-replacement" (drawn from the drafter's law, all different), or "top-k" (its most probable).
        acceptance: "exact" (recursive rejection), or "identical" (a child is kept when it is the token that
            the slot's own noise draws from the target law: the tokens of `AutoregressiveSampler`, same generator.
            Siblings without replacement are then the drafter's best guesses under the same noise), or a relaxed rule:
            "grouped", "clustered" or "lantern".
        expected_acceptance: a guess, above 0 and at most 1, at how often the first of drawn siblings is kept where the
            drafter's law is flat. It shapes the tree (1: a chain, lower: more siblings), not what comes out.
        group_size, probability_gap, code_distance, delta, factor, neighbours, bounded: of relaxed rules, see
            `Relaxation`.

    Raises:
        ValueError: a value that is not one of these.
    """

    config_name = "sampler_config.json"
    needs_drafter = True

    @register_to_config
    def __init__(
        self,
        depth: int = 5,
        width: int = 8,
        num_nodes: int | None = None,
        siblings: str = WITHOUT_REPLACEMENT,
        acceptance: str = "exact",
        expected_acceptance: float = 0.6,
        group_size: int = 14,
        probability_gap: float = 0.15,
        code_distance: float | None = 0.5,
        delta: float = 0.1,
        factor: float | None = None,
        neighbours: int = 64,
        bounded: bool = False,
    ) -> None:
        _ = self.relaxation, self.options  # which refuse what is not allowed

    @property
    def options(self) -> TreeOptions:
        """The configuration as a checked record. A relaxed acceptance puts its rule in when the tables are made."""
        names = ("depth", "width", "num_nodes", "siblings", "acceptance", "expected_acceptance")
        settings = {name: self.config[name] for name in names}
        if settings["acceptance"] in RELAXED:
            settings["acceptance"] = "exact"
        return TreeOptions(**settings)

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
        drafter: Any = None,
        drafter_condition: Any = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
        codebook: Tensor | None = None,
    ) -> SampleResult:
        """Decode a batch. Arguments and errors are those of `DraftedSampler.__call__`, and:

        Raises:
            TypeError: a model or a drafter that cannot score trees.
            ValueError: a width beyond the vocabulary, a tree that does not fit the model's cache.
        """
        check_request(model, law, batch_size)
        check_drafter(self, model, drafter)
        check_trees(model, drafter)
        relaxation, options = self.relaxation, self.options
        relaxation.check(codebook, model.vocab_size)
        if options.width > model.vocab_size:
            raise ValueError(
                f"width={options.width}, but siblings differ and the vocabulary has {model.vocab_size} tokens; pass "
                f"a width of at most {model.vocab_size}."
            )
        keys = draw_keys(generator, batch_size)
        watch = Stopwatch()
        cache = model.prefill(
            condition,
            batch_size=batch_size,
            guided=law.guided,
            window=max(options.columns, options.depth + 1),
        )
        check_room(options, cache.window)
        device = cache.logits.device
        asked = condition if drafter_condition is None else drafter_condition
        drafter_cache = start_drafter(
            drafter, model, cache, asked, batch_size=batch_size, window=options.drafter_columns
        )
        watch.lap("prefill", device)
        options = replace(options, rule=relaxation.rule(codebook, device))
        noise = CounterNoise(keys, device)
        checked = CheckedLaw(law, model.grid.num_tokens, deferred=device.type == "cuda")
        state = prepare(model, cache, drafter_cache, checked, noise, options.depth + 1, options.rule)
        advance = partial(step, model, drafter, state, checked, noise, options, watch)
        return decode(self, state, checked, noise, advance, watch, callback)


def check_trees(model: Any, drafter: Any) -> None:
    """Refuse models that score chains only.

    Raises:
        TypeError: names the model or drafter, and the sampler that fits it.
    """
    for role, network in (("model", model), ("drafter", drafter)):
        if not hasattr(network, "keep") and not hasattr(network, "follow"):
            raise TypeError(
                f"the {role}, a {type(network).__name__}, cannot score a tree of drafts; use DraftedSampler, which "
                "drafts a chain."
            )


def check_room(options: TreeOptions, window: int) -> None:
    """Refuse a tree that is larger than the cache's scratch room.

    Raises:
        ValueError: names the sizes.
    """
    if options.columns > window:
        raise ValueError(
            f"a tree of {options.columns} columns (the root and {options.columns - 1} nodes) does not fit the model's "
            f"cache, which has room for {window}; pass num_nodes, or depth and width, for at most {window - 1} nodes."
        )
