"""Training of a small ControlAR: its start, a run that is killed, and the pipeline that comes of it."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from scripts.train import control
from scripts.train.control import ControlTraining, controls_of, losses_of, start_from_raster, train_control
from tests.helpers.tiny import quiet, seeded, tiny_readers
from tests.helpers.training import check_training
from visual_spec.data import shapes
from visual_spec.data.shapes import caption, outline
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.prototype.controlar import ControlARTransformer
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.training import tokens
from visual_spec.training.tokens import dataset_scenes, tokenize_dataset

SHORT = ControlTraining(
    steps=12, batch_size=4, scenes=6, learning_rate=1e-2, rank=2, adapter_dim=12, adapter_layers=1,
    dropout=0.2, compile=False,
)  # fmt: skip


def raster() -> LlamaGenTransformer:
    torch.manual_seed(2)
    return LlamaGenTransformer(
        vocab_size=16, dim=16, num_layers=3, num_heads=2, grid_size=16, prefix_length=20, num_classes=None,
        caption_dim=8, zero_prefix_keys=False,
    ).eval()  # fmt: skip


def started() -> ControlARTransformer:
    torch.manual_seed(4)
    return start_from_raster(raster(), SHORT)


@pytest.fixture(scope="module")
def readers() -> Any:
    torch.manual_seed(1)
    encoder, vq_model = tiny_readers()
    vq_model.register_to_config(image_size=128)
    return encoder, vq_model


def test_scenes_are_those_of_the_tokens(monkeypatch):
    monkeypatch.setattr(shapes, "render", lambda scene, size: np.zeros((1, 1, 3), np.uint8))
    parts = tokens._painted(502, 3, False, 1, partial(tokens._paint, "shapes"))
    assert [text for texts, _ in parts for text in texts] == [
        caption(scene) for scene in dataset_scenes(502, 3)
    ]


def test_controls_are_outlines_in_the_range_of_control_pictures():
    scenes = dataset_scenes(3, 1)
    controls = controls_of(scenes)
    assert controls.shape == (3, 3, 128, 128) and controls.dtype == torch.float32
    for scene, picture in zip(scenes, controls, strict=True):
        assert np.array_equal(picture.numpy(), np.repeat(np.where(outline(scene), 1, -1)[None], 3, 0))


def test_it_starts_from_the_law_of_the_raster_model(readers):
    encoder, vq_model = readers
    words, ids = tokenize_dataset(vq_model, encoder, 2, 5)
    base, ids = raster().teacher_forced(ids.long(), encoder(words)), ids.long()
    want = torch.nn.functional.cross_entropy(base.mT, ids, reduction="none")
    assert torch.equal(losses_of(started(), encoder, words, controls_of(dataset_scenes(2, 5)), ids), want)


def test_a_run_ends_in_a_pipeline_that_draws_along_outlines(readers, tmp_path, monkeypatch):
    encoder, vq_model = readers
    monkeypatch.setattr(control, "held_out_losses", partial(control.held_out_losses, count=4))

    def train(out, every):
        model = started()
        return train_control(model, encoder, vq_model, SHORT, out, every=every), model

    record = check_training(tmp_path, train, 5, every=4, saved={"transformer": ControlARTransformer})
    folder = tmp_path / "whole"
    model: Any = ControlARTransformer.from_pretrained(folder / "transformer")
    start, own = raster().state_dict(), model.transformer.state_dict()
    assert torch.equal(own["tok_embeddings.weight"], start["tok_embeddings.weight"])
    assert not torch.equal(own["layers.2.attention.wo.weight"], start["layers.2.attention.wo.weight"])
    assert float(model.condition_mlp.uncond_embedding.detach().abs().max()) == 0
    assert 0 < record["held_out_loss"] < 2.77 and 0 < record["held_out_loss_of_other_outlines"]

    ImagePipeline(model, vq_model, encoder, SpeculativeJacobiSampler()).save_pretrained(tmp_path / "saved")
    pipe = quiet(load_pipeline(tmp_path / "saved"))
    scenes = dataset_scenes(2, 9, held_out=True)
    asked: dict[str, Any] = dict(
        prompt=[caption(scene) for scene in scenes],
        control=[np.repeat(outline(scene)[..., None], 3, 2).astype(np.uint8) * 255 for scene in scenes],
        guidance_scale=2.0,
    )
    fast = pipe(**asked, generator=seeded(1, 2))
    pipe.sampler = AutoregressiveSampler()
    assert torch.equal(pipe(**asked, generator=seeded(1, 2), output_type="latent").tokens, fast.tokens)
    assert fast.trace.identical and fast.images[0].size == (32 * 4, 128)
