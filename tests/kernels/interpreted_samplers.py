"""Decodes by the kernels of masked and relaxed samplers, in Triton's interpreter; run by tests/samplers."""

from typing import Any

import pytest
import torch

from tests.helpers.tabular import TabularMaskedModel, TabularModel
from tests.kernels.relaxing import codes
from visual_spec.kernels import (
    clustered_mass,
    draw,
    grouped_mass,
    lantern_mass,
    masked_sample,
    neighbour_mass,
)
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import of_settings
from visual_spec.samplers.core import state, verification
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked import unmasking
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

KERNELS = (
    (draw, "draw"),
    (masked_sample, "masked_sample"),
    (grouped_mass, "grouped_mass"),
    (clustered_mass, "clustered_mass"),
    (lantern_mass, "lantern_mass"),
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Take the path of a GPU from here on, by the kernels themselves. Says which of them ran."""
    names: set[str] = set()

    def watched(module: Any, name: str) -> Any:
        real = getattr(module, f"{name}_triton")

        def call(*args: Any) -> Any:
            names.add(name)
            return real(*args)

        return call

    for module, name in KERNELS:
        monkeypatch.setattr(module, "TILE", 64, raising=False)
        monkeypatch.setattr(module, f"{name}_triton", watched(module, name))
    for module in (neighbour_mass, *(module for module, _ in KERNELS)):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    for module in (state, verification, unmasking):
        monkeypatch.setattr(module, "fits", lambda logits: logits.dtype == torch.float32)
    return names


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize(
    ("settings", "law"),
    [
        (
            dict(clock="magnet", span=2, temperature="falling", guidance="falling"),
            TokenLaw(guidance_scale=3.0, temperature=2.0, top_p=0.8),
        ),
        (dict(score="probability", filtered_score=True, choice_temperature=1.0), TokenLaw(top_k=2)),
        (dict(), TokenLaw(temperature=0.0)),
    ],
)
def test_masked_decodes(request, settings, law):
    model = TabularMaskedModel(TokenGrid(1, 4), 3, conditions=2, dtype=torch.float32)

    def decode() -> Any:
        generator = torch.Generator().manual_seed(3)
        condition = torch.tensor([1, 0] if law.guided else [1])
        sampler = of_settings(MaskedSampler, 3, **settings)
        return sampler(model, condition, law=law, generator=generator, batch_size=len(condition))

    expected = decode()
    launched = request.getfixturevalue("launched")
    found = decode()
    assert launched == {"masked_sample"}
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.trace.entry_call, expected.trace.entry_call)


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize(
    ("acceptance", "relaxation"),
    [
        ("grouped", dict(group_size=4, code_distance=3.0, probability_gap=0.4)),
        ("clustered", dict(group_size=3)),
        ("lantern", dict(delta=0.3, neighbours=3)),
    ],
)
def test_relaxed_decodes(request, acceptance, relaxation):
    model = TabularModel(TokenGrid(2, 4), 7, order=2, conditions=2, dependence=0.2, dtype=torch.float32)

    def decode():
        generator = torch.Generator().manual_seed(3)
        sampler = SpeculativeJacobiSampler(3, acceptance=acceptance, relaxation=relaxation)
        condition, law = torch.tensor([1, 0]), TokenLaw()
        return sampler(model, condition, law=law, generator=generator, batch_size=2, codebook=codes(7))

    expected = decode()
    launched = request.getfixturevalue("launched")
    found = decode()
    assert launched == {"draw", f"{acceptance}_mass"}  # slot 0, and the windows
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.trace.commit_call, expected.trace.commit_call)
