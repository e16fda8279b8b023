"""Jacobi decoding with several drafts for the first slots of the window: SJD-PAC, made exact.

Half of the calls of speculative Jacobi decoding commit one token, because the first draft is refused. So the first D
slots hold K siblings each, the usual draft and K - 1 others. One tree call scores every combination of them:

    root -+- draft of slot n -+- draft of slot n + 1 -- draft of slot n + 2 -- ...   the main branch, W nodes
          |                   +- sibling
          +- sibling ---------+- draft of slot n + 1
                              +- sibling

The walk starts at the root. At slot i it tests the siblings against the law of the current node, by recursive
rejection. A kept sibling is the next node. If all are refused, the last residual gives the token and the walk ends. A
walk that leaves the main branch and reaches the last level takes one more token from the law of its leaf. Slots after
the end of the walk are drafted as in `jacobi`, from the laws of the main branch.

Why it is lossless. Let N be the randomness used at the slots before i, in all calls. The call at which slot i is first
tested is a function of N. So are the law of the node it is tested under and the law its main draft was drawn from,
because the laws of the previous call depend on drafts of earlier slots only. Then, given N,

* the main draft follows its label: it was drawn from the label afresh, or with the slot's own Gumbel noise; or it came
  from recursive rejection, whose output follows the law it was run against, and that law became its label;
* each other sibling is drawn in this call from that label without the siblings before it, renormalised, and is labelled
  with this law. A label with no mass left (a copied token) gives no siblings;
* the acceptance numbers and the residual's noise are addressed by slot, call and sibling, and have no other use: in one
  call a slot is either walked over or drafted, and N decides which.

So recursive rejection is exact at slot i given N, and by induction the committed tokens follow the autoregressive law.
K-SEQ needs siblings that are independent given N. There all other siblings are drawn from the label itself, each with
its own numbers, and the same steps hold.

Siblings belong to slots, not to nodes: all nodes of a level share them, which no step above forbids. (The SJD-PAC
release draws the extra candidates from the residual of the last refusal but labels them with the law itself. This is
not exact.)

Source: Kang et al., "SJD-PAC: accelerating speculative Jacobi decoding via proactive drafting and adaptive
continuation", CVPR 2026. Its continuation is the maximal coupling of `jacobi`; its depth counts the root, and ours
does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TreeModel
from visual_spec.models.core.settings import AUTO, COUNT, Graph, OneOf, register_to_config
from visual_spec.samplers.core.checks import Acceptance, Coupling
from visual_spec.samplers.core.drafts import INITIAL_DRAFTS, Draft, rows_of, with_bonus
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import DRAFT, TOKEN
from visual_spec.samplers.core.state import Run, draw_near
from visual_spec.samplers.core.verification import verify_laws
from visual_spec.samplers.raster.jacobi import JacobiState, SpeculativeJacobiSampler, widest
from visual_spec.samplers.raster.siblings import (
    final_noise,
    sibling_stream,
    verify_siblings,
    with_replacement,
    without,
    without_replacement,
)

MOST_NODES = 1024
RECURSIVE = "recursive"
K_SEQ = "k-seq"
SIBLING_RULES = (RECURSIVE, K_SEQ)


@dataclass(frozen=True)
class HeadTree:
    """The nodes of a call: the main branch, root first, then the others, level by level.

    A node at level t holds a token of slot n + t - 1; the root has level 0. Its path names it: the sibling numbers from
    the root to the node, read in base K. Path 0 is the main branch, node t; the others follow.
    """

    window: int
    siblings: int
    depth: int

    def first(self, level: int) -> int:
        """Return the node of path 1 of a level."""
        return self.window + sum(self.siblings**earlier - 1 for earlier in range(1, level))

    @property
    def nodes(self) -> int:
        """Number of nodes of a call."""
        return self.first(self.depth + 1)

    def node(self, level: int, path: Tensor) -> Tensor:
        """Return the node of each path: long, of the shape of `path`."""
        return torch.where(path == 0, level, path + (self.first(level) - 1))

    @cache  # noqa: B019 (a few shapes, for the life of the process)
    def layout(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the level of every node [N], the sibling it holds [N], and bool [N, N]: which nodes each node sees."""
        levels, numbers, ancestors = list(range(self.window)), [0] * self.window, []
        for node in range(self.window):
            ancestors.append(set(range(node + 1)))
        parents = [0]  # nodes of the level above, by path
        for level in range(1, self.depth + 1):
            here = [level]
            for path in range(1, self.siblings**level):
                here.append(len(levels))
                levels.append(level)
                numbers.append(path % self.siblings)
                ancestors.append(ancestors[parents[path // self.siblings]] | {here[-1]})
            parents = here
        visible = torch.zeros(len(levels), len(levels), dtype=torch.bool)
        for node, seen in enumerate(ancestors):
            visible[node, list(seen)] = True
        return torch.tensor(levels, device=device), torch.tensor(numbers, device=device), visible.to(device)


@dataclass(frozen=True)
class Walk:
    """Where the walks down a tree of D levels went.

    Attributes:
        nodes: D + 1 times long [B, 1], from the root on.
        laws: D + 1 times [B, 1, V], the target's laws after these nodes.
        tokens: D times long [B, 1], the token of each slot.
        kept: long [B], how many of them were drafts.
        on_main: bool [B], whether the walk ended in the leaf of the main branch.
    """

    nodes: list[Tensor]
    laws: list[Tensor]
    tokens: list[Tensor]
    kept: Tensor
    on_main: Tensor


class ProactiveJacobiSampler(SpeculativeJacobiSampler):
    """Speculative Jacobi decoding with K siblings for each of the first D slots of the window. Lossless.

    With one sibling it returns the tokens of `SpeculativeJacobiSampler` with carried drafts. A call scores `window`
    nodes of the main branch and K + K**2 + ... + K**D - D others; models that decode one picture at a time have room
    for them. The module docstring describes the method and proves that it is lossless.

    Args:
        window: slots of the main branch, at least 2.
        siblings: K, drafts for each of the first slots, at least 1.
        depth: D, number of slots with siblings, at least 1 and below the window.
        coupling: as in `SpeculativeJacobiSampler`: "maximal", "independent" or "gumbel".
        acceptance: "exact"; or "identical", which needs coupling "gumbel" and returns the tokens of
            `AutoregressiveSampler` for the same generator.
        initial_draft: as in `SpeculativeJacobiSampler`. A copied token has no siblings: a slot gets them after a call
            has scored it.
        sibling_rule: "recursive" (different siblings, tested by recursive rejection), or "k-seq" (independent
            siblings, K-SEQ of SpecTr). Both are exact; not used by acceptance "identical".
        graph: as in `SpeculativeJacobiSampler`.
    """

    takes = ()

    reads_text = False

    @register_to_config
    def __init__(
        self,
        window: Annotated[int, COUNT] = 32,
        siblings: Annotated[int, COUNT] = 4,
        depth: Annotated[int, COUNT] = 2,
        coupling: Coupling = "maximal",
        acceptance: Acceptance = "exact",
        initial_draft: Annotated[str, OneOf(INITIAL_DRAFTS)] = "left",
        sibling_rule: Annotated[str, OneOf(SIBLING_RULES)] = RECURSIVE,
        graph: Graph = AUTO,
    ) -> None:
        if sibling_rule == K_SEQ and acceptance == "identical":
            raise ValueError(
                "sibling_rule='k-seq' is a test against chance, and acceptance='identical' makes no such test; pass "
                "sibling_rule='recursive', or acceptance='exact'."
            )
        if depth >= window:
            raise ValueError(
                f"depth={depth} in a window of {window} slots, which has {window - 1} drafts; pass a depth below the "
                "window."
            )
        # The power alone may be astronomical, so the depth is bounded first.
        nodes = siblings ** min(depth, 11)
        if siblings > 1 and (nodes > MOST_NODES or HeadTree(window, siblings, depth).nodes > MOST_NODES):
            raise ValueError(
                f"siblings={siblings} over depth={depth} and window={window} make a tree of more than {MOST_NODES} "
                "nodes a call; pass fewer siblings or less depth."
            )

    def tree(self, model: TreeModel) -> HeadTree:
        """Return the shape of a call's tree."""
        window = max(min(widest(self.config.window), model.grid.num_tokens), self.config.depth + 1)
        return HeadTree(window, self.config.siblings, self.config.depth)

    def plan(self, run: Run) -> None:
        run.window = self.tree(run.model).nodes

    def prepare(self, run: Run) -> JacobiState:
        # Also under acceptance "identical": siblings are drawn from the laws.
        return self.labelled(run, self.tree(run.model).window)

    def check(self, model: TreeModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        if not callable(getattr(model, "keep", None)):
            raise TypeError(
                f"{type(model).__name__} has no `keep`: it cannot score trees of drafts. Use SpeculativeJacobiSampler, "
                "or a model that implements TreeModel."
            )
        if self.config.sibling_rule == RECURSIVE and self.config.siblings > model.vocab_size:
            raise ValueError(
                f"siblings={self.config.siblings} for a vocabulary of {model.vocab_size} tokens; siblings differ from "
                f"each other, so pass at most {model.vocab_size}."
            )

    def step(self, run: Run, state: JacobiState) -> None:
        """Make one target call: score the tree, walk down it, replace the refused token, draft again.

        Commits 1 to W tokens a row. A complete row does not change.
        """
        window, tree = state.window, self.tree(run.model)
        count, depth = self.config.siblings, self.config.depth
        levels, numbers, visible = tree.layout(run.device)
        draft = with_bonus(self.propose(run, state))  # [B, W], the main branch
        slots = state.next_slots(window)
        state.round += 1
        # Of the first D slots: [B, D, K], and D times [B, K, V].
        siblings, labels = self._siblings(run, state, draft, slots)

        newest = state.tokens.gather(1, slots[:, :1] - 1)
        # Where the tokens of the other nodes stand among the siblings.
        place = (levels[window:] - 1) * count + numbers[window:]
        others = siblings.flatten(1).index_select(1, place)
        tokens = torch.cat([newest, draft.tokens[:, :-1], others], 1)  # [B, N]
        node_slots = (state.lengths - 1)[:, None] + levels
        logits = run.model(state.cache, tokens, node_slots, visible.expand(len(slots), -1, -1))  # [R, N, V]
        run.lap("model")
        target = run.law(logits, node_slots + 1, run.guided)  # [B, N, V]

        walk = self._walk(run, state, tree, target, siblings, labels, slots)
        # After the head the main branch continues. At its first slot, a walk that ends in another leaf takes its last
        # token.
        laws = [*walk.laws, target[:, depth + 1 : window]]
        chain = verify_laws(
            torch.cat(laws[-2:], 1),
            run.noise,
            slots[:, depth:],
            draft.after(depth),
            rule=run.rule,
            round=state.round,
            coupled=True,
        )
        kept = walk.kept + torch.where(walk.on_main, chain.kept, 0)

        rest = torch.arange(depth + 1, window, device=run.device).expand(len(slots), -1)
        along = torch.cat([*walk.nodes, rest], 1)  # [B, W]
        if run.keeps_scores:
            run.scored = rows_of(logits, along.repeat(len(logits) // len(slots), 1)), slots
        run.model.keep(state.cache, along, slots - 1)
        near = None
        if run.unit is not None:
            _, near = draw_near(run.law, run.noise, logits, node_slots + 1, run.guided, run.unit)
            near = near.gather(1, along)
        state.tokens.scatter_(1, slots, torch.cat([*walk.tokens, chain.tokens], 1))
        state.commit(slots, kept + 1, run.num_tokens, near)
        self.redraft(run, state, torch.cat(laws, 1), kept + 1, window)
        run.lap("verify")

    def _walk(
        self,
        run: Run,
        state: JacobiState,
        tree: HeadTree,
        target: Tensor,
        siblings: Tensor,
        labels: list[Tensor],
        slots: Tensor,
    ) -> Walk:
        """Walk down the tree of the first D slots, one verified token a level.

        Args:
            target: [B, N, V], the laws after the nodes.
            siblings, labels: as `_siblings` returns them.
            slots: long [B, W].
        """
        count = self.config.siblings
        # A row whose walk has ended continues along the main branch: the outcome there is the slot's next draft.
        path, kept = torch.zeros_like(state.lengths), torch.zeros_like(state.lengths)
        walking = torch.ones_like(state.lengths, dtype=torch.bool)
        nodes, laws, tokens = [], [], []
        for level in range(self.config.depth):
            nodes.append(tree.node(level, path)[:, None])
            laws.append(rows_of(target, nodes[-1]))  # [B, 1, V]
            here, at = siblings[:, level], slots[:, level, None]
            accepted, left = verify_siblings(
                laws[-1][:, 0],
                here,
                labels[level],
                run.noise,
                at,
                rule=run.rule,
                round=state.round,
                independent=self.config.sibling_rule == K_SEQ,
            )
            replacement = run.noise.categorical(left[:, None], at, *final_noise(run.rule, state.round))
            sibling = here.gather(1, accepted[:, None].clamp(max=count - 1))
            tokens.append(torch.where(accepted[:, None] < count, sibling, replacement))
            walking = walking & (accepted < count)
            kept = kept + walking
            path = torch.where(walking, path * count + accepted, 0)
        nodes.append(tree.node(self.config.depth, path)[:, None])
        laws.append(rows_of(target, nodes[-1]))
        return Walk(nodes, laws, tokens, kept, walking & (path == 0))

    def _siblings(
        self, run: Run, state: JacobiState, draft: Draft, slots: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """The siblings of the first D slots, main draft first: tokens [B, D, K]; and the laws [B, K, V] of each slot.

        Under Gumbel coupling, different siblings are the K best of the slot's own noise, and the main draft is the
        best. Independent siblings have their own noise.
        """
        assert draft.label is not None
        count, depth = self.config.siblings - 1, self.config.depth
        independent = self.config.sibling_rule == K_SEQ
        own_noise = self.config.coupling == "gumbel" and not independent
        stream, round = (TOKEN, 0) if own_noise else (sibling_stream(DRAFT, 1), state.round)
        dense = draft.label.dense(draft.tokens)  # [B, W, V]
        tokens, laws = [], []
        for level in range(depth):
            main, label, at = draft.tokens[:, level, None], dense[:, level], slots[:, level, None]
            if count == 0:
                others, other_laws = main[:, :0], label[:, None][:, :0]
            elif independent:
                others, other_laws = with_replacement(label, count, run.noise, at, round, stream)
            else:
                left = without(label, main)
                others, other_laws = without_replacement(left, count, run.noise, at, round, stream)
            tokens.append(torch.cat([main, others], 1))
            laws.append(torch.cat([label[:, None], other_laws], 1))
        return torch.stack(tokens, 1), laws
