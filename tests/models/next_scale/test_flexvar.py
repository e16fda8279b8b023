"""FlexVAR: a straight-line computation, numbers recorded from its public code, official files, scales at run time."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.flexvar import LABELS, LATENTS, SIDES, buffers, numbers, official_weights, tiny, tiny_vq
from tests.helpers.official import VQ_SHAPES, add_tiny_presets, random_weights
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.tiny_scales import tiny_scale_pipeline
from tests.helpers.var import normed, silu, straight_layers
from tests.helpers.vqgan import mean_matrix
from visual_spec.models.core.checkpoints import read_checkpoint
from visual_spec.models.next_scale.flexvar import (
    FlexVARTransformer,
    FlexVQModel,
    is_flexvae,
    is_flexvar,
    load_flexvae,
    load_flexvar,
    waves,
)
from visual_spec.models.next_scale.var import is_var, load_var_checkpoint
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.pipelines.convert import convert
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler, write_sampler
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler

# -- the model and its tokenizer --------------------------------------------------------------------------------------


def straight_line(
    model: FlexVARTransformer, label: int, maps: list[Tensor], scales: tuple[int, ...]
) -> Tensor:
    """Logits [L, V] of one picture (maps [D, n, n]): loops over tokens and what they see."""
    w = model.state_dict()
    rows, levels = [], []
    for level, side in enumerate(scales):
        bins = mean_matrix(32, side)
        positions = torch.einsum("iy,jx,cyx->ijc", bins, bins, w["pos_1LC"][0])
        for row in range(side):
            for column in range(side):
                start = w["class_emb.weight"][label] + w["pos_start"][0, 0]
                if level:
                    start = w["word_embed.weight"] @ maps[level - 1][:, row, column] + w["word_embed.bias"]
                rows.append(start + positions[row, column])
                levels.append(level)
    x = straight_layers(model, torch.stack(rows), label, lambda i, j: levels[j] <= levels[i])
    condition = silu(w["class_emb.weight"][label])
    scale, shift = (w["head_nm.ada_lin.1.weight"] @ condition + w["head_nm.ada_lin.1.bias"]).view(2, -1)
    return normed(x, scale, shift) @ w["head.weight"].T + w["head.bias"]


@pytest.mark.parametrize("shared", [False, True])
def test_logits_equal_a_straight_line_computation_at_any_scales(shared):
    model = tiny(shared=shared)
    for scales in (SIDES, (1, 4)) if not shared else [(1, 2, 3)]:
        view = model.at(scales)
        maps = [numbers(2 * 4 * n * n, 0.3).cos().view(2, 4, n, n) for n in scales[1:]]
        state = view.prefill(LABELS, batch_size=2, guided=True)
        logits = [state.logits] + [view(state, map, k) for k, map in enumerate(maps, 1)]
        for row, label in enumerate([3, 0, 5, 5]):
            want = straight_line(model, label, [map[row % 2] for map in maps], scales)
            assert (torch.cat(logits, 1)[row] - want).abs().max() < 1e-10
    assert model.scales == SIDES


def test_tokens_maps_and_logits_are_those_of_the_public_code():
    """Recorded: `encode_var_wo_firstL` and `FlexVAR.forward` of jiaosiyu1999/FlexVAR@04462cb, in float64."""
    vq_model, model = tiny_vq(), tiny()
    tokens = torch.cat(vq_model.tokens_of(LATENTS), 1)
    assert tokens.tolist() == [
        [7, 4, 3, 3, 0, 4, 3, 3, 5, 10, 7, 3, 1, 0, 10, 8, 1, 5, 6, 10, 3, 7, 8, 3, 10, 0, 11, 1, 1, 1],
        [3, 10, 7, 7, 8, 10, 8, 7, 2, 6, 4, 7, 9, 8, 3, 10, 3, 1, 1, 6, 5, 0, 7, 0, 8, 5, 3, 2, 3, 10],
    ]  # fmt: skip
    maps = vq_model.maps_of(tokens)
    words = torch.cat([map.flatten(2).mT for map in maps], 1)[1, [0, 5, 20]]
    assert torch.allclose(
        words,
        torch.tensor(
            [
                [0.5082111504, -0.4915774498, -0.4914272247, 0.5085000691],
                [0.4941465735, 0.3969938777, -0.0825752583, -0.0686915043],
                [0.5646717786, 0.7112765107, -0.0474330165, 0.1698715149],
            ],
            dtype=torch.float64,
        ),
        atol=2e-7,
    )  # the public codes are unit to 1e-7 only: their norm is float32's epsilon
    logits = model.teacher_forced(maps, LABELS)[1, [0, 3, 9, 29], :4]
    assert torch.allclose(logits, torch.tensor([
        [-2.4841296112, 1.0335434624, 4.6319829666, 1.8543461622],
        [-2.078369353, -2.7307095029, -0.0473318571, 0.2539780609],
        [0.6216941935, 1.9398862316, 3.4387075919, 0.9342398985],
        [0.1849099129, 0.5291354953, 1.3455404243, 0.8946532357],
    ], dtype=torch.float64), atol=1e-8)  # fmt: skip
    fewer = vq_model.at((1, 2, 4))
    maps = fewer.maps_of(torch.cat(fewer.tokens_of(LATENTS), 1))
    logits = model.at((1, 2, 4)).teacher_forced(maps, LABELS)[0, [0, 2, 20], :4]
    assert torch.allclose(logits, torch.tensor([
        [-1.8521111493, -3.8517779208, -2.3134711002, 1.851651165],
        [-1.5654354759, -2.8200929236, -1.7683037569, 1.2333022281],
        [-1.1082726888, -2.3378588151, -1.7116393774, 0.5531579329],
    ], dtype=torch.float64), atol=1e-8)  # fmt: skip


# Second picture of the public `autoregressive_infer_cfg`, cfg 2.5, likeliest codes. The first is code 11 throughout.
GREEDY = {
    (1, 2, 3, 4): [2, *[9] * 13, *[5] * 16],
    (1, 2, 4): [2, 9, 9, 9, 9, 9, 9, 9, 9, 9, 5, 9, 9, 5, 9, 9, 11, 5, 9, 9, 9],
    (1, 3, 7): [
        2, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 5, 5, 5, 5, 5, 9, 5, 5, 5, 9, 5, 5, 9, 5, 9, 5, 5, 9, 9, 5, 5, 5, 5, 5, 5, 5,
        5, 5, 9, 5, 5, 9, 5, 5, 5, 5, 5, 5, 5, 5, 9, 5, 5, 9, 9, 9, 5, 5,
    ],
}  # fmt: skip


@pytest.mark.parametrize("scales", GREEDY)
def test_greedy_tokens_under_rising_guidance_are_those_of_the_public_code(scales):
    sampler = ScaleWiseSampler(scales=scales)
    law = TokenLaw(guidance_scale=3.5, top_k=1)
    drawn = sampler(tiny(), LABELS, tokenizer=tiny_vq(), law=law, batch_size=2)
    assert drawn.tokens.tolist() == [[11] * len(GREEDY[scales]), GREEDY[scales]]
    assert drawn.canvas.shape == (2, 4, scales[-1], scales[-1])
    assert drawn.trace.model_calls == (len(scales),) and not drawn.trace.lossless


def test_positions_begin_as_the_waves_of_the_public_code():
    table = waves(32, 6)[0]
    assert torch.allclose(table[2, 5, 7], torch.tensor(5.0 * 10000 ** (-2 / 6)).sin())
    assert torch.allclose(table[3, 5, 7], torch.tensor(7.0 * 10000 ** (-2 / 6)).cos())
    assert torch.equal(FlexVARTransformer(12, 4, 16, 1, 2, 5).pos_1LC[0], waves(32, 16)[0])


def test_a_local_tokenizer_codes_reduced_pictures_and_others_reduced_latents():
    pictures = numbers(2 * 3 * 64, 0.2).sin().view(2, 3, 8, 8)
    local = tiny_vq()
    reduced = [F.adaptive_avg_pool2d(pictures, 2 * side) for side in SIDES]
    want = [
        local.quantize.nearest(local.quant_conv(local.encoder(picture))).flatten(1) for picture in reduced
    ]
    assert torch.equal(local.encode_tokens(pictures), torch.cat(want, 1))
    normed = tiny_vq(norm_groups=4)
    latents = normed.quant_conv(normed.encoder(pictures))
    bins = [mean_matrix(4, side) for side in SIDES]
    codes = F.normalize(normed.quantize.embedding.weight, dim=-1)
    want = [
        torch.einsum("iy,jx,bcyx,vc->bijv", own, own, latents, codes).argmax(-1).flatten(1) for own in bins
    ]
    assert torch.equal(normed.encode_tokens(pictures), torch.cat(want, 1))


def test_the_picture_so_far_is_the_last_map_alone_enlarged():
    vq_model = tiny_vq()
    tokens = torch.arange(9)[None] % 12
    canvas = vq_model.accumulate(vq_model.begin(1), 2, tokens)
    codes = F.normalize(vq_model.quantize.embedding.weight, dim=-1)[tokens[0]].T.view(1, 4, 3, 3)
    assert torch.allclose(canvas, codes)
    small = vq_model.decoder(vq_model.post_quant_conv(codes))
    assert small.shape[-1] == 6
    want = F.interpolate(small, size=(8, 8), mode="bicubic").clamp(-1, 1)
    assert torch.allclose(vq_model.decode_canvas(canvas), want)
    refuses(ValueError, r"scale 2 has \[B, 9\]", vq_model.accumulate, canvas, 2, tokens[:, :4])


# -- scales of a call -------------------------------------------------------------------------------------------------


def tiny_pipeline(**settings: Any) -> ScaleImagePipeline:
    pipe = ScaleImagePipeline(
        tiny().float(), tiny_vq().float(), ScaleWiseSampler(), default_top_k=0, **settings
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_pipeline_draws_the_scales_that_its_sampler_asks_for(tmp_path):
    pipe = tiny_pipeline()
    name, settings = parse_sampler("scale-wise:scales=1/2/4")
    pipe.sampler = make_sampler(name, **settings)
    drawn = pipe([3, 0], generator=seeded(1, 2), output_type="pt")
    fresh = ScaleImagePipeline(
        tiny((1, 2, 4)).float(), tiny_vq(scales=(1, 2, 4)).float(), ScaleWiseSampler(), default_top_k=0
    )
    fresh.set_progress_bar_config(disable=True)
    want = fresh([3, 0], generator=seeded(1, 2), output_type="pt")
    assert torch.equal(drawn.tokens, want.tokens) and torch.equal(drawn.images, want.images)
    assert drawn.tokens.shape == (2, 21) and want.trace.lossless and not drawn.trace.lossless
    assert torch.equal(pipe.decode_tokens(drawn.tokens, "pt"), drawn.images)
    pipe.save_pretrained(tmp_path)
    loaded = load_pipeline(tmp_path)
    assert loaded.transformer.scales == SIDES and tuple(loaded.sampler.config["scales"]) == (1, 2, 4)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(loaded([3, 0], generator=seeded(1, 2)).tokens, drawn.tokens)
    assert write_sampler("scale-wise", {"scales": [1, 2, 4]}) == "scale-wise:scales=1/2/4"
    pipe.sampler = ScaleWiseSampler(scales=[1, 2], schedule={"stop_after": 0})
    assert pipe([3]).images[0].size == (4, 4)  # the last scale makes the size, and stopping early does not


def test_hooks_of_a_model_do_not_reach_its_other_scales():
    from accelerate.hooks import ModelHook, add_hook_to_module

    hooked, sampler = tiny(), ScaleWiseSampler(scales=(1, 3))
    add_hook_to_module(hooked, ModelHook())
    one, other = (
        sampler(model, LABELS, tokenizer=tiny_vq(), law=TokenLaw(), batch_size=2, generator=seeded(1, 2))
        for model in (tiny(), hooked)
    )
    assert torch.equal(one.tokens, other.tokens)


def test_scales_that_cannot_be_are_refused():
    for scales, message in [([2, 4], "1.*32.*1"), ([1, 40], "1.*32.*1"), ([1, 4, 2], "coarse")]:
        refuses(ValueError, message, tiny().at, scales)
    refuses(ValueError, "scales", ScaleWiseSampler, scales=[0, 1])
    pipe = tiny_scale_pipeline(pair=False, sampler=ScaleWiseSampler(scales=[1, 2, 3, 4]))
    assert pipe([0]).tokens.shape == (1, 30)  # its own
    pipe.sampler = ScaleWiseSampler(scales=[1, 4])
    refuses(ValueError, r"scales=\[1, 4\].*VARTransformer", pipe, [0])
    refuses(ValueError, "8 pixels", tiny_vq, image_size=16)


# -- official files ---------------------------------------------------------------------------------------------------


def test_every_key_of_a_file_counts(tmp_path):
    weights = official_weights() | buffers()
    torch.save({"trainer": {"var_wo_ddp": weights}}, tmp_path / "ar-ckpt.pth")
    model = load_flexvar(tmp_path / "ar-ckpt.pth", dtype=torch.float32)
    assert model.dtype == torch.float32 and model.config["position_side"] == 32 and len(model.scales) == 10
    assert is_flexvar(weights) and not is_var(weights)
    refuses(ValueError, "no VAR", load_var_checkpoint, weights)
    for change, message in [
        ({"blocks.1.attn.zero_k_bias": torch.ones(16)}, "zero_k_bias"),
        ({"pos_1LC": torch.zeros(1, 30, 16)}, "FlexVAR"),
    ]:
        refuses(ValueError, message, load_flexvar, weights | change)


def test_official_files_become_a_pipeline(tmp_path, monkeypatch):
    add_tiny_presets(monkeypatch)
    codes = {
        "quantize.embedding.weight": (12, 12),
        "quant_conv.weight": (12, 8, 1, 1),
        "quant_conv.bias": (12,),
    }
    vae = random_weights(VQ_SHAPES | codes | {"post_quant_conv.weight": (8, 12, 1, 1)})
    torch.save({"model": vae | {"quantize.codebook_used": torch.zeros(65536)}}, tmp_path / "FlexVAE.pth")
    words = {"word_embed.weight": torch.randn(16, 12)}
    file = {key: value.float() for key, value in (official_weights() | buffers() | words).items()}
    torch.save(file, tmp_path / "FlexVARd2.pth")
    assert is_flexvae(vae) and not is_flexvae(random_weights(VQ_SHAPES))
    assert isinstance(load_flexvae(tmp_path / "FlexVAE.pth"), FlexVQModel)
    facts = convert([tmp_path / "FlexVAE.pth", tmp_path / "FlexVARd2.pth"], tmp_path / "out")
    assert sorted(facts["files"].values()) == ["FlexVAR's tokenizer", "FlexVAR-d2"]
    pipe = load_pipeline(tmp_path / "out")
    assert (type(pipe.transformer), type(pipe.vq_model)) == (FlexVARTransformer, FlexVQModel)
    law = pipe.make_law()
    assert (law.guidance_scale, law.top_k, law.top_p) == (3.5, 900, 0.95)
    alone = convert([tmp_path / "FlexVARd2.pth"], tmp_path / "alone", image_size=512)
    assert alone["class"] == "FlexVARTransformer"
    assert FlexVARTransformer.from_pretrained(tmp_path / "alone").scales[-2:] == (23, 32)
    # As latents go in, the tokenizer computes what LlamaGen's does.
    plain = VQModel(**{key: value for key, value in pipe.vq_model.config.items() if key in _VQ_SETTINGS})
    plain.load_state_dict(pipe.vq_model.state_dict())
    pictures = torch.rand(1, 3, 32, 32) * 2 - 1
    assert torch.equal(pipe.vq_model.encode_tokens(pictures)[:, -256:], plain.encode_tokens(pictures))
    assert read_checkpoint(tmp_path / "FlexVAE.pth").weights.keys() >= plain.state_dict().keys()


_VQ_SETTINGS = ("base_channels", "channel_multipliers", "blocks_per_level", "latent_channels", "codebook_size",
                "codebook_dim", "norm_groups", "image_size")  # fmt: skip
