"""Official files of MAR and KL-16: every key is accounted for, and KL-16 computes what latent diffusion's names say."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.mar import ldm_shapes, random_weights
from tests.models.continuous.tiny import tiny_mar
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


class Trap:
    """What pickle would run on loading."""

    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "ran", True)


def test_nothing_in_a_file_runs(tmp_path):
    path = tmp_path / "checkpoint-last.pth"
    torch.save({"model_ema": tiny_mar().state_dict(), "args": Trap()}, path)
    with pytest.raises(ValueError, match="refused"):
        load_mar_checkpoint(path, num_heads=2)
    assert not Trap.ran


def test_what_cannot_be_read_off_the_weights_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match="num_heads"):
        load_mar_checkpoint(tiny_mar().state_dict())
    with pytest.raises(ValueError, match="z_proj.weight.*model_ema"):
        load_mar_checkpoint({"mask_token": torch.zeros(1, 1, 16)}, num_heads=2)
    torch.save({"epoch": 3}, tmp_path / "odd.pth")
    with pytest.raises(ValueError, match="keep the key 'model_ema'"):
        load_mar_checkpoint(tmp_path / "odd.pth")


# -- KL-16 ------------------------------------------------------------------------------------------------------------


class Straight:
    """Latent diffusion's autoencoder from weights by its own names."""

    def __init__(self, weights: dict[str, Tensor], levels: int) -> None:
        self.w, self.levels = weights, levels

    def conv(self, name: str, x: Tensor, **options: Any) -> Tensor:
        weight = self.w[f"{name}.weight"]
        return F.conv2d(x, weight, self.w[f"{name}.bias"], padding=weight.shape[-1] // 2, **options)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.group_norm(x, 32, self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps=1e-6)

    def block(self, name: str, x: Tensor) -> Tensor:
        hidden = self.conv(f"{name}.conv1", F.silu(self.norm(f"{name}.norm1", x)))
        hidden = self.conv(f"{name}.conv2", F.silu(self.norm(f"{name}.norm2", hidden)))
        return hidden + (
            self.conv(f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.weight" in self.w else x
        )

    def attention(self, name: str, x: Tensor) -> Tensor:
        hidden = self.norm(f"{name}.norm", x)
        q, k, v = (self.conv(f"{name}.{part}", hidden).flatten(2) for part in "qkv")  # [B, C, N]
        weights = (torch.einsum("bci,bcj->bij", q, k) / math.sqrt(x.shape[1])).softmax(-1)
        mixed = torch.einsum("bij,bcj->bci", weights, v).unflatten(2, x.shape[2:])
        return x + self.conv(f"{name}.proj_out", mixed)

    def middle(self, name: str, x: Tensor) -> Tensor:
        x = self.attention(f"{name}.attn_1", self.block(f"{name}.block_1", x))
        return self.block(f"{name}.block_2", x)

    def encode(self, x: Tensor) -> Tensor:
        x = self.conv("encoder.conv_in", x)
        for level in range(self.levels):
            for i in (0, 1):
                x = self.block(f"encoder.down.{level}.block.{i}", x)
                if f"encoder.down.{level}.attn.{i}.q.weight" in self.w:
                    x = self.attention(f"encoder.down.{level}.attn.{i}", x)
            name = f"encoder.down.{level}.downsample.conv"
            if level < self.levels - 1:  # padded on the right and below only
                x = F.conv2d(
                    F.pad(x, (0, 1, 0, 1)), self.w[f"{name}.weight"], self.w[f"{name}.bias"], stride=2
                )
        x = self.middle("encoder.mid", x)
        x = self.conv("encoder.conv_out", F.silu(self.norm("encoder.norm_out", x)))
        return self.conv("quant_conv", x)

    def decode(self, z: Tensor) -> Tensor:
        x = self.middle("decoder.mid", self.conv("decoder.conv_in", self.conv("post_quant_conv", z)))
        for level in reversed(range(self.levels)):
            for i in (0, 1, 2):
                x = self.block(f"decoder.up.{level}.block.{i}", x)
            if level:
                x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
                x = self.conv(f"decoder.up.{level}.upsample.conv", x)
        return self.conv("decoder.conv_out", F.silu(self.norm("decoder.norm_out", x)))


@torch.no_grad()
def test_kl16_computes_what_latent_diffusion_does():
    weights = random_weights(ldm_shapes(32, (1, 1, 2, 2, 4), 16, attention_at=4))
    given = {**weights, "loss.logvar": torch.zeros(1)}  # of training, and left out
    model = load_kl16_checkpoint(given, block_out_channels=(32, 32, 64, 64, 128), sample_size=32)
    straight = Straight(weights, 5)
    pictures = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    encoded: Any = model.encode(pictures)
    moments = straight.encode(pictures)
    torch.testing.assert_close(encoded.latent_dist.mean, moments[:, :16], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(encoded.latent_dist.logvar, moments[:, 16:], rtol=1e-4, atol=1e-4)
    latents: Any = torch.randn(2, 16, 2, 2, generator=torch.Generator().manual_seed(2))
    decoded: Any = model.decode(latents)
    torch.testing.assert_close(decoded.sample, straight.decode(latents), rtol=1e-4, atol=1e-4)


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
