"""Training an ACDiT at a tiny size: the loss is the published one, it learns, resumes, and is judged."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from scripts.train import acdit
from scripts.train.acdit import BlockTraining, judge, step_loss, train_blocks
from scripts.train.clips import encoded_clips
from scripts.train.mar import latent_pictures
from tests.helpers.refusals import refuses
from tests.helpers.tiny_continuous import tiny_latents
from tests.helpers.training import check_training, trained
from visual_spec.data.shapes_classes import CLASSES
from visual_spec.prototype.acdit.model import ACDiTTransformer

TRAINING = BlockTraining(steps=12, batch_size=4, scenes=12, learning_rate=4e-3)


def tiny_model(tokenizer: Any, block_size: int = 4, prediction: str = "v_prediction") -> Any:
    torch.manual_seed(1)
    model = acdit.new_model(tokenizer, block_size, prediction)
    config: dict[str, Any] = {k: v for k, v in model.config.items() if k[0] != "_"}
    small = ACDiTTransformer(**dict(config, dim=32, num_layers=1))
    torch.nn.init.zeros_(small.final_layer.linear.weight)
    return small


@pytest.fixture(scope="module")
def tokenizer() -> AutoencoderKL:
    return tiny_latents()


@pytest.fixture(autouse=True)
def few_pictures_are_judged(monkeypatch):
    monkeypatch.setattr(acdit, "held_out_loss", partial(acdit.held_out_loss, count=6))


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@torch.no_grad()
def test_the_loss_is_the_error_of_the_noise_or_the_velocity(tokenizer, prediction):
    """Drawn again and written out, block by block."""
    model, pictures = tiny_model(tokenizer, prediction=prediction), latent_pictures(tokenizer, 12, 0)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    settings = replace(TRAINING, label_dropout=0.5, object_weight=3.0)
    loss = step_loss(model, pictures, settings, np.random.default_rng(1))
    rng = np.random.default_rng(1)
    chosen = torch.from_numpy(rng.integers(12, size=4))
    noise = torch.Generator().manual_seed(int(rng.integers(2**63)))
    dropped = torch.from_numpy(rng.random(4) < 0.5)
    assert 0 < dropped.sum() < 4
    clean = pictures.draw(chosen, noise)[:, model.places]
    times, added = torch.randint(1000, (4, 4), generator=noise), torch.randn(clean.shape, generator=noise)
    kept = (1 - torch.linspace(0.0001, 0.02, 1000)).cumprod(0)[times].repeat_interleave(4, 1)[..., None]
    noisy = kept.sqrt() * clean + (1 - kept).sqrt() * added
    labels = torch.where(dropped, len(CLASSES), pictures.labels[chosen])
    output = model.predictions(clean, noisy, times, labels)
    target = added if prediction == "epsilon" else kept.sqrt() * added - (1 - kept).sqrt() * clean
    weights = 1 + 2 * pictures.objects[chosen][:, model.places].float()
    wanted = ((output - target).square().mean(-1) * weights).sum() / weights.sum()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("block_size", [4, 16])
def test_it_learns_and_is_judged(tmp_path, tokenizer, block_size):
    model = tiny_model(tokenizer, block_size)
    record = train_blocks(model, tokenizer, replace(TRAINING, steps=121, batch_size=8), tmp_path)
    losses = [loss for _, loss in record["loss"]]
    assert len(losses) == 7 and min(losses[-3:]) < 0.8 * losses[0]
    drawn = judge(model, tokenizer, 3, guidance=2.0, levels=2)
    assert (drawn["pictures"], drawn["levels"]) == (3, 2) and "class" in drawn


def test_clips_are_learned_and_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(acdit, "held_out_loss", lambda *args: 0.0)
    model = ACDiTTransformer(4, 48, 16, 2, dim=32, num_layers=1, num_heads=2, num_classes=32)
    record = train_blocks(model, None, replace(TRAINING, steps=81, batch_size=8), tmp_path)
    losses = [loss for _, loss in record["loss"]]
    assert min(losses[-2:]) < 0.8 * losses[0]
    drawn = judge(model, None, 3, guidance=2.0, levels=2)
    assert drawn["clips"] == 3 and {"kept", "direction", "class"} <= drawn.keys()


def test_a_clip_without_a_class_has_the_last_row():
    model, clips = acdit.new_model(None, 16, "v_prediction", 2), encoded_clips(4, 0, 2)
    layers: list[Any] = [*model.blocks, model.final_layer]
    for layer in layers:
        torch.nn.init.normal_(layer.adaLN_modulation[1].weight)
    torch.nn.init.normal_(model.final_layer.linear.weight)
    step_loss(model, clips, replace(TRAINING, label_dropout=1.0), np.random.default_rng(0)).backward()
    touched: Any = model.y_embedder.embedding_table.weight.grad
    assert touched.abs().sum(1).nonzero().flatten().tolist() == [32]


def test_pictures_and_clips_are_told_apart(monkeypatch, tmp_path):
    for more in ([], ["--frames", "8", "--tokenizer", str(tmp_path)]):
        monkeypatch.setattr("sys.argv", ["acdit", "--out", str(tmp_path), *more])
        refuses(SystemExit, "--tokenizer FOLDER.*--frames", acdit.main)


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path, tokenizer):
    train = trained(lambda: tiny_model(tokenizer), train_blocks, tokenizer, TRAINING)
    check_training(tmp_path, train, 10, every=8, saved={"": ACDiTTransformer})


def test_models_for_other_tokens_are_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="16 tokens.*3.*16.*4"):
        model = ACDiTTransformer(4, 4, 4, dim=32, num_layers=1, num_heads=2, num_classes=len(CLASSES))
        train_blocks(model, tokenizer, TRAINING, tmp_path)
