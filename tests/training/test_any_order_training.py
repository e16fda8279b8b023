"""Training of any-order models: their start from a raster model, their orders, and a run that is killed."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.train import any_order
from scripts.train.any_order import AnyOrderTraining, draw_orders, predicted, start_from, train_any_order
from tests.helpers.training import check_training, shrink_pictures, tiny_raster
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.any_order import AnyOrderSampler
from visual_spec.samplers.orders.locality import group_sizes

SHORT = AnyOrderTraining(
    steps=40, batch_size=8, scenes=16, learning_rate=1e-2, caption_dropout=0.2, compile=False, locality=0.5
)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    shrink_pictures(monkeypatch, any_order, "held_out_loss")


@pytest.mark.parametrize("order", ["any", "queries"])
def test_it_starts_with_all_weights_of_the_raster_model(order):
    one, model = tiny_raster(), start_from(tiny_raster(), order)
    assert model.trained_order == "any"
    weights = model.state_dict()
    assert weights.keys() - one.state_dict().keys() == {"pos_instruct_embeddings"}
    assert all(torch.equal(weights[key], value) for key, value in one.state_dict().items())
    again = start_from(model, "queries").state_dict()  # of an any-order model the instruction too
    assert all(torch.equal(again[key], value) for key, value in weights.items())


def test_orders_and_groups_are_those_of_the_settings():
    """Groups of one of the calls, by a cosine from one slot; a share of steps in the order of decoding."""
    settings = AnyOrderTraining(locality=0.5, least_calls=12, most_calls=20)
    seen = []
    for seed in range(40):
        orders, groups = draw_orders(settings, np.random.default_rng(seed), 2, 16, True)
        assert all(sorted(row) == list(range(256)) for row in orders.tolist()) and groups.diff().min() >= 0
        assert groups.bincount().tolist() == list(group_sizes(256, int(groups[-1]) + 1))
        (row, column), (next_row, next_column) = (divmod(slot, 16) for slot in orders[0, :2].tolist())
        beside = abs(next_row - row) + abs(next_column - column) == 1  # the second call begins at a side
        seen.append((int(groups[-1]) + 1, beside))
    assert set(seen) == {(calls, beside) for calls in (12, 16, 20) for beside in (False, True)}
    orders, groups = draw_orders(AnyOrderTraining(), np.random.default_rng(0), 2, 16, False)
    assert groups.tolist() == list(range(256)) and orders.shape == (2, 256)


@pytest.mark.parametrize("order", ["any", "queries"])
def test_it_learns_and_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    readers, tmp_path: Path, order
):
    encoder, vq_model = readers

    def train(out: Path, every: int) -> tuple[dict[str, Any], Any]:
        torch.manual_seed(4)
        model = start_from(tiny_raster(), order)
        return train_any_order(model, encoder, vq_model, SHORT, out, every=every), model

    record = check_training(tmp_path, train, 6, every=4, saved={"": LlamaGenTransformer})
    assert record["loss"][-1][1] < record["loss"][0][1] - 0.2
    trained: Any = LlamaGenTransformer.from_pretrained(tmp_path / "whole", torch_dtype=torch.float32)
    assert record["held_out_loss"] == pytest.approx(
        any_order.held_out_loss(trained, encoder, vq_model, SHORT), abs=1e-3
    )
    drawn = AnyOrderSampler()(trained, encoder(["red circle"]), law=TokenLaw(), batch_size=1)
    assert drawn.tokens.shape == (1, 16)


def test_tokens_of_objects_weigh_more(readers, tmp_path: Path):
    """The loss of the first step, added up token by token."""
    encoder, vq_model = readers
    settings = replace(SHORT, steps=1, scenes=40, object_weight=3.0, caption_dropout=0.0)
    model = start_from(tiny_raster(), "queries")
    record = train_any_order(model, encoder, vq_model, settings, tmp_path)

    words, tokens = any_order.tokenize_dataset(
        vq_model, encoder, 40, settings.seed + 1, touching=settings.touching
    )
    rng = np.random.default_rng((settings.seed, 0))
    chosen = torch.from_numpy(rng.integers(40, size=8))
    orders, groups = draw_orders(settings, rng, 8, 4, True)
    fresh = start_from(tiny_raster(), "queries")
    with torch.no_grad():
        logits = predicted(fresh, tokens[chosen].long(), orders, groups, encoder(words[chosen]))
    losses = weights = 0.0
    for row, picture in enumerate(chosen.tolist()):
        ground = [other for other in range(40) if torch.equal(words[other, -3:-1], words[picture, -3:-1])]
        for place, slot in enumerate(orders[row].tolist()):
            token, counts = int(tokens[picture, slot]), Counter(tokens[ground, slot].tolist())
            most = max(counts.values())
            usual = min(code for code, count in counts.items() if count == most)
            weight = 1.0 if token == usual else 3.0
            losses -= weight * float(logits[row, place].log_softmax(-1)[token])
            weights += weight
    assert 8 * 16 < weights < 8 * 16 * 3
    assert record["loss"][0][1] == pytest.approx(losses / weights, abs=1e-4)
