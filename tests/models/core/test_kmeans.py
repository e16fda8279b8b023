"""k-means against a computation with lists, and on groups that are known."""

import pytest
import torch
import torch.nn.functional as F

from visual_spec.models.core.kmeans import k_means


def by_hand(vectors: list[list[float]], centres: list[list[float]], rounds: int, unit: bool):
    """Lloyd's algorithm as in a book."""
    nearest: list[int] = []
    for _ in range(rounds):
        nearest = [
            min(
                range(len(centres)),
                key=lambda k: sum((a - b) ** 2 for a, b in zip(x, centres[k], strict=True)),
            )
            for x in vectors
        ]
        for number in range(len(centres)):
            served = [x for x, owner in zip(vectors, nearest, strict=True) if owner == number]
            if served:
                mean = [sum(column) / len(served) for column in zip(*served, strict=True)]
                length = sum(value * value for value in mean) ** 0.5 if unit else 1.0
                centres[number] = [value / length for value in mean]
    return centres, nearest


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("rounds", [1, 4, 50])
def test_centres_are_those_of_a_computation_by_hand(rounds, unit):
    vectors = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if unit:
        vectors = F.normalize(vectors, dim=-1)
    start = vectors[:7].clone()
    centres, nearest = k_means(vectors, start, rounds, unit=unit)
    expected, owners = by_hand(vectors.tolist(), start.tolist(), rounds, unit)
    assert torch.allclose(centres, torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert nearest.tolist() == owners
    assert torch.equal(start, vectors[:7])


def test_centres_that_serve_none_stay():
    vectors = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    centres, nearest = k_means(vectors, torch.tensor([[0.0, 0.0], [50.0, 0.0]]), 5)
    assert centres.tolist() == [[0.0, 2.0], [50.0, 0.0]] and nearest.tolist() == [0, 0]


def test_many_vectors_are_served_as_few_are():
    vectors = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    centres, nearest = k_means(vectors, vectors[:9], 3)
    before, _ = k_means(vectors, vectors[:9], 2)
    assert torch.equal(nearest, torch.cdist(vectors, before).argmin(1))
    means = torch.stack([vectors[nearest == number].mean(0) for number in range(9)])
    assert torch.allclose(centres, means, atol=1e-12)
