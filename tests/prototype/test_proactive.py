"""The proactive Jacobi sampler as an object. Its law: tests/exactness/test_siblings_sequence_law.py."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.statistics import LEAST_P, p_value
from tests.helpers.tabular import TabularModel
from tests.helpers.tiny import seeded, tiny_transformer
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.prototype.proactive import HeadTree, ProactiveJacobiSampler
from visual_spec.samplers.core import base
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

COUPLINGS = [("maximal", "exact"), ("independent", "exact"), ("gumbel", "exact"), ("gumbel", "identical")]
MODEL = TabularModel(TokenGrid(8, 8), 16, order=2, conditions=3, dependence=0.2)
CONDITION = torch.tensor([2, 0, 1, 2])
LAW = TokenLaw()
GUIDED = TokenLaw(guidance_scale=2.0, top_k=9)


def decode(
    sampler,
    model: Any = MODEL,
    condition: Tensor | None = CONDITION,
    law: TokenLaw = LAW,
    seed: int = 0,
    **options,
):
    batch_size = options.pop("batch_size", 4)
    generator = options.pop("generator", None) or torch.Generator().manual_seed(seed)
    return sampler(model, condition, law=law, generator=generator, batch_size=batch_size, **options)


def captions(count: int) -> TextCondition:
    generator = torch.Generator().manual_seed(9)
    mask = torch.arange(6) >= torch.tensor([[0], [3], [5], [1]])[:count]
    return TextCondition(torch.randn(count, 6, 8, generator=generator, dtype=torch.float64), mask)


# -------------------------------------------------------------------------------------------------------- tree


@pytest.mark.parametrize(
    "window, siblings, depth", [(2, 1, 1), (4, 2, 1), (5, 2, 3), (4, 3, 2), (6, 4, 2), (9, 1, 4)]
)
def test_tree_holds_every_path_once_after_its_ancestors(window, siblings, depth):
    tree = HeadTree(window, siblings, depth)
    levels, numbers, visible = tree.layout(torch.device("cpu"))
    size = tree.nodes
    assert size == window + sum(siblings**level - 1 for level in range(1, depth + 1))
    assert len(levels) == len(numbers) == len(visible) == size
    assert levels[:window].tolist() == list(range(window)) and not numbers[:window].any()

    # Nodes by path, walking as the sampler does: from a node at path p, sibling j is at path p K + j.
    paths: dict[tuple[int, ...], int] = {(0,) * level: level for level in range(window)}  # the main branch
    for name in [name for level in range(1, depth + 1) for name in product(range(siblings), repeat=level)]:
        code = 0
        for number in name:
            code = code * siblings + number
        node = int(tree.node(len(name), torch.tensor(code)))
        assert paths.setdefault(name, node) == node
    assert sorted(paths.values()) == list(range(size))
    for name, node in paths.items():
        assert levels[node] == len(name)
        assert numbers[node] == (name[-1] if name else 0)
        ancestors = {paths[name[:length]] for length in range(len(name) + 1)}
        assert set(visible[node].nonzero()[:, 0].tolist()) == ancestors


class Watching(TabularModel):
    """Keeps what it was asked."""

    def prefill(self, *args, **kwargs):
        self.asked, self.calls = kwargs, []
        return super().prefill(*args, **kwargs)

    def forward(self, state, tokens, slots, visible=None, **rest):
        assert visible is not None
        self.calls.append((tokens.clone(), slots.clone()))
        return super().forward(state, tokens, slots, visible, **rest)


@pytest.mark.parametrize("coupling, acceptance", COUPLINGS)
@pytest.mark.usefixtures("whole_batch")
def test_siblings_differ_and_belong_to_slots(coupling, acceptance):
    model = Watching(TokenGrid(8, 8), 16, order=2, conditions=3, dependence=0.2)
    sampler = ProactiveJacobiSampler(8, 3, 2, coupling, acceptance, "last_law")
    trace = decode(sampler, model, law=GUIDED).trace
    assert model.asked == {"batch_size": 4, "guided": True, "window": 8 + 2 + 8}
    tree = HeadTree(8, 3, 2)
    lengths = torch.ones(4, dtype=torch.long)
    for call, (tokens, slots) in enumerate(model.calls, start=1):
        levels, _, _ = tree.layout(tokens.device)
        assert torch.equal(slots, lengths[:, None] - 1 + levels)
        first = [int(tree.node(1, torch.tensor(path))) for path in range(3)]
        second = [int(tree.node(2, torch.tensor(path))) for path in range(9)]
        for row in range(4):
            assert len(tokens[row, first].unique()) == 3
            for parent in range(3):  # all nodes of a level have the same children
                assert torch.equal(tokens[row, second[3 * parent :][:3]], tokens[row, second[:3]])
        lengths = (trace.commit_call <= call).sum(1)
    assert (lengths == 64).all()


# ------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("initial_draft", ["last_law", "uniform"])
@pytest.mark.parametrize("coupling, acceptance", COUPLINGS)
def test_one_sibling_gives_the_tokens_of_jacobi(coupling, acceptance, initial_draft):
    if coupling == "maximal" or acceptance == "identical":  # the others redraw the token that is copied
        initial_draft = "left" if initial_draft == "uniform" else initial_draft
    jacobi = decode(
        SpeculativeJacobiSampler(8, coupling, acceptance, initial_draft, drafts="carried"), law=GUIDED
    )
    for depth in (1, 3, 7):
        found = decode(ProactiveJacobiSampler(8, 1, depth, coupling, acceptance, initial_draft), law=GUIDED)
        assert torch.equal(found.tokens, jacobi.tokens)
        assert torch.equal(found.trace.commit_call, jacobi.trace.commit_call)
        assert torch.equal(found.trace.target_calls, jacobi.trace.target_calls)


@pytest.mark.parametrize("coupling", ["maximal", "independent", "gumbel"])
def test_k_seq_of_one_sibling_gives_the_tokens_of_jacobi(coupling):
    jacobi = decode(SpeculativeJacobiSampler(8, coupling, "exact", "last_law"), law=GUIDED)
    sampler = ProactiveJacobiSampler(8, 1, 3, coupling, "exact", "last_law", "k-seq")
    found = decode(sampler, law=GUIDED)
    assert torch.equal(found.tokens, jacobi.tokens)
    assert torch.equal(found.trace.commit_call, jacobi.trace.commit_call)


@pytest.mark.parametrize("siblings, depth, window", [(2, 1, 2), (2, 3, 8), (4, 2, 8), (16, 1, 5)])
def test_identical_acceptance_gives_the_tokens_of_autoregressive_sampling(siblings, depth, window):
    sampler = ProactiveJacobiSampler(window, siblings, depth, "gumbel", "identical")
    assert torch.equal(decode(sampler).tokens, decode(AutoregressiveSampler()).tokens)


def test_identical_tokens_on_a_transformer_whose_cache_holds_the_kept_path():
    """Guided, ragged captions, float64: a wrong column kept in the cache would change the tokens."""
    model = tiny_transformer().double()
    law = TokenLaw(guidance_scale=2.5, top_k=8)
    wanted = AutoregressiveSampler()(
        model, captions(4), law=law, generator=seeded(1, 2, 3, 4), batch_size=4
    ).tokens
    sampler = ProactiveJacobiSampler(5, 3, 2, "gumbel", "identical", "last_law")
    found = sampler(model, captions(4), law=law, generator=seeded(1, 2, 3, 4), batch_size=4)
    assert torch.equal(found.tokens, wanted)
    walked = found.trace.commit_call.diff(dim=1) == 0
    assert walked.any()  # some calls commit several tokens

    keep = model.keep
    model.keep = lambda state, nodes, slots: keep(state, torch.zeros_like(nodes), slots)
    try:
        wrong = sampler(model, captions(4), law=law, generator=seeded(1, 2, 3, 4), batch_size=4)
    finally:
        del model.keep
    assert not torch.equal(wrong.tokens, wanted)


# --------------------------------------------------------------------------------------------------- statistics

STATISTICAL = TabularModel(TokenGrid(1, 5), 4, dtype=torch.float32)
SAMPLES, ROWS = 60_000, 20_000


def p_of(sampler, monkeypatch, seed: int = 0) -> float:
    """Chi-square of whole decodes with the real noise in float32, rows as samples."""

    def keys(generator, batch_size):
        return torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator)

    monkeypatch.setattr(base, "draw_keys", keys)
    generator = torch.Generator().manual_seed(seed)
    powers = 4 ** torch.arange(4, -1, -1)
    total = torch.zeros(4**5, dtype=torch.long)
    for _ in range(SAMPLES // ROWS):
        tokens = sampler(STATISTICAL, None, law=LAW, generator=generator, batch_size=ROWS).tokens
        total += torch.bincount(tokens @ powers, minlength=len(total))
    return p_value(total, STATISTICAL.law_of_sequences(LAW))


def test_k_seq_follows_the_law_with_the_real_noise(monkeypatch):
    sampler = ProactiveJacobiSampler(3, 3, 2, initial_draft="last_law", sibling_rule="k-seq")
    assert p_of(sampler, monkeypatch) > LEAST_P


@pytest.mark.parametrize(
    "coupling, acceptance",
    [COUPLINGS[0], *[pytest.param(*pair, marks=pytest.mark.slow) for pair in COUPLINGS[1:]]],
)
def test_follows_the_law_with_the_real_noise(coupling, acceptance, monkeypatch):
    sampler = ProactiveJacobiSampler(3, 3, 2, coupling, acceptance, "last_law")
    assert p_of(sampler, monkeypatch) > LEAST_P


def test_statistics_catch_siblings_that_share_their_numbers(monkeypatch):
    """The mistake that enumeration cannot weigh: one uniform number for all siblings of a slot."""
    monkeypatch.setattr("visual_spec.samplers.raster.siblings.sibling_stream", lambda stream, sibling: stream)
    assert p_of(ProactiveJacobiSampler(3, 3, 2, initial_draft="last_law"), monkeypatch) < LEAST_P


# -------------------------------------------------------------------------------------------------------- trace


def test_grid_of_one_token_needs_the_prefill_only():
    model = Watching(TokenGrid(1, 1), 5)
    result = decode(ProactiveJacobiSampler(4), model, None, batch_size=2)
    assert result.tokens.shape == (2, 1) and model.calls == []


# -------------------------------------------------------------------------------- configuration and refusals


@pytest.mark.parametrize("window, depth", [(1, 1), (4, 4), (2, 5)])
def test_refuses_a_tree_deeper_than_the_window(window, depth):
    refuses(ValueError, f"depth={depth} .*{window} slots", ProactiveJacobiSampler, window, 2, depth)


@pytest.mark.parametrize("siblings, depth", [(2, 10), (10, 3), (40, 20), (1025, 1)])
def test_refuses_a_tree_of_too_many_nodes(siblings, depth):
    refuses(ValueError, "1024", ProactiveJacobiSampler, 32, siblings, depth)


def test_refuses_identical_acceptance_without_gumbel_coupling():
    with pytest.raises(ValueError, match="coupling='gumbel'.*coupling='maximal'"):
        ProactiveJacobiSampler(acceptance="identical")


def test_refuses_sibling_rules_that_do_not_fit():
    with pytest.raises(ValueError, match="sibling_rule='recursive'.*acceptance='exact'"):
        ProactiveJacobiSampler(coupling="gumbel", acceptance="identical", sibling_rule="k-seq")


def test_independent_siblings_may_outnumber_the_tokens():
    model = TabularModel(TokenGrid(2, 2), 3)
    sampler = ProactiveJacobiSampler(3, 5, 1, initial_draft="last_law", sibling_rule="k-seq")
    assert decode(sampler, model, None).tokens.shape == (4, 4)


def test_refuses_models_and_vocabularies_that_do_not_fit():
    class Chain:
        grid, vocab_size = TokenGrid(2, 2), 4

    refuses(TypeError, "Chain.*`keep`", decode, ProactiveJacobiSampler(4), Chain(), None)
    refuses(ValueError, "siblings=17.*16.*16", decode, ProactiveJacobiSampler(4, 17, 1))
    with pytest.raises(ValueError, match="4 codebooks a slot"):
        decode(ProactiveJacobiSampler(4), TabularModel(TokenGrid(2, 2, codebooks=4), 3), None)
