"""Training FlowAR at a tiny size: the loss is the one written out, and a run that was interrupted goes on."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from scripts.train import flowar
from scripts.train.flowar import FlowTraining, map_loss, train_maps
from scripts.train.mar import EncodedPictures
from tests.helpers.continuous_image import tiny_vae
from tests.helpers.training import check_training, trained
from tests.models.continuous.tiny import tiny_flowar
from visual_spec.data.shapes_classes import CLASSES
from visual_spec.prototype.flowar.model import FlowARTransformer

SETTINGS = FlowTraining(steps=12, batch_size=4, scenes=8, learning_rate=4e-3)


@pytest.fixture(autouse=True)
def few_pictures_are_judged(monkeypatch):
    monkeypatch.setattr(flowar, "held_out_loss", partial(flowar.held_out_loss, count=6))


def new_model() -> FlowARTransformer:
    torch.manual_seed(1)
    model = FlowARTransformer(4, 3, 16, 1, 2, 64, 1, num_classes=len(CLASSES))
    flowar.initialise(model)
    return model


def test_the_loss_is_that_of_every_place_of_every_map():
    model: Any = tiny_flowar().double()
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(6, 16, 3, generator=generator, dtype=torch.float64)
    objects = torch.zeros(6, 16, dtype=torch.bool)
    objects[:, 5] = True
    pictures = EncodedPictures(torch.tensor([0, 1, 2, 3, 4, 0]), means, 0 * means, objects)
    settings = FlowTraining(batch_size=2, label_dropout=0.0, object_weight=3.0)
    found = map_loss(model, pictures, settings, np.random.default_rng(5))

    rng = np.random.default_rng(5)
    chosen = rng.integers(6, size=2)
    noise = torch.Generator().manual_seed(int(rng.integers(2**63)))
    torch.randn(2, 16, 3, generator=noise)  # of the latents, which have no spread here
    state = model.prefill(pictures.labels[chosen], batch_size=2, guided=False)
    latents = means[chosen].mT.reshape(2, 3, 4, 4)
    total, weight, z = 0.0, 0.0, state.conditions
    for scale, side in enumerate((1, 2, 4)):
        each = 4 // side
        map = latents.reshape(2, 3, side, each, side, each).mean((3, 5))
        times, added = torch.rand(2, generator=noise), torch.randn(2, side * side, 3, generator=noise)
        for row in range(2):
            for place in range(side * side):
                across, down = place % side, place // side
                token, own = map[row, :, down, across], added[row].double()
                tokens = map[row].reshape(3, -1).T
                share = times[row].double()
                inputs = model.flownet.inputs(z[row : row + 1], side)
                velocity = model.flownet(
                    ((1 - share) * tokens + share * own)[None], times[row : row + 1], inputs
                )
                error = (velocity[0, place] - (own[place] - token)).square().mean()
                heavy = 3.0 if (down, across) == (1 // each, 1 // each) else 1.0  # place 5 is row 1, column 1
                total, weight = total + heavy * error, weight + heavy
        if side < 4:
            z = model(state, map, scale + 1)
    torch.testing.assert_close(found, total / weight, rtol=1e-6, atol=0)


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path):
    tokenizer = tiny_vae()

    train = trained(new_model, train_maps, tokenizer, SETTINGS)
    check_training(tmp_path, train, 10, every=8, saved={"": FlowARTransformer})


@pytest.mark.slow
def test_it_learns(tmp_path):
    record = train_maps(new_model(), tiny_vae(), replace(SETTINGS, steps=141), tmp_path)
    losses = dict(record["loss"])
    assert losses[140] < 0.8 * losses[0]


def test_drawn_pictures_are_judged():
    found = flowar.judge(new_model(), tiny_vae(), 3, guidance=2.0, levels=2)
    assert (found["pictures"], found["levels"]) == (3, 2) and 0 <= found["class"] <= 1
