"""Loop level: the exact law of whole sequences of the proactive Jacobi sampler, by enumeration of its real step."""

import pytest

from tests.exactness.enumeration import PLAIN, Enumeration, Enumerator
from tests.exactness.enumeration import distance as distance_of
from tests.helpers.drafting_sequences import three_tokens as model
from tests.helpers.refusals import refuses
from tests.helpers.sampler_settings import COMBINATIONS
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.prototype import proactive
from visual_spec.prototype.proactive import ProactiveJacobiSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster import siblings as siblings_module
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


def check(model: TabularModel, law: TokenLaw, sampler: SpeculativeJacobiSampler) -> Enumeration:
    found = Enumerator(sampler, model, law).run()
    assert distance_of(found, model, law) < 1e-10
    return found


SHAPES = [(2, 2, 1, "left"), (2, 3, 1, "last_law"), (3, 2, 1, "left"), (3, 2, 2, "last_law")]


@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("window, siblings, depth, initial_draft", SHAPES)
def test_every_combination_is_lossless(window, siblings, depth, coupling, acceptance, initial_draft):
    found = check(
        model(), PLAIN, ProactiveJacobiSampler(window, siblings, depth, coupling, acceptance, initial_draft)
    )
    alone = ProactiveJacobiSampler(window, 1, depth, coupling, acceptance, initial_draft)
    assert found.calls < Enumerator(alone, model()).run().calls - 0.05  # and siblings save calls


@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize(
    "window, depth, initial_draft", [(2, 1, "uniform"), (3, 1, "last_law"), (3, 2, "last_law")]
)
def test_one_sibling_is_jacobi(window, depth, coupling, acceptance, initial_draft):
    options = ProactiveJacobiSampler(window, 1, depth, coupling, acceptance, initial_draft)
    jacobi = SpeculativeJacobiSampler(window, coupling, acceptance, initial_draft, drafts="carried")
    found = check(model(seed=2), PLAIN, options)
    assert found.calls == pytest.approx(Enumerator(jacobi, model(seed=2)).run().calls, abs=1e-10)


@pytest.mark.parametrize("length, window", [(4, 2), (3, 3)])
@pytest.mark.parametrize("siblings", [2, 3, 4])
def test_lossless_over_four_tokens(siblings, length, window):
    """Where three siblings do not cover the vocabulary."""
    four = TabularModel(TokenGrid(1, length), 4, seed=siblings)
    found = check(four, PLAIN, ProactiveJacobiSampler(window, siblings, 1, "maximal", "exact", "last_law"))
    if siblings == 4:  # one of four siblings is always kept: two tokens a call after the prefill
        assert found.calls == pytest.approx({4: 3, 3: 2}[length])


# ---------------------------------------------------------------------------------------------------------- K-SEQ


def k_seq_options(
    window: int, siblings: int, depth: int, coupling: str, initial_draft: str
) -> ProactiveJacobiSampler:
    return ProactiveJacobiSampler(window, siblings, depth, coupling, "exact", initial_draft, "k-seq")


@pytest.mark.fast_sets(6)
@pytest.mark.parametrize("coupling", ["maximal", "independent", "gumbel"])
@pytest.mark.parametrize("window, siblings, depth, initial_draft", SHAPES)
def test_k_seq_is_lossless(window, siblings, depth, coupling, initial_draft):
    found = check(model(), PLAIN, k_seq_options(window, siblings, depth, coupling, initial_draft))
    if initial_draft == "last_law":  # independent siblings of a copied token are copies of it
        alone = ProactiveJacobiSampler(window, 1, depth, coupling, "exact", initial_draft)
        assert found.calls < Enumerator(alone, model()).run().calls - 0.02


@pytest.mark.parametrize("coupling", ["maximal", "gumbel"])
def test_k_seq_of_one_sibling_is_jacobi(coupling):
    found = check(model(seed=2), PLAIN, k_seq_options(3, 1, 2, coupling, "last_law"))
    jacobi = SpeculativeJacobiSampler(3, coupling, "exact", "last_law")
    assert found.calls == pytest.approx(Enumerator(jacobi, model(seed=2)).run().calls, abs=1e-10)


def test_k_seq_is_lossless_with_more_siblings_than_tokens():
    check(model(), PLAIN, k_seq_options(2, 4, 1, "maximal", "last_law"))


def test_catches_k_seq_over_siblings_that_differ(monkeypatch):
    """Drawn without replacement, accepted as if they were independent."""
    monkeypatch.setattr(proactive, "with_replacement", proactive.without_replacement)
    monkeypatch.setattr(proactive, "without", lambda law, tokens: law)
    assert distance(k_seq_options(3, 3, 1, "maximal", "last_law")) > 1e-3


LAWS = {
    "guidance": TokenLaw(guidance_scale=2.5),
    "top-k": TokenLaw(top_k=2),
    "top-p": TokenLaw(top_p=0.8),
    "greedy": TokenLaw(temperature=0.0),
    "allowed": TokenLaw(allowed=(1, 3)),
    "all": TokenLaw(guidance_scale=1.7, temperature=1.3, top_k=2, top_p=0.9),
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
@pytest.mark.parametrize("coupling, acceptance", [("maximal", "exact"), ("gumbel", "identical")])
def test_lossless_under_guidance_and_filters(law, coupling, acceptance):
    """Laws of one or two tokens: siblings run out."""
    check(model(seed=1), law, ProactiveJacobiSampler(3, 3, 2, coupling, acceptance, "last_law"))


@pytest.mark.parametrize("law", [LAWS["guidance"], LAWS["all"]], ids=["guidance", "all"])
def test_k_seq_is_lossless_under_guidance_and_filters(law):
    check(model(seed=1), law, k_seq_options(3, 2, 2, "maximal", "last_law"))


def test_lossless_on_a_longer_sequence():
    check(model(1, 5), PLAIN, ProactiveJacobiSampler(3, 2, 1, "maximal", "exact", "last_law"))


@pytest.mark.slow
@pytest.mark.parametrize("initial_draft", ["left", "up", "last_law", "uniform"])
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("siblings, depth", [(2, 1), (2, 2), (3, 2)])
def test_lossless_from_every_initial_draft(siblings, depth, coupling, acceptance, initial_draft):
    check(
        model(seed=3), PLAIN, ProactiveJacobiSampler(3, siblings, depth, coupling, acceptance, initial_draft)
    )


@pytest.mark.slow
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_lossless_in_a_window_as_long_as_the_sequence(depth, coupling, acceptance):
    check(model(seed=4), PLAIN, ProactiveJacobiSampler(4, 2, depth, coupling, acceptance, "last_law"))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
def test_lossless_on_five_slots(coupling, acceptance, depth):
    check(model(1, 5, seed=5), PLAIN, ProactiveJacobiSampler(3, 2, depth, coupling, acceptance, "last_law"))


# ----------------------------------------------------------------------------------------------- planted mistakes


def distance(sampler: ProactiveJacobiSampler) -> float:
    return distance_of(Enumerator(sampler, model()).run(), model())


TWO = ProactiveJacobiSampler(3, 2, 2, "maximal", "exact", "last_law")
THREE = ProactiveJacobiSampler(3, 3, 1, "maximal", "exact", "last_law")


@pytest.mark.parametrize("options", [TWO, THREE])
def test_catches_siblings_under_the_label_of_the_main_draft(monkeypatch, options):
    """Drawn without the main draft, labelled with the law that has it."""
    real = ProactiveJacobiSampler._siblings

    def mislabelled(*arguments):
        tokens, laws = real(*arguments)
        return tokens, [law[:, :1].expand_as(law) for law in laws]

    monkeypatch.setattr(ProactiveJacobiSampler, "_siblings", mislabelled)
    assert distance(options) > 1e-2


def test_catches_siblings_that_share_their_numbers(monkeypatch):
    monkeypatch.setattr(siblings_module, "sibling_stream", lambda stream, sibling: stream)
    refuses(AssertionError, "same noise", distance, TWO)


def test_catches_a_walk_that_scores_siblings_by_the_law_after_the_main_branch(monkeypatch):
    monkeypatch.setattr(proactive.HeadTree, "node", lambda self, level, path: path * 0 + level)
    assert distance(TWO) > 1e-2
