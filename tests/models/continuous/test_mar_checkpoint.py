"""Official files of MAR and KL-16: every key is accounted for, and KL-16 computes what latent diffusion's names say."""

import argparse
import math
from typing import Any

import pytest
import torch

from tests.helpers import vqgan
from tests.helpers.mar import ldm_shapes, random_weights
from tests.helpers.refusals import refuses
from tests.helpers.vqgan import conv
from tests.models.continuous.tiny import Trap, tiny_mar
from visual_spec.models.continuous.mar import MARTransformer
from visual_spec.models.continuous.mar_checkpoint import (
    KL16,
    kl16_layout,
    load_kl16_checkpoint,
    load_mar_checkpoint,
)

# -- MAR --------------------------------------------------------------------------------------------------------------


def test_averaged_weights_are_read_with_their_sizes(tmp_path):
    model = tiny_mar()
    other = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    path = tmp_path / "checkpoint-last.pth"
    torch.save({"model": other, "model_ema": model.state_dict(), "epoch": 3}, path)
    found = load_mar_checkpoint(path, num_heads=2)
    assert all(found.config[name] == size for name, size in model.config.items() if name[0] != "_")
    for key, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[key], value)
    half = load_mar_checkpoint(model.state_dict(), num_heads=2, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and not half.training


@pytest.mark.parametrize("preset", ["B", "L", "H"])
def test_official_sizes_are_recognised(preset):
    from visual_spec.models.continuous.mar import PRESETS

    with torch.device("meta"):
        size: Any = PRESETS[preset]
        model = MARTransformer(**size)
    config = load_mar_checkpoint(model.state_dict()).config
    assert all(config[name] == value for name, value in model.config.items() if not name.startswith("_"))


def test_the_arguments_that_every_released_file_holds_are_read_past(tmp_path):
    path, model = tmp_path / "checkpoint-last.pth", tiny_mar()
    torch.save({"model_ema": model.state_dict(), "args": argparse.Namespace(model="mar_base")}, path)
    loaded = load_mar_checkpoint(path, num_heads=2).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())


def test_nothing_in_a_file_runs(tmp_path):
    path = tmp_path / "checkpoint-last.pth"
    torch.save({"model_ema": tiny_mar().state_dict(), "args": Trap()}, path)
    refuses(ValueError, "refused", load_mar_checkpoint, path, num_heads=2)
    assert not Trap.ran


def test_what_cannot_be_read_off_the_weights_is_asked_for(tmp_path):
    refuses(ValueError, "num_heads", load_mar_checkpoint, tiny_mar().state_dict())
    with pytest.raises(ValueError, match="z_proj.weight.*model_ema"):
        load_mar_checkpoint({"mask_token": torch.zeros(1, 1, 16)}, num_heads=2)
    torch.save({"epoch": 3}, tmp_path / "odd.pth")
    refuses(ValueError, "'model_ema'", load_mar_checkpoint, tmp_path / "odd.pth")


# -- KL-16 ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_kl16_computes_what_latent_diffusion_does():
    weights = random_weights(ldm_shapes(32, (1, 1, 2, 2, 4), 16, attention_at=4))
    given = {**weights, "loss.logvar": torch.zeros(1)}  # of training, and left out
    model = load_kl16_checkpoint(given, block_out_channels=(32, 32, 64, 64, 128), sample_size=32)
    pictures = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    encoded: Any = model.encode(pictures)
    moments = conv(vqgan.encoded(pictures, weights, 32), weights, "quant_conv", padding=0)
    torch.testing.assert_close(encoded.latent_dist.mean, moments[:, :16], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(encoded.latent_dist.logvar, moments[:, 16:], rtol=1e-4, atol=1e-4)
    latents: Any = torch.randn(2, 16, 2, 2, generator=torch.Generator().manual_seed(2))
    decoded: Any = model.decode(latents)
    wanted = conv(latents, weights, "post_quant_conv", padding=0)
    torch.testing.assert_close(decoded.sample, vqgan.decoded(wanted, weights, 32), rtol=1e-4, atol=1e-4)


def test_kl16_at_its_true_size():
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    shapes = ldm_shapes(128, (1, 1, 2, 2, 4), 16, attention_at=4)
    with torch.device("meta"):
        model = AutoencoderKL(**KL16)
    found = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    kl16_key = kl16_layout().key
    assert {kl16_key(key) for key in shapes} == set(found)
    for key, shape in shapes.items():
        matrix = ".attentions." in kl16_key(key) and ".to_" in kl16_key(key)
        assert found[kl16_key(key)] == (shape[:2] if matrix and len(shape) == 4 else shape)
    assert shapes["quant_conv.weight"] == (32, 32, 1, 1) and shapes["post_quant_conv.weight"] == (
        16,
        16,
        1,
        1,
    )
    assert sum(math.prod(shape) for shape in shapes.values()) / 1e6 == pytest.approx(66, abs=1)
    assert model.config["scaling_factor"] == 0.2325
