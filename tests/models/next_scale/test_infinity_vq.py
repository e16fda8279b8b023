"""Infinity's tokenizer: its schedules, the official key layout, and all that it computes against plain loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import vqgan
from tests.helpers.refusals import refuses
from tests.helpers.tiny_infinity import SIDES, tiny_bits
from tests.helpers.vqgan import mean_matrix
from visual_spec.models.core.protocol import Side, area_of, shape_of
from visual_spec.models.next_scale.infinity_scales import (
    SIZES,
    published_budget,
    ratios,
    rope_grid_of,
    scales_for,
)
from visual_spec.models.next_scale.infinity_vq import load_infinity_vq_checkpoint
from visual_spec.models.next_scale.scale_budget import offsets_of

WIDE: tuple[Side, ...] = (1, (2, 1), (3, 2), (5, 3))
SHAPES: dict[str, dict[str, Any]] = {
    "squares": dict(),
    "other shapes": dict(scales=WIDE),
    "patches": dict(patchify=True, bits=2, scales=WIDE),
}


# -- an independent computation ---------------------------------------------------------------------------------------


def linear_matrix(size: int, target: int) -> Tensor:
    """Linear interpolation with half-pixel centres, edges repeated: `[target, size]`."""
    matrix = torch.zeros(target, size, dtype=torch.float64)
    for i in range(target):
        centre = max((i + 0.5) * size / target - 0.5, 0)
        low = math.floor(centre)
        matrix[i, min(low, size - 1)] += 1 - (centre - low)
        matrix[i, min(low + 1, size - 1)] += centre - low
    return matrix


def resized(x: Tensor, shape: tuple[int, int], matrix) -> Tensor:
    """`[D, h, w]` to another shape."""
    return matrix(x.shape[1], shape[0]) @ x @ matrix(x.shape[2], shape[1]).T


def coded(
    latents: Tensor, scales: tuple[Side, ...], cell: int
) -> tuple[list[list[int]], list[Tensor], list[Tensor]]:
    """One picture `[D, h, w]`: bits, input maps of scales 1 on, and canvases, one place and one bit at a time."""
    depth, total = len(latents), latents.shape[1:]
    canvas, bits, maps, canvases = torch.zeros_like(latents), [], [], []
    for scale, side in enumerate(scales):
        height, width = shape_of(side)
        shape = (height * cell, width * cell)
        if scale:
            small = resized(canvas, shape, linear_matrix)
            map = torch.zeros(depth * cell * cell, height, width, dtype=torch.float64)
            for channel in range(len(map)):
                d, corner = divmod(channel, cell * cell)
                map[channel] = small[d, corner // cell :: cell, corner % cell :: cell]
            maps.append(map)
        left = resized(latents - canvas, shape, mean_matrix)
        codes, row = torch.zeros(depth, *shape, dtype=torch.float64), []
        for y in range(height):
            for x in range(width):
                for d in range(depth):
                    for corner in range(cell * cell):
                        place = (d, y * cell + corner // cell, x * cell + corner % cell)
                        row.append(int(left[place] > 0))
                        codes[place] = (1 if row[-1] else -1) / math.sqrt(depth)
        bits.append(row)
        canvas = canvas + resized(codes, (total[0], total[1]), linear_matrix)
        canvases.append(canvas)
    return bits, maps, canvases


# -- the tokenizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_both_networks_equal_plain_formulas(changes):
    model = tiny_bits(**changes)
    weights = model.state_dict()
    images = torch.rand(2, 3, *model.image_size, dtype=torch.float64) * 2 - 1
    latents = model.encode_latents(images)
    assert (latents - vqgan.encoded(images, weights, 2)).abs().max() < 1e-10
    assert latents.shape == model.begin(2).shape
    canvas = torch.randn_like(latents)
    assert (model.decode_canvas(canvas) - vqgan.decoded(canvas, weights, 2).clamp(-1, 1)).abs().max() < 1e-10
    assert model.decode_canvas(canvas).shape == images.shape


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_bits_canvases_and_inputs_equal_plain_loops(changes):
    model = tiny_bits(**changes)
    cell = 2 if changes.get("patchify") else 1
    images = torch.rand(2, 3, *model.image_size, dtype=torch.float64) * 2 - 1
    latents = model.encode_latents(images)
    tokens, canvases = model.quantise(latents)
    assert model.tokens_per_place == model.code_dim == model.bits * cell * cell
    assert [part.shape[1] for part in tokens] == [area_of(side) * model.code_dim for side in model.scales]
    maps = model.maps_of(torch.cat(tokens, 1))
    for row in range(2):
        bits, inputs, drawn = coded(latents[row], tuple(model.scales), cell)
        assert [part[row].tolist() for part in tokens] == bits
        for got, want in zip(canvases, drawn, strict=True):
            assert (got[row] - want).abs().max() < 1e-12
        for got, want in zip(maps, inputs, strict=True):
            assert got[row].shape == want.shape and (got[row] - want).abs().max() < 1e-12
    assert 0.2 < torch.cat(tokens, 1).double().mean() < 0.8
    assert torch.equal(model.encode_tokens(images), torch.cat(tokens, 1))
    # Each scale brings the canvas nearer.
    errors = [float((latents - canvas).square().mean()) for canvas in canvases]
    assert errors[-1] < errors[0]


def test_decoding_tokens_is_drawing_all_scales():
    model = tiny_bits(patchify=True)
    tokens = torch.randint(0, 2, (2, model.num_tokens), generator=torch.Generator().manual_seed(2))
    canvas = model.begin(2)
    for scale, part in enumerate(tokens.split([12 * side * side for side in SIDES], 1)):
        canvas = model.accumulate(canvas, scale, part)
    assert torch.equal(model.decode_tokens(tokens), model.decode_canvas(canvas))
    assert model.decode_tokens(tokens).shape == (2, 3, 16, 16)
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64) * 2 - 1
    assert torch.equal(model(images), model.decode_tokens(model.encode_tokens(images)))


def test_what_does_not_fit_is_refused():
    model = tiny_bits()
    refuses(ValueError, r"\(1, 89\).*3.*\[B, 90\]", model.decode_tokens, torch.zeros(1, 89, dtype=torch.long))
    refuses(ValueError, "0.*2.*0.*1", model.decode_tokens, torch.arange(90)[None] % 3)
    with pytest.raises(ValueError, match=r"1.*\[B, 12\]: 3.*4"):
        model.accumulate(model.begin(1), 1, torch.zeros(1, 4, dtype=torch.long))
    refuses(ValueError, r"\(1, 3, 8, 9\).*\[B, 3, 8, 8\]", model.encode_tokens, torch.zeros(1, 3, 8, 9))
    refuses(ValueError, "coarse", tiny_bits, scales=(1, 3, 2))


# -- schedules --------------------------------------------------------------------------------------------------------


def test_schedules_have_the_pixels_and_ratios_that_they_are_for():
    assert scales_for(1024) == (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
    assert offsets_of(scales_for(1024))[-1] == 10521
    assert len(ratios()) == 15
    for ratio in ratios():
        for size, count in SIZES.items():
            scales = scales_for(size, ratio)
            height, width = shape_of(scales[-1])
            assert len(scales) == count
            assert abs(height / width - ratio) < 0.01
            near = 0.055 if size in (512, 1024) else 0.12
            assert abs(16 * (height * width) ** 0.5 - size) < near * size
            assert scales == scales_for(1024, ratio)[:count]
            assert rope_grid_of(scales) == scales_for(1024, ratio)[-1]
            assert scales_for(size, 1 / ratio) == tuple(
                side if isinstance(side, int) else side[::-1] for side in scales
            )
    assert scales_for(1024, 0.76)[-1] == (54, 72)
    assert scales_for(256, 9.0)[-1] == (27, 9)
    refuses(ValueError, r"size=640.*\[256, 512, 768, 1024\]", scales_for, 640)
    refuses(ValueError, "ratio=0", scales_for, 1024, 0)


@pytest.mark.parametrize(("preset", "layers", "drafters"), [("2b", 32, (0, 23)), ("8b", 40, (0, 1, 2))])
def test_published_budgets_are_a_tenth_of_the_cache(preset: str, layers: int, drafters: tuple[int, ...]):
    budget = published_budget(preset)
    assert budget.num_layers == layers
    assert 0.098 < budget.share < 0.103
    assert budget.drafters[8] == drafters
    for scale in range(8, 13):
        # The same sum at every scale: 650 tokens a layer.
        assert abs(sum(budget.tokens[scale]) / layers - 650) < 3
        assert len(set(budget.tokens[scale])) == 2
    assert all(len(set(row)) == 1 for row in budget.tokens[:8])
    refuses(ValueError, "preset='20b'", published_budget, "20b")


# -- official checkpoints --------------------------------------------------------------------------------------------


def official_shapes(bits: int, multipliers: tuple[int, ...]) -> vqgan.Shapes:
    """Keys and shapes of the released `infinity_vae_d*.pth`: convolutions and norms are wrapped."""
    plain = vqgan.networks(128, multipliers, 2, bits, bits, attends="nowhere")
    shapes: vqgan.Shapes = {"quantizer.lfq.mask": (bits,), "quantize.lfq.mask": (bits,)}
    for key, shape in plain.items():
        name, part = key.rsplit(".", 1)
        shapes[f"{name}.{'norm' if 'norm' in name else 'conv'}.{part}"] = shape
    return shapes


def official(bits: int, multipliers: tuple[int, ...]) -> dict[str, Tensor]:
    shapes = official_shapes(bits, multipliers)
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


@pytest.mark.parametrize("bits", [16, 24, 32, 64])
def test_official_files_load_key_for_key(bits: int):
    weights = official(bits, (1, 2, 4, 4, 4))
    model = load_infinity_vq_checkpoint(weights, scales=scales_for(512, 2.0))
    assert (model.bits, model.code_dim, model.patch_size) == (bits, bits, 16)
    assert model.image_size == (46 * 16, 23 * 16)
    assert sum(p.numel() for p in model.parameters()) == sum(w.numel() for w in weights.values()) - 2 * bits


def test_the_tokenizer_of_patches_is_known_by_its_levels():
    model = load_infinity_vq_checkpoint(official(14, (1, 2, 4, 4)))
    assert model.config["patchify"] and (model.bits, model.code_dim) == (14, 56)
    assert model.patch_size == 16 and model.image_size == (1024, 1024)
    assert model.num_tokens == 10521 * 56


@pytest.mark.parametrize("wrapped", [True, False])
def test_files_give_the_same_pictures(tmp_path, wrapped: bool):
    model = tiny_bits(dtype=torch.float32, norm_groups=2)
    weights = {}
    for key, value in model.state_dict().items():
        name, kind = key.rsplit(".", 1)
        kind = f"{'norm' if 'norm' in name else 'conv'}.{kind}" if wrapped else kind
        weights[f"{name}.{kind}"] = value.clone()
    torch.save({"vae": weights, "epoch": 3}, tmp_path / "own.pth")
    settings: dict[str, Any] = dict(scales=SIDES, norm_groups=2)
    again = load_infinity_vq_checkpoint(tmp_path / "own.pth", **settings)
    tokens = torch.randint(0, 2, (1, model.num_tokens))
    assert torch.equal(again.decode_tokens(tokens), model.decode_tokens(tokens))
    assert again.config["channel_multipliers"] == (1, 2) and not again.config["patchify"]
    half = load_infinity_vq_checkpoint(tmp_path / "own.pth", dtype=torch.bfloat16, **settings)
    assert half.dtype == torch.bfloat16
    assert (half.decode_tokens(tokens) - model.decode_tokens(tokens)).abs().mean() < 0.05


def test_powers_of_two_are_looked_at():
    model = tiny_bits(dtype=torch.float32, norm_groups=2)
    weights, settings = model.state_dict(), dict[str, Any](scales=SIDES, norm_groups=2)
    rising = 2 ** torch.arange(model.bits)
    for powers in (rising, rising.flip(0), rising.float()):
        load_infinity_vq_checkpoint({**weights, "quantize.lfq.mask": powers}, **settings)
    for powers in (rising + 1, rising * 2, torch.zeros(model.bits), rising[torch.arange(model.bits) // 2]):
        with pytest.raises(ValueError, match=r"quantize\.lfq\.mask"):
            load_infinity_vq_checkpoint({**weights, "quantize.lfq.mask": powers}, **settings)
