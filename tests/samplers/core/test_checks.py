import pytest
import torch

from tests.helpers.refusals import refuses
from visual_spec.samplers.core.checks import CheckedLaw, wants_graph
from visual_spec.samplers.core.law import TokenLaw

SLOTS = torch.tensor([[4, 5, 6], [7, 8, 9]])  # of a grid of 9 tokens: the last column of row 1 is past it


def logits(guided: bool = False) -> torch.Tensor:
    return torch.randn(4 if guided else 2, 3, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("deferred", [False, True])
def test_passes_the_law_through(deferred):
    law = TokenLaw(guidance_scale=2.0, top_k=3)
    checked = CheckedLaw(law, 9, deferred=deferred)
    assert torch.equal(checked(logits(True), SLOTS, True), law(logits(True), True))
    checked.finish()


def test_finite_logits_whose_sum_overflows_are_no_error():
    logits = torch.full((2, 3, 4), 3e38)
    law = CheckedLaw(TokenLaw(), 5)(logits, torch.arange(3).expand(2, -1), guided=False)
    torch.testing.assert_close(law.exp(), torch.full((2, 3, 4), 0.25))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_ignores_slots_past_the_grid(deferred, value):
    bad = logits()
    bad[1, 2, 0] = value
    checked = CheckedLaw(TokenLaw(), 9, deferred=deferred)
    checked(bad, SLOTS, False)
    checked.finish()


def test_reports_the_bad_slot_and_not_the_one_past_the_grid():
    bad = logits()
    bad[0, 2, 0], bad[1, 2, 0] = torch.inf, torch.nan
    with pytest.raises(FloatingPointError, match="sample 0.*0.*2.*6.*inf"):
        CheckedLaw(TokenLaw(), 9)(bad, SLOTS, False)


def test_deferred_check_reports_the_first_bad_slot_at_the_end():
    checked = CheckedLaw(TokenLaw(guidance_scale=3.0), 9, deferred=True)
    for column in (2, 1):
        bad = logits(True)
        bad[2, column, 1] = torch.nan  # the unconditional row of sample 0
        checked(bad, SLOTS, True)
    refuses(FloatingPointError, "sample 0.*5.*nan", checked.finish)


def test_looks_at_allowed_ids_only():
    bad = logits()
    bad[:, :, 4] = torch.nan
    CheckedLaw(TokenLaw(allowed=(0, 4)), 9)(bad, SLOTS, False)
    with pytest.raises(FloatingPointError, match="sample 0"):
        CheckedLaw(TokenLaw(allowed=(1, 5)), 9)(bad, SLOTS, False)


def test_the_device_of_a_model_that_does_not_name_it_is_where_its_weights_are():
    refuses(ValueError, "graph=True.*meta", wants_graph, True, torch.nn.Linear(1, 1, device="meta"))
    refuses(ValueError, "graph=True.*cpu", wants_graph, True, torch.nn.Identity())
