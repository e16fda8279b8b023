"""Official MAGNeT files: random weights in audiocraft's layout, computed by plain functions that read that layout,
against the modules they are loaded into."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from tests.tiny import seeded
from visual_spec.models.columns.encodec import decode_codes, encode_waves
from visual_spec.models.columns.musicgen import MagnetModel
from visual_spec.models.masked.magnet_checkpoint import load_magnet, load_magnet_codec
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked import MaskedSampler

BOOKS, CODES, DIM, HEADS, LAYERS, TEXT, HIDDEN = 3, 8, 24, 4, 2, 10, 40
PROJECTION = "condition_provider.conditioners.description.output_proj"

SETTINGS: dict[str, Any] = {
    "lm_model": "transformer_lm_magnet",
    "sample_rate": 400,
    "dataset": {"segment_duration": 2},
    "transformer_lm": {
        "num_heads": HEADS,
        "norm_first": True,
        "activation": "gelu",
        "positional_embedding": "sin",
        "past_context": None,
        "causal": False,
        "subcodes_context": 2,
        "compression_model_framerate": 4,
        "span_len": -1,
        "segment_duration": 0,
    },
    "codebooks_pattern": {"modeling": "parallel"},
    "masking": {"span_len": 3},
    "fuser": {"cross": ["description"], "sum": [], "prepend": [], "cross_attention_pos_emb": False},
    "conditioners": {"description": {"model": "t5", "t5": {"name": "t5-large"}}},
    "generate": {
        "lm": {
            "temp": 3.5,
            "top_k": 0,
            "top_p": 0.8,
            "max_cfg_coef": 20.0,
            "min_cfg_coef": 1.0,
            "decoding_steps": [5, 3, 2],
        }
    },
}

# The settings as they are written: the codec's refer to each other.
CODEC_SETTINGS: dict[str, Any] = {
    "compression_model": "encodec",
    "sample_rate": 400,
    "channels": 1,
    "encodec": {
        "autoencoder": "seanet",
        "quantizer": "rvq",
        "sample_rate": "${sample_rate}",
        "channels": "${channels}",
        "causal": False,
        "renormalize": False,
    },
    "seanet": {
        "dimension": 6,
        "channels": "${channels}",
        "causal": "${encodec.causal}",
        "n_filters": 4,
        "n_residual_layers": 2,
        "ratios": [3, 2],
        "activation": "ELU",
        "activation_params": {"alpha": 1.0},
        "norm": "weight_norm",
        "kernel_size": 5,
        "residual_kernel_size": 3,
        "last_kernel_size": 3,
        "dilation_base": 2,
        "pad_mode": "constant",
        "true_skip": True,
        "compress": 2,
        "lstm": 2,
        "disable_norm_outer_blocks": 0,
        "decoder": {"trim_right_ratio": 1.0, "final_activation": None},
        "encoder": {},
    },
    "rvq": {"n_q": BOOKS, "bins": CODES},
}


def changed(settings: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Settings with another value at a dotted name."""
    first, _, rest = name.partition(".")
    inner = changed(settings.get(first) or {}, rest, value) if rest else value
    return {**settings, first: inner}


def random(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.4 if len(shape) > 1 else 0.2)
        + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        + (2.0 if name.endswith("weight_g") else 0.0)
        for name, shape in shapes.items()
    }


def language_model_weights() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for book in range(BOOKS):
        shapes[f"emb.{book}.weight"] = (CODES + 1, DIM)
        shapes[f"linears.{book}.weight"] = (CODES, DIM)
    for layer in range(LAYERS):
        start = f"transformer.layers.{layer}"
        for attention in ("self_attn", "cross_attention"):
            shapes[f"{start}.{attention}.in_proj_weight"] = (3 * DIM, DIM)
            shapes[f"{start}.{attention}.out_proj.weight"] = (DIM, DIM)
        shapes[f"{start}.linear1.weight"] = (HIDDEN, DIM)
        shapes[f"{start}.linear2.weight"] = (DIM, HIDDEN)
        for norm in ("norm1", "norm_cross", "norm2"):
            shapes[f"{start}.{norm}.weight"] = shapes[f"{start}.{norm}.bias"] = (DIM,)
    shapes["out_norm.weight"] = shapes["out_norm.bias"] = (DIM,)
    shapes[f"{PROJECTION}.weight"], shapes[f"{PROJECTION}.bias"] = (DIM, TEXT), (DIM,)
    return random(shapes)


def codec_weights() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, inputs: int, outputs: int, kernel: int) -> None:
        shapes[f"{name}.weight_g"] = (outputs, 1, 1)
        shapes[f"{name}.weight_v"] = (outputs, inputs, kernel)
        shapes[f"{name}.bias"] = (outputs,)

    def residual(name: str, channels: int) -> None:
        conv(f"{name}.block.1.conv.conv", channels, channels // 2, 3)
        conv(f"{name}.block.3.conv.conv", channels // 2, channels, 1)

    def lstm(name: str, channels: int) -> None:
        for layer in range(2):
            for part in ("ih", "hh"):
                shapes[f"{name}.lstm.weight_{part}_l{layer}"] = (4 * channels, channels)
                shapes[f"{name}.lstm.bias_{part}_l{layer}"] = (4 * channels,)

    conv("encoder.model.0.conv.conv", 1, 4, 5)
    for place, channels, ratio in ((1, 4, 2), (5, 8, 3)):
        residual(f"encoder.model.{place}", channels)
        residual(f"encoder.model.{place + 1}", channels)
        conv(f"encoder.model.{place + 3}.conv.conv", channels, 2 * channels, 2 * ratio)
    lstm("encoder.model.9", 16)
    conv("encoder.model.11.conv.conv", 16, 6, 3)
    conv("decoder.model.0.conv.conv", 6, 16, 5)
    lstm("decoder.model.1", 16)
    for place, channels, ratio in ((3, 16, 3), (7, 8, 2)):
        name = f"decoder.model.{place}.convtr.convtr"
        conv(name, channels // 2, channels, 2 * ratio)  # a transposed convolution has its inputs first
        shapes[f"{name}.bias"] = (channels // 2,)
        residual(f"decoder.model.{place + 1}", channels // 2)
        residual(f"decoder.model.{place + 2}", channels // 2)
    conv("decoder.model.11.conv.conv", 4, 1, 3)
    for book in range(BOOKS):
        start = f"quantizer.vq.layers.{book}._codebook"
        shapes |= {f"{start}.inited": (1,), f"{start}.cluster_size": (CODES,)}
        shapes |= {f"{start}.embed": (CODES, 6), f"{start}.embed_avg": (CODES, 6)}
    return random(shapes, 1)


def write(folder: Path, name: str, weights: dict[str, Tensor], settings: dict[str, Any] | None) -> Path:
    content: dict[str, Any] = {"best_state": weights, "version": "1.4.0a1", "exported": True}
    if settings is not None:
        content["xp.cfg"] = yaml.safe_dump(settings)
    path = folder / name
    torch.save(content, path)
    return path


def write_language_model(
    folder: Path, settings: dict[str, Any] | None = SETTINGS, changes: dict[str, Any] | None = None
) -> Path:
    weights = language_model_weights()
    weights.update(changes or {})
    return write(folder, "state_dict.bin", {k: v for k, v in weights.items() if v is not None}, settings)


# -- the language model ------------------------------------------------------------------------------------------------


def straight_logits(
    weights: dict[str, Tensor], codes: Tensor, features: Tensor, mask: Tensor, stage: int, reach: int
) -> Tensor:
    """Logits [T, V] of one clip, codes [K, T], with text features [S, C]; in float64."""
    w = {name: value.double() for name, value in weights.items()}
    count = codes.shape[1]
    half = torch.arange(DIM // 2, dtype=torch.float64)
    phase = torch.arange(count, dtype=torch.float64)[:, None] / 10_000 ** (half / (DIM // 2 - 1))
    x = torch.cat([phase.cos(), phase.sin()], 1)
    for book in range(BOOKS):
        x = x + w[f"emb.{book}.weight"][codes[book]]
    text = (features.double() @ w[f"{PROJECTION}.weight"].T + w[f"{PROJECTION}.bias"]) * mask[:, None]
    allowed = torch.ones(count, count, dtype=torch.bool)
    if stage:
        for query in range(count):
            for key in range(count):
                allowed[query, key] = abs(query - key) <= reach

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
            + w[f"{name}.bias"]
        )

    def attention(name: str, queries: Tensor, keys: Tensor, allowed: Tensor) -> Tensor:
        packed = w[f"{name}.in_proj_weight"]
        q, k, v = queries @ packed[:DIM].T, keys @ packed[DIM : 2 * DIM].T, keys @ packed[2 * DIM :].T
        size, outputs = DIM // HEADS, []
        for head in range(HEADS):
            at = slice(head * size, (head + 1) * size)
            scores = q[:, at] @ k[:, at].T / math.sqrt(size)
            outputs.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v[:, at])
        return torch.cat(outputs, 1) @ w[f"{name}.out_proj.weight"].T

    for layer in range(LAYERS):
        start = f"transformer.layers.{layer}"
        normed = norm(f"{start}.norm1", x)
        x = x + attention(f"{start}.self_attn", normed, normed, allowed)
        everything = torch.ones(count, len(text), dtype=torch.bool)  # padding is attended to, as zeros
        x = x + attention(f"{start}.cross_attention", norm(f"{start}.norm_cross", x), text, everything)
        hidden = norm(f"{start}.norm2", x) @ w[f"{start}.linear1.weight"].T
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        x = x + hidden @ w[f"{start}.linear2.weight"].T
    return norm("out_norm", x) @ w[f"linears.{stage}.weight"].T


def clips() -> tuple[TextCondition, Tensor]:
    """Two captions, one with padding, and clips of 8 frames with hidden codes."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(2, 4, TEXT, generator=generator)
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    codes = torch.randint(0, CODES + 1, (2, BOOKS, 8), generator=generator)
    return TextCondition(features, mask), codes


def test_logits_are_those_of_a_plain_computation_in_the_official_layout(tmp_path):
    write_language_model(tmp_path)
    loaded = load_magnet(tmp_path, dtype=torch.float64)
    model = MagnetModel(loaded.model, 8, reach=loaded.settings.reach, padding="zeros")
    weights, (condition, codes) = language_model_weights(), clips()
    assert loaded.settings.reach == 2
    state = model.prepare(condition, batch_size=2, guided=True)
    nothing = torch.zeros_like(condition.mask[0])
    for stage in range(BOOKS):
        got = model(state, codes.transpose(1, 2), stage)
        for row in range(2):
            for guided, mask in ((0, condition.mask[row]), (2, nothing)):
                wanted = straight_logits(weights, codes[row], condition.features[row], mask, stage, 2)
                assert (got[row + guided] - wanted).abs().max() < 1e-5
        scored = model.logits(codes, condition, torch.full((2,), stage))
        assert (scored - got[:2]).abs().max() < 1e-10
    assert (got[:2] - got[2:]).abs().max() > 0.1


@pytest.mark.parametrize("part", ["self_attn.in_proj_weight", "cross_attention.in_proj_weight"])
def test_every_third_of_a_packed_matrix_counts(tmp_path, part):
    name = f"transformer.layers.1.{part}"
    (condition, codes), found = clips(), []
    for turn in range(3):
        weights = language_model_weights()[name]
        path = write_language_model(tmp_path, changes={name: weights.roll(turn * DIM, 0)})
        model = MagnetModel(load_magnet(path).model, 8, padding="zeros")
        found.append(model.logits(codes, condition, torch.zeros(2, dtype=torch.long)))
    assert (found[0] - found[1]).abs().max() > 0.01 and (found[1] - found[2]).abs().max() > 0.01


def test_settings_of_the_file(tmp_path):
    settings = load_magnet(write_language_model(tmp_path)).settings
    assert (settings.duration, settings.frame_rate, settings.num_frames) == (2.0, 4, 6)
    assert (settings.span, settings.reach, settings.steps) == (3, 2, (5, 3, 2))
    assert (settings.temperature, settings.top_p, settings.top_k) == (3.5, 0.8, 0)
    assert (settings.guidance_scale, settings.least_guidance) == (20.0, 1.0)
    assert (settings.text_encoder, settings.sampling_rate) == ("t5-large", 400)


@pytest.mark.parametrize("duration, frames", [(10, 498), (30, 1500)])
def test_clips_have_whole_spans(tmp_path, duration, frames):
    official = changed(
        changed(SETTINGS, "dataset.segment_duration", duration),
        "transformer_lm.compression_model_framerate",
        50,
    )
    assert load_magnet(write_language_model(tmp_path, official)).settings.num_frames == frames


def test_top_k_counts_only_where_there_is_no_top_p(tmp_path):
    settings = changed(SETTINGS, "generate.lm.top_k", 5)
    loaded = load_magnet(write_language_model(tmp_path, settings)).settings
    assert (loaded.top_k, loaded.top_p) == (0, 0.8)
    settings = changed(settings, "generate.lm.top_p", 0.0)
    loaded = load_magnet(write_language_model(tmp_path, settings)).settings
    assert (loaded.top_k, loaded.top_p) == (5, 1.0)


def test_settings_that_the_file_lacks(tmp_path):
    few = {"dataset": {"segment_duration": 30}, "transformer_lm": {"num_heads": 4, "subcodes_context": -1}}
    settings = load_magnet(write_language_model(tmp_path, few)).settings
    assert settings.steps == (60, 10, 10) and settings.num_frames == 1500 and settings.reach is None
    assert (settings.temperature, settings.top_p, settings.guidance_scale) == (3.0, 0.9, 10.0)
    path = write_language_model(tmp_path, None)
    with pytest.raises(ValueError, match="does not tell the number of attention heads; pass num_heads"):
        load_magnet(path)
    assert load_magnet(path, num_heads=4).settings.steps == (20, 10, 10)
    with pytest.raises(ValueError, match="num_heads=5; pass an integer that divides the width 24"):
        load_magnet(path, num_heads=5)


def test_a_clip_from_files(tmp_path):
    """Half precision on disk, as official files have it; from the folder to a wave."""
    weights = {name: value.half() for name, value in language_model_weights().items()}
    write(tmp_path, "state_dict.bin", weights, SETTINGS)
    write(tmp_path, "compression_state_dict.bin", codec_weights(), CODEC_SETTINGS)
    assert load_magnet(tmp_path, dtype=None).model.dtype == torch.float16
    loaded = load_magnet(tmp_path)
    assert loaded.model.dtype == torch.float32  # on a CPU, as in audiocraft
    settings = loaded.settings
    model = MagnetModel(loaded.model, settings.num_frames, reach=settings.reach, padding="zeros")
    sampler = MaskedSampler(
        settings.steps, clock="magnet", span=settings.span, temperature="falling", guidance="falling"
    )
    law = TokenLaw(
        guidance_scale=settings.guidance_scale, temperature=settings.temperature, top_p=settings.top_p
    )
    condition, _ = clips()
    result = sampler(model, condition, law=law, generator=seeded(0, 1), batch_size=2)
    waves = decode_codes(load_magnet_codec(tmp_path), model.codes(result.tokens))
    assert waves.shape == (2, 1, 6 * 6) and waves.isfinite().all()


# -- the codec ---------------------------------------------------------------------------------------------------------


class Straight:
    """EnCodec by plain functions over the official weights, in float64."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.w = {name: value.double() for name, value in weights.items()}

    def kernel(self, name: str) -> Tensor:
        direction = self.w[f"{name}.weight_v"]
        length = direction.square().sum((1, 2), keepdim=True).sqrt()
        return self.w[f"{name}.weight_g"] * direction / length

    def conv(self, x: Tensor, name: str, stride: int = 1, dilation: int = 1) -> Tensor:
        kernel = self.kernel(f"{name}.conv.conv")
        total = (kernel.shape[-1] - 1) * dilation + 1 - stride
        right = total // 2
        missing = -x.shape[-1] % stride
        x = F.pad(x, (total - right, right + missing))
        return F.conv1d(x, kernel, self.w[f"{name}.conv.conv.bias"], stride=stride, dilation=dilation)

    def transposed(self, x: Tensor, name: str, stride: int) -> Tensor:
        kernel = self.kernel(f"{name}.convtr.convtr")
        total = kernel.shape[-1] - stride
        y = F.conv_transpose1d(x, kernel, self.w[f"{name}.convtr.convtr.bias"], stride=stride)
        return y[..., total - total // 2 : y.shape[-1] - total // 2]

    def residual(self, x: Tensor, name: str, dilation: int) -> Tensor:
        y = self.conv(F.elu(x), f"{name}.block.1", dilation=dilation)
        return x + self.conv(F.elu(y), f"{name}.block.3")

    def lstm(self, x: Tensor, name: str) -> Tensor:
        steps = list(x.unbind(-1))
        for layer in range(2):
            hidden = cell = torch.zeros_like(steps[0])
            for at, value in enumerate(steps):
                gates = (
                    value @ self.w[f"{name}.lstm.weight_ih_l{layer}"].T
                    + self.w[f"{name}.lstm.bias_ih_l{layer}"]
                )
                gates = gates + hidden @ self.w[f"{name}.lstm.weight_hh_l{layer}"].T
                gates = gates + self.w[f"{name}.lstm.bias_hh_l{layer}"]
                entry, forget, new, out = gates.chunk(4, 1)
                cell = forget.sigmoid() * cell + entry.sigmoid() * new.tanh()
                hidden = out.sigmoid() * cell.tanh()
                steps[at] = hidden
        return x + torch.stack(steps, -1)

    def latents(self, waves: Tensor) -> Tensor:
        x = self.conv(waves.double(), "encoder.model.0")
        for place, ratio in ((1, 2), (5, 3)):
            for block in range(2):
                x = self.residual(x, f"encoder.model.{place + block}", 2**block)
            x = self.conv(F.elu(x), f"encoder.model.{place + 3}", ratio)
        return self.conv(F.elu(self.lstm(x, "encoder.model.9")), "encoder.model.11")

    def quantise(self, x: Tensor) -> Tensor:
        codes = []
        for book in range(BOOKS):
            table = self.w[f"quantizer.vq.layers.{book}._codebook.embed"]
            distance = (x[:, None] - table[None, :, :, None]).square().sum(2)  # [B, V, T]
            codes.append(distance.argmin(1))
            x = x - table[codes[-1]].transpose(1, 2)
        return torch.stack(codes, 1)

    def decode(self, codes: Tensor) -> Tensor:
        tables = [self.w[f"quantizer.vq.layers.{book}._codebook.embed"] for book in range(BOOKS)]
        x = sum(table[codes[:, book]] for book, table in enumerate(tables)).transpose(1, 2)  # type: ignore[union-attr]
        x = self.lstm(self.conv(x, "decoder.model.0"), "decoder.model.1")
        for place, ratio in ((3, 3), (7, 2)):
            x = self.transposed(F.elu(x), f"decoder.model.{place}", ratio)
            for block in range(2):
                x = self.residual(x, f"decoder.model.{place + 1 + block}", 2**block)
        return self.conv(F.elu(x), "decoder.model.11")


def test_the_codec_is_that_of_a_plain_computation_in_the_official_layout(tmp_path):
    path = write(tmp_path, "compression_state_dict.bin", codec_weights(), CODEC_SETTINGS)
    codec = load_magnet_codec(path).double()
    assert codec.config.num_quantizers == BOOKS and codec.config.frame_rate == 67  # 400 / 6, rounded up
    straight = Straight(codec_weights())
    generator = torch.Generator().manual_seed(2)
    waves = torch.randn(2, 1, 62, generator=generator).double()
    latents = straight.latents(waves)
    assert (codec.encoder(waves) - latents).abs().max() < 1e-10 and latents.std() > 0.1
    assert torch.equal(encode_waves(codec, waves), straight.quantise(latents))
    latents = 0.5 * torch.randn(2, 6, 9, generator=generator).double()
    codes = straight.quantise(latents)
    assert torch.equal(codec.quantizer.encode(latents).transpose(0, 1), codes)
    assert all(len(book.unique()) > 4 for book in codes.unbind(1))
    decoded = straight.decode(codes)
    assert (decode_codes(codec, codes) - decoded).abs().max() < 1e-10 and decoded.std() > 0.1


def test_a_file_that_names_its_codec(tmp_path):
    codec = load_magnet_codec(write(tmp_path, "compression_state_dict.bin", codec_weights(), CODEC_SETTINGS))
    codec.save_pretrained(tmp_path / "encodec")
    torch.save(
        {"pretrained": "facebook/encodec_32khz", "exported": True}, tmp_path / "compression_state_dict.bin"
    )
    found = load_magnet_codec(tmp_path, pretrained=tmp_path / "encodec")
    for key, value in codec.state_dict().items():
        assert torch.equal(found.state_dict()[key], value)
    with pytest.raises(OSError, match="only names its codec, facebook/encodec_32khz.*pass pretrained="):
        load_magnet_codec(tmp_path)  # there is no network
    torch.save({"pretrained": "dac_44khz", "exported": True}, tmp_path / "compression_state_dict.bin")
    with pytest.raises(ValueError, match="names the codec 'dac_44khz', which is no EnCodec"):
        load_magnet_codec(tmp_path)


# -- bad files ---------------------------------------------------------------------------------------------------------


def test_keys_that_differ_are_all_listed(tmp_path):
    path = write_language_model(
        tmp_path,
        changes={
            "out_norm.bias": None,
            "transformer.layers.0.linear1.bias": torch.zeros(HIDDEN),
            "linears.1.weight": torch.zeros(CODES + 1, DIM),
        },
    )
    with pytest.raises(ValueError) as caught:
        load_magnet(path)
    for part in (
        "a MAGNeT of 3 codebooks, 2 layers and width 24",
        "1 missing: out_norm.bias",
        "1 unexpected: transformer.layers.0.linear1.bias",
        "1 of another shape: linears.1.weight [9, 24] instead of [8, 24]",
    ):
        assert part in str(caught.value)
    weights = codec_weights()
    weights["decoder.model.14.conv.conv.bias"] = weights.pop("encoder.model.9.lstm.bias_hh_l1")
    path = write(tmp_path, "compression_state_dict.bin", weights, CODEC_SETTINGS)
    with pytest.raises(ValueError) as caught:
        load_magnet_codec(path)
    assert "1 missing: encoder.model.9.lstm.bias_hh_l1" in str(caught.value)
    assert "1 unexpected: decoder.model.14.conv.conv.bias" in str(caught.value)


@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "lm_model",
            "transformer_lm",
            "holds a 'transformer_lm', not MAGNeT's.*MusicgenForConditionalGeneration",
        ),
        ("transformer_lm.norm_first", False, "transformer_lm.norm_first=False instead of True"),
        ("transformer_lm.activation", "relu", "transformer_lm.activation='relu' instead of 'gelu'"),
        ("transformer_lm.positional_embedding", "rope", "positional_embedding='rope' instead of 'sin'"),
        ("transformer_lm.causal", True, "transformer_lm.causal=True"),
        ("codebooks_pattern.modeling", "delay", "codebooks_pattern.modeling='delay' instead of 'parallel'"),
        ("fuser.prepend", ["self_wav"], r"fuser.prepend=\['self_wav'\] instead of \[\]"),
        ("fuser.cross_attention_pos_emb", True, "fuser.cross_attention_pos_emb=True"),
    ],
)
def test_settings_of_another_network_are_refused(tmp_path, name, value, message):
    with pytest.raises(ValueError, match=message):
        load_magnet(write_language_model(tmp_path, changed(SETTINGS, name, value)))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("seanet.norm", "time_group_norm", "seanet.norm='time_group_norm' instead of 'weight_norm'"),
        ("seanet.lstm", 0, "seanet.lstm=0"),
        ("seanet.decoder.final_activation", "Tanh", "final_activation='Tanh'"),
        ("encodec.renormalize", True, "encodec.renormalize=True"),
        ("encodec.quantizer", "no_quant", "encodec.quantizer='no_quant'"),
    ],
)
def test_settings_of_another_codec_are_refused(tmp_path, name, value, message):
    settings = changed(CODEC_SETTINGS, name, value)
    path = write(tmp_path, "compression_state_dict.bin", codec_weights(), settings)
    with pytest.raises(ValueError, match=message):
        load_magnet_codec(path)


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no state_dict.bin, as official.*it holds nothing"):
        load_magnet(tmp_path)
    path = tmp_path / "state_dict.bin"
    torch.save({"best_state": SimpleNamespace(a=1), "xp.cfg": "a: 1"}, path)
    with pytest.raises(
        ValueError, match=r"needs? pickle, which can run any code; it is refused.*\"best_state\", \"xp.cfg\""
    ):
        load_magnet(path)
    torch.save({"model": {"a": torch.zeros(1)}}, path)
    with pytest.raises(
        ValueError, match=r"no weights under 'best_state' \('model'\); pass a file that audiocraft"
    ):
        load_magnet(path)
    with pytest.raises(ValueError, match="no weights under 'best_state'"):
        load_magnet_codec(path)
    torch.save({"best_state": {"a.weight": torch.zeros(1)}, "xp.cfg": "- 1"}, path)
    with pytest.raises(ValueError, match="settings .* no mapping, but a list"):
        load_magnet(path)
    write(tmp_path, "state_dict.bin", codec_weights(), None)
    with pytest.raises(
        ValueError, match="is no MAGNeT checkpoint: .*keys such as encoder.model.0.conv.conv.weight_g"
    ):
        load_magnet(path)
    path.write_bytes(b"<html>")
    with pytest.raises(ValueError, match="it may be a web page"):
        load_magnet(path)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)
NO_SETTINGS = {
    "aliases without end": (
        LAUGHS + "transformer_lm: {norm_first: *a29}\n",
        "no plain YAML: it holds an alias",
    ),
    "a tree in itself": ("a: &a [*a]\n", "no plain YAML: it holds an alias"),
    "deep": ("[" * 5000, "no plain YAML"),
    "a tag": (
        "a: !!python/object/apply:os.system ['true']\n",
        "no plain YAML: could not determine a constructor",
    ),
    "broken": ("a: [1, 2", "no plain YAML"),
    "a list": ("- 1\n", "that are no mapping, but a list"),
    "a number": (3, "that are no mapping, but a int"),
    "a circle": (
        "dataset: {segment_duration: '${a}'}\na: '${b}'\nb: '${a}'\n",
        "refer to each other in a circle",
    ),
}


@pytest.mark.parametrize("name", NO_SETTINGS)
def test_settings_that_cannot_be_read_are_refused_in_one_line(tmp_path, name):
    text, message = NO_SETTINGS[name]
    path = tmp_path / "state_dict.bin"
    torch.save({"best_state": language_model_weights(), "xp.cfg": text}, path)
    with pytest.raises(ValueError, match=message) as error:
        load_magnet(path, num_heads=HEADS)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataset.segment_duration", "long"),
        ("dataset.segment_duration", float("nan")),
        ("dataset.segment_duration", [1]),
        ("masking.span_len", None),
        ("masking.span_len", 2.5),
        ("generate.lm.decoding_steps", 7),
        ("generate.lm.decoding_steps", ["a"]),
        ("generate.lm.temp", {"x": 1}),
        ("generate.lm.top_k", True),
        ("conditioners.description.t5.name", 3),
    ],
)
def test_settings_of_another_kind_are_named(tmp_path, name, value):
    path = write_language_model(tmp_path, changed(SETTINGS, name, value))
    with pytest.raises(ValueError, match=rf"state_dict.bin was trained with {name}=.*no such setting"):
        load_magnet(path)


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_missing_layer_is_noticed_be_it_the_last_one(tmp_path, layer):
    start = f"transformer.layers.{layer}."
    without: dict[str, Any] = {key: None for key in language_model_weights() if key.startswith(start)}
    settings = changed(SETTINGS, "transformer_lm.num_layers", LAYERS)
    assert len(load_magnet(write_language_model(tmp_path, settings)).model.model.decoder.layers) == LAYERS
    path = write_language_model(tmp_path, settings, without)
    with pytest.raises(
        ValueError, match=r"state_dict.bin (holds 1 layers, and its settings say 2|is no MAGNeT)"
    ):
        load_magnet(path)


def test_codecs_of_absurd_sizes_are_refused_before_they_are_built(tmp_path):
    for name, value in {
        "seanet.dimension": 10**9,
        "seanet.n_filters": 10**8,
        "seanet.ratios": [10**6, 10**6],
        "seanet.n_residual_layers": 10**9,
        "seanet.lstm": 10**9,
        "seanet.kernel_size": -3,
        "rvq.bins": 10**12,
        "rvq.n_q": 10**9,
        "rvq.n_q ": 0,
        "encodec.sample_rate": 0,
    }.items():
        settings = changed(CODEC_SETTINGS, name.strip(), value)
        path = write(tmp_path, "compression_state_dict.bin", codec_weights(), settings)
        with pytest.raises(ValueError, match="compression_state_dict.bin") as error:
            load_magnet_codec(path)
        assert "\n" not in str(error.value), name


def test_values_that_nothing_computes_with_are_named(tmp_path):
    weights = language_model_weights()
    for value, message in [
        (
            torch.full_like(weights["emb.1.weight"], torch.nan),
            "is damaged: .* of .*embed_tokens.1.weight are nan",
        ),
        (weights["emb.1.weight"].long(), "embed_tokens.1.weight is of torch.int64"),
    ]:
        path = write_language_model(tmp_path, changes={"emb.1.weight": value})
        with pytest.raises(ValueError, match=f"state_dict.bin.*{message}"):
            load_magnet(path)
    codec = codec_weights()
    codec["decoder.model.0.conv.conv.bias"][0] = torch.inf
    path = write(tmp_path, "compression_state_dict.bin", codec, CODEC_SETTINGS)
    with pytest.raises(ValueError, match="1 of 16 values of decoder.model.0.conv.conv.bias"):
        load_magnet_codec(path)
