"""The causal model of continuous tokens: its cache against a straight-line computation of whole rows."""

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.models.continuous import straight
from tests.models.continuous.tiny import tiny_causal

ORDERS = {"raster": None, "fixed": [5, 0, 3, 1, 15, 2, 4, 6, 14, 7, 9, 8, 13, 10, 12, 11]}


def fed(model, labels, tokens, widths, guided=False):
    """Conditions [R, L + 1, dim], tokens [B, L, d] in order fed in windows of these widths."""
    batch = len(tokens)
    state = model.prefill(labels, batch_size=batch, guided=guided, window=max(widths))
    found, first = [state.conditions[:, None]], 0
    for width in widths:
        slots = torch.arange(first, first + width).expand(batch, -1)
        found.append(model(state, tokens[:, first : first + width], slots))
        first += width
    return torch.cat(found, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_conditions_are_the_straight_line_ones(order):
    torch.manual_seed(0)
    model = tiny_causal(order=ORDERS[order])
    labels, tokens = torch.tensor([4, 1]), torch.randn(2, 16, 3)
    places = ORDERS[order] or list(range(16))
    assert model.places.tolist() == [*places, 16]
    found = fed(model, labels, tokens, [1] * 16, guided=True)
    for row in (0, 1):
        for label, z in ((int(labels[row]), found[row]), (None, found[2 + row])):
            expected = straight.causal(model.state_dict(), 2, label, tokens[row], places)
            torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        fed(model, labels, tokens, [3, 1, 7, 5], guided=True), found, rtol=1e-4, atol=1e-4
    )
    with torch.no_grad():
        taught = model.teacher_forced(tokens, labels)
        dropped = model.teacher_forced(tokens, labels, torch.tensor([False, True]))
    torch.testing.assert_close(taught, found[:2, :16], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dropped[1], found[3, :16], rtol=1e-4, atol=1e-4)
    assert torch.equal(dropped[0], taught[0])


def test_rejected_slots_are_written_again_and_rows_go_their_own_way():
    torch.manual_seed(0)
    model = tiny_causal()
    labels, tokens = torch.tensor([0, 2]), torch.randn(2, 16, 3)
    expected = fed(model, labels, tokens, [1] * 16)
    state = model.prefill(labels, batch_size=2, guided=False, window=4)
    model(state, torch.randn(2, 4, 3), torch.arange(4).expand(2, -1))  # drafts, none of which is kept
    slots = torch.tensor([[0, 1, 2], [0, 1, 2]])
    model(state, tokens[:, :3], slots)
    # Row 0 goes on after slot 2, row 1 begins again at slot 1.
    slots = torch.tensor([[3, 4, 5], [1, 2, 3]])
    z = model(state, tokens[torch.arange(2)[:, None], slots], slots)
    for row in (0, 1):
        torch.testing.assert_close(z[row], expected[row, slots[row] + 1], rtol=1e-4, atol=1e-4)
    state.select(torch.tensor([1]))
    z = model(state, tokens[1:, 4:6], torch.tensor([[4, 5]]))
    torch.testing.assert_close(z[0], expected[1, 5:7], rtol=1e-4, atol=1e-4)


def test_windows_may_reach_beyond_the_last_slot():
    torch.manual_seed(0)
    model = tiny_causal()
    labels, tokens = torch.tensor([0]), torch.randn(1, 16, 3)
    expected = fed(model, labels, tokens, [1] * 16)
    state = model.prefill(labels, batch_size=1, guided=False, window=4)
    model(state, tokens[:, :14], torch.arange(14)[None])
    z = model(state, torch.cat([tokens[:, 14:], torch.randn(1, 2, 3)], 1), torch.arange(14, 18)[None])
    torch.testing.assert_close(z[:, :2], expected[:, 15:], rtol=1e-4, atol=1e-4)
    assert z.isfinite().all()


def test_an_order_that_is_no_permutation_is_refused():
    refuses(ValueError, "0 to 15", tiny_causal, order=[0] * 16)
