"""MAR's schedule of slots and guidance against the published loop, written out."""

import numpy as np
import pytest
import torch

from scripts.train.mar import random_orders, step_slots
from tests.helpers.refusals import refuses
from visual_spec.models.core.orders import check_order, guidance_scales, hidden_after


def published(order: list[int], num_steps: int, scale: float) -> list[tuple[set[int], float]]:
    """Slots and scale of guidance of each step, as sets: what was hidden and no longer is."""
    length = len(order)
    hidden, found = set(order), []
    for step in range(num_steps):
        share = np.cos(np.pi / 2 * (step + 1) / num_steps)
        left = max(1, min(len(hidden) - 1, int(np.floor(length * share))))
        still = set(order[:left])
        found.append((hidden if step == num_steps - 1 else hidden ^ still, left))
        hidden = still
    return [(slots, 1 + (scale - 1) * (length - left) / length) for slots, left in found]


@pytest.mark.parametrize("num_steps", [1, 2, 16, 32, 64, 100, 255, 256])
def test_steps_fill_what_the_published_loop_fills(num_steps):
    order = random_orders(256, [torch.Generator().manual_seed(seed) for seed in (0, 1)])
    found = step_slots(order, num_steps)
    scales = guidance_scales(2.9, 256, num_steps)
    for row in (0, 1):
        expected = published(order[row].tolist(), num_steps, 2.9)
        assert [set(slots[row].tolist()) for slots in found] == [slots for slots, _ in expected]
        assert scales == pytest.approx([scale for _, scale in expected])
    assert sorted(torch.cat(found, 1)[0].tolist()) == list(range(256))


def test_guidance_grows_to_almost_its_scale_or_stays():
    scales = guidance_scales(3.0, 256, 256)
    assert scales[0] == pytest.approx(1 + 2 / 256)
    assert scales[-1] == scales[-2] == pytest.approx(1 + 2 * 255 / 256)
    assert guidance_scales(4.0, 256, 3, linear=False) == [4.0] * 3


def test_orders_are_permutations_and_follow_their_generators():
    first, second = (random_orders(16, [torch.Generator().manual_seed(s)])[0] for s in (3, 4))
    both = random_orders(16, [torch.Generator().manual_seed(s) for s in (3, 4)])
    assert torch.equal(both, torch.stack([first, second]))
    assert not torch.equal(first, second)
    check_order(both)


@pytest.mark.parametrize("steps", [0, 17, True, 2.0])
def test_other_numbers_of_steps_are_refused(steps):
    refuses(ValueError, "from 1 to 16", hidden_after, 16, steps)


@pytest.mark.parametrize("order", [[[0, 1, 1, 3]], [[0, 1, 2, 4]], [0, 1, 2, 3], [[0.0, 1.0]]])
def test_what_is_no_order_is_refused(order):
    refuses(ValueError, "order", check_order, torch.tensor(order))
