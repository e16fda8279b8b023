"""Training of `shapes_any`: its start from a raster model, and a run that is killed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.train import any_order
from scripts.train.any_order import AnyOrderTraining, start_from_raster, train_any_order
from tests.helpers.training import check_training, shrink_pictures, tiny_raster
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.any_order import AnyOrderSampler

SHORT = AnyOrderTraining(
    steps=40, batch_size=8, scenes=16, learning_rate=1e-2, caption_dropout=0.2, compile=False
)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    shrink_pictures(monkeypatch, any_order, "held_out_loss")


def test_it_starts_with_all_weights_of_the_raster_model():
    one, model = tiny_raster(), start_from_raster(tiny_raster())
    assert model.trained_order == "any"
    weights = model.state_dict()
    assert weights.keys() - one.state_dict().keys() == {"pos_instruct_embeddings"}
    assert all(torch.equal(weights[key], value) for key, value in one.state_dict().items())


def test_it_learns_and_an_interrupted_run_ends_where_an_uninterrupted_one_does(readers, tmp_path: Path):
    encoder, vq_model = readers

    def train(out: Path, every: int) -> tuple[dict[str, Any], Any]:
        torch.manual_seed(4)
        model = start_from_raster(tiny_raster())
        return train_any_order(model, encoder, vq_model, SHORT, out, every=every), model

    record = check_training(tmp_path, train, 6, every=4, saved={"": LlamaGenTransformer})
    assert record["loss"][-1][1] < record["loss"][0][1] - 0.2
    trained: Any = LlamaGenTransformer.from_pretrained(tmp_path / "whole", torch_dtype=torch.float32)
    assert record["held_out_loss"] == pytest.approx(
        any_order.held_out_loss(trained, encoder, vq_model), abs=1e-3
    )
    drawn = AnyOrderSampler()(trained, encoder(["red circle"]), law=TokenLaw(), batch_size=1)
    assert drawn.tokens.shape == (1, 16)
