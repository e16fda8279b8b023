"""Training of a small ControlAR: its start, a run that is killed, and the pipeline that comes of it."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scripts.train import control
from scripts.train.control import (
    ControlTraining,
    change_little,
    controls_of,
    learn_to_read,
    losses_of,
    moved,
    start_from_raster,
    train_control,
    weights_of,
)
from tests.helpers.tiny import quiet, seeded, tiny_readers
from tests.helpers.training import check_training
from visual_spec.data import shapes
from visual_spec.data.shapes import caption, covered, outline
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
    dropout=0.2, reading_steps=3, compile=False,
)  # fmt: skip


def raster() -> LlamaGenTransformer:
    torch.manual_seed(2)
    return LlamaGenTransformer(
        vocab_size=16, dim=16, num_layers=3, num_heads=2, grid_size=16, prefix_length=20, num_classes=None,
        caption_dim=8, zero_prefix_keys=False,
    ).eval()  # fmt: skip


def started() -> ControlARTransformer:
    torch.manual_seed(4)
    model = start_from_raster(raster(), SHORT)
    change_little(model, SHORT.rank)
    return model


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


def test_moved_outlines_are_near_their_place():
    """Every pixel is near one of the true outline, half of the lines are two pixels wide; a share of 0 moves none."""
    controls = controls_of(dataset_scenes(8, 1))
    assert torch.equal(moved(controls, np.random.default_rng(0), 0.0), controls)
    found = moved(controls, np.random.default_rng(0), 1.0)
    near = torch.nn.functional.max_pool2d(controls, 7, 1, 3)
    assert (near[found > 0] > 0).all() and (found != controls).flatten(1).any(1).sum() >= 6
    counts = (found > 0).flatten(1).sum(1) / (controls > 0).flatten(1).sum(1)
    assert (counts == 1).any() and (counts > 1.5).any()


def test_it_starts_from_the_law_of_the_raster_model(readers):
    encoder, vq_model = readers
    words, ids = tokenize_dataset(vq_model, encoder, 2, 5)
    base, ids = raster().teacher_forced(ids.long(), encoder(words)), ids.long()
    want = torch.nn.functional.cross_entropy(base.mT, ids, reduction="none")
    assert torch.equal(losses_of(started(), encoder, words, controls_of(dataset_scenes(2, 5)), ids), want)


def test_what_reads_the_control_learns_where_shapes_are():
    """From a loss that guesses: a pixel in the middle of a shape, far from its outline, is told from the ground."""
    model, settings = started(), replace(SHORT, reading_steps=200, reading_rate=5e-3, reading_batch=8)
    scenes = dataset_scenes(4, 3)

    def told() -> float:
        """How well a linear map of what is seen, fitted by least squares, tells the middle of each cell."""
        with torch.no_grad():
            seen = model.condition_mlp.cap_proj(model.read(controls_of(scenes))).flatten(0, 1)
        truth = torch.from_numpy(np.stack([covered(scene)[4::8, 4::8] for scene in scenes])).flatten().float()
        found = torch.linalg.lstsq(seen, truth[:, None]).solution
        return float((seen @ found)[:, 0].sub(truth).square().mean() / truth.var())

    before = told()
    learn_to_read(model, scenes, settings)
    assert told() < 0.7 * before


def test_tokens_weigh_by_the_outline_alone():
    control = torch.full((1, 3, 128, 128), -1.0)
    control[:, :, 20:40, 20] = 1.0  # down through cells (2, 2), (3, 2) and (4, 2)
    control[:, :, 39, 20:40] = 1.0  # then to the right, to (4, 4)
    weights = weights_of(control, SHORT).view(16, 16)
    expected = torch.ones(16, 16)
    expected[[3, 4, 4, 4], [2, 2, 3, 4]] = SHORT.outline_weight
    expected[2, 2] = SHORT.start_weight
    assert torch.equal(weights, expected)


def test_a_run_ends_in_a_pipeline_that_draws_along_outlines(readers, tmp_path, monkeypatch):
    encoder, vq_model = readers
    monkeypatch.setattr(control, "held_out_losses", partial(control.held_out_losses, count=4))

    def train(out, every):
        model = started()
        return train_control(model, encoder, vq_model, SHORT, out, every=every), model

    raster().save_pretrained(tmp_path / "shapes" / "transformer")  # what the changes are of
    record = check_training(tmp_path, train, 5, every=4, saved={"transformer": ControlARTransformer})
    folder = tmp_path / "whole"
    model: Any = ControlARTransformer.from_pretrained(folder / "transformer")
    start, own = raster().state_dict(), model.transformer.state_dict()
    assert torch.equal(own["tok_embeddings.weight"], start["tok_embeddings.weight"])
    assert not torch.equal(own["layers.2.attention.wo.weight"], start["layers.2.attention.wo.weight"])
    assert float(model.condition_mlp.uncond_embedding.detach().abs().max()) == 0
    stored = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    kinds = {value.dtype for name, value in stored.items() if value.ndim > 1}
    assert kinds == {torch.float8_e4m3fn} and "transformer.tok_embeddings.weight" not in stored
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
