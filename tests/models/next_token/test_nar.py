"""NAR's official layout: what a file gives, beside its own forward written out, of whole pictures and step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.next_token import straight
from tests.models.next_token.test_llamagen_checkpoint import on_meta
from tests.official import add_tiny_presets, random_weights, transformer_shapes
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.models.next_token.llamagen_checkpoint import load_transformer, official_defaults, recognise
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.orders import Step, order_of
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.ordered import OrderedSampler

SIDE, VOCAB, CLASSES, WORDS = 5, 12, 7, 4
TOKENS = torch.randint(VOCAB, (3, SIDE * SIDE), generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([3, 0, 6])


def nar_shapes(layers: int, dim: int, branch: int = 1, **more: Any) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a release: a transformer with the lower head's blocks at the end of its layers."""
    shapes = transformer_shapes(layers + branch, dim, **more)
    return shapes | {"medusa_norm.weight": (dim,), "medusa_output.weight": shapes["output.weight"]}


@pytest.fixture(autouse=True)
def tiny_presets(monkeypatch):
    add_tiny_presets(monkeypatch)


def file_of(tmp_path, **more: Any) -> tuple[dict[str, Tensor], LlamaGenTransformer]:
    weights = random_weights(nar_shapes(2, 16, vocab=VOCAB, **more), torch.float64)
    torch.save({"model": weights}, tmp_path / "nar.pt")
    return weights, load_transformer(tmp_path / "nar.pt", image_size=2 * SIDE, patch_size=2)


def captions(valid: list[int]) -> TextCondition:
    mask = torch.arange(WORDS) >= WORDS - torch.tensor(valid)[:, None]
    generator = torch.Generator().manual_seed(2)
    return TextCondition(torch.randn(len(valid), WORDS, 8, dtype=torch.float64, generator=generator), mask)


# What a model makes of the predictions of its right and lower head, [V] each.
Merge = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


def mean(weights: dict[str, Tensor], right: Tensor, below: Tensor) -> Tensor:
    return (right + below) / 2


def straight_line(
    weights: dict[str, Tensor],
    prefix: Tensor,
    words: Tensor,
    tokens: Tensor,
    merge: Merge = mean,
    branch: int = 2,
) -> Tensor:
    """Logits [L, V] of all slots of one picture, in one pass over prefix [T, dim] and tokens [L]: no cache, no calls.

    Two layers before the right head; the lower one's leave them before layer `branch`; two attention heads.
    """
    size, start, side = prefix.shape[1] // 2, len(prefix), math.isqrt(len(tokens))
    x = torch.cat([prefix, weights["tok_embeddings.weight"][tokens]])
    row, column = torch.arange(len(tokens)) // side, torch.arange(len(tokens)) % side
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    mask[start:, start:] = (row + column)[:, None] >= row + column
    mask[:, :start] &= words
    mask |= torch.eye(len(x), dtype=torch.bool)
    frequencies = 10000.0 ** (-torch.arange(0, size // 2, 2, dtype=torch.float64) / (size // 2))
    angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], 1)
    turn = torch.cat([torch.zeros(start, size // 2), torch.polar(torch.ones_like(angles), angles)])[:, None]

    taps = [x]
    for layer in range(2):
        taps.append(straight.layer(weights, layer, taps[-1], mask, turn))
    x = taps[branch]
    for layer in range(2, sum(name.endswith("attention.wo.weight") for name in weights)):
        x = straight.layer(weights, layer, x, mask, turn)
    right = straight.norm(weights, taps[2], "norm")[start - 1 :] @ weights["output.weight"].T
    below = straight.norm(weights, x, "medusa_norm")[start - 1 :] @ weights["medusa_output.weight"].T
    found = [merge(weights, right[0], below[0])]
    for slot in range(1, len(tokens)):
        left, up = right[slot], below[slot - side + 1] if slot >= side else None
        if up is None:
            found.append(left)
        else:
            found.append(merge(weights, left, up) if slot % side else up)
    return torch.stack(found)


def expected(
    weights: dict[str, Tensor], condition: Any, tokens: Tensor, merge: Merge = mean, branch: int = 2
) -> Tensor:
    """`straight_line` of a batch, conditional rows, then unconditional ones: [2B, L, V]."""
    found = []
    for guided in (False, True):
        for sample in range(len(tokens)):
            if isinstance(condition, Tensor):
                label = CLASSES if guided else int(condition[sample])
                prefix, words = weights["cls_embedding.embedding_table.weight"][[label]], torch.ones(1).bool()
            else:
                words = condition.mask[sample]
                features = condition.features[sample] * words[:, None]
                features = weights["cls_embedding.uncond_embedding"] if guided else features
                inner = features @ weights["cls_embedding.cap_proj.fc1.weight"].T
                inner = torch.nn.functional.gelu(inner, approximate="tanh")
                prefix = inner @ weights["cls_embedding.cap_proj.fc2.weight"].T
            found.append(straight_line(weights, prefix, words, tokens[sample], merge, branch))
    return torch.stack(found)


def scores(model: LlamaGenTransformer, condition: Any, tokens: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """Logits [2B, L, V] of given tokens, from the calls of these steps."""
    count, window = len(tokens), max(len(step.slots) for step in steps)
    state = model.prefill(condition, batch_size=count, guided=True, window=window)
    found = state.logits.new_full((2 * count, SIDE * SIDE, VOCAB), torch.nan)
    found[:, 0] = state.logits
    for step in steps:
        slots, emitted = step.slots.expand(count, -1), step.emitted.expand(count, -1)
        seen = step.seen.expand(count, -1, -1)
        fed = tokens[:, step.sources]
        found[:, step.emitted] = model(state, fed, slots, seen=seen, predicted=emitted, answers=step.answers)
    return found


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
    for order, frames in (("spiral", 1), ("nar", 2)):
        with pytest.raises(
            ValueError,
            match=f"order='{order}' of {frames} frames; pass raster, or nar, flashar, par4, par16 or any of one frame",
        ):
            LlamaGenTransformer(dim=16, num_heads=2, num_layers=1, order=order, num_frames=frames)
