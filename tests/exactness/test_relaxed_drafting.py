"""Relaxed rules on chains and trees of drafts: laws, bounds and the meter, against `plain_drafting`."""

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN, distance
from tests.exactness.plain_drafting import (
    PlainBranches,
    PlainChain,
    PlainDecoder,
    PlainRule,
    PlainTree,
    apart,
)
from tests.exactness.regions import total_variation
from tests.helpers.drafting_sequences import LAWS, branches, chain, pair
from tests.helpers.relaxed_rules import (
    CODEBOOK,
    ONE_SIDED,
    RELAXATIONS,
    check_reports,
    codes,
    many_laws,
    settings_of,
    tv,
)
from visual_spec.samplers.core.acceptance import AcceptanceRule, Relaxation
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.relaxed import bounded_rule, rule_of
from visual_spec.samplers.raster import siblings
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.siblings import committed_law, moved_mass, sibling_tests, without
from visual_spec.samplers.raster.tree import TreeSampler

ROUNDING = 1e-12
# Settings that mean something among more tokens than three.
WIDE = {
    "grouped": Relaxation("grouped", group_size=3, probability_gap=0.3, code_distance=None),
    "clustered": Relaxation("clustered", group_size=2),
    "lantern": Relaxation("lantern", delta=0.2, neighbours=4),
    "lantern++": Relaxation("lantern", factor=2.0, neighbours=4),
    "bounded": Relaxation("lantern", delta=0.1, neighbours=4, factor=4.0, bounded=True),
    "bounded groups": Relaxation(
        "grouped", 4, probability_gap=1.0, code_distance=None, delta=0.1, bounded=True
    ),
}
NOTHING = {
    "no delta": Relaxation("lantern", delta=0.0, neighbours=2),
    "factor 1": Relaxation("lantern", factor=1.0, neighbours=2),
    "groups of one": Relaxation("grouped", group_size=1, code_distance=None),
    "no budget": Relaxation("lantern", factor=9.0, delta=0.0, neighbours=2, bounded=True),
}


# ---------------------------------------------------------------------------------------------------- one slot


def rows(size: int, count: int, drawn: bool, pairs: int = 40) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every list of different siblings for pairs of laws: target, siblings [N, T, K], their laws, and probability."""
    target, draft = many_laws(size, pairs, size + count)
    lists = torch.tensor(list(permutations(range(size), count)))  # [T, K]
    tokens = lists.expand(pairs, -1, -1)
    if not drawn:
        points = torch.eye(size, dtype=torch.float64).log()[tokens]
        return target, tokens, points, torch.ones(pairs, len(lists), dtype=torch.float64)
    laws = [draft[:, None].expand(-1, len(lists), -1)]
    for sibling in range(count - 1):
        laws.append(without(laws[-1], tokens[..., sibling, None]))
    stacked = torch.stack(laws, 2)  # [N, T, K, V]
    chance = stacked.gather(-1, tokens[..., None])[..., 0].exp().prod(-1)
    return target, tokens, stacked, chance


def one_slot(
    rule: AcceptanceRule, target: Tensor, tokens: Tensor, laws: Tensor, drawn: bool
) -> tuple[Tensor, Tensor]:
    """Law of the committed token given the siblings [N, T, V], and the mass that the meter counts [N, T]."""
    wide = target[:, None].expand(-1, tokens.shape[1], -1).flatten(0, 1)
    siblings = tokens.flatten(0, 1), laws.flatten(0, 1)
    tests, left = sibling_tests(wide, *siblings, None, rule)
    moved = moved_mass(wide, siblings[0], siblings[1] if drawn else None, tests, left)
    law = committed_law(tests, siblings[0], left)
    return law.view(*tokens.shape[:2], -1), moved.view(tokens.shape[:2])


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("drawn", [False, True], ids=["top-k", "drawn"])
def test_siblings_commit_the_law_of_the_papers(name, drawn):
    rule = PlainRule(WIDE[name], codes(5))
    target, tokens, laws, _ = rows(5, 3, drawn, pairs=6)
    found, _ = one_slot(rule_of(WIDE[name], codes(5), "cpu"), target, tokens, laws, drawn)
    for row, p in enumerate(target.exp().tolist()):
        for number, drafts in enumerate(tokens[row].tolist()):
            expected = rule.commits(p, drafts, laws[row, number].exp().tolist())
            assert apart(found[row, number].tolist(), expected) < 1e-10


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("drawn", [False, True], ids=["top-k", "drawn"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_siblings_under_settings_that_relax_nothing_commit_the_target_law(name, drawn, count):
    target, tokens, laws, chance = rows(4, count, drawn)
    law, moved = one_slot(rule_of(NOTHING[name], codes(4), "cpu"), target, tokens, laws, drawn)
    if drawn:
        law = (chance[..., None] * law).sum(1, keepdim=True)
    assert tv(law, target[:, None]).max() < ROUNDING
    assert moved.max() < ROUNDING


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", WIDE)
def test_of_top_k_siblings_the_meter_counts_the_distance_itself(name, count):
    target, tokens, laws, _ = rows(5, count, False)
    law, moved = one_slot(rule_of(WIDE[name], codes(5), "cpu"), target, tokens, laws, False)
    distance = tv(law, target[:, None])
    torch.testing.assert_close(moved, distance, atol=ROUNDING, rtol=0)
    assert distance.max() > 0.05
    if "bounded" in name:
        assert distance.max() <= WIDE[name].delta + ROUNDING


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", WIDE)
def test_of_drawn_siblings_the_meter_counts_no_less_than_the_distance(name, count):
    target, tokens, laws, chance = rows(5, count, True)
    law, moved = one_slot(rule_of(WIDE[name], codes(5), "cpu"), target, tokens, laws, True)
    distance = tv((chance[..., None] * law).sum(1), target)
    counted = (chance * moved).sum(1)
    assert (counted >= distance - ROUNDING).all()
    if "bounded" in name:
        assert counted.max() <= WIDE[name].delta + ROUNDING
        if count == 1:
            torch.testing.assert_close(counted, distance, atol=ROUNDING, rtol=0)
    assert counted.mean() < 2 * distance.mean()


def everything(target: Tensor, draft_law: Tensor, drafts: Tensor) -> Tensor:
    return torch.ones_like(target[..., 0])


@pytest.mark.parametrize("drawn", [False, True], ids=["top-k", "drawn"])
@pytest.mark.parametrize("delta", [0.02, 0.1, 0.5])
def test_bounded_siblings_share_one_budget(delta, drawn):
    """Under the greediest rule there is; with a budget for each sibling it would not hold."""
    for count in (1, 2, 3, 4):
        target, tokens, laws, chance = rows(5, count, drawn, pairs=60)
        distance = []
        for rule in (
            bounded_rule(everything, delta),
            replace(bounded_rule(everything, delta), after_refusal=None),
        ):
            law, _ = one_slot(rule, target, tokens, laws, drawn)
            mean = (chance[..., None] * law).sum(1) if drawn else law
            distance.append(tv(mean, target if drawn else target[:, None]).max())
        assert 0.9 * delta < distance[0] <= delta + ROUNDING
        if count > 1 and delta < 0.5:
            assert distance[1] > 1.2 * delta


def test_what_one_sibling_leaves_of_the_budget_serves_the_next():
    """A first sibling that the rule does not favour: the second has the whole budget, and more by its rareness."""
    target = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64).log()
    drafts = torch.tensor([[0, 1]])
    points = torch.eye(3, dtype=torch.float64).log()[drafts]

    def second_only(target: Tensor, draft_law: Tensor, drafts: Tensor) -> Tensor:
        exact = siblings.EXACT.probability(target, draft_law, drafts)
        return torch.where(drafts == 1, 1.0, exact)

    tests, left = sibling_tests(target, drafts, points, None, bounded_rule(second_only, 0.1))
    # Half the time the second is tested: 0.1 of all is 0.2 of that half, on top of 0.2 / 0.5.
    torch.testing.assert_close(tests, torch.tensor([[0.5, 0.6]], dtype=torch.float64))
    law = committed_law(tests, drafts, left)
    torch.testing.assert_close(law, torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64))


@pytest.mark.parametrize("delta", [0.05, 0.2])
def test_lantern_moves_delta_for_each_test_that_it_makes(delta):
    rule = rule_of(Relaxation("lantern", delta=delta, neighbours=4), codes(5), "cpu")
    target, tokens, laws, _ = rows(5, 3, False, pairs=60)
    law, moved = one_slot(rule, target, tokens, laws, False)
    wide = target[:, None].expand(-1, tokens.shape[1], -1).flatten(0, 1)
    tests, _ = sibling_tests(wide, tokens.flatten(0, 1), laws.flatten(0, 1), None, rule)
    made = 1 + (1 - tests[:, :-1]).cumprod(1).sum(1).view(moved.shape)
    assert (moved <= delta * made + ROUNDING).all()
    assert moved.max() > 1.1 * delta  # so it is no bound for the slot


def test_a_sibling_that_has_lent_its_mass_to_a_refused_one_is_refused():
    """Token 1 is the nearest code of token 0, and is merged into it; token 2 stays, with its mass among the rest."""
    target = torch.tensor([[0.3, 0.1, 0.4, 0.2]], dtype=torch.float64).log()
    codebook = torch.tensor([[0.0], [1.0], [10.0], [30.0]])
    rule = rule_of(Relaxation("lantern", delta=0.15, neighbours=2), codebook, "cpu")
    drafts = torch.tensor([[0, 1, 2]])
    points = torch.eye(4, dtype=torch.float64).log()[drafts]
    tests, left = sibling_tests(target, drafts, points, None, rule)
    torch.testing.assert_close(tests, torch.tensor([[0.4, 0.0, 0.4 / 0.6]], dtype=torch.float64))
    torch.testing.assert_close(left.exp(), torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64))


# -------------------------------------------------------------------------------------------------------- loop


def plain(kind: type[PlainDecoder], name: str, seed: int = 0, law: TokenLaw = PLAIN, **shape) -> PlainDecoder:
    target, draft = (network.law_of_sequences(law, guided=law.guided) for network in pair(seed))
    return kind(target, draft, 3, 4, PlainRule(RELAXATIONS[name], CODEBOOK), **shape)


BOOK: dict[str, Any] = {"codebook": CODEBOOK}


def tree(name: str, depth: int, width: int, law: TokenLaw = PLAIN, seed: int = 0, **changes: Any):
    """The enumeration of a tree under a relaxed rule."""
    settings = {"siblings": "top-k", **settings_of(RELAXATIONS[name]), **changes}
    return branches(pair(seed), law, BOOK, depth=depth, width=width, **settings)


def check(found, decoder: PlainDecoder, law: TokenLaw = PLAIN, seed: int = 0) -> None:
    """The enumeration of the sampler's own steps against the plain decoder; and the meter against the distance."""
    expected = decoder.run()
    assert distance(found, expected.law) < 1e-10
    assert found.calls == pytest.approx(expected.calls, abs=1e-10)
    assert found.tested == pytest.approx(expected.tested, abs=1e-10) and found.tested > 1
    assert found.moved == pytest.approx(expected.moved, abs=1e-10)
    assert 0.2 * expected.apart < distance(found, pair(seed)[0], law) <= expected.apart + ROUNDING
    settings = decoder.rule.settings
    if settings.bounded:
        assert max(found.moved, expected.apart) <= settings.delta * found.tested + ROUNDING


@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_chain_follows_the_rule_and_its_meter_the_distance(num_drafts, name):
    found = chain(pair(), PLAIN, num_drafts, parts=BOOK, **settings_of(RELAXATIONS[name]))
    decoder = plain(PlainChain, name, num_drafts=num_drafts)
    check(found, decoder)
    assert found.moved == pytest.approx(decoder.found.apart, rel=0.05)
    if name in ONE_SIDED:
        assert found.moved == pytest.approx(decoder.found.apart, abs=ROUNDING)


@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize(
    "shape", [dict(depth=1, width=2), dict(depth=2, width=2), dict(depth=2, width=2, num_nodes=3)]
)
def test_tree_of_the_best_follows_the_rule_and_its_meter_is_the_distance(shape, name):
    found = tree(name, **shape)
    decoder = plain(PlainTree, name, **shape)
    check(found, decoder)
    assert found.moved == pytest.approx(decoder.found.apart, abs=1e-10)


@pytest.mark.parametrize("name", RELAXATIONS)
def test_tree_of_the_best_under_guidance(name):
    law = LAWS["guidance"]
    check(tree(name, 2, 2, law, 1), plain(PlainTree, name, 1, law, depth=2, width=2), law, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("shape", [dict(depth=3, width=3), dict(depth=3, width=3, num_nodes=5)])
def test_larger_trees_of_the_best(shape, name):
    check(tree(name, **shape, seed=3), plain(PlainTree, name, 3, **shape), seed=3)


@pytest.mark.parametrize("name", RELAXATIONS)
def test_tree_of_drawn_siblings_follows_the_rule_and_its_meter_bounds_the_distance(name):
    found = tree(name, 1, 2, siblings="without-replacement")
    decoder = plain(PlainBranches, name, width=2)
    check(found, decoder)
    assert decoder.found.apart - ROUNDING <= found.moved < 1.6 * decoder.found.apart


@pytest.mark.parametrize("name", RELAXATIONS)
def test_relaxing_a_tree_saves_calls(name):
    exact = branches(pair(), PLAIN, depth=2, width=2, siblings="top-k")
    assert tree(name, 2, 2).calls < exact.calls - 1e-3


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize(
    "way, depth",
    [
        ("top-k", 2),
        ("without-replacement", 1),
        pytest.param("without-replacement", 2, marks=pytest.mark.slow),
    ],
)
def test_trees_under_settings_that_relax_nothing_are_lossless(way, depth, name):
    shape = dict(depth=depth, width=2, siblings=way)
    exact = branches(pair(), PLAIN, **shape)
    found = branches(pair(), PLAIN, BOOK, **shape, **settings_of(NOTHING[name]))
    assert distance(found, pair()[0], PLAIN) < 1e-10
    assert found.moved < 1e-12 and found.calls == pytest.approx(exact.calls, abs=1e-10)


def test_catches_a_refused_sibling_that_keeps_what_it_was_lent(monkeypatch):
    monkeypatch.setattr(AcceptanceRule, "refused_target", lambda self, target, drafts: target)
    found = tree("lantern", 2, 2)
    assert total_variation(found.law, plain(PlainTree, "lantern", depth=2, width=2).run().law) > 1e-3


@pytest.mark.parametrize(
    "depth, way", [(2, dict(siblings="top-k", num_nodes=3)), (1, dict(siblings="without-replacement"))]
)
def test_tree_sampler_reports_what_the_enumeration_says(depth, way):
    settings = settings_of(RELAXATIONS["lantern"])
    sampler = TreeSampler(depth=depth, width=2, expected_acceptance=0.3, **way, **settings)
    model, drafter = pair()
    check_reports(sampler, model, tree("lantern", depth, 2, **way), drafter=drafter)


def test_chain_sampler_reports_what_the_enumeration_says():
    settings = settings_of(RELAXATIONS["grouped"])
    model, drafter = pair()
    expected = chain(pair(), PLAIN, 2, parts=BOOK, **settings)
    check_reports(DraftedSampler(2, **settings), model, expected, drafter=drafter)
