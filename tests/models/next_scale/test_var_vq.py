"""VAR's tokenizer: the official key layout, and all that it computes against plain loops."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import vqgan
from tests.helpers.refusals import refuses
from tests.helpers.vqgan import conv, mean_matrix
from visual_spec.models.core.vq_blocks import PositionNorm
from visual_spec.models.next_scale.var import SCALES as OFFICIAL_SCALES
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel, load_var_vq_checkpoint, smoother_of_scale

SCALES = (1, 2, 3, 5, 8)  # 3 and 5 do not divide 8: bins overlap
TINY: dict[str, Any] = dict(
    base_channels=8,
    channel_multipliers=(1, 2),
    blocks_per_level=1,
    codebook_size=24,
    code_dim=4,
    scales=SCALES,
    norm_groups=4,
)


def small(**changes: Any) -> MultiscaleVQModel:
    torch.manual_seed(0)
    model = MultiscaleVQModel(**{**TINY, **changes}).double().eval().requires_grad_(False)
    model.codebook.normal_()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def random_tokens(batch_size: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 24, (batch_size, sum(n * n for n in SCALES)), generator=generator)


# -- an independent computation ---------------------------------------------------------------------------------------


def latents_of(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return conv(vqgan.encoded(x, weights, 4), weights, "quant_conv")


def picture_of(canvas: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return vqgan.decoded(conv(canvas, weights, "post_quant_conv"), weights, 4).clamp(-1, 1)


def enlarge_matrix(size: int, target: int) -> Tensor:
    """Cubic convolution with a = -0.75, half-pixel centres, edges repeated: `[target, size]`."""
    matrix = torch.zeros(target, size, dtype=torch.float64)
    for i in range(target):
        centre = (i + 0.5) * size / target - 0.5
        for place in range(math.floor(centre) - 1, math.floor(centre) + 3):
            d, a = abs(centre - place), -0.75
            share = (
                (a + 2) * d**3 - (a + 3) * d**2 + 1 if d <= 1 else a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
            )
            matrix[i, min(max(place, 0), size - 1)] += share
    return matrix


def drawn(
    canvas: Tensor, scale: int, tokens: Tensor, weights: dict[str, Tensor], scales: tuple[int, ...]
) -> Tensor:
    """One picture's canvas `[D, N, N]` with the tokens `[n * n]` of a scale."""
    side, full = scales[scale], scales[-1]
    codes = torch.zeros(canvas.shape[0], side, side, dtype=torch.float64)
    for i, token in enumerate(tokens.tolist()):
        codes[:, i // side, i % side] = weights["quantize.embedding.weight"][token]
    if scale < len(scales) - 1:
        codes = enlarge_matrix(side, full) @ codes @ enlarge_matrix(side, full).T
    place = {5: (0, 1, 2, 2, 3)}[len(scales)][scale]
    smooth = conv(codes[None], weights, f"quantize.quant_resi.qresi_ls.{place}")[0]
    return canvas + 0.5 * codes + 0.5 * smooth


def pyramid(
    latents: Tensor, weights: dict[str, Tensor], scales: tuple[int, ...]
) -> tuple[list[int], list[Tensor]]:
    """Tokens of one picture's latents `[D, N, N]`, and its canvas after every scale."""
    canvas, tokens, canvases = torch.zeros_like(latents), [], []
    codebook = weights["quantize.embedding.weight"]
    for scale, side in enumerate(scales):
        shrink = mean_matrix(scales[-1], side)
        wanted = shrink @ (latents - canvas) @ shrink.T
        found = []
        for row, column in itertools.product(range(side), range(side)):
            distances = [(wanted[:, row, column] - code).norm().item() for code in codebook]
            found.append(distances.index(min(distances)))
        canvas = drawn(canvas, scale, torch.tensor(found), weights, scales)
        tokens += found
        canvases.append(canvas)
    return tokens, canvases


# -- what it computes -------------------------------------------------------------------------------------------------


def test_encoding_is_that_of_plain_loops():
    model = small()
    weights = model.state_dict()
    pictures = torch.rand(2, 3, 16, 16, dtype=torch.float64) * 2 - 1
    latents = model.encode_latents(pictures)
    assert (latents - latents_of(pictures, weights)).abs().max() < 1e-12
    latents = latents * 3  # so that many codes are in play, at all scales
    expected = [pyramid(row, weights, SCALES) for row in latents]
    _, tokens, canvases = model.quantise(latents)
    assert torch.cat(tokens, 1).tolist() == [row for row, _ in expected]
    assert torch.cat(tokens, 1).unique().numel() > 12
    for scale, canvas in enumerate(canvases):
        assert (canvas - torch.stack([rows[scale] for _, rows in expected])).abs().max() < 1e-12
    assert model.encode_tokens(pictures).tolist() == [
        pyramid(row, weights, SCALES)[0] for row in latents_of(pictures, weights)
    ]


def test_decoding_is_that_of_plain_loops():
    model = small()
    weights, tokens = model.state_dict(), random_tokens(2)
    canvas = torch.zeros(2, 4, 8, 8, dtype=torch.float64)
    first = 0
    for scale, side in enumerate(SCALES):
        part = tokens[:, first : first + side * side]
        canvas = torch.stack([drawn(canvas[b], scale, part[b], weights, SCALES) for b in range(2)])
        first += side * side
    pictures = model.decode_tokens(tokens)
    assert (pictures - picture_of(canvas, weights)).abs().max() < 1e-12
    assert pictures.shape == (2, 3, 16, 16) and 0.05 < pictures.std() and pictures.abs().max() <= 1


def test_maps_and_pictures_of_tokens_are_those_of_the_canvas_drawn_scale_by_scale():
    model, tokens = small(), random_tokens(3)
    canvas, maps, first = model.begin(3), [], 0
    assert canvas.shape == (3, 4, 8, 8) and canvas.dtype == torch.float64 and not canvas.any()
    for scale, side in enumerate(SCALES):
        before, copy = canvas, canvas.clone()
        part = tokens[:, first : first + side * side]
        canvas = model.accumulate(canvas, scale, part)
        assert torch.equal(before, copy)  # the canvas given is left as it was
        codes = model.codebook[part].mT.reshape(3, 4, side, side)
        assert torch.equal(model.accumulate_codes(before, scale, codes), canvas)
        first += side * side
        if scale + 1 < len(SCALES):
            maps.append(model.next_map(canvas, scale + 1))
            shrink = mean_matrix(8, SCALES[scale + 1])
            assert (maps[-1] - shrink @ canvas @ shrink.T).abs().max() < 1e-12
    assert torch.equal(model.decode_canvas(canvas), model.decode_tokens(tokens))
    whole = model.maps_of(tokens)
    assert len(whole) == len(maps) == 4
    assert all(torch.equal(a, b) for a, b in zip(whole, maps, strict=True))


def test_gradients_reach_codes_and_convolutions_and_not_the_latents():
    model = small().requires_grad_(True)
    latents = torch.randn(1, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    wanted, _, canvases = model.quantise(latents)
    assert not any(part.requires_grad for part in wanted)
    sum(canvas.square().sum() for canvas in canvases).backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert latents.grad is None and model.codebook.grad is not None
    assert all(p.grad is not None for p in model.quantize.quant_resi.parameters())


def test_the_convolution_of_each_scale_is_the_official_one():
    assert [smoother_of_scale(scale, 10) for scale in range(10)] == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    for count in (2, 4, 6, 8, 12):  # these have no ties
        ticks = [1 / 12 + place * 10 / 36 for place in range(4)]
        for scale in range(count):
            distances = [abs(tick - scale / (count - 1)) for tick in ticks]
            assert smoother_of_scale(scale, count) == distances.index(min(distances))


def test_a_canvas_keeps_its_type():
    model = small().bfloat16()
    canvas = model.begin(2, dtype=torch.float32)
    assert model.begin(2).dtype == torch.bfloat16
    canvas = model.accumulate(canvas, 1, random_tokens(2)[:, 1:5])
    assert canvas.dtype == torch.float32 and model.decode_canvas(canvas).dtype == torch.bfloat16


def test_the_local_variant_normalises_positions_and_has_no_attention():
    torch.manual_seed(0)
    model = MultiscaleVQModel(**{**TINY, "norm_groups": None, "scales": (1, 2, 4, 32)}).double()
    assert not [name for name, _ in model.named_parameters() if "attn" in name]
    norms = [module for module in model.modules() if isinstance(module, torch.nn.GroupNorm)]
    assert norms and all(isinstance(module, PositionNorm) for module in norms)
    picture = torch.rand(1, 3, 64, 64, dtype=torch.float64) * 2 - 1
    changed = picture.clone()
    changed[..., :4, :4] *= -1
    # [32, 32]
    difference = (model.encode_latents(picture) - model.encode_latents(changed)).abs().amax((0, 1))
    assert difference[0, 0] > 1e-6 and difference[16:, 16:].max() == 0


def test_wrong_input_is_refused():
    model = small()
    with pytest.raises(ValueError, match=r"scales \(1, 2, 3, 5, 8\) have \[B, 103\]"):
        model.decode_tokens(torch.zeros(1, 64, dtype=torch.long))
    refuses(ValueError, "0 to 23", model.decode_tokens, torch.full((1, 103), 24))
    with pytest.raises(ValueError, match=r"scale 2 has \[B, 9\]"):
        model.accumulate(model.begin(1), 2, torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match=r"encodes \[B, 3, 16, 16\]"):
        model.encode_tokens(torch.zeros(1, 3, 32, 32, dtype=torch.float64))
    for scales in ((8,), (2, 1, 8), (0, 8)):
        refuses(ValueError, "least", MultiscaleVQModel, **{**TINY, "scales": scales})


# -- official files ---------------------------------------------------------------------------------------------------


def official_shapes(
    width: int, multipliers: tuple[int, ...], blocks: int, codes: int, dim: int
) -> vqgan.Shapes:
    """Keys and shapes of `vae_ch160v4096z32.pth` as the research notes list them, for any size."""
    attends = rf"\.{len(multipliers) - 1}$|mid"
    shapes = vqgan.networks(width, multipliers, blocks, dim, dim, attends=attends, joined=True)
    for name in ("quant_conv", "post_quant_conv", *(f"quantize.quant_resi.qresi_ls.{j}" for j in range(4))):
        shapes |= vqgan.convolution(name, dim, dim, 3)
    return shapes | {"quantize.embedding.weight": (codes, dim)}


def write_official(path, **changes: Tensor):
    shapes = official_shapes(8, (1, 2), 1, 24, 4)
    generator = torch.Generator().manual_seed(0)
    weights = {key: torch.randn(shape, generator=generator) * 0.3 for key, shape in shapes.items()}
    torch.save({**weights, "quantize.ema_vocab_hit_SV": torch.ones(5, 24), **changes}, path)
    return weights


def test_the_default_has_the_official_keys_and_shapes(monkeypatch):
    for name in (
        "kaiming_uniform_",
        "uniform_",
        "normal_",
    ):  # filling tensors on the meta device takes seconds
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
    with torch.device("meta"):
        model = MultiscaleVQModel()
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert shapes == official_shapes(160, (1, 1, 2, 2, 4), 2, 4096, 32)
    assert len(shapes) == 323 and sum(p.numel() for p in model.parameters()) == 108_948_355
    assert (model.image_size, model.num_tokens) == (256, 680)
    assert model.scales == OFFICIAL_SCALES[256]


def test_an_official_file_is_loaded_whole(tmp_path):
    weights = write_official(tmp_path / "vae.pth")
    model = load_var_vq_checkpoint(tmp_path / "vae.pth", **TINY)
    assert not model.training
    state = model.state_dict()
    assert state.keys() == weights.keys() and all(torch.equal(state[key], weights[key]) for key in weights)
    assert load_var_vq_checkpoint(tmp_path / "vae.pth", dtype=torch.float64, **TINY).dtype == torch.float64


def test_sizes_are_read_off_the_file(tmp_path):
    """What the errors ask for, the official file, is all there is to pass: nobody has to know a constructor."""
    weights = write_official(tmp_path / "vae.pth")
    model = load_var_vq_checkpoint(
        tmp_path / "vae.pth", scales=TINY["scales"], norm_groups=TINY["norm_groups"]
    )
    assert model.config["base_channels"] == 8 and model.config["channel_multipliers"] == (1, 2)
    assert (model.config["blocks_per_level"], model.codebook_size, model.code_dim) == (1, 24, 4)
    assert model.state_dict().keys() == weights.keys()
    with pytest.raises(ValueError, match=r"vae\.pth.*VAR.*num_channels \(8\)"):
        load_var_vq_checkpoint(tmp_path / "vae.pth")  # 32 groups of 8 channels
