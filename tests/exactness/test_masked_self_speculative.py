"""Self-speculative masked decoding: the exact law of its real steps, against the product of the conditionals."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN, Enumerator
from tests.exactness.regions import total_variation
from tests.helpers.causal_tables import TabularCausalLayer, TabularFeatureModel
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.prototype.self_speculative.sampler import SelfSpeculativeMaskedSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import halton_order

ORDERS = {"raster": [0, 1, 2, 3], "halton": halton_order(1, 2, 2).tolist()}
GROUPS = {1: [4], 2: [2, 2], 3: [1, 1, 2], 4: [1, 1, 1, 1]}  # of the linear schedule, by steps


def tables(seed: int = 0) -> tuple[TabularFeatureModel, TabularCausalLayer]:
    model = TabularFeatureModel(TokenGrid(2, 2), 2, seed=seed)
    return model, TabularCausalLayer(model, seed)


def law_of_groups(
    model: TabularFeatureModel,
    layer: TabularCausalLayer,
    order: list[int],
    sizes: list[int],
    law: TokenLaw = PLAIN,
) -> Tensor:
    """The law of four tokens in the order of decoding, written out with Python's numbers."""
    found = []
    for drawn in itertools.product(range(2), repeat=4):
        probability, start = 1.0, 0
        for size in sizes:
            for place in range(start, start + size):
                logits = []
                for table in (0, model.conditions):  # conditional, unconditional
                    context = 0
                    for slot in range(4):
                        at = order.index(slot)
                        context = 3 * context + (drawn[at] if at < start else 2)
                    row = model.logits[table, 0, context, order[place]].tolist()
                    for earlier in range(start, place):
                        more = layer.table[order[earlier], drawn[earlier], order[place]].tolist()
                        row = [a + b for a, b in zip(row, more, strict=True)]
                    logits.append(row)
                mixed = [u + law.guidance_scale * (c - u) for c, u in zip(*logits, strict=True)]
                weights = [math.exp(value / law.temperature) for value in mixed]
                probability *= weights[drawn[place]] / sum(weights)
            start += size
        found.append(probability)
    return torch.tensor(found, dtype=torch.float64)


def sampler_of(steps: int, order: str, num_drafts: int | None, acceptance: str) -> Any:
    return SelfSpeculativeMaskedSampler(steps, "linear", order, num_drafts, acceptance)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("acceptance", ["identical", "exact"])
@pytest.mark.parametrize("steps, num_drafts", [(1, 0), (1, None), (2, 1), (2, None), (3, None), (4, None)])
def test_its_law_is_that_of_the_groups(steps, num_drafts, acceptance, order):
    model, layer = tables()
    sampler = sampler_of(steps, order, num_drafts, acceptance)
    found = Enumerator(sampler, model, causal_layer=layer).run()
    expected = law_of_groups(model, layer, ORDERS[order], GROUPS[steps])
    assert total_variation(found.law, expected) < 1e-10
    # The enumeration counts passes, and one more for the prefill, of which there is none.
    if num_drafts == 0 or steps == 4:
        assert found.calls == pytest.approx(5)
    else:
        assert found.calls < 4.8


@pytest.mark.parametrize("acceptance", ["identical", "exact"])
def test_its_law_is_that_of_the_groups_with_guidance(acceptance):
    model, layer = tables(1)
    law = TokenLaw(guidance_scale=2.5, temperature=0.7)
    found = Enumerator(sampler_of(2, "raster", None, acceptance), model, law, causal_layer=layer).run()
    expected = law_of_groups(model, layer, ORDERS["raster"], GROUPS[2], law)
    assert total_variation(found.law, expected) < 1e-10


def total_variation_of_planted_bug(acceptance: str) -> float:
    model, layer = tables()
    found = Enumerator(sampler_of(1, "raster", None, acceptance), model, causal_layer=layer).run()
    return total_variation(found.law, law_of_groups(model, layer, ORDERS["raster"], GROUPS[1]))


def test_catches_a_layer_that_sees_its_own_token(monkeypatch):
    """The first token of a group then counts on what its draft was."""
    real = TabularCausalLayer.forward

    def peeking(self: Any, features: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        found = real(self, features, tokens, slots)
        return found + self.table[slots, tokens, slots]

    monkeypatch.setattr(TabularCausalLayer, "forward", peeking)
    assert total_variation_of_planted_bug("exact") > 1e-2


def test_catches_drafts_labelled_with_the_law_of_another_place(monkeypatch):
    real = SelfSpeculativeMaskedSampler._draft

    def mislabelled(self: Any, run: Any, state: Any, places: Tensor) -> Any:
        draft = real(self, run, state, places)
        assert draft.label is not None
        rows = draft.label.rows
        draft.label.rows = torch.where(rows >= 0, 3 - rows, rows)
        return draft

    monkeypatch.setattr(SelfSpeculativeMaskedSampler, "_draft", mislabelled)
    assert total_variation_of_planted_bug("exact") > 1e-3


def test_catches_groups_that_end_where_the_drafts_fail(monkeypatch):
    """As published: the model is called again after a refusal."""
    real = SelfSpeculativeMaskedSampler.step

    def early(self: Any, run: Any, state: Any) -> None:
        real(self, run, state)
        state.group.end = state.lengths.clone()

    monkeypatch.setattr(SelfSpeculativeMaskedSampler, "step", early)
    assert total_variation_of_planted_bug("identical") > 1e-3


def test_the_tokens_are_those_of_one_a_pass():
    model = TabularFeatureModel(TokenGrid(2, 3), 3, conditions=3)
    layer = TabularCausalLayer(model)
    conditions = torch.tensor([0, 1, 2, 0, 1])
    law = TokenLaw(guidance_scale=1.7, temperature=0.6)

    def decode(num_drafts: int | None, samples: list[int], order: str) -> Any:
        sampler = SelfSpeculativeMaskedSampler(2, "linear", order, num_drafts)
        more: Any = dict(generator=seeded(*samples), batch_size=len(samples), causal_layer=layer)
        return sampler(model, conditions[samples], law=law, **more)

    for order in ("halton", "rolled_halton", "raster", "random"):
        plain = decode(0, [*range(5)], order)
        assert plain.trace.target_calls.tolist() == [2] * 5 and plain.trace.layer_calls.tolist() == [6] * 5
        for num_drafts in (1, 2, None):
            fast = decode(num_drafts, [*range(5)], order)
            assert torch.equal(fast.tokens, plain.tokens)
            assert torch.equal(fast.trace.commit_call, plain.trace.commit_call)
            assert fast.trace.target_calls.tolist() == [2] * 5
            assert (2 <= fast.trace.layer_calls).all() and fast.trace.layer_calls.sum() < 30
            # Samples that need fewer passes leave the batch, and are counted still.
            alone = [decode(num_drafts, [sample], order) for sample in range(5)]
            assert torch.equal(torch.cat([one.tokens for one in alone]), plain.tokens)
            assert fast.trace.layer_calls.tolist() == [one.trace.layer_calls.item() for one in alone]
        assert [row.sum().item() for row in plain.trace.commit_call] == [3] * 5  # three tokens in each call


def test_with_a_layer_that_adds_nothing_every_draft_stands():
    """The law is then that of masked decoding in the same order, and so are the calls."""
    model = TabularFeatureModel(TokenGrid(2, 3), 3)
    layer = TabularCausalLayer(model, scale=0.0)
    more: Any = dict(law=PLAIN, generator=seeded(*range(4)), batch_size=4, causal_layer=layer)
    for acceptance in ("identical", "exact"):
        found: Any = SelfSpeculativeMaskedSampler(2, acceptance=acceptance)(model, None, **more)
        assert found.trace.layer_calls.tolist() == [2] * 4
        assert "2.0 passes" in found.trace.summary()


def test_what_cannot_be_decoded_is_refused():
    model, layer = tables()
    refuses(ValueError, "num_drafts=-1.*0.*None", SelfSpeculativeMaskedSampler, num_drafts=-1)
    refuses(ValueError, "order='entropy'", SelfSpeculativeMaskedSampler, order="entropy")
    with pytest.raises(ValueError, match="causal_layer.*CausalLayer"):
        SelfSpeculativeMaskedSampler()(model, None, law=PLAIN)
    two = TabularFeatureModel(TokenGrid(1, 2, codebooks=2), 2)
    with pytest.raises(ValueError, match="2 codebooks"):
        SelfSpeculativeMaskedSampler()(two, None, law=PLAIN, causal_layer=layer)
    with pytest.raises(ValueError, match="MagnetModel"):
        wrong: Any = torch.nn.Linear(1, 1)
        SelfSpeculativeMaskedSampler()(wrong, None, law=PLAIN, causal_layer=layer)
