"""Masses of a draft and its kin: the references against `samplers.relaxed`, the kernels against the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.interpreter import run_interpreted
from tests.kernels.relaxing import codes, laws
from visual_spec.kernels.neighbour_mass import clustered_mass, grouped_mass, lantern_mass
from visual_spec.samplers.core.relaxed import (
    cluster_table,
    clustered_acceptance,
    grouped_acceptance,
    lantern_acceptance,
    neighbour_table,
)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert ((expected > 0) & (expected < 1)).any()
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 14])
@pytest.mark.parametrize(("gap", "distance"), [(1.0, None), (0.05, None), (0.15, 3.0), (0, 0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_grouped(size, gap, distance, seed):
    given = laws(seed=seed)
    settings: dict[str, Any] = dict(size=size, gap=gap, distance=distance, codebook=codes())
    close(grouped_mass(*given, **settings), grouped_acceptance(*given, **settings))


def test_a_group_larger_than_the_support():
    given = laws()
    expected = grouped_acceptance(*given, size=100, gap=1.0)
    # The group is the support, so what the target allows is kept.
    assert torch.equal(expected, given[0].gather(-1, given[2][..., None])[..., 0].isfinite().float())
    torch.testing.assert_close(grouped_mass(*given, size=100, gap=1.0), expected)


@pytest.mark.parametrize("count", [5, 37])
def test_clustered(count):
    given = laws(3, 5)
    clusters = cluster_table(codes(), count)
    close(clustered_mass(*given, clusters=clusters), clustered_acceptance(*given, clusters=clusters))


@pytest.mark.parametrize(
    "limits", [dict(delta=0.1), dict(delta=0), dict(delta=0.5, factor=2.0), dict(factor=1.0)]
)
@pytest.mark.parametrize("count", [1, 6, 36])
def test_lantern(limits, count):
    given = laws(3, 5)
    settings: dict[str, Any] = dict(neighbours=neighbour_table(codes(), count), **limits)
    close(lantern_mass(*given, **settings), lantern_acceptance(*given, **settings))


def test_operators_pass_the_checks_of_pytorch():
    target, draft_law, drafts = laws()
    ops = torch.ops.visual_spec
    near = neighbour_table(codes(), 4)
    for op, rest in (
        (ops.grouped_mass, (codes(), 5, 0.2, 1.0)),
        (ops.clustered_mass, (torch.arange(37) % 4,)),
        (ops.lantern_mass, (near, 0.1, True)),
    ):
        given = (target, draft_law, drafts, *rest)
        torch.library.opcheck(op.default, given, test_utils=("test_schema", "test_faketensor"))


def test_operator_in_a_compiled_function():
    target, draft_law, drafts = laws()

    def accept(target, draft_law, drafts):
        return grouped_mass(target * 1.0, draft_law, drafts, size=5, gap=0.2)

    found = torch.compile(accept, backend="aot_eager", fullgraph=True)(target, draft_law, drafts)
    assert torch.equal(found, accept(target, draft_law, drafts))


def test_refusals():
    target, draft_law, drafts = laws()
    with pytest.raises(ValueError, match=r"target has shape \(2, 4, 37\), draft_law \(2, 3, 37\)"):
        grouped_mass(target, draft_law[:, :3], drafts, size=3, gap=1)
    with pytest.raises(ValueError, match="size=0; pass at least 1"):
        grouped_mass(target, draft_law, drafts, size=0, gap=1)
    with pytest.raises(ValueError, match=r"distance=0.5 compares codes, but codebook has none"):
        grouped_mass(target, draft_law, drafts, size=3, gap=1, distance=0.5)
    with pytest.raises(TypeError, match="target is torch.float64"):
        clustered_mass(target.double(), draft_law, drafts, clusters=torch.arange(37))
    with pytest.raises(ValueError, match=r"clusters have shape \(36,\); pass \[37\]"):
        clustered_mass(target, draft_law, drafts, clusters=torch.arange(36))
    with pytest.raises(ValueError, match=r"neighbours have shape \(36, 4\); pass \[37, K\]"):
        lantern_mass(target, draft_law, drafts, neighbours=torch.zeros(36, 4).int())


def test_kernels():
    run_interpreted("interpreted_neighbour_mass.py")
