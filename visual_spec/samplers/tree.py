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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_spec.samplers.core.base import Run, Sampler
from visual_spec.samplers.core.checks import check_choice, check_count
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.drafters import check_drafter, draft_law
from visual_spec.samplers.core.drafts import rows_of
from visual_spec.samplers.core.graph import AUTO, check_graph
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import DRAFT, TOKEN
from visual_spec.samplers.core.relaxed import Relaxation
from visual_spec.samplers.core.siblings import without
from visual_spec.samplers.core.verification import final_noise, verify_siblings
from visual_spec.samplers.drafted import DraftedState, begin_drafted, catch_up

WITHOUT_REPLACEMENT = "without-replacement"
TOP_K = "top-k"
SIBLINGS = (WITHOUT_REPLACEMENT, TOP_K)


@dataclass
class Tree:
    """Drafts of one step. Node 0 is the root, the newest committed token; parents stand before their children.

    Attributes:
        tokens: long [B, N].
        parents: long [B, N], the number of each node's parent; the root's is itself.
        ranks: long [B, N], the place of a node among its siblings, in the order they were drawn.
        depths: long [B, N], 0 for the root.
        scores: [B, N], logarithm of how likely the path to each node is to be kept (`worth_of_children`); -inf where
            there is no draft.
        laws: [B, 1 + (depth - 1) * width, V], the drafter's law behind each node; None where no rule needs it.
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    scores: Tensor
    laws: Tensor | None

    def nodes(self, chosen: Tensor) -> Tree:
        """The tree of some nodes [B, M], in ascending order and with each node's ancestors among them."""
        place = torch.zeros_like(self.parents)  # of each old node among the chosen
        place.scatter_(1, chosen, torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen))
        tokens, ranks, depths, scores = (
            values.gather(1, chosen) for values in (self.tokens, self.ranks, self.depths, self.scores)
        )
        return Tree(tokens, place.gather(1, self.parents.gather(1, chosen)), ranks, depths, scores, None)


def ancestry(parents: Tensor, depth: int) -> Tensor:
    """Which nodes each node sees, itself and its ancestors: parents long [B, N] to bool [B, N, N]."""
    itself = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
    visible = itself.expand(len(parents), -1, -1)
    rows = parents[..., None].expand(-1, -1, parents.shape[1])
    for _ in range(depth):
        visible = itself | visible.gather(1, rows)
    return visible


def worth_of_children(draft: Tensor, best: Tensor, settings: Any) -> Tensor:
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
    if settings.siblings == TOP_K:
        return best
    spread = 1 - draft.exp().square().sum(-1, keepdim=True)
    # At most 3/4: above it a second child would be worth more than the first, without which it has no law.
    refused = ((1 - settings.expected_acceptance) * spread).clamp_(0, 0.75)  # [B, N, 1]
    later = torch.arange(best.shape[-1] - 1, device=best.device)
    return torch.cat([(1 - refused).log(), (refused / 3).log() + later * math.log(2 / 3)], -1)


@dataclass
class Path:
    """What a walk down the tree kept.

    Attributes:
        nodes: long [B, D + 1], the root, then the accepted nodes; behind the last one it is repeated.
        kept: long [B], how many nodes were accepted.
        replacement: long [B, 1], the token behind the path.
    """

    nodes: Tensor
    kept: Tensor
    replacement: Tensor


class TreeSampler(Sampler):
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
        relaxation: the numbers of a relaxed rule, by name, such as {"delta": 0.2}; see `Relaxation`.
        graph: replay the calls as a CUDA graph, see `visual_spec.samplers.core.graph`; the tokens are the same. "auto"
            does so where it can.

    Raises:
        ValueError: a value that is not one of these.
    """

    takes = ("drafter", "drafter_condition", "codebook")
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
        relaxation: Mapping[str, Any] | None = None,
        graph: bool | str = AUTO,
    ) -> None:
        check_count("depth", depth)
        check_count("width", width)
        check_choice("siblings", siblings, SIBLINGS)
        Relaxation.of(acceptance, relaxation)
        if not 0 < expected_acceptance <= 1:
            raise ValueError(
                f"expected_acceptance={expected_acceptance!r}; pass a probability above 0 and at most 1."
            )
        check_graph(graph)
        _check_nodes(num_nodes, depth * width, acceptance, siblings)

    @property
    def num_scored(self) -> int:
        """Nodes of the target call: the root, and the drafts that are scored."""
        return 1 + (self.config.num_nodes or self.config.depth * self.config.width)

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        check_drafter(self, model, parts.get("drafter"))
        check_trees(model, parts["drafter"])
        self.relaxation.check(parts.get("codebook"), model.vocab_size)
        if self.config.width > model.vocab_size:
            raise ValueError(
                f"width={self.config.width}, but siblings differ and the vocabulary has {model.vocab_size} tokens; "
                f"pass a width of at most {model.vocab_size}."
            )

    def window_of(self, model: Any) -> int:
        return max(self.num_scored, self.config.depth + 1)

    def prepare(self, run: Run) -> DraftedState:
        check_room(self.num_scored, run.cache.window)
        depth, width = self.config.depth, self.config.width
        # The most nodes of a drafter call: all levels but the last, or a text of depth + 1 tokens to catch up.
        return begin_drafted(run, depth + 1, max((depth - 1) * width, depth + 1))

    def step(self, run: Run, state: DraftedState) -> None:
        """Draft a tree, score it in one call, commit the path that is kept and one token more."""
        depth = self.config.depth
        tree = self.propose(run, state)
        run.lap("draft")
        slots = state.lengths[:, None] + tree.depths  # [B, N], the slot that each node predicts
        logits = run.model(state.cache, tree.tokens, slots - 1, ancestry(tree.parents, depth))  # [R, N, V]
        run.lap("model")
        state.round += 1
        path = self.walk(run, state, tree, run.law(logits, slots, run.guided))
        slots = state.next_slots(depth + 1)  # [B, D + 1]
        run.model.keep(state.cache, path.nodes, slots - 1)
        if hasattr(run.drafter, "observe"):
            features = state.cache.features  # [R, N, dim]
            along = path.nodes.repeat(len(features) // len(slots), 1)
            run.drafter.observe(state.drafter_cache, rows_of(features, along), slots - 1)
        # The accepted drafts, then the replacement where the path ends.
        drafts = tree.tokens.gather(1, path.nodes[:, 1:])
        tokens = torch.cat([drafts, path.replacement], 1).scatter(1, path.kept[:, None], path.replacement)
        state.tokens.scatter_(1, slots, tokens)
        state.commit(slots, path.kept + 1, run.num_tokens)
        run.lap("verify")

    def propose(self, run: Run, state: DraftedState) -> Tree:
        """Draft a tree of `width` nodes on each of `depth` levels; each level but the last costs a drafter call."""
        depth, width, top_k = self.config.depth, self.config.width, self.config.siblings == TOP_K
        # Nodes of one level share a slot, and so its noise. Only one of them can be on the path that is kept, and which
        # one it is does not depend on this noise.
        stream, round = (TOKEN, 0) if self.identical else (DRAFT, state.round + 1)
        zero = torch.zeros_like(state.lengths)[:, None]  # [B, 1]
        logits = catch_up(run.drafter, state, depth + 1)  # [R, 1, V]
        precise = torch.promote_types(logits.dtype, torch.float32)
        newest = state.tokens.gather(1, state.lengths[:, None] - 1)
        tree = Tree(newest, zero, zero, zero, zero.to(precise), None)
        laws = []
        for level in range(1, depth + 1):
            first = tree.tokens.shape[1] - logits.shape[1]  # the first node of the last level
            slots = state.lengths[:, None].expand(-1, logits.shape[1]) + level - 1
            draft = draft_law(run.law, logits, slots, run.guided)  # [B, nodes of the last level, V]
            best = draft.topk(min(width, draft.shape[-1]), -1)
            # How many children a node gets is settled before they are drawn. The sort is stable, so that among equally
            # worthy ones child k comes before child k + 1.
            worth = tree.scores[:, first:, None] + worth_of_children(draft, best.values, self.config)
            if top_k:
                children, ranked = best.indices, worth
            else:
                children = run.noise.ranking(
                    draft, slots, best.values.shape[-1], stream, round
                )  # [B, nodes, K]
                # First draws of first draws are always there: a tree keeps no fewer drafts than the chain in it.
                ranked = worth.clone()
                ranked[:, 0, 0].fill_(torch.inf)
            order = (
                ranked.flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, :width]
            )  # [B, width]
            parents, ranks = order // best.values.shape[-1], order % best.values.shape[-1]
            tokens = children.flatten(1).gather(1, order)
            scores = worth.flatten(1).gather(1, order)
            # The grid ends here, and a law of fewer tokens than children runs out: what comes then is no draft.
            there = best.values.flatten(1).gather(1, order) > -torch.inf
            scores = torch.where(there & (slots[:, :1] < run.num_tokens), scores, -torch.inf)
            tree = Tree(
                torch.cat([tree.tokens, tokens], 1),
                torch.cat([tree.parents, parents + first], 1),
                torch.cat([tree.ranks, ranks], 1),
                torch.cat([tree.depths, torch.full_like(tokens, level)], 1),
                torch.cat([tree.scores, scores], 1),
                None,
            )
            laws.append(draft)
            if level < depth:
                # The drafter's text ends with the root: its tree is the forest behind it.
                visible = ancestry(tree.parents, level)[:, 1:, 1:]
                places = state.lengths[:, None] - 1 + tree.depths[:, 1:]
                logits = run.drafter(state.drafter_cache, tree.tokens[:, 1:], places, visible)[:, -width:]
        if self.num_scored <= depth * width:
            # EAGLE-2's second choice. A node is no more probable than its parent and the sort is stable, so no parent
            # is left out before its child.
            chosen = tree.scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.num_scored]
            return tree.nodes(chosen.sort(-1).values)
        if not self.identical and not top_k:
            tree.laws = torch.cat(laws, 1)
        return tree

    def walk(self, run: Run, state: DraftedState, tree: Tree, target: Tensor) -> Path:
        """From the root, test the children of the node reached, until none is kept or the tree ends.

        Args:
            target: [B, N, V], the target law behind every node.
        """
        width, slots = self.config.width, state.lengths[:, None]
        at = torch.zeros_like(slots)  # [B, 1], the node reached
        going = torch.ones_like(at, dtype=torch.bool)
        nodes, kept = [at], torch.zeros_like(state.lengths)
        left = rows_of(target, at)[:, 0]  # [B, V], the law of the token behind the path
        count = min(width, tree.tokens.shape[1] - 1)
        for level in range(self.config.depth):
            # The children of the node reached, in the order they were drawn: [B, K].
            child = (tree.parents == at) & (tree.depths == level + 1) & (tree.scores > -torch.inf)
            children = tree.ranks.masked_fill(~child, width).topk(count, largest=False).indices
            there = child.gather(1, children) & going
            tokens = tree.tokens.gather(1, children)
            accepted, refused = verify_siblings(
                left,
                tokens,
                None if self.identical else _sibling_laws(tree, at, tokens, target),
                run.noise,
                slots + level,
                rule=run.rule,
                round=state.round,
                there=there,
                meter=state.meter,
                drawn=tree.laws is not None,
            )
            left = torch.where(going, refused, left)
            going = going & (accepted < count)[:, None]
            at = torch.where(going, children.gather(1, accepted.clamp(max=count - 1)[:, None]), at)
            kept = kept + going[:, 0]
            nodes.append(at)
            left = torch.where(going, rows_of(target, at)[:, 0], left)
        last = run.noise.categorical(
            left[:, None], slots + kept[:, None], *final_noise(run.rule, state.round)
        )
        return Path(torch.cat(nodes, 1), kept, last)


def _check_nodes(num_nodes: object, drafted: int, acceptance: str, siblings: str) -> None:
    if num_nodes is None:
        return
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or not 1 <= num_nodes <= drafted:
        raise ValueError(
            f"num_nodes={num_nodes!r}, but depth * width = {drafted} nodes are drafted; pass an integer from 1 to "
            f"{drafted}, or None (score all of them)."
        )
    if num_nodes < drafted and acceptance != "identical" and siblings == WITHOUT_REPLACEMENT:
        raise ValueError(
            f"num_nodes={num_nodes} would choose among drafts by what they turned out to be, and those that are left "
            "no longer follow the law they were drawn from: not exact. Pass num_nodes=None and a smaller width, "
            "siblings='top-k' (nothing is drawn), or acceptance='identical' (any draft will do)."
        )


def _sibling_laws(tree: Tree, parent: Tensor, tokens: Tensor, like: Tensor) -> Tensor:
    """The law that each of the siblings [B, K] was drawn from, given the ones before it: [B, K, V]."""
    if tree.laws is None:  # the most probable ones: nothing is drawn
        points = like.new_full((*tokens.shape, like.shape[-1]), -torch.inf)
        return points.scatter_(-1, tokens[..., None], 0.0)
    # Nodes of the last level have no children, and no law.
    laws = [rows_of(tree.laws, parent.clamp(max=tree.laws.shape[1] - 1))]  # each [B, 1, V]
    for sibling in range(tokens.shape[1] - 1):
        laws.append(without(laws[-1], tokens[:, sibling, None, None]))
    return torch.cat(laws, 1)


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


def check_room(nodes: int, window: int) -> None:
    """Refuse a tree that is larger than the cache's scratch room.

    Args:
        nodes: of the target call, the root included.

    Raises:
        ValueError: names the sizes.
    """
    if nodes > window:
        raise ValueError(
            f"a tree of {nodes} nodes (the root among them) does not fit the model's cache, which has room for "
            f"{window}; pass num_nodes, or depth and width, for at most {window - 1} nodes behind the root."
        )
