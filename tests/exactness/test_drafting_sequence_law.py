"""Loop level: the exact law of whole sequences of chain and tree sampler, by enumeration of their real steps."""

from typing import Any

import pytest
import torch

from tests.exactness.enumeration import PLAIN, distance
from tests.exactness.regions import total_variation
from tests.helpers.drafting_sequences import LAWS, branches, chain, pair
from tests.helpers.tabular import TabularModel
from visual_spec.kernels.law import NO_DRAFT
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.acceptance import AcceptanceRule, residual
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster import block, drafted, tree
from visual_spec.samplers.raster.block import verify_block
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.tree import TreeSampler

# --------------------------------------------------------------------------------------------------------- chain


@pytest.mark.parametrize("acceptance", ["exact", "identical", "block"])
@pytest.mark.parametrize("stop_below", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_chain_is_lossless(num_drafts, stop_below, acceptance):
    found = chain(pair(), PLAIN, num_drafts, stop_below, acceptance)
    assert distance(found, pair()[0], PLAIN) < 1e-10
    assert found.calls < 3.6


@pytest.mark.parametrize("acceptance", ["exact", "identical", "block"])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_chain_is_lossless_under_guidance_and_filters(law, acceptance):
    assert distance(chain(pair(1), law, 2, 0.4, acceptance), pair(1)[0], law) < 1e-10


def test_an_early_stop_gives_up_calls():
    """It is the draft after the stop that is missing; were the stop without effect, the proof would be void."""
    calls = [chain(pair(), PLAIN, 3, below, "exact").calls for below in (0, 0.4, 1)]
    assert calls[0] + 0.05 < calls[1] and calls[1] + 0.05 < calls[2]


def test_a_block_saves_calls_where_there_are_two_drafts_or_more():
    def calls(acceptance: str, num_drafts: int) -> float:
        return chain(pair(), PLAIN, num_drafts, acceptance=acceptance).calls

    assert calls("block", 1) == pytest.approx(calls("exact", 1), abs=1e-12)  # it is the same test
    assert calls("block", 2) < calls("exact", 2) - 1e-3
    assert calls("block", 3) < calls("exact", 3) - 1e-3


def expected_block(target: Any, label: Any, drafts: list[int]) -> list[tuple[float, list[float]]]:
    """The published algorithm in plain numbers: for tau = 0, 1, ..., h (1 for none) and the law of the next token."""
    weight, found = 1.0, []
    for place, (p, q) in enumerate(zip(target, label, strict=True)):
        if place:
            x = drafts[place - 1]
            weight = min(1.0, weight * target[place - 1][x] / label[place - 1][x])
        left = [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]
        last = place == len(drafts)
        h = weight if last else sum(left) / (sum(left) + 1 - weight)
        # Never asked for where nothing is left.
        law = p if last else [each / (sum(left) or 1.0) for each in left]
        found.append((h if place else 1.0, law))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_block_is_tested_as_published(seed):
    """Probability of every number of kept drafts, and the law after each, against plain arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    target, label = torch.rand(2, 4, 5, generator=generator, dtype=torch.float64).softmax(-1)
    drafts = [1, 3, 0]

    class Told:
        """Lets `kept` drafts stand, and keeps what it is asked."""

        def __init__(self, kept: int) -> None:
            self.kept = kept

        def bernoulli(self, probability, slots, stream, round):
            self.probability = probability[0].tolist()
            return torch.arange(1, 4)[None] == self.kept

        def categorical(self, law, slots, stream, round):
            self.law, self.slot = law[0, 0].exp().tolist(), int(slots)
            return slots * 0

    published = expected_block(target.tolist(), [*label[:3].tolist(), [0.0] * 5], drafts)
    none = label.clone()
    none[3] = 0
    for kept, (_, law) in enumerate(published):
        told: Any = Told(kept)
        laws, slots = (target.log()[None], none.log()[None]), torch.arange(7, 11)[None]
        found, _ = verify_block(*laws, torch.tensor([[*drafts, -1]]), told, slots, 1)
        assert found.tolist() == [kept] and told.slot == 7 + kept
        assert told.probability == pytest.approx([h for h, _ in published[1:]], abs=1e-12)
        if any(law):
            assert told.law == pytest.approx(law, abs=1e-12)


def test_catches_a_block_whose_residual_forgets_the_weight(monkeypatch):
    assert distance(chain(pair(), PLAIN, 2, acceptance="block"), pair()[0], PLAIN) < 1e-10
    monkeypatch.setattr(block, "residual", lambda weighted, label: residual(weighted.log_softmax(-1), label))
    assert distance(chain(pair(), PLAIN, 2, acceptance="block"), pair()[0], PLAIN) > 1e-4


def test_catches_a_label_from_unguided_logits(monkeypatch):
    """Guided drafts, labelled with the drafter's conditional law."""
    law, seen = TokenLaw(guidance_scale=2.5), []

    def keeping_both(checked, logits, slots, guided):
        seen.append(PLAIN(logits[: len(slots)], False, slots))
        return real_law(checked, logits, slots, guided)

    def wrongly_labelled(*args):
        seen.clear()
        found: Any = real_propose(*args)
        found.label.laws = torch.cat(seen, 1)
        return found

    real_law, real_propose = drafted.draft_law, DraftedSampler.propose
    monkeypatch.setattr(drafted, "draft_law", keeping_both)
    monkeypatch.setattr(DraftedSampler, "propose", wrongly_labelled)
    assert distance(chain(pair(1), law, 2), pair(1)[0], law) > 1e-2


def test_catches_dropping_the_draft_that_made_the_stop(monkeypatch):
    """What is left are drafts of high probability, and the label does not say so."""

    def dropping(*args):
        found: Any = real_propose(*args)
        law = found.label.dense(found.tokens)
        improbable = law.gather(-1, found.tokens.clamp(min=0)[..., None])[..., 0].exp() < 0.4
        found.tokens = found.tokens.masked_fill(improbable, -1)
        found.label.rows = found.label.rows.masked_fill(improbable, NO_DRAFT)
        return found

    real_propose = DraftedSampler.propose
    monkeypatch.setattr(DraftedSampler, "propose", dropping)
    assert distance(chain(pair(), PLAIN, 2, 0.4), pair()[0], PLAIN) > 1e-2


def test_a_drafter_that_is_not_fed_what_was_committed_drafts_worse(monkeypatch):
    """And from no other law. What was not fed is scrubbed between calls, so that it shows."""
    networks = pair(width=3)
    honest = chain(networks, PLAIN, 1)

    def forgetful(run, state, most):
        state.fed = state.lengths - 1
        return real_feed(run, state, most)

    real_feed = drafted.catch_up
    monkeypatch.setattr(drafted, "catch_up", forgetful)
    found = chain(networks, PLAIN, 1)
    assert distance(found, networks[0], PLAIN) < 1e-10 and found.calls > honest.calls + 1e-3


def test_another_rule_takes_the_place_of_the_exact_one():
    """All drafts kept: after slot 0 the law is the drafter's."""
    model, drafter = pair()
    everything = AcceptanceRule(lambda target, law, drafts: torch.ones_like(law[..., 0]), lossless=False)
    found = chain((model, drafter), PLAIN, 3, parts={"rule": everything})
    blended = TabularModel(TokenGrid(2, 2), 3)
    blended.logits = drafter.logits.clone()
    blended.logits[:, 0] = model.logits[:, 0]
    assert total_variation(found.law, blended.law_of_sequences(PLAIN)) < 1e-10
    assert found.calls == pytest.approx(2)


# ---------------------------------------------------------------------------------------------------------- tree

TREES = {
    "one level": dict(depth=1, width=2),
    "one level, all tokens": dict(depth=1, width=3),
    "two levels": dict(depth=2, width=2),
    "chain": dict(depth=2, width=1),
}
WAYS: list[tuple[str, str]] = [
    ("without-replacement", "exact"),
    ("top-k", "exact"),
    ("top-k", "identical"),
    ("without-replacement", "identical"),
]


@pytest.mark.parametrize("siblings, acceptance", WAYS)
@pytest.mark.parametrize("shape", TREES.values(), ids=TREES.keys())
def test_tree_is_lossless(shape, siblings, acceptance):
    found = branches(pair(), PLAIN, siblings=siblings, acceptance=acceptance, **shape)
    assert distance(found, pair()[0], PLAIN) < 1e-10
    assert found.calls < 3.5


@pytest.mark.parametrize("expected_acceptance", [0.001, 1.0])
def test_tree_is_lossless_whatever_acceptance_shaped_it(expected_acceptance):
    found = branches(pair(4), PLAIN, depth=2, width=2, expected_acceptance=expected_acceptance)
    assert distance(found, pair(4)[0], PLAIN) < 1e-10


@pytest.mark.parametrize("siblings, acceptance", WAYS)
@pytest.mark.parametrize("law", [LAWS["guidance"], LAWS["all"]], ids=["guidance", "all"])
def test_tree_is_lossless_under_guidance_and_filters(law, siblings, acceptance):
    """Under "all" two tokens are left of three: a node's third child is no draft."""
    width = 3 if law is LAWS["all"] else 2
    found = branches(pair(1), law, siblings=siblings, acceptance=acceptance, depth=2, width=width)
    assert distance(found, pair(1)[0], law) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("siblings, acceptance", WAYS)
@pytest.mark.parametrize("shape", [dict(depth=2, width=3), dict(depth=3, width=2)])
def test_larger_trees_are_lossless(shape, siblings, acceptance):
    found = branches(pair(3), PLAIN, siblings=siblings, acceptance=acceptance, **shape)
    assert distance(found, pair(3)[0], PLAIN) < 1e-10


@pytest.mark.parametrize(
    "siblings, acceptance", [("top-k", "exact"), ("top-k", "identical"), ("without-replacement", "identical")]
)
def test_tree_of_the_best_nodes_is_lossless(siblings, acceptance):
    found = branches(pair(), PLAIN, siblings=siblings, acceptance=acceptance, num_nodes=3, depth=2, width=2)
    assert distance(found, pair()[0], PLAIN) < 1e-10


@pytest.mark.parametrize("acceptance", ["exact", "identical"])
def test_siblings_save_calls(acceptance):
    calls = [branches(pair(), PLAIN, acceptance=acceptance, depth=2, width=width).calls for width in (1, 2)]
    assert calls[1] < calls[0] - 0.05


def test_catches_siblings_labelled_without_removing_earlier_ones(monkeypatch):
    monkeypatch.setattr(tree, "without", lambda law, tokens: law)
    assert distance(branches(pair(), PLAIN, depth=1, width=2), pair()[0], PLAIN) > 1e-3


def test_catches_siblings_tested_in_another_order_than_they_were_drawn_in(monkeypatch):
    def reversed_ranks(*args):
        found = real_propose(*args)
        found.ranks = torch.where(found.depths > 0, 1 - found.ranks, found.ranks)
        return found

    real_propose = TreeSampler.propose
    monkeypatch.setattr(TreeSampler, "propose", reversed_ranks)
    assert distance(branches(pair(), PLAIN, depth=1, width=2), pair()[0], PLAIN) > 1e-3


def test_catches_choosing_among_drawn_nodes_by_what_they_turned_out_to_be(monkeypatch):
    """What `num_nodes` would do to drawn siblings, had it not been refused: the improbable ones are left out."""

    def choosing(*args):
        found = real_propose(*args)
        assert found.laws is not None
        laws = found.laws.gather(1, found.parents[..., None].expand(-1, -1, 3))
        improbable = laws.gather(2, found.tokens[..., None])[..., 0].exp() < 0.3
        found.scores = found.scores.masked_fill(improbable & (found.depths > 0), -torch.inf)
        return found

    real_propose = TreeSampler.propose
    monkeypatch.setattr(TreeSampler, "propose", choosing)
    assert distance(branches(pair(), PLAIN, depth=1, width=2), pair()[0], PLAIN) > 1e-3
