"""The kernels of relaxed acceptance in Triton's interpreter; `test_neighbour_mass.py` runs this file."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.relaxing import codes, laws
from visual_spec.kernels import clustered_mass, grouped_mass, lantern_mass
from visual_spec.kernels.clustered_mass import clustered_mass_triton
from visual_spec.kernels.grouped_mass import grouped_mass_triton
from visual_spec.kernels.lantern_mass import lantern_mass_triton
from visual_spec.samplers.core.relaxed import (
    cluster_table,
    clustered_acceptance,
    grouped_acceptance,
    lantern_acceptance,
    neighbour_table,
)

NEAR: dict[str, Any] = dict(rtol=2e-6, atol=1e-7)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grouped_mass, clustered_mass):
        monkeypatch.setattr(module, "TILE", 64)


@pytest.mark.fast_sets(3)
@pytest.mark.parametrize("size", [1, 2, 7, 24])
@pytest.mark.parametrize(("gap", "distance"), [(1.0, float("inf")), (0.15, 3.0)])
def test_grouped(size, gap, distance):
    for vocab_size in (37, 130):
        given = laws(1, 3, vocab_size, seed=size)
        book = codes(vocab_size)
        found = grouped_mass_triton(*given, book, size, gap, distance)
        limit = None if distance == float("inf") else distance
        expected = grouped_acceptance(*given, size=size, gap=gap, distance=limit, codebook=book)
        torch.testing.assert_close(found, expected, **NEAR)


def test_equal_ones_go_by_id():
    target = torch.zeros(1, 3, 130).log_softmax(-1)
    _, draft_law, _ = laws(1, 3, 130)
    given = (target, draft_law, torch.tensor([[129, 70, 2]]))
    found = grouped_mass_triton(*given, codes(130), 5, 1.0, float("inf"))
    expected = grouped_acceptance(*given, size=5, gap=1.0)
    assert (expected < 1).any()
    torch.testing.assert_close(found, expected, **NEAR)


def test_a_group_larger_than_the_support():
    given = laws(2, 2, 9)
    found = grouped_mass_triton(*given, codes(9), 20, 1.0, float("inf"))
    torch.testing.assert_close(found, grouped_acceptance(*given, size=20, gap=1.0), **NEAR)


def test_clustered():
    given = laws(2, 3, 130)
    clusters = cluster_table(codes(130), 9)
    found = clustered_mass_triton(*given, clusters)
    torch.testing.assert_close(found, clustered_acceptance(*given, clusters=clusters), **NEAR)


def test_lantern():
    given = laws(2, 3, 130)
    for count in (1, 6, 64):
        near = neighbour_table(codes(130), count)
        for delta, factor in ((0.1, None), (0.5, 3.0)):
            found = lantern_mass_triton(*given, near, factor - 1 if factor else delta, factor is None)
            expected = lantern_acceptance(*given, neighbours=near, delta=delta, factor=factor)
            torch.testing.assert_close(found, expected, **NEAR)


def test_no_drafts():
    target, draft_law, drafts = laws()
    none = (target[:, :0], draft_law[:, :0], drafts[:, :0])
    assert grouped_mass_triton(*none, codes(), 3, 1.0, 1.0).shape == (2, 0)
    assert clustered_mass_triton(*none, torch.arange(37)).shape == (2, 0)
    assert lantern_mass_triton(*none, neighbour_table(codes(), 2), 0.1, True).shape == (2, 0)


@pytest.mark.slow
def test_operators_pass_the_checks_of_pytorch(monkeypatch):
    """By the kernels; `test_neighbour_mass.py` does it by the definitions."""
    for module in (grouped_mass, clustered_mass, lantern_mass):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    ops = torch.ops.visual_spec
    for op, rest in (
        (ops.grouped_mass, (codes(), 5, 0.2, 1.0)),
        (ops.clustered_mass, (torch.arange(37) % 4,)),
        (ops.lantern_mass, (neighbour_table(codes(), 4), 0.1, True)),
    ):
        torch.library.opcheck(op.default, (*laws(), *rest), test_utils=("test_schema", "test_faketensor"))


def every_rule(*given: Tensor) -> list[Tensor]:
    target, draft_law, drafts = given
    return [
        grouped_mass_triton(target, draft_law, drafts, codes(), 7, 0.15, 3.0),
        clustered_mass_triton(target, draft_law, drafts, cluster_table(codes(), 9)),
        lantern_mass_triton(target, draft_law, drafts, neighbour_table(codes(), 6), 0.1, True),
    ]


def test_parts_of_larger_tensors_are_read_where_they_lie(monkeypatch):
    """All columns but the last, one codebook of three, and one law for all columns, as samplers hand them over."""
    target, draft_law, drafts = laws(2, 4)
    monkeypatch.setattr(Tensor, "contiguous", lambda self: self.clone() if self.dim() < 3 else pytest.fail())
    for part in (np.s_[:, :-1], np.s_[:, 1::2]):
        given = target[part], draft_law[part], drafts[part]
        assert not given[0].is_contiguous()
        expected = every_rule(*(tensor.clone(memory_format=torch.contiguous_format) for tensor in given))
        assert all(torch.equal(*pair) for pair in zip(every_rule(*given), expected, strict=True))
    wide = draft_law[:, :1].expand(-1, 4, -1)
    expected = every_rule(target, wide.clone(memory_format=torch.contiguous_format), drafts)
    assert all(torch.equal(*pair) for pair in zip(every_rule(target, wide, drafts), expected, strict=True))


def test_rows_far_apart(tmp_path):
    """Offsets beyond 2**31 numbers, from sample to sample and from draft to draft. The file is sparse."""
    given, stride = [part[:, :1].clone() for part in laws(3, 2)], 2**30 + 48
    flat = torch.from_numpy(np.memmap(tmp_path / "laws", np.float32, "w+", shape=(2 * stride + 64,)))
    far = flat.as_strided((3, 1, 37), (stride, 37, 1), storage_offset=5)
    expected = every_rule(*given)
    far.copy_(given[0])
    assert all(torch.equal(*pair) for pair in zip(every_rule(far, *given[1:]), expected, strict=True))
    far.copy_(given[1])
    turned = given[0].transpose(0, 1), far.transpose(0, 1), given[2].T
    found = every_rule(*turned)
    assert all(torch.equal(one, other.T) for one, other in zip(found, expected, strict=True))
