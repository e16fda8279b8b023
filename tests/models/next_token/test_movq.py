"""MoVQGAN's decoder: keys of the releases, a straight line in float64, and pixels of the public code."""

import re

import pytest
import torch
from torch import Tensor

from tests.helpers import vqgan
from tests.helpers.official import random_weights
from tests.helpers.refusals import refuses
from visual_spec.models.next_token.movq import MoVQDecoder

CODES = torch.arange(12).view(1, 2, 6) * 7 % 24
TINY = (32, (1, 2), 1)
# Of github.com/Alpha-VLLM/Lumina-mGPT-2.0, `MOVQDecoder` with these weights: every third pixel of the second line.
RELEASED = [
    [-0.060073, 0.001551, -0.119106, -0.192439],
    [-0.093676, -0.183374, -0.202043, -0.147531],
    [-0.054151, -0.209856, -0.236888, -0.121231],
]


def movq_shapes(width: int, multipliers: tuple[int, ...], blocks: int, codes: int) -> vqgan.Shapes:
    """VQGAN's decoder with attention at the lowest resolution, and beside each norm two convolutions of the codes."""
    plain = vqgan.networks(width, multipliers, blocks, 4, 4, attends=rf"up\.{len(multipliers) - 1}|mid")
    shapes: vqgan.Shapes = {}
    for key, shape in plain.items():
        name, kind = key.rsplit(".", 1)
        if not key.startswith("decoder."):
            continue
        if not re.search(r"norm(\d|_out)?$", name):
            shapes[key] = shape
            continue
        shapes[f"{name}.norm_layer.{kind}"] = shape
        for part in ("conv_y", "conv_b"):
            shapes |= vqgan.convolution(f"{name}.{part}", 4, shape[0])
    ends = vqgan.convolution("post_quant_conv", 4, 4) | {"quantize.embedding.weight": (codes, 4)}
    return dict(sorted(shapes.items())) | ends


def tiny_weights() -> dict[str, Tensor]:
    """Random ones, small in the end, so that no pixel is cut."""
    weights = random_weights(movq_shapes(*TINY, 24), torch.float64)
    return {key: value * (0.01 if "conv_out" in key else 1) for key, value in weights.items()}


def tiny_decoder() -> MoVQDecoder:
    model = MoVQDecoder(*TINY, codebook_size=24).double()
    model.load_state_dict(tiny_weights())
    return model


@pytest.mark.parametrize(("width", "blocks"), [(128, 2), (128, 4), (256, 2)], ids=["67M", "102M", "270M"])
def test_released_decoders_have_the_released_keys(width, blocks):
    with torch.device("meta"):
        state = MoVQDecoder(width, blocks_per_level=blocks).state_dict()
    want = movq_shapes(width, (1, 2, 2, 4), blocks, 16384)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == want


def test_pixels_are_those_of_the_public_code():
    picture = tiny_decoder().decode_codes(CODES)
    assert picture.shape == (1, 3, 4, 12)
    assert torch.allclose(picture[0, :, 1, ::3], torch.tensor(RELEASED, dtype=torch.float64), atol=1e-6)


def test_pixels_are_those_of_a_straight_line(monkeypatch):
    weights, codes = tiny_weights(), torch.randint(24, (2, 3, 5), generator=torch.Generator().manual_seed(1))
    there = weights["quantize.embedding.weight"][codes].movedim(-1, 1)
    plain = vqgan.norm

    def modulated(x: Tensor, weights: vqgan.Weights, name: str, groups: int) -> Tensor:
        larger = there.repeat_interleave(x.shape[2] // 3, 2).repeat_interleave(x.shape[3] // 5, 3)
        scale, shift = (
            vqgan.conv(larger, weights, f"{name}.{part}", padding=0) for part in ("conv_y", "conv_b")
        )
        return plain(x, weights, f"{name}.norm_layer", groups) * scale + shift

    monkeypatch.setattr(vqgan, "norm", modulated)
    marks = {key.replace(".norm_layer", ""): value for key, value in weights.items()}  # names of the helper
    latents = vqgan.conv(there, weights, "post_quant_conv", padding=0)
    want = vqgan.decoded(latents, marks | weights, 32)
    assert 0.01 < want.std() and want.abs().max() < 1
    assert (tiny_decoder().decode_codes(codes) - want).abs().max() < 1e-12


def test_a_released_file_is_read_with_its_size(tmp_path):
    """The file holds the whole network; another size than the default is known by its shapes."""
    small = MoVQDecoder(32, blocks_per_level=4).state_dict()
    torch.save({**small, "encoder.conv_in.weight": torch.zeros(1)}, tmp_path / "movqgan.ckpt")
    model = MoVQDecoder.from_file(tmp_path / "movqgan.ckpt")
    assert (model.config["base_channels"], model.config["blocks_per_level"]) == (32, 4)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in small.items())
    assert model.decode_codes(torch.zeros(1, 2, 3, dtype=torch.long)).shape == (1, 3, 16, 24)
    del small["decoder.mid.attn_1.norm.conv_b.bias"]
    torch.save(small, tmp_path / "short.ckpt")
    with pytest.raises(ValueError, match=r"1 missing: decoder\.mid\.attn_1\.norm\.conv_b\.bias"):
        MoVQDecoder.from_file(tmp_path / "short.ckpt")
    refuses(FileNotFoundError, r"none\.ckpt", MoVQDecoder.from_file, tmp_path / "none.ckpt")
