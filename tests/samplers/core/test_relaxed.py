"""Relaxed acceptance as users meet it: tables, settings, refusals, a sampler that uses it. Laws: tests/exactness."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.refusals import refuses
from tests.helpers.sampler_settings import lossy
from tests.helpers.tabular import TabularModel
from tests.helpers.tiny import seeded
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.acceptance import Relaxation
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.relaxed import cluster_table, neighbour_table, smallest
from visual_spec.samplers.core.trace import SampleResult
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

LAW = TokenLaw()
MODEL = TabularModel(TokenGrid(8, 8), 16, order=2, conditions=3, dependence=0.2)
CODEBOOK = torch.nn.functional.normalize(
    torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), dim=-1
)
SETTINGS: dict[str, dict[str, Any]] = {
    "grouped": lossy("grouped", group_size=6, code_distance=2.0, probability_gap=0.3),
    "clustered": lossy("clustered", group_size=4),
    "lantern": lossy("lantern", delta=0.2, neighbours=8),
    "lantern++": lossy("lantern", factor=3.0, neighbours=8),
    "bounded": lossy("lantern", delta=0.1, neighbours=8, bounded=True),
}


def decode(sampler: Any, model: TabularModel = MODEL, batch_size: int = 4, **options: Any) -> SampleResult:
    arguments = dict(generator=seeded(*range(batch_size)), batch_size=batch_size, codebook=CODEBOOK)
    return sampler(model, torch.arange(batch_size) % 3, law=LAW, **{**arguments, **options})


# ---------------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize("count", [0, 1, 5, 23, 40])
def test_smallest_is_the_head_of_a_stable_sort(count):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50, 23, generator=generator, dtype=torch.float64)
    tied = (2 * values).round()
    gaps = tied.masked_fill(torch.rand(50, 23, generator=generator) < 0.6, torch.inf)
    for rows in (values, tied, gaps, torch.zeros(3, 23), torch.full((3, 23), torch.inf), -gaps):
        found, places = smallest(rows, count)
        expected, order = rows.sort(dim=-1, stable=True)
        assert torch.equal(found, expected[..., :count]) and torch.equal(places, order[..., :count])


def test_smallest_of_values_that_are_not_numbers_stays_in_range():
    _, places = smallest(torch.full((2, 9), torch.nan), 4)
    assert places.shape == (2, 4) and places.min() >= 0 and places.max() < 9


# ------------------------------------------------------------------------------------------------------- tables


def test_neighbours_are_the_nearest_codes_in_order(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    # Many at equal distances, some the same.
    codes = torch.randint(-2, 3, (40, 3), generator=generator).float()
    monkeypatch.setattr("visual_spec.samplers.core.relaxed._TABLE_ROWS", 7 * 40)  # 7 rows at a time
    table = neighbour_table(codes, 12)
    assert table.shape == (40, 12) and table.dtype == torch.int32
    for x, row in enumerate(table.tolist()):
        others = sorted(
            (y for y in range(40) if y != x),
            key=lambda y: (math.dist(codes[x].tolist(), codes[y].tolist()), y),
        )
        assert row == others[:12]


def test_clusters_are_the_nearest_centres():
    generator = torch.Generator().manual_seed(2)
    codes = torch.randn(300, 4, generator=generator)
    clusters = cluster_table(codes, 20)
    assert clusters.shape == (300,) and 0 <= clusters.min() and clusters.max() < 20
    sizes = torch.bincount(clusters, minlength=20)
    assert sizes.min() >= 1 and sizes.max() < 60
    centres = torch.stack([codes[clusters == cluster].mean(0) for cluster in range(20)])
    assert torch.equal(torch.cdist(codes, centres).argmin(1), clusters)
    # Much tighter than chance.
    spread = (codes - centres[clusters]).square().sum()
    assert spread < 0.5 * codes.square().sum()


@pytest.mark.parametrize("make", [neighbour_table, cluster_table])
def test_tables_are_built_once_for_the_same_codes(make):
    codes = torch.randn(30, 4, generator=torch.Generator().manual_seed(3))
    first = make(codes, 5)
    assert make(codes.clone(), 5) is first
    changed = codes.clone()
    changed[0] += 1
    assert make(changed, 5) is not first and make(codes, 6) is not first


# ----------------------------------------------------------------------------------------------------- settings


def test_lossless_acceptances_need_no_codebook_and_measure_nothing():
    for acceptance in ("exact", "identical"):
        sampler = SpeculativeJacobiSampler(8, acceptance=acceptance)
        assert sampler.lossless and not sampler.needs_codebook
        trace = decode(sampler, codebook=None).trace
        assert trace.lossless and trace.divergence is None and trace.moved_mass is None


def test_groups_without_a_distance_need_no_codebook():
    sampler = SpeculativeJacobiSampler(8, **lossy("grouped", code_distance=None))
    assert not sampler.needs_codebook
    result = decode(sampler, codebook=None)
    assert torch.equal(result.tokens, decode(sampler).tokens)


# ----------------------------------------------------------------------------------------------------- the loop


def test_groups_are_selected_and_never_sorted_whole(monkeypatch):
    widths = set()

    class Sorts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if str(func).startswith("aten.sort"):
                widths.add(args[0].shape[-1])
            return func(*args, **(kwargs or {}))

    with Sorts():
        decode(SpeculativeJacobiSampler(8, **lossy("grouped", group_size=6)), batch_size=1)
    assert widths == {3, 2}  # below and above


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "numbers, message",
    [
        (dict(delta=-0.1), "delta=-0.1"),
        (dict(delta=1.5), "delta=1.5"),
        (dict(delta=math.nan), "delta=nan"),
        (dict(delta=True), "delta=True"),
        (dict(delta="0.1"), "delta='0.1'"),
        (dict(probability_gap=2), "probability_gap=2"),
        (dict(code_distance=-1.0), "code_distance=-1.0"),
        (dict(factor=0.9), "factor=0.9"),
        (dict(factor=math.inf), "factor=inf"),
        (dict(group_size=0), "group_size=0.*1"),
        (dict(group_size=2.0), r"group_size=2\.0"),
        (dict(neighbours=0), "neighbours=0.*1"),
        (dict(neighbours=True), "neighbours=True"),
        (dict(bounded=1), "bounded=1.*True.*False"),
    ],
)
def test_refuses_settings_out_of_range(numbers, message):
    refuses(ValueError, message, SpeculativeJacobiSampler, **lossy("lantern", **numbers))


def test_refuses_an_acceptance_that_there_is_not():
    refuses(ValueError, "acceptance='loose'", SpeculativeJacobiSampler, acceptance="loose")


def test_settings_by_name():
    assert Relaxation.of("lantern") == Relaxation.of("lantern", {}) == Relaxation("lantern")
    settings = {"delta": 0.2, "neighbours": 9, "bounded": True}
    assert Relaxation.of("lantern", settings) == Relaxation("lantern", delta=0.2, neighbours=9, bounded=True)
    assert Relaxation.of("exact") == Relaxation.of("exact", {}) == Relaxation("exact")


@pytest.mark.parametrize(
    "acceptance, settings, message",
    [
        ("lantern", {"delta": 0.2, "detla": 0.3}, "'detla'.*group_size"),
        ("lantern", {"acceptance": "grouped"}, "'acceptance'.*group_size"),
        ("lantern", {1: 2}, "setting 1"),
        ("lantern", 0.2, r"relaxation=0\.2"),
        ("lantern", {"delta": 2}, "delta=2"),
        ("loose", {"delta": 0.2}, "acceptance='loose'"),
        ("exact", {"delta": 0.1}, "acceptance='exact'.*relaxation=None"),
        ("identical", {"group_size": 4, "delta": 0.1}, "group_size.*acceptance='identical'"),
    ],
)
def test_refuses_settings_by_name(acceptance, settings, message):
    refuses(ValueError, message, Relaxation.of, acceptance, settings)
