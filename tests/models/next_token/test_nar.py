"""NAR's official layout: what a file gives, beside its own forward written out, of whole pictures and step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.llamagen import on_meta
from tests.helpers.nar import (
    CLASSES,
    LABELS,
    SIDE,
    TOKENS,
    VOCAB,
    WORDS,
    captions,
    expected,
    nar_shapes,
    scores,
)
from tests.helpers.official import add_tiny_presets, random_weights
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_checkpoint import load_transformer, official_defaults, recognise
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.orders.tables import order_of
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


@pytest.fixture(autouse=True)
def tiny_presets(monkeypatch):
    add_tiny_presets(monkeypatch)


def file_of(tmp_path, **more: Any) -> tuple[dict[str, Tensor], LlamaGenTransformer]:
    weights = random_weights(nar_shapes(2, 16, vocab=VOCAB, **more), torch.float64)
    torch.save({"model": weights}, tmp_path / "nar.pt")
    return weights, load_transformer(tmp_path / "nar.pt", image_size=2 * SIDE, patch_size=2)


CASES = [
    pytest.param(dict(classes=CLASSES), LABELS, id="classes"),
    pytest.param(dict(caption=(WORDS, 8)), captions([4, 2, 1]), id="captions"),
    pytest.param(dict(classes=CLASSES, branch=2), LABELS, id="two blocks of the lower head"),
]


@pytest.mark.parametrize(("more", "condition"), CASES)
def test_one_pass_and_step_by_step_compute_what_the_layout_says(tmp_path, more, condition):
    weights, model = file_of(tmp_path, **more)
    assert model.trained_order == "nar" and model.dtype == torch.float64
    want = expected(weights, condition, TOKENS)
    order = order_of("nar", model.grid)
    assert len(order.steps) == 2 * SIDE - 1
    for steps in (order.steps[1:], (order.joined(),)):
        found = scores(model, condition, TOKENS, steps)
        assert float((found - want).abs().max()) < 1e-12 * float(want.abs().max())


@pytest.mark.parametrize(("more", "condition"), CASES)
def test_the_sampler_draws_plane_by_plane(tmp_path, more, condition):
    """The likeliest tokens, found by the pass over the whole picture, plane by plane."""
    weights, model = file_of(tmp_path, **more)
    law = TokenLaw(guidance_scale=1.5, top_k=1)
    result = OrderedSampler()(model, condition, law=law, batch_size=3)
    slots = torch.arange(SIDE * SIDE)
    distance, tokens = slots // SIDE + slots % SIDE, torch.zeros_like(TOKENS)
    for plane in range(2 * SIDE - 1):
        conditional, other = expected(weights, condition, tokens).chunk(2)
        best = (other + 1.5 * (conditional - other)).argmax(-1)
        tokens = best.where(distance == plane, tokens)
    assert torch.equal(result.tokens, tokens)
    assert (result.trace.target_calls == 2 * SIDE - 1).all() and result.trace.lossless
    assert torch.equal(result.trace.commit_call, distance.expand(3, -1))


def test_a_saved_model_keeps_its_order(tmp_path):
    weights, model = file_of(tmp_path, classes=CLASSES, branch=2)
    assert set(model.state_dict()) == set(weights)
    model.save_pretrained(tmp_path / "folder")
    again: Any = LlamaGenTransformer.from_pretrained(tmp_path / "folder", torch_dtype=torch.float64)
    assert (again.trained_order, again.config["branch_layers"]) == ("nar", 2)
    steps = order_of("nar", model.grid).steps[1:]
    one, other = (scores(each, LABELS, TOKENS, steps) for each in (model, again))
    assert torch.equal(one, other)


OFFICIAL = {"B": (12, 768), "M": (18, 1024), "L": (24, 1024), "XL": (36, 1280), "XXL": (48, 1536)}


@pytest.mark.parametrize("kind", ["class", "text"])
@pytest.mark.parametrize("name", OFFICIAL)
def test_no_key_of_a_release_is_missing_or_left_over(name, kind):
    condition: dict[str, Any] = {"classes": 1000} if kind == "class" else {"caption": (120, 2048)}
    shapes = nar_shapes(*OFFICIAL[name], **condition)
    architecture = recognise(on_meta({**shapes, "freqs_cis": (257, 32, 2)}))
    assert architecture.name == f"NAR-{name}, {kind}-conditional" and architecture.shapes() == shapes
    assert architecture.config["branch_layers"] == 1


def test_a_damaged_release_is_compared_with_the_nearest():
    shapes = nar_shapes(36, 1280, classes=1000)
    del shapes["medusa_norm.weight"]
    with pytest.raises(
        ValueError, match="closest is NAR-XL, class-conditional, with 1 missing: medusa_norm.weight"
    ):
        recognise(on_meta(shapes))


def test_defaults_are_those_of_the_scripts(tmp_path):
    for more, scale in ((dict(classes=CLASSES), 2.0), (dict(caption=(WORDS, 8)), 7.5)):
        _, model = file_of(tmp_path, **more)
        assert official_defaults(model) == {"default_guidance_scale": scale, "default_top_k": 0}


def test_refuses_calls_in_raster_order(tmp_path):
    _, model = file_of(tmp_path, classes=CLASSES)
    with pytest.raises(ValueError, match="trained for order 'nar', and this sampler decodes in raster order"):
        SpeculativeJacobiSampler(4)(model, LABELS, law=TokenLaw(), batch_size=3)
    state = model.prefill(LABELS, batch_size=3, guided=False, window=1)
    with pytest.raises(ValueError, match="trained for order 'nar'; pass seen and answers"):
        model(state, TOKENS[:, :1], torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="teacher_forced scores raster order"):
        model.teacher_forced(TOKENS, LABELS)
    for order, frames in (("spiral", 1), ("flashar", 2), ("par4", 2)):
        with pytest.raises(
            ValueError,
            match=f"order='{order}' of {frames} frames of a LlamaGen",
        ):
            LlamaGenTransformer(dim=16, num_heads=2, num_layers=1, order=order, num_frames=frames)
