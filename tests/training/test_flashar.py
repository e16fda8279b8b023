"""Training FlashAR's second head at a tiny size: where it starts, what it learns from, and that it resumes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.nar import scores
from tests.helpers.refusals import refuses
from tests.helpers.training import check_training, shrink_pictures, tiny_raster, trained
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.samplers.orders.tables import order_of
from visual_spec.training import flashar
from visual_spec.training.flashar import FlashTraining, Pass, start_from_raster, train_flashar

SHORT = FlashTraining(
    steps=24, branch_steps=8, batch_size=8, scenes=16, branch_rate=0.03, learning_rate=0.03, compile=False
)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    shrink_pictures(monkeypatch, flashar, "held_out_losses")


def raster(**more: Any) -> LlamaGenTransformer:
    return tiny_raster(1, **more)


def tiny() -> LlamaGenTransformer:
    torch.manual_seed(2)
    return start_from_raster(raster())


def condition(rows: int) -> TextCondition:
    features = torch.randn(rows, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return TextCondition(features, torch.arange(20).expand(rows, -1) >= 12)


def decoded(model: LlamaGenTransformer, tokens: Tensor, told: TextCondition) -> Tensor:
    return scores(model, told, tokens, order_of("flashar", model.grid).steps[1:], guided=False)


def mean_loss(logits: Tensor, tokens: Tensor, weights: Tensor) -> float:
    """Every token as often as it weighs."""
    each = weights.flatten()
    logits, tokens = (value.flatten(0, 1).repeat_interleave(each, 0) for value in (logits, tokens))
    return float(F.cross_entropy(logits, tokens))


def test_the_pass_of_training_is_what_decoding_computes():
    model = tiny().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens, told = torch.randint(16, (3, 16), generator=torch.Generator().manual_seed(4)), condition(3)
    want, forced = decoded(model, tokens, told), Pass(model)
    with torch.no_grad():
        merged, _ = forced(model, tokens, told)
        weights = torch.randint(1, 4, (3, 16), generator=torch.Generator().manual_seed(5))
        losses = forced.losses(model, tokens, told, weights)
    assert sorted(forced.targets.tolist()) == list(range(16))
    torch.testing.assert_close(merged, want[:, forced.targets], rtol=0, atol=1e-12)
    assert float(losses[0]) == pytest.approx(mean_loss(want, tokens, weights), abs=1e-12)
    # With a gate that is shut, the lower head alone answers wherever it can: column 0 has it alone anyway.
    for parameter in model.hv_gate_mlp.parameters():
        torch.nn.init.zeros_(parameter)
    list(model.hv_gate_mlp.parameters())[-1].data.fill_(-1000)
    alone = decoded(model, tokens, told)
    answered = torch.tensor([0, *range(4, 16)])
    want_below = mean_loss(alone[:, answered], tokens[:, answered], weights[:, answered])
    assert float(losses[1]) == pytest.approx(want_below, abs=1e-12)


def test_it_starts_as_the_raster_model_with_its_last_block_and_head_copied():
    one, model = raster(), tiny()
    weights, known = model.state_dict(), one.state_dict()
    assert model.trained_order == "flashar" and len(model.layers) == 3
    assert all(torch.equal(weights[key], value) for key, value in known.items())
    for key, value in known.items():
        copied = key.replace("layers.1.", "layers.2.")
        copied = f"medusa_{key}" if key in ("norm.weight", "output.weight") else copied
        if copied != key:
            assert torch.equal(weights[copied], value)
    weights["layers.2.attention.wo.weight"].add_(1)  # a copy, not the same
    assert torch.equal(weights["layers.1.attention.wo.weight"], known["layers.1.attention.wo.weight"])
    refuses(ValueError, "'flashar'.*2.*1", start_from_raster, model)
    refuses(ValueError, "2 blocks.*3", start_from_raster, one, 3)


def test_it_learns_and_an_interrupted_run_ends_where_an_uninterrupted_one_does(readers, tmp_path: Path):
    encoder, vq_model = readers

    train = trained(tiny, train_flashar, encoder, vq_model, SHORT)
    # In each stage.
    record = check_training(tmp_path, train, 6, 15, every=4, saved={"": LlamaGenTransformer})
    assert record["loss"][-1][1] < record["loss"][0][1] - 0.2


def test_at_first_only_the_branch_learns(readers, tmp_path: Path):
    encoder, vq_model = readers
    start, model = tiny().state_dict(), tiny()
    train_flashar(model, encoder, vq_model, replace(SHORT, steps=8), tmp_path)
    own = ("layers.2.", "medusa_", "hv_gate_mlp.")
    for key, value in model.state_dict().items():
        kind = torch.float8_e4m3fn if value.ndim == 2 else torch.float16
        same = torch.equal(value, start[key].to(kind).float())
        assert same == (not key.startswith(own)), key


def test_a_compiled_run_trains_the_trunk_after_the_branch(readers, tmp_path: Path, monkeypatch):
    """The graph is traced while the branch learns, and serves when all do."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    encoder, vq_model = readers
    start, model = tiny().state_dict(), tiny()
    train_flashar(model, encoder, vq_model, replace(SHORT, compile=True), tmp_path)
    key = "layers.0.attention.wqkv.weight"
    assert not torch.equal(model.state_dict()[key], start[key].to(torch.float8_e4m3fn).float())


def test_another_order_is_refused(readers, tmp_path: Path):
    encoder, vq_model = readers
    refuses(ValueError, "'raster'", train_flashar, raster(), encoder, vq_model, SHORT, tmp_path)
