"""The instrument itself: areas that stand for Gumbel noise."""

import torch

from tests.exactness.regions import Regions, total_variation


def random_laws(count: int, seed: int) -> torch.Tensor:
    return (
        2 * torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).softmax(1)


def test_cells_of_the_triangle_have_the_area_of_the_law():
    laws = torch.cat([random_laws(200, 0), torch.tensor([[0.3, 0.7, 0.0], [0.0, 0.0, 1.0]])])
    probability, _ = Regions().draw(torch.zeros(len(laws), dtype=torch.long), laws)
    assert (probability - laws).abs().max() < 1e-13


def test_the_same_noise_and_the_same_law_give_the_same_token():
    table = Regions()
    laws = random_laws(50, 1)
    _, left = table.draw(torch.zeros(50, dtype=torch.long), laws)
    for token in range(3):
        again, _ = table.draw(left[:, token], laws)
        assert (again[:, token] - 1).abs().max() < 1e-10


def test_joint_law_of_two_draws_with_one_noise_is_what_gumbel_noise_gives():
    first, second = random_laws(2, 2)
    table = Regions()
    probability, left = table.draw(torch.zeros(1, dtype=torch.long), first[None])
    joint = torch.stack([probability[0, v] * table.draw(left[:1, v], second[None])[0][0] for v in range(3)])
    assert (joint.sum(1) - first).abs().max() < 1e-13
    assert (joint.sum(0) - second).abs().max() < 1e-13

    generator = torch.Generator().manual_seed(3)
    gumbel = -torch.empty(400_000, 3, dtype=torch.float64).exponential_(generator=generator).log()
    pairs = 3 * (first.log() + gumbel).argmax(1) + (second.log() + gumbel).argmax(1)
    measured = torch.bincount(pairs, minlength=9) / len(pairs)
    assert total_variation(measured, joint.flatten()) < 5e-3
