"""NAR and FlashAR: their official layouts, beside their own forward written out, whole and step by step."""

import argparse
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.llamagen import on_meta
from tests.helpers.llamagen_releases import flashar_shapes
from tests.helpers.nar import (
    CLASSES,
    LABELS,
    SIDE,
    TOKENS,
    VOCAB,
    WORDS,
    captions,
    expected,
    gated,
    mean,
    nar_shapes,
    scores,
)
from tests.helpers.official import random_weights
from tests.helpers.refusals import refuses
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_checkpoint import load_transformer, official_defaults, recognise
from visual_spec.models.next_token.llamagen_near_to_far import HeadGate
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.orders.tables import order_of
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


def file_of(
    tmp_path, order: str = "flashar", training: dict[str, Any] | None = None, **more: Any
) -> tuple[dict[str, Tensor], LlamaGenTransformer]:
    shapes = {"nar": nar_shapes, "flashar": flashar_shapes}[order](2, 16, vocab=VOCAB, **more)
    weights = random_weights(shapes, torch.float64)
    for key in [key for key in weights if key.startswith("hv_gate_mlp")]:
        weights[key] = 3 * torch.randn(
            weights[key].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(key))
        )
    fixed = torch.tensor(0.7, dtype=torch.float64)  # of a run before it had a gate; nothing reads it
    unread = {"hv_mix_logit": fixed} if order == "flashar" else {}
    args = {} if training is None else {"args": argparse.Namespace(**training)}
    torch.save({"model": weights | unread} | args, tmp_path / "official.pt")
    return weights, load_transformer(tmp_path / "official.pt", image_size=2 * SIDE, patch_size=2)


MERGE = {"nar": mean, "flashar": gated}
CASES = [
    pytest.param("nar", dict(classes=CLASSES), LABELS, id="NAR, classes"),
    pytest.param("nar", dict(caption=(WORDS, 8)), captions([4, 2, 1]), id="NAR, captions"),
    pytest.param("nar", dict(classes=CLASSES, branch=2), LABELS, id="NAR, two blocks of the lower head"),
    pytest.param("flashar", dict(classes=CLASSES), LABELS, id="FlashAR, classes"),
    pytest.param(
        "flashar",
        dict(caption=(WORDS, 8), branch=2),
        captions([4, 2, 1]),
        id="FlashAR, captions, two blocks below",
    ),
]


def close(found: Tensor, want: Tensor) -> bool:
    return float((found - want).abs().max()) < 1e-12 * float(want.abs().max())


@pytest.mark.parametrize(("kind", "more", "condition"), CASES)
def test_one_pass_and_step_by_step_compute_what_the_layout_says(tmp_path, kind, more, condition):
    weights, model = file_of(tmp_path, kind, **more)
    assert model.trained_order == kind and model.dtype == torch.float64
    want = expected(weights, condition, TOKENS, MERGE[kind])
    order = order_of(kind, model.grid)
    assert len(order.steps) == 2 * SIDE - 1
    for steps in (order.steps[1:], (order.joined(),)):
        assert close(scores(model, condition, TOKENS, steps), want)


@pytest.mark.parametrize(("kind", "more", "condition"), CASES)
def test_the_sampler_draws_plane_by_plane(tmp_path, kind, more, condition):
    """The likeliest tokens, found by the pass over the whole picture, plane by plane."""
    weights, model = file_of(tmp_path, kind, **more)
    result = OrderedSampler()(model, condition, law=TokenLaw(guidance_scale=1.5, top_k=1), batch_size=3)
    slots = torch.arange(SIDE * SIDE)
    distance, tokens = slots // SIDE + slots % SIDE, torch.zeros_like(TOKENS)
    for plane in range(2 * SIDE - 1):
        conditional, other = expected(weights, condition, tokens, MERGE[kind]).chunk(2)
        best = (other + 1.5 * (conditional - other)).argmax(-1)
        tokens = best.where(distance == plane, tokens)
    assert torch.equal(result.tokens, tokens)
    assert (result.trace.target_calls == 2 * SIDE - 1).all() and result.trace.lossless
    assert torch.equal(result.trace.commit_call, distance.expand(3, -1))


def test_defaults_are_those_of_the_scripts(tmp_path):
    captioned, labelled = dict[str, Any](caption=(WORDS, 8)), dict[str, Any](classes=CLASSES)
    for kind, more, scale in (("nar", labelled, 2.0), ("nar", captioned, 7.5), ("flashar", labelled, 2.0)):
        _, model = file_of(tmp_path, kind, **more)
        assert official_defaults(model) == {"default_guidance_scale": scale, "default_top_k": 0}


TRAININGS = [
    pytest.param({"vertical_start_layer": 0}, 1, 0, id="from the first block"),
    pytest.param({"vertical_start_layer": 1, "medusa_attention_num": 1}, 1, 1, id="from the second block"),
    pytest.param({"vertical_start_last_minus_depth": True}, 2, 0, id="as deep as the trunk"),
    pytest.param({"vertical_start_layer": -1}, 1, 2, id="after the trunk"),
    pytest.param({"vertical_start_layer": 7}, 1, 2, id="past the trunk"),
]


def heads_of(model: Any, condition: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """What training reads of all slots in one pass: the merged logits, and their slots."""
    whole = order_of("flashar", model.grid).joined()
    first = torch.zeros(1, 2, dtype=torch.long)
    answers = torch.cat([first, whole.answers.where(whole.answers < 0, whole.answers + 1)])
    seen = whole.seen[:, whole.sources]
    heads = model.teacher_forced_heads(
        TOKENS[:, whole.sources], condition, slots=whole.sources, seen=seen, answers=answers, **more
    )
    return model.merge(heads, answers), torch.cat([first[0, :1], whole.emitted])


@pytest.mark.parametrize(("training", "branch_layers", "start"), TRAININGS)
def test_the_branch_starts_where_it_was_trained_to(tmp_path, training, branch_layers, start):
    """As `_run_backbone_and_vertical` of github.com/lxazjk/LlamaGen-FlashAR: the trunk's output before that block."""
    weights, model = file_of(tmp_path, training=training, classes=CLASSES, branch=branch_layers)
    want = expected(weights, LABELS, TOKENS, gated, start)
    order = order_of("flashar", model.grid)
    for steps in (order.steps[1:], (order.joined(),)):
        assert close(scores(model, LABELS, TOKENS, steps), want)
    merged, slots = heads_of(model, LABELS)
    assert close(merged.detach(), want[:3, slots])
    again: Any = LlamaGenTransformer.from_config(model.config)
    assert again.config["branch_start"] == model.config["branch_start"]


def test_both_heads_in_one_pass_with_gradients(tmp_path):
    """What training reads: the heads of all slots at once merge to what decoding computes."""
    weights, model = file_of(tmp_path, caption=(WORDS, 8))
    condition = captions([4, 2, 1])
    want = expected(weights, condition, TOKENS, gated)
    merged, slots = heads_of(model, condition)
    assert close(merged.detach(), want[:3, slots])
    merged.sum().backward()
    assert all(
        parameter.grad is not None for key, parameter in model.named_parameters() if "uncond" not in key
    )
    merged, _ = heads_of(model, condition, dropped=torch.tensor([False, True, False]))
    assert close(merged.detach(), want[[0, 4, 2]][:, slots])


def test_a_file_that_contradicts_its_training_is_refused(tmp_path):
    with pytest.raises(ValueError, match="medusa_attention_num=2.*1"):
        file_of(tmp_path, training={"medusa_attention_num": 2}, classes=CLASSES)


@pytest.mark.parametrize(("order", "start"), [("flashar", 3), ("nar", -1), ("raster", 0)])
def test_a_branch_that_starts_nowhere_is_refused(order, start):
    with pytest.raises(ValueError, match=f"branch_start={start} of order '{order}'"):
        LlamaGenTransformer(VOCAB, 16, 2, 2, SIDE, order=order, branch_start=start)


def test_a_fresh_gate_is_the_mean_and_passes_no_gradient_to_the_heads():
    gate, shape = HeadGate(VOCAB).double(), (2, 3, VOCAB)
    right, below = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.equal(gate(right, below), torch.full((2, 3, 1), 0.5, dtype=torch.float64))
    for parameter in gate.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    gate(right, below).sum().backward()
    assert right.grad is None and all(parameter.grad is not None for parameter in gate.parameters())
    flat = torch.zeros(shape, dtype=torch.float64)
    assert gate(flat, flat).isfinite().all()


def test_a_fixed_share_without_a_gate_is_refused():
    """It would be decoded as a mean, which it is not."""
    with pytest.raises(ValueError, match="NAR-XL.*1.*hv_mix_logit"):
        recognise(on_meta({**nar_shapes(36, 1280, classes=1000), "hv_mix_logit": ()}))


def test_a_damaged_release_is_compared_with_the_nearest():
    shapes = nar_shapes(36, 1280, classes=1000)
    del shapes["medusa_norm.weight"]
    refuses(ValueError, r"NAR-XL.*1.*medusa_norm\.weight", recognise, on_meta(shapes))


def test_refuses_calls_in_raster_order(tmp_path):
    _, model = file_of(tmp_path, "nar", classes=CLASSES)
    with pytest.raises(ValueError, match="'nar'.*OrderedSampler"):
        SpeculativeJacobiSampler(4)(model, LABELS, law=TokenLaw(), batch_size=3)
    state = model.prefill(LABELS, batch_size=3, guided=False, window=1)
    refuses(ValueError, "'nar'.*seen", model, state, TOKENS[:, :1], torch.zeros(3, 1, dtype=torch.long))
    refuses(ValueError, "teacher_forced", model.teacher_forced, TOKENS, LABELS)
    for order, frames in (("spiral", 1), ("flashar", 2), ("par4", 2)):
        with pytest.raises(ValueError, match=f"order='{order}' of {frames} frames of a LlamaGen"):
            LlamaGenTransformer(dim=16, num_heads=2, num_layers=1, order=order, num_frames=frames)
