"""Speculative masked decoding: the exact law of its real steps, against that of one token a call, written in Python."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN, Enumerator
from tests.exactness.regions import total_variation
from tests.helpers.order_laws import ORDERS, one_a_call
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularMaskedModel
from tests.helpers.tiny import seeded
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import halton_order
from visual_spec.samplers.masked import speculative as masked_speculative
from visual_spec.samplers.masked.speculative import MaskedOrderModel, SpeculativeMaskedSampler


def table(seed: int = 0) -> TabularMaskedModel:
    return TabularMaskedModel(TokenGrid(2, 2), 2, seed=seed)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("acceptance", ["identical", "exact"])
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 5])
def test_it_is_lossless(num_drafts, acceptance, order):
    model = table()
    found = Enumerator(SpeculativeMaskedSampler(num_drafts, order, acceptance), model).run()
    assert total_variation(found.law, one_a_call(model, ORDERS[order])) < 1e-10
    assert found.calls == 4 if not num_drafts else found.calls < 3.8


@pytest.mark.parametrize("acceptance", ["identical", "exact"])
@pytest.mark.parametrize(
    "law",
    [TokenLaw(guidance_scale=2.5), TokenLaw(temperature=0.7, top_p=0.8), TokenLaw(temperature=0.0)],
    ids=["guidance", "filters", "greedy"],
)
def test_it_is_lossless_under_guidance_and_filters(law, acceptance):
    model = table(1)
    found = Enumerator(SpeculativeMaskedSampler(2, "raster", acceptance), model, law).run()
    assert total_variation(found.law, one_a_call(model, ORDERS["raster"], law)) < 1e-10


def test_catches_a_row_that_knows_nothing_of_its_drafts(monkeypatch):
    """Masked decoding's own law: all drafts stand, as if they were independent."""
    real = MaskedOrderModel._scores

    def blind(self: Any, state: Any, newest: Tensor) -> Tensor:
        width = newest.shape[1]
        found = real(self, state, newest[:, :1].expand(-1, width).contiguous())
        if width == 1:
            return found
        return torch.cat([found[:, :1], state.ahead[:, 0, : width - 1]], 1)

    monkeypatch.setattr(MaskedOrderModel, "_scores", blind)
    model = table()
    found = Enumerator(SpeculativeMaskedSampler(2, "raster", "exact"), model).run()
    assert total_variation(found.law, one_a_call(model, ORDERS["raster"])) > 1e-2


def test_catches_drafts_labelled_with_another_row(monkeypatch):
    real = SpeculativeMaskedSampler.propose

    def mislabelled(self: Any, run: Any, state: Any) -> Any:
        draft: Any = real(self, run, state)
        if state.cache.ahead.shape[1] > 1:
            logits = state.cache.ahead[:, 0]
            draft.label.laws = run.law(logits, state.next_slots(2), False)
        return draft

    monkeypatch.setattr(masked_speculative.SpeculativeMaskedSampler, "propose", mislabelled)
    model = table()
    found = Enumerator(SpeculativeMaskedSampler(2, "raster", "exact"), model).run()
    assert total_variation(found.law, one_a_call(model, ORDERS["raster"])) > 1e-3


@pytest.mark.parametrize("order", ["halton", "rolled_halton", "raster", "random"])
def test_the_tokens_are_those_of_one_a_call(order):
    model = TabularMaskedModel(TokenGrid(2, 3), 3, conditions=3)
    tables = torch.tensor([0, 1, 2, 0, 1])
    law = TokenLaw(guidance_scale=1.7, temperature=0.6)

    def decode(num_drafts: int, samples: list[int]) -> Any:
        sampler = SpeculativeMaskedSampler(num_drafts, order)
        return sampler(model, tables[samples], law=law, generator=seeded(*samples), batch_size=len(samples))

    plain = decode(0, [*range(5)])
    assert plain.trace.target_calls.tolist() == [6] * 5
    for num_drafts in (1, 3, 9):
        fast = decode(num_drafts, [*range(5)])
        assert torch.equal(fast.tokens, plain.tokens)
        assert (fast.trace.target_calls <= plain.trace.target_calls).all()
        assert fast.trace.target_calls.sum() < plain.trace.target_calls.sum()
        assert torch.equal(decode(num_drafts, [3]).tokens[0], plain.tokens[3])
    # At call i of the plain decode the i-th slot of the order is committed.
    for row in plain.trace.commit_call:
        assert sorted(row.tolist()) == list(range(6))


def test_the_order_is_that_of_the_grid():
    model = TabularMaskedModel(TokenGrid(2, 3), 3)
    result = SpeculativeMaskedSampler(0)(model, None, law=PLAIN)
    assert result.trace.commit_call[0].argsort().tolist() == halton_order(1, 2, 3).tolist()
    rolled = [
        SpeculativeMaskedSampler(0, "random")(
            model, None, law=PLAIN, generator=seeded(seed)
        ).trace.commit_call[0]
        for seed in range(4)
    ]
    assert len({tuple(calls.tolist()) for calls in rolled}) > 1


def test_what_cannot_be_decoded_is_refused():
    refuses(ValueError, "num_drafts=-1;", SpeculativeMaskedSampler, -1)
    refuses(ValueError, "order='entropy'", SpeculativeMaskedSampler, order="entropy")
    with pytest.raises(ValueError, match="2 codebooks"):
        SpeculativeMaskedSampler()(TabularMaskedModel(TokenGrid(1, 2, codebooks=2), 2), None, law=PLAIN)
    with pytest.raises(ValueError, match="MagnetModel"):
        wrong: Any = torch.nn.Linear(1, 1)
        SpeculativeMaskedSampler()(wrong, None, law=PLAIN)
