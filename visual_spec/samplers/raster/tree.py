"""Speculative decoding with a tree of drafts: one target call scores many continuations, one path is kept.

A step drafts the tree level by level and scores all of it in one tree call of the target. It then walks from the root
to a kept child, to a kept child of that one, and so on, and commits the path and one more token. `prepare` and the
state come from `drafted.py`: between two steps there are no drafts.

With siblings "top-k", `num_nodes` and acceptance "lantern" this is the walk of LANTERN (Jang et al., ICLR 2025) over
EAGLE-2's tree; with siblings drawn without replacement and a `factor`, LANTERN++'s tree (Park et al., 2025). LANTERN's
release removes all K neighbours of a refused draft from the target law; this sampler removes only those that lent mass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TreeModel
from visual_spec.models.core.settings import AUTO, COUNT, Graph, OneOf, Within, register_to_config
from visual_spec.samplers.core.acceptance import RelaxedAcceptance, RelaxedNumbers
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.drafters import ask_drafter, catch_up, check_drafter, draft_law
from visual_spec.samplers.core.drafts import rows_of
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import DRAFT, TOKEN
from visual_spec.samplers.core.state import Run, draw_near
from visual_spec.samplers.core.trace import IDENTICAL
from visual_spec.samplers.raster.drafted import DraftedState, begin_drafted
from visual_spec.samplers.raster.siblings import final_noise, verify_siblings, without

WITHOUT_REPLACEMENT = "without-replacement"
TOP_K = "top-k"
SIBLINGS = (WITHOUT_REPLACEMENT, TOP_K)


@dataclass
class Tree:
    """The drafts of one step. Node 0 is the root, the newest committed token; parents precede their children.

    Attributes:
        tokens: long [B, N].
        parents: long [B, N], the number of each node's parent; the root is its own parent.
        ranks: long [B, N], the place of a node among its siblings, in the order of their draws.
        depths: long [B, N], 0 for the root.
        scores: [B, N], log of the estimated probability that the path to each node is kept (`worth_of_children`); -inf
            for a missing draft.
        laws: [B, 1 + (depth - 1) * width, V], the drafter's law after each node; None if no rule needs it.
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    depths: Tensor
    scores: Tensor
    laws: Tensor | None

    def nodes(self, chosen: Tensor) -> Tree:
        """Return the tree of the chosen nodes [B, M], in ascending order and including each node's ancestors."""
        place = torch.zeros_like(self.parents)  # new number of each old node
        place.scatter_(1, chosen, torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen))
        tokens, ranks, depths, scores = (
            values.gather(1, chosen) for values in (self.tokens, self.ranks, self.depths, self.scores)
        )
        return Tree(tokens, place.gather(1, self.parents.gather(1, chosen)), ranks, depths, scores, None)


def ancestry(parents: Tensor, depth: int) -> Tensor:
    """Return which nodes each node sees, its ancestors and itself: parents long [B, N] to bool [B, N, N]."""
    itself = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)
    visible = itself.expand(len(parents), -1, -1)
    rows = parents[..., None].expand(-1, -1, parents.shape[1])
    for _ in range(depth):
        visible = itself | visible.gather(1, rows)
    return visible


def worth_of_children(draft: Tensor, best: Tensor, settings: Any) -> Tensor:
    """Return the log of each child's estimated probability of being kept once its parent is, before any child is drawn.

    The most probable tokens are kept about as often as the drafter's law says (EAGLE-2). For drawn children that
    measure is wrong: a draw is kept with probability min(1, target / draft), whether it was probable or not. If the
    laws differ by small independent errors of their logits, the first child is refused about in proportion to 1 - sum
    of draft(x)**2. This is 0 for a point and nearly 1 for a flat law. The rest of the target then lies where it exceeds
    the draft, and a further sibling hits it about one time in three.

    Args:
        draft: [B, N, V], the law after each node.
        best: [B, N, K], its largest values, in descending order.

    Returns:
        [B, N, K], not increasing along K.
    """
    if settings.siblings == TOP_K:
        return best
    spread = 1 - draft.exp().square().sum(-1, keepdim=True)
    # At most 3/4: above it a second child would be worth more than the first, and a second child needs the first.
    refused = ((1 - settings.expected_acceptance) * spread).clamp_(0, 0.75)  # [B, N, 1]
    later = torch.arange(best.shape[-1] - 1, device=best.device)
    return torch.cat([(1 - refused).log(), (refused / 3).log() + later * math.log(2 / 3)], -1)


@dataclass
class Path:
    """The result of a walk down the tree.

    Attributes:
        nodes: long [B, D + 1], the root, then the accepted nodes; the last one is repeated to fill.
        kept: long [B], the number of accepted nodes.
        replacement: long [B, 1], the token after the path.
    """

    nodes: Tensor
    kept: Tensor
    replacement: Tensor


class TreeSampler(Sampler[TreeModel, DraftedState]):
    """Speculative decoding with a tree of drafts, verified by recursive rejection.

    Tree attention and multi-round rejection are SpecInfer's (Miao et al., ASPLOS 2024, section 4); the tree follows the
    drafter's confidence as in EAGLE-2 (Li et al., EMNLP 2024). Lossless for any drafter over the model's tokens, except
    under the relaxed acceptances of `relaxed.py`.

    Why it is lossless. Let slot i come directly after the kept path. The tests that led there depend only on the drafts
    of slots before i. So does the number of children of the reached node: path probabilities and the law after each
    node decide it before the children are drawn. Given all that, the children follow the laws on their labels, in the
    order drawn, and the noise of acceptance and residual is fresh. So recursive rejection commits a token of the target
    law at slot i. A choice among drafts after they are drawn (`num_nodes`, the second choice of EAGLE-2) breaks this,
    unless nothing is drawn: the most probable tokens are a function of the earlier tokens, and their labels are points.

    Relaxed acceptance. The rule makes every test of recursive rejection; `siblings.recursive_rejection` says what a
    refused sibling leaves to the next. LANTERN's `delta` bounds what one test of a "top-k" sibling moves, so a slot
    moves at most `delta` times the number of its tests. With `bounded`, the siblings of a slot share one `delta`, drawn
    or not (`relaxed.budget_behind`). The trace's divergence is the exact distance for "top-k", and an upper bound in
    the mean for drawn siblings (`siblings.moved_mass`).

    Args:
        depth: levels, at least 1: the most drafts that one call can accept.
        width: nodes of a level, at least 1, and the most children of a node.
        num_nodes: score only the most probable nodes; None scores all depth * width. Not for siblings that are drawn
            and verified exactly.
        siblings: "without-replacement" (drawn from the drafter's law, all different), or "top-k" (its most probable).
        acceptance: "exact" (recursive rejection); "identical" (a child is kept if it is the token that the slot's own
            noise draws from the target law: the tokens of `AutoregressiveSampler` for the same generator. Siblings
            without replacement are then the drafter's best guesses under the same noise); or a relaxed rule:
            "grouped", "clustered" or "lantern".
        expected_acceptance: estimate, above 0 and at most 1, of how often the first of drawn siblings is kept if the
            drafter's law is flat. It shapes the tree (1: a chain, lower: more siblings), not the output law.
        relaxation: the numbers of a relaxed rule, by name, such as {"delta": 0.2}; see `Relaxation`.
        graph: as in `SpeculativeJacobiSampler`.
    """

    takes = ("drafter", "drafter_condition", "codebook")
    needs_drafter = gives_logprobs = True

    @register_to_config
    def __init__(
        self,
        depth: Annotated[int, COUNT] = 5,
        width: Annotated[int, COUNT] = 8,
        num_nodes: Annotated[int | None, Within(1, none="all of them")] = None,
        siblings: Annotated[str, OneOf(SIBLINGS)] = WITHOUT_REPLACEMENT,
        acceptance: RelaxedAcceptance = "exact",
        expected_acceptance: Annotated[float, Within(above=0, most=1)] = 0.6,
        relaxation: RelaxedNumbers = None,
        graph: Graph = AUTO,
    ) -> None:
        drafted = depth * width
        if num_nodes is not None and num_nodes > drafted:
            raise ValueError(
                f"num_nodes={num_nodes!r}, but depth * width = {drafted} nodes are drafted; pass an integer from 1 to "
                f"{drafted}, or None (score all of them)."
            )
        drawn = acceptance != "identical" and siblings == WITHOUT_REPLACEMENT
        if num_nodes is not None and num_nodes < drafted and drawn:
            raise ValueError(
                f"num_nodes={num_nodes} would choose among drafts by what they turned out to be, and those that are "
                "left no longer follow the law they were drawn from: not exact. Pass num_nodes=None and a smaller "
                "width, siblings='top-k' (nothing is drawn), or acceptance='identical' (any draft will do)."
            )

    @property
    def measures_at_least(self) -> bool:
        return False  # `siblings.moved_mass` is the distance of top-k siblings, and an upper bound for drawn ones

    @property
    def num_scored(self) -> int:
        """Number of nodes of the target call: the root, and the scored drafts."""
        return 1 + (self.config.num_nodes or self.config.depth * self.config.width)

    def check(self, model: TreeModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        check_drafter(self, model, parts.get("drafter"))
        for role, network in (("model", model), ("drafter", parts["drafter"])):
            if not hasattr(network, "keep") and not hasattr(network, "follow"):
                raise TypeError(
                    f"the {role}, a {type(network).__name__}, cannot score a tree of drafts; use DraftedSampler, which "
                    "drafts a chain."
                )
        self.relaxation.check(parts.get("codebook"), model.vocab_size)
        if self.config.width > model.vocab_size:
            raise ValueError(
                f"width={self.config.width}, but siblings differ and the vocabulary has {model.vocab_size} tokens; "
                f"pass a width of at most {model.vocab_size}."
            )

    def plan(self, run: Run) -> None:
        run.window = max(self.num_scored, self.config.depth + 1)

    def prepare(self, run: Run) -> DraftedState:
        if self.num_scored > run.cache.window:
            raise ValueError(
                f"a tree of {self.num_scored} nodes (the root among them) does not fit the model's cache, which has "
                f"room for {run.cache.window}; pass num_nodes, or depth and width, for at most "
                f"{run.cache.window - 1} nodes after the root."
            )
        depth, width = self.config.depth, self.config.width
        # The most nodes of a drafter call: all levels but the last, or the depth + 1 tokens of a catch-up.
        return begin_drafted(run, depth + 1, max((depth - 1) * width, depth + 1))

    def step(self, run: Run, state: DraftedState) -> None:
        """Draft a tree, score it in one call, commit the kept path and one more token."""
        depth = self.config.depth
        tree = self.propose(run, state)
        run.lap("draft")
        slots = state.lengths[:, None] + tree.depths  # [B, N], the slot that each node predicts
        logits = run.model(state.cache, tree.tokens, slots - 1, ancestry(tree.parents, depth))  # [R, N, V]
        run.lap("model")
        state.round += 1
        path = self.walk(run, state, tree, run.law(logits, slots, run.guided))
        near = None
        if run.unit is not None:
            _, near = draw_near(run.law, run.noise, logits, slots, run.guided, run.unit)
            near = near.gather(1, path.nodes)
        slots = state.next_slots(depth + 1)  # [B, D + 1]
        if run.keeps_scores:
            run.scored = rows_of(logits, path.nodes.repeat(len(logits) // len(slots), 1)), slots
        run.model.keep(state.cache, path.nodes, slots - 1)
        if hasattr(run.drafter, "observe"):
            features = state.cache.features  # [R, N, dim]
            along = path.nodes.repeat(len(features) // len(slots), 1)
            run.drafter.observe(state.drafter_cache, rows_of(features, along), slots - 1)
        # The accepted drafts, then the replacement after the path.
        drafts = tree.tokens.gather(1, path.nodes[:, 1:])
        tokens = torch.cat([drafts, path.replacement], 1).scatter(1, path.kept[:, None], path.replacement)
        state.tokens.scatter_(1, slots, tokens)
        state.commit(slots, path.kept + 1, run.num_tokens, near)
        run.lap("verify")

    def propose(self, run: Run, state: DraftedState) -> Tree:
        """Draft a tree of `width` nodes on each of `depth` levels; each level but the last costs a drafter call."""
        depth, width, top_k = self.config.depth, self.config.width, self.config.siblings == TOP_K
        # Nodes of one level share a slot, and so its noise. At most one of them is on the kept path, and which one does
        # not depend on this noise.
        stream, round = (TOKEN, 0) if self.keeps == IDENTICAL else (DRAFT, state.round + 1)
        zero = torch.zeros_like(state.lengths)[:, None]  # [B, 1]
        logits = catch_up(run, state, depth + 1)  # [R, 1, V]
        precise = torch.promote_types(logits.dtype, torch.float32)
        newest = state.tokens.gather(1, state.lengths[:, None] - 1)
        tree = Tree(newest, zero, zero, zero, zero.to(precise), None)
        laws = []
        for level in range(1, depth + 1):
            first = tree.tokens.shape[1] - logits.shape[1]  # the first node of the last level
            slots = state.lengths[:, None].expand(-1, logits.shape[1]) + level - 1
            draft = draft_law(run.law, logits, slots, run.guided)  # [B, nodes of the last level, V]
            best = draft.topk(min(width, draft.shape[-1]), -1)
            # The number of children of a node is decided before they are drawn. The sort is stable, so that among equal
            # scores child k comes before child k + 1.
            worth = tree.scores[:, first:, None] + worth_of_children(draft, best.values, self.config)
            if top_k:
                children, ranked = best.indices, worth
            else:
                many = best.values.shape[-1]
                children = run.noise.ranking(draft, slots, many, stream, round)  # [B, nodes, K]
                # The chain of first children is always included: a tree has at least the drafts of its chain.
                ranked = worth.clone()
                ranked[:, 0, 0].fill_(torch.inf)
            order = ranked.flatten(1).sort(dim=-1, descending=True, stable=True).indices
            order = order[:, :width]  # [B, width]
            parents, ranks = order // best.values.shape[-1], order % best.values.shape[-1]
            tokens = children.flatten(1).gather(1, order)
            scores = worth.flatten(1).gather(1, order)
            # Past the end of the grid, or of the law's support, there is no draft.
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
                # The committed tokens in the drafter's cache end with the root, so it gets the tree without its root.
                visible = ancestry(tree.parents, level)[:, 1:, 1:]
                places = state.lengths[:, None] - 1 + tree.depths[:, 1:]
                logits = ask_drafter(run.drafter, state.drafter_cache, tree.tokens[:, 1:], places, visible)
                logits = logits[:, -width:]
        if self.num_scored <= depth * width:
            # EAGLE-2's second choice. A node is at most as probable as its parent and the sort is stable, so no child
            # is chosen without its parent.
            chosen = tree.scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.num_scored]
            return tree.nodes(chosen.sort(-1).values)
        if self.keeps != IDENTICAL and not top_k:
            tree.laws = torch.cat(laws, 1)
        return tree

    def walk(self, run: Run, state: DraftedState, tree: Tree, target: Tensor) -> Path:
        """Walk from the root: test the children of the reached node, until none is kept or the tree ends.

        `target`: [B, N, V], the target law after every node.
        """
        width, slots = self.config.width, state.lengths[:, None]
        at = torch.zeros_like(slots)  # [B, 1], the reached node
        going = torch.ones_like(at, dtype=torch.bool)
        nodes, kept = [at], torch.zeros_like(state.lengths)
        left = rows_of(target, at)[:, 0]  # [B, V], the law of the token after the path
        count = min(width, tree.tokens.shape[1] - 1)
        for level in range(self.config.depth):
            # The children of the reached node, in the order they were drawn: [B, K].
            child = (tree.parents == at) & (tree.depths == level + 1) & (tree.scores > -torch.inf)
            children = tree.ranks.masked_fill(~child, width).topk(count, largest=False).indices
            there = child.gather(1, children) & going
            tokens = tree.tokens.gather(1, children)
            accepted, refused = verify_siblings(
                left,
                tokens,
                None if self.keeps == IDENTICAL else _sibling_laws(tree, at, tokens, target),
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


def _sibling_laws(tree: Tree, parent: Tensor, tokens: Tensor, like: Tensor) -> Tensor:
    """Return the law that each of the siblings [B, K] was drawn from, given the ones before it: [B, K, V]."""
    if tree.laws is None:  # the most probable tokens: nothing is drawn
        points = like.new_full((*tokens.shape, like.shape[-1]), -torch.inf)
        return points.scatter_(-1, tokens[..., None], 0.0)
    # Nodes of the last level have no children, and no law.
    laws = [rows_of(tree.laws, parent.clamp(max=tree.laws.shape[1] - 1))]  # each [B, 1, V]
    for sibling in range(tokens.shape[1] - 1):
        laws.append(without(laws[-1], tokens[:, sibling, None, None]))
    return torch.cat(laws, 1)
