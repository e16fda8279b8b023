"""Training the KL tokenizer and the continuous models at a tiny size: they learn, resume, and report what is true."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from scripts.train import kl_tokenizer, mar
from scripts.train.classes import object_slots, sample_one_object_scenes
from scripts.train.kl_tokenizer import (
    KLTokenizerTraining,
    class_pictures,
    moments_of,
    normalise,
    train_kl_tokenizer,
)
from scripts.train.mar import (
    ContinuousTraining,
    decode,
    draw,
    hidden_count,
    initialise,
    latent_pictures,
    round_matrices,
    train_latents,
)
from tests.helpers.tiny_continuous import SIDE, tiny_latents, tiny_tokenizer
from tests.helpers.training import check_training, equal, trained
from tests.models.continuous import straight
from visual_spec.data.shapes_classes import CLASSES, class_of
from visual_spec.models.continuous.causal import CausalContinuousTransformer
from visual_spec.models.continuous.mar import MARTransformer


def tiny_model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = dict(
        grid_size=4, token_dim=3, dim=16, num_layers=1, num_heads=2, head_width=16, head_depth=1
    )
    made = MARTransformer if kind == "mar" else CausalContinuousTransformer
    extra = {"buffer_size": 2} if kind == "mar" else {"order": [*range(15, -1, -1)]}
    model = made(**{**sizes, **extra, "num_classes": len(CLASSES), **changes})
    initialise(model)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> AutoencoderKL:
    return tiny_latents()


@pytest.fixture(autouse=True)
def few_pictures_are_judged(monkeypatch):
    monkeypatch.setattr(kl_tokenizer, "judge", partial(kl_tokenizer.judge, count=4))
    monkeypatch.setattr(mar, "held_out_loss", partial(mar.held_out_loss, count=6))


# -- the tokenizer ----------------------------------------------------------------------------------------------------

TOKENIZER = KLTokenizerTraining(steps=12, batch_size=4, crop=16, scenes=8, learning_rate=4e-3, kl_warmup=4)


@pytest.mark.slow
def test_the_tokenizer_learns(tmp_path):
    model = tiny_tokenizer()
    record = train_kl_tokenizer(model, replace(TOKENIZER, steps=101, whole_pictures=0.5), tmp_path)
    losses = dict(record["loss"])
    assert list(losses) == [0, 50, 100] and losses[100] < 0.75 * losses[0]
    assert record["held_out_pictures"] == 4


def test_an_interrupted_tokenizer_resumes_to_the_same_weights(tmp_path):
    train = trained(tiny_tokenizer, train_kl_tokenizer, TOKENIZER)
    check_training(tmp_path, train, 10, every=8, saved={"": AutoencoderKL})


@torch.no_grad()
def test_normalised_latents_have_a_spread_of_one_and_draw_the_same():
    model: Any = tiny_tokenizer().eval()
    model.quant_conv.bias += torch.linspace(-1, 1, 6)
    _, pictures = class_pictures(8, 0, size=SIDE)
    means, stds = moments_of(model, pictures)
    before: Any = model.decode(means)
    normalise(model, pictures)
    found, noise = moments_of(model, pictures)
    after: Any = model.decode(found)
    torch.testing.assert_close(after.sample, before.sample, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    spread = found.var((0, 2, 3)) + noise.square().mean((0, 2, 3))
    torch.testing.assert_close(spread, torch.ones(3), rtol=1e-3, atol=0)
    # One scale for the means and the noise of a channel.
    scale = stds.mean((0, 2, 3)) / noise.mean((0, 2, 3))
    centred = means - means.mean((0, 2, 3), keepdim=True)
    torch.testing.assert_close(found * scale[:, None, None], centred, rtol=1e-3, atol=1e-4)


# -- the models -------------------------------------------------------------------------------------------------------

TRAINING = ContinuousTraining(steps=12, batch_size=4, scenes=12, learning_rate=4e-3)


def test_latents_are_those_of_the_pictures_and_their_objects(tmp_path, tokenizer):
    found = latent_pictures(tokenizer, 6, 3)
    scenes = sample_one_object_scenes(6, 3)
    assert found.labels.tolist() == [class_of(scene) for scene in scenes]
    assert np.array_equal(found.objects.numpy(), object_slots(scenes, [4]))
    means, stds = moments_of(tokenizer, class_pictures(6, 3, size=SIDE)[1])
    for row, slot in ((0, 0), (2, 7), (5, 12)):  # raster order
        torch.testing.assert_close(found.means[row, slot], means[row, :, slot // 4, slot % 4])
        torch.testing.assert_close(found.stds[row, slot], stds[row, :, slot // 4, slot % 4])
    drawn = torch.stack(
        [found.draw(torch.tensor([2]), torch.Generator().manual_seed(s))[0] for s in range(400)]
    )
    torch.testing.assert_close(drawn.mean(0), found.means[2], rtol=0, atol=0.3)
    torch.testing.assert_close(drawn.std(0), found.stds[2], rtol=0.25, atol=0)
    for _ in range(2):  # made, then read
        kept = latent_pictures(tokenizer, 6, 3, cache=tmp_path)
        assert all(torch.equal(value, getattr(found, name)) for name, value in vars(kept).items())
    other = latent_pictures(tiny_tokenizer(5).eval(), 6, 3, cache=tmp_path)
    assert not torch.equal(other.means, found.means) and len(list(tmp_path.iterdir())) == 2
    pictures = decode(tokenizer, found.means)
    expected: Any = tokenizer.decode(means)
    torch.testing.assert_close(pictures, expected.sample)


def test_a_kill_while_latents_are_kept_leaves_no_half_of_them(tmp_path, tokenizer, monkeypatch):
    save = torch.save

    def half(content: Any, file: Any) -> None:
        save(content, file)
        place = file if isinstance(file, Path) else Path(file.name)
        place.write_bytes(place.read_bytes()[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", half)
        latent_pictures(tokenizer, 6, 3, cache=tmp_path)
    assert not list(tmp_path.iterdir())
    kept = latent_pictures(tokenizer, 6, 3, cache=tmp_path)
    assert torch.equal(kept.means, latent_pictures(tokenizer, 6, 3).means)


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("kind", ["mar", "causal"])
@pytest.mark.parametrize("head_kind", ["velocity", "flow"])
def test_models_learn(tmp_path, tokenizer, kind, head_kind):
    model = tiny_model(kind, head_kind=head_kind)
    record = train_latents(model, tokenizer, replace(TRAINING, steps=121, batch_size=8), tmp_path)
    losses = [loss for _, loss in record["loss"]]
    assert len(losses) == 7 and min(losses[-3:]) < 0.8 * losses[0]


@pytest.mark.parametrize("kind", ["mar", "causal"])
def test_an_interrupted_model_resumes_to_the_same_weights(tmp_path, tokenizer, kind):
    train = trained(lambda: tiny_model(kind), train_latents, tokenizer, TRAINING)
    saved = {"": MARTransformer if kind == "mar" else CausalContinuousTransformer}
    check_training(tmp_path, train, 10, every=8, saved=saved)


def test_shares_of_hidden_slots():
    counts = [hidden_count(64, ContinuousTraining(), np.random.default_rng(i)) for i in range(500)]
    assert min(counts) >= 13 and max(counts) == 64 and min(counts) < 20
    assert np.median(counts) == pytest.approx(64 * (1 - 0.5 * 0.57), abs=4)


@pytest.mark.parametrize("kind", ["mar", "causal"])
def test_models_for_other_tokens_or_classes_are_refused(tmp_path, tokenizer, kind):
    for changes in ({"token_dim": 4}, {"num_classes": 3}):
        with pytest.raises(ValueError, match=str(next(iter(changes.values())))):
            train_latents(tiny_model(kind, **changes), tokenizer, TRAINING, tmp_path)


# -- judging ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def randomised(kind: str) -> Any:
    model = tiny_model(kind)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return model.double().eval()  # chains of random weights amplify rounding a thousandfold


@torch.no_grad()
def chain(model: Any, name: str, z: torch.Tensor, other: torch.Tensor, scale: float, noise: Any) -> Any:
    """One token from its condition and the null class's, point by point, in five levels."""
    weights, schedule = model.state_dict(), model.schedule(5)
    x = noise()
    for index in (4, 3, 2, 1, 0):
        time = float(schedule.times[index])
        with_class, without = (straight.head(weights, name, x, time, c) for c in (z, other))
        mixed = without[:3] + scale * (with_class[:3] - without[:3])
        mean, sigma = schedule.kernel(x[None], index, torch.cat([mixed, with_class[3:]])[None])
        x = mean[0] + (sigma[0] * 0.9 * noise() if index else 0)
    return x


def test_mar_draws_by_the_published_loop():
    model = randomised("mar")
    labels = torch.tensor([7])
    found = draw(model, labels, guidance=3.0, head_steps=5, temperature=0.9, seed=5)
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(16, generator=generator).tolist()
    tokens, known = torch.zeros(16, 3).double(), torch.zeros(16, dtype=torch.bool)
    for step in range(16):  # as many as tokens, so one each, read from the end of the order
        weights, slot = model.state_dict(), order[15 - step]
        z, other = (straight.mar(weights, 2, label, tokens, known)[slot] for label in (7, None))
        scale = 1 + 2.0 * (16 - max(1, 15 - step)) / 16
        tokens[slot] = chain(
            model, "diffloss.net", z, other, scale, lambda: torch.randn(3, generator=generator).double()
        )
        known[slot] = True
    torch.testing.assert_close(found[0], tokens, rtol=1e-9, atol=1e-9)


def test_the_causal_model_draws_slot_by_slot():
    model = randomised("causal")
    found = draw(model, torch.tensor([7]), guidance=3.0, linear=False, head_steps=5, temperature=0.9, seed=5)
    generator = torch.Generator().manual_seed(5)
    places, drawn = list(range(15, -1, -1)), torch.zeros(0, 3).double()
    for _ in range(16):
        z, other = (straight.causal(model.state_dict(), 2, label, drawn, places)[-1] for label in (7, None))
        token = chain(model, "head", z, other, 3.0, lambda: torch.randn(3, generator=generator).double())
        drawn = torch.cat([drawn, token[None]])
    torch.testing.assert_close(found[0], drawn.flip(0), rtol=1e-9, atol=1e-9)


def test_rounded_matrices_are_stored_in_eight_bits(tmp_path):
    model = randomised("mar")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    round_matrices(model, tmp_path)
    again = MARTransformer.from_pretrained(tmp_path, torch_dtype=torch.float32)
    assert equal(again, model) and again.dtype == torch.float32
    size = (tmp_path / "diffusion_pytorch_model.safetensors").stat().st_size
    assert size < 2 * sum(value.numel() for value in before.values()) + 30_000
    for key, value in model.state_dict().items():
        near = 2**-4 if before[key].ndim == 2 else 2**-10
        torch.testing.assert_close(value, before[key], rtol=near, atol=2**-10)
    assert "_name_or_path" not in json.loads((tmp_path / "config.json").read_text())


def test_the_scripts_train_a_model(tmp_path, monkeypatch, capsys):
    tokenizer = ["--steps", "2", "--scenes", "4", "--channels", "4", "4", "8", "8", "--latent-channels", "3"]
    tokenizer += ["--image-size", str(SIDE), "--crop", "16"]
    monkeypatch.setattr("sys.argv", ["x", "--out", str(tmp_path / "vae"), *tokenizer])
    kl_tokenizer.main()
    common = ["x", "--tokenizer", str(tmp_path / "vae"), "--steps", "2", "--scenes", "4", "--batch-size", "2"]
    for kind in ("mar", "causal"):
        judged = ["--judged-pictures", "2", "--judged-head-steps", "2", "--eight-bits"]
        out = tmp_path / kind
        monkeypatch.setattr(
            "sys.argv", [*common, "--size", "small", "--kind", kind, "--out", str(out), *judged]
        )
        mar.main()
        record = json.loads((out / "training.json").read_text())
        assert record["drawn"]["pictures"] == 2 and "'drawn'" in capsys.readouterr().out
