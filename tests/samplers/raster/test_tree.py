"""The tree sampler as an object, and what trees have in common with chains: shapes, caches, raggedness, refusals."""

import math
from typing import Any

import pytest
import torch

from tests.helpers.drafting import (
    CODEBOOK,
    CONDITION,
    GUIDED,
    MODEL,
    NEAR,
    captions,
    check_features,
    counting,
    decode,
    draft_model,
    eagle_pair,
    law_after,
    seeded,
    watch_features,
)
from tests.helpers.refusals import refuses
from tests.helpers.sampler_settings import lossy
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster import tree
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.siblings import without
from visual_spec.samplers.raster.tree import TreeSampler, ancestry

LENGTH = 36
WAYS: list[dict[str, Any]] = [
    dict(siblings="without-replacement", acceptance="exact"),
    dict(siblings="top-k", acceptance="exact"),
    dict(siblings="without-replacement", acceptance="identical"),
    dict(siblings="top-k", acceptance="identical", num_nodes=5),
]
LANTERN = lossy("lantern", delta=0.2, neighbours=8)
BOUNDED = lossy("lantern", delta=0.1, factor=4.0, neighbours=8, bounded=True)
RELAXED: list[dict[str, Any]] = [
    dict(siblings="top-k", num_nodes=7, **LANTERN),
    dict(siblings="top-k", **lossy("grouped", group_size=6, code_distance=2.0, probability_gap=0.3)),
    dict(siblings="without-replacement", **lossy("lantern", factor=3.0, neighbours=8)),
    dict(siblings="without-replacement", **BOUNDED),
    dict(siblings="top-k", **BOUNDED),
]


def drawn_trees(
    monkeypatch, model: Any = MODEL, drafter: Any = NEAR, law: TokenLaw = GUIDED, **settings
) -> list[Any]:
    """(lengths, tree) of every step of one decode."""
    trees = []
    real_propose = TreeSampler.propose

    def propose(self, run, state):
        trees.append((state.lengths.clone(), real_propose(self, run, state)))
        return trees[-1][1]

    monkeypatch.setattr(TreeSampler, "propose", propose)
    decode(TreeSampler(**settings), model, drafter, law=law)
    return trees


@pytest.mark.parametrize("way", WAYS)
def test_trees_have_their_shape(monkeypatch, way):
    depth, width = 3, 4
    sampler = TreeSampler(depth, width, **way)
    for lengths, found in drawn_trees(monkeypatch, depth=depth, width=width, **way):
        batch_size, nodes = found.tokens.shape
        assert nodes == sampler.num_scored and found.tokens[:, 0].max() < 12
        for row in range(batch_size):
            seen = set()
            for column in range(nodes):
                parent = int(found.parents[row, column])
                if column == 0:
                    assert parent == 0 and found.depths[row, 0] == 0 and found.scores[row, 0] == 0
                    continue
                assert parent < column and found.depths[row, column] == found.depths[row, parent] + 1
                assert found.scores[row, column] <= found.scores[row, parent] + 1e-9
                there = found.scores[row, column] > -torch.inf
                assert there <= (lengths[row] + found.depths[row, column] - 1 < LENGTH)
                if there:
                    name = parent, int(found.tokens[row, column])
                    assert name not in seen  # siblings differ
                    seen.add(name)
                    rank = int(found.ranks[row, column])
                    siblings = found.parents[row] == parent
                    assert rank == 0 or (siblings & (found.ranks[row] == rank - 1))[1:].any()
            if way.get("num_nodes") is None:
                assert torch.bincount(found.depths[row]).tolist() == [1, width, width, width]


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("pair", ["tables", "eagle"])
def test_a_tree_may_score_fewer_nodes_than_its_depth(pair, num_nodes):
    (model, drafter), condition = (MODEL, NEAR), CONDITION[:2]
    if pair == "eagle":
        (model, drafter), condition = eagle_pair(), captions(2)
    options: dict[str, Any] = dict(law=GUIDED, batch_size=2)
    plain = AutoregressiveSampler()(model, condition, generator=seeded(range(2)), **options).tokens
    sampler = TreeSampler(4, 2, num_nodes, "top-k", "identical")
    found = decode(sampler, model, drafter, condition, **options)
    assert torch.equal(found.tokens, plain)
    assert found.trace.target_calls.max() < plain.shape[1]
    exact = decode(TreeSampler(4, 2, num_nodes, "top-k", "exact"), model, drafter, condition, **options).trace
    for commits in exact.commit_call.tolist():
        assert max(commits.count(call) for call in set(commits)) <= num_nodes + 1


@pytest.mark.usefixtures("whole_batch")
def test_first_draws_of_first_draws_are_always_in_the_tree(monkeypatch):
    for lengths, found in drawn_trees(monkeypatch, depth=4, width=2, expected_acceptance=0.05):
        for row in range(4):
            column = 0
            for level in range(1, min(4, LENGTH - int(lengths[row])) + 1):
                child = (
                    (found.parents[row] == column) & (found.ranks[row] == 0) & (found.depths[row] == level)
                )
                assert child.sum() == 1 and found.scores[row, child] > -torch.inf
                column = int(child.nonzero())


def test_further_siblings_are_worth_little_where_the_drafter_is_sure(monkeypatch):
    worth = []
    for scale in (30, 0.3):
        drafter = TabularModel(TokenGrid(6, 6), 12, order=1, conditions=3, scale=scale)
        _, found = drawn_trees(monkeypatch, drafter=drafter, depth=3, width=4)[0]
        first = found.depths == 1
        worth.append([float(found.scores[first & (found.ranks == rank)].exp().mean()) for rank in range(4)])
    assert worth[0][0] > 0.99 and max(worth[0][1:]) < 0.01
    assert 0.6 < worth[1][0] < 0.7 and worth[1][1] > 0.1 and worth[1][1] > worth[1][2] > worth[1][3]


@pytest.mark.parametrize("expected_acceptance", [0.001, 0.3, 1.0])
@pytest.mark.parametrize("siblings", ["without-replacement", "top-k"])
def test_no_sibling_is_worth_more_than_one_drawn_before_it(siblings, expected_acceptance):
    """The law of a drawn sibling is that of one that comes after the others: it must not stand alone."""
    settings = TreeSampler(2, 6, siblings=siblings, expected_acceptance=expected_acceptance).config
    for scale in (0, 1, 5, 50):
        law = (scale * torch.randn(3, 4, 12, generator=torch.Generator().manual_seed(0))).log_softmax(-1)
        worth = tree.worth_of_children(law, law.topk(6).values, settings)
        assert worth.shape == (3, 4, 6) and not (worth[..., 1:] > worth[..., :-1]).any()


def test_ancestry_is_the_path_to_the_root():
    parents = torch.tensor([[0, 0, 0, 1, 1, 2, 5], [0, 0, 1, 2, 3, 4, 5]])
    visible = ancestry(parents, 6)
    for row in range(2):
        for node in range(7):
            path = {0, node}
            while node:
                node = int(parents[row, node])
                path.add(node)
            assert set(visible[row, max(path)].nonzero()[:, 0].tolist()) == path


def test_a_tree_keeps_no_fewer_drafts_than_the_chain_in_it():
    """The first siblings are the drafts of the chain, tested with the same noise: in the first call this must show."""
    batch_size = 400
    condition = torch.zeros(batch_size, dtype=torch.long)
    arguments: dict[str, Any] = dict(condition=condition, batch_size=batch_size)
    chain = decode(DraftedSampler(3), **arguments).trace.commit_call
    branched = decode(TreeSampler(depth=3, width=3), **arguments).trace.commit_call
    kept = [(commit == 1).sum(1) for commit in (chain, branched)]
    assert (kept[1] >= kept[0]).all() and (kept[1] > kept[0]).sum() > 40


IDENTICAL: list[Any] = [
    *(DraftedSampler(count, bound, "identical") for count, bound in ((1, 0.0), (4, 0.0), (4, 0.3))),
    *(TreeSampler(depth, width, acceptance="identical") for depth, width in ((1, 4), (4, 3))),
    TreeSampler(3, 4, 6, "top-k", "identical"),
]


@pytest.mark.parametrize("drafter", ["eagle", "model"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("sampler", IDENTICAL)
def test_identical_chains_and_trees_return_the_tokens_of_autoregressive_sampling(
    sampler, batch_size, drafter
):
    """On a transformer with its caches: a slip in rollback, tree attention, kept paths or raggedness would show."""
    model, eagle = eagle_pair()
    network = eagle if drafter == "eagle" else draft_model()
    condition, law = captions(batch_size), TokenLaw(guidance_scale=2.0, temperature=1.5)
    arguments: dict[str, Any] = dict(law=law, batch_size=batch_size)
    want = AutoregressiveSampler()(model, condition, generator=seeded(range(batch_size)), **arguments)
    got = decode(sampler, model, network, condition, **arguments)
    assert torch.equal(got.tokens, want.tokens)
    assert got.trace.identical and sampler.identical and got.trace.target_calls.max() < 25


@pytest.mark.parametrize("drafter", ["tabular", "eagle"])
@pytest.mark.usefixtures("whole_batch")
def test_every_node_carries_the_law_it_was_drawn_from(monkeypatch, drafter):
    """Labels recomputed by chains from scratch: a label that is off would bias the output unnoticed."""
    law = TokenLaw(guidance_scale=2.0, top_k=6)
    model, network = (MODEL, NEAR) if drafter == "tabular" else eagle_pair()
    condition = CONDITION[:2] if drafter == "tabular" else captions(2)
    checked = 0
    real_propose = TreeSampler.propose

    def propose(self, run, state):
        nonlocal checked
        found = real_propose(self, run, state)
        assert found.laws is not None
        visible = ancestry(found.parents, 3)
        for row in range(2):
            length = int(state.lengths[row])
            if length + 3 <= run.num_tokens and state.round % 5 == row:
                text = state.tokens[row, :length].tolist()
                for column in range(found.laws.shape[1]):
                    path = found.tokens[row, visible[row, column]].tolist()[1:]
                    want = law_after(run.model, run.drafter, condition, law, text + path, length, row, 2)
                    assert (found.laws[row, column].exp() - want.exp()).abs().max() < 1e-9
                    checked += 1
        return found

    monkeypatch.setattr(TreeSampler, "propose", propose)
    decode(TreeSampler(depth=3, width=3), model, network, condition, law=law, batch_size=2)
    assert checked >= 14


def test_sibling_laws_are_the_parents_without_the_earlier_ones(monkeypatch):
    law = torch.randn(1, 1, 12, dtype=torch.float64).log_softmax(-1)
    tokens = torch.tensor([[3, 0, 7]])
    zero = torch.zeros(1, 4, dtype=torch.long)
    found = tree.Tree(zero, zero, zero, zero, zero.double(), law)
    labels = tree._sibling_laws(found, zero[:, :1], tokens, law)
    for sibling in range(3):
        assert (labels[0, sibling] - without(law[0, 0], tokens[0, :sibling])).nan_to_num(
            0
        ).abs().max() < 1e-12
    found.laws = None
    points = tree._sibling_laws(found, zero[:, :1], tokens, law).exp()
    assert torch.equal(points[0], torch.eye(12, dtype=torch.float64)[tokens[0]])


@pytest.mark.parametrize("sampler", [DraftedSampler(3), *(TreeSampler(3, 3, **way) for way in WAYS)])
@pytest.mark.usefixtures("whole_batch")
def test_features_the_drafter_reads_next_are_those_of_the_target(monkeypatch, sampler):
    model, eagle = eagle_pair()
    seen = watch_features(monkeypatch, type(sampler))
    result = decode(sampler, model, eagle, captions(3), batch_size=3)
    check_features(seen, model, captions(3), result.tokens)


@pytest.mark.parametrize(
    "depth, width", [(1, None), (2, None), (5, None), (50, None), (1, 2), (3, 2), (5, 4), (40, 1)]
)
def test_what_the_target_itself_drafts_is_accepted_to_its_full_depth(depth, width):
    calls = 1 + math.ceil((LENGTH - 1) / (depth + 1))
    for acceptance in ("exact", "identical", "block") if width is None else ("exact", "identical"):
        sampler: Any = DraftedSampler(depth, acceptance=acceptance)
        if width is not None:
            sampler = TreeSampler(depth, width, acceptance=acceptance)
        assert decode(sampler, MODEL, MODEL, law=GUIDED).trace.target_calls.tolist() == [calls] * 4


def test_the_drafter_is_called_once_for_each_level():
    """Before each target call: one to catch up, and one for each level but the last."""
    model, drafter = counting(MODEL), counting(NEAR)
    decode(TreeSampler(3, 4), model, drafter, law=GUIDED)
    assert len(drafter.calls) == 3 * len(model.calls)
    assert model.asked["window"] == 13 and drafter.asked["window"] == 8
    assert max(int(slots.max()) for slots in model.calls + drafter.calls) < LENGTH + 8


# ---------------------------------------------------------------------------------------------- relaxed rules


@pytest.mark.parametrize("way", RELAXED)
def test_one_relaxed_sibling_is_the_relaxed_chain(way):
    """Both walk the same drafts with the same noise: a width of one, drawn."""
    settings = {name: value for name, value in way.items() if name not in ("siblings", "num_nodes")}
    arguments: dict[str, Any] = dict(condition=torch.arange(100) % 3, batch_size=100, codebook=CODEBOOK)
    chain = decode(DraftedSampler(3, **settings), **arguments)
    found = decode(TreeSampler(3, 1, **settings), **arguments)
    assert torch.equal(found.tokens, chain.tokens)
    assert torch.equal(found.trace.commit_call, chain.trace.commit_call)
    if way["relaxation"].get("bounded"):
        assert found.trace.divergence == pytest.approx(chain.trace.divergence, abs=1e-9)


# ------------------------------------------------------------------------------------------------ small and odd


@pytest.mark.parametrize("way", WAYS[:3])
def test_a_law_of_two_tokens_has_two_children(monkeypatch, way):
    for lengths, found in drawn_trees(monkeypatch, law=TokenLaw(top_k=2), depth=2, width=4, **way):
        there = found.scores > -torch.inf
        assert not there[found.ranks >= 2].any()
        assert there[lengths < LENGTH, 1:3].all()  # the root's


@pytest.mark.parametrize("way", WAYS)
def test_laws_of_fewer_tokens_than_siblings_and_the_smallest_grids(way):
    result = decode(TreeSampler(3, 6, **way), law=TokenLaw(top_k=2))
    want = decode(TreeSampler(3, 6, **way), law=TokenLaw(top_k=2), batch_size=1, condition=CONDITION[:1])
    assert torch.equal(result.tokens[:1], want.tokens)
    for width in (1, 2):
        model = TabularModel(TokenGrid(1, width), 6)
        found = decode(TreeSampler(3, 6, **way), model, model, None, batch_size=2)
        assert found.trace.target_calls.tolist() == [width] * 2


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("num_nodes", [0, 13, 2.0, True])
def test_refuses_more_nodes_than_are_drafted(num_nodes: Any):
    with pytest.raises(ValueError, match=rf"num_nodes={num_nodes}"):
        TreeSampler(depth=3, width=4, num_nodes=num_nodes, siblings="top-k")


def test_refuses_to_choose_among_drawn_siblings_and_says_what_to_do():
    refuses(ValueError, "num_nodes=None.*siblings='top-k'", TreeSampler, depth=3, width=4, num_nodes=6)


def test_refuses_to_decode_without_a_drafter_or_with_one_of_other_tokens():
    refuses(ValueError, "TreeSampler", decode, TreeSampler(), MODEL, None)
    with pytest.raises(ValueError, match="11.*1 x 6 x 6.*12"):
        decode(TreeSampler(), MODEL, TabularModel(TokenGrid(6, 6), 11, order=1))


@pytest.mark.parametrize("role", ["model", "drafter"])
def test_refuses_models_that_score_chains_only(role):
    class Chains:
        grid, vocab_size, prefill = MODEL.grid, MODEL.vocab_size, MODEL.prefill

    networks: dict[str, Any] = {"model": MODEL, "drafter": NEAR, role: Chains()}
    refuses(TypeError, f"{role}.*Chains.*DraftedSampler", decode, TreeSampler(), **networks)


def test_refuses_more_siblings_than_there_are_tokens():
    refuses(ValueError, "width=13.*12.*12", decode, TreeSampler(2, 13))


def test_refuses_a_tree_larger_than_the_cache():
    class Small(TabularModel):
        def prefill(self, condition, *, batch_size, guided, window):
            return super().prefill(condition, batch_size=batch_size, guided=guided, window=min(window, 8))

    model = Small(TokenGrid(6, 6), 12, order=1, conditions=3)
    refuses(ValueError, "11.*8.*num_nodes.*7", decode, TreeSampler(2, 5), model)
    assert decode(TreeSampler(1, 7), model).tokens.shape == (4, LENGTH)
