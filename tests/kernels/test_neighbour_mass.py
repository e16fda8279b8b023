"""Masses of a draft and its kin: the definitions against others, the kernels against the definitions.

The papers' rules in plain Python are in tests/exactness/test_relaxed_rules.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.relaxing import codes, laws
from visual_spec.kernels import neighbour_mass
from visual_spec.kernels.clustered_mass import clustered_mass
from visual_spec.kernels.grouped_mass import grouped_mass
from visual_spec.kernels.lantern_mass import lantern_mass
from visual_spec.samplers.core.relaxed import neighbour_table


def by_sorting(
    target: Tensor, draft_law: Tensor, drafts: Tensor, size: int, gap: float, distance: float | None
) -> Tensor:
    """GSD's probabilities by the place of every token in the order, without selecting."""
    at = drafts[..., None]
    place = target.argsort(dim=-1, stable=True).argsort(-1)  # [B, N, V]; equal ones by id
    apart = place - place.gather(-1, at)
    inside, own = target.exp(), target.gather(-1, at).exp()
    member = (apart >= -(size // 2)) & (apart <= (size - 1) // 2) & (inside > 0)
    member &= (inside - own).abs() < gap
    if distance is not None:
        member &= (codes() - codes()[drafts][:, :, None]).square().sum(-1) < distance
    member |= apart == 0
    ratio = (inside * member).sum(-1) / (draft_law.exp() * member).sum(-1)
    return ratio.clamp(max=1).masked_fill(own.squeeze(-1) == 0, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 14])
@pytest.mark.parametrize(("gap", "distance"), [(1.0, None), (0.05, None), (0.15, 3.0), (0, 0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_grouped(size, gap, distance, seed):
    given = laws(seed=seed)
    found = grouped_mass(*given, size=size, gap=gap, distance=distance, codebook=codes())
    assert ((found > 0) & (found < 1)).any()
    torch.testing.assert_close(found, by_sorting(*given, size, gap, distance), rtol=2e-6, atol=1e-7)


def test_a_group_larger_than_the_support():
    target, draft_law, drafts = laws()
    # The group is the support, so what the target allows is kept.
    expected = target.gather(-1, drafts[..., None])[..., 0].isfinite().float()
    assert torch.equal(grouped_mass(target, draft_law, drafts, size=100, gap=1.0), expected)


@pytest.mark.parametrize("dtypes", [(torch.float64,) * 2, (torch.float32, torch.float64)])
def test_laws_that_no_kernel_takes_go_by_the_definitions(monkeypatch, dtypes):
    """Even on a GPU: float64, and laws of two precisions."""
    monkeypatch.setattr(neighbour_mass, "on_gpu", lambda tensor: True)
    target, draft_law, drafts = laws()
    given = target.to(dtypes[0]), draft_law.to(dtypes[1]), drafts
    near = neighbour_table(codes(), 4)
    rules: list[tuple[Any, dict[str, Any]]] = [
        (grouped_mass, dict(size=5, gap=0.2)),
        (clustered_mass, dict(clusters=torch.arange(37) % 4)),
        (lantern_mass, dict(neighbours=near, delta=0.2)),
    ]
    for mass, settings in rules:
        found = mass(*given, **settings)
        assert found.dtype == torch.float64
        monkeypatch.undo()
        torch.testing.assert_close(found.float(), mass(target, draft_law, drafts, **settings))
        monkeypatch.setattr(neighbour_mass, "on_gpu", lambda tensor: True)


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
    with pytest.raises(ValueError, match=r"\(2, 4, 37\), draft_law \(2, 3, 37\)"):
        grouped_mass(target, draft_law[:, :3], drafts, size=3, gap=1)
    with pytest.raises(ValueError, match="size=0.*1"):
        grouped_mass(target, draft_law, drafts, size=0, gap=1)
    with pytest.raises(ValueError, match=r"distance=0\.5"):
        grouped_mass(target, draft_law, drafts, size=3, gap=1, distance=0.5)
    with pytest.raises(ValueError, match=r"clusters.*\(36,\)"):
        clustered_mass(target, draft_law, drafts, clusters=torch.arange(36))
    with pytest.raises(ValueError, match=r"neighbours.*\(36, 4\)"):
        lantern_mass(target, draft_law, drafts, neighbours=torch.zeros(36, 4).int())
