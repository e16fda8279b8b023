"""Official MusicGen files: random weights in audiocraft's layout, computed by plain functions that read that layout,
against transformers' model that they become."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MusicgenForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from tests.helpers.audiocraft_files import (
    BOOKS,
    CODES,
    DIM,
    LAYERS,
    MUSICGEN_SETTINGS,
    SETTINGS,
    STEREO_SETTINGS,
    TEXT,
    changed,
    language_model_weights,
    random,
    straight_logits,
    write,
    write_language_model,
)
from tests.helpers.musicgen import write_musicgen
from tests.helpers.refusals import refuses
from tests.helpers.tiny_t5 import tiny_t5
from visual_spec.models.columns.audiocraft_codec import load_audiocraft_codec
from visual_spec.models.columns.encodec import decode_codes
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.columns.musicgen_checkpoint import load_musicgen
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler

FRAMES = 7


def load(folder: Path, **settings: Any) -> tuple[MusicgenForConditionalGeneration, float]:
    return load_musicgen(folder, tiny_t5(d_model=TEXT), **settings)


def straight_greedy(weights: dict[str, Tensor], features: Tensor, mask: Tensor, channels: int) -> Tensor:
    """The likeliest codes [K, T] of one clip, step by step of the delay pattern, with guidance 3."""
    books = BOOKS * channels
    lags = [book // channels for book in range(books)]
    fed = torch.full((books, 1), CODES)
    for step in range(FRAMES + max(lags)):
        seen = torch.ones(step + 1, step + 1, dtype=torch.bool).tril()
        guided, plain = (
            straight_logits(weights, fed, features, words, seen)[-1]
            for words in (mask, torch.zeros_like(mask))
        )
        new = (plain + 3 * (guided - plain)).argmax(-1)
        valid = torch.tensor([0 <= step - lag < FRAMES for lag in lags])
        fed = torch.cat([fed, torch.where(valid, new, CODES)[:, None]], 1)
    return torch.stack([fed[book, 1 + lag : 1 + lag + FRAMES] for book, lag in enumerate(lags)])


@pytest.mark.parametrize("channels", [1, 2], ids=["mono", "stereo"])
def test_clips_are_those_of_a_plain_computation_in_the_official_layout(tmp_path, channels):
    network, _ = load(write_musicgen(tmp_path, channels), dtype=torch.float64)
    weights = language_model_weights(BOOKS * channels)
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(2, 4, TEXT, generator=generator).double()
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    model = MusicgenColumnModel(network, FRAMES, padding="zeros")
    law = TokenLaw(guidance_scale=3.0, temperature=0.0)
    condition = TextCondition(features, mask)
    result = ColumnAutoregressiveSampler()(model, condition, law=law, batch_size=2)
    codes = model.codes(result.tokens, condition)
    for row in range(2):
        assert torch.equal(codes[row], straight_greedy(weights, features[row], mask[row], channels))
    assert len(codes.unique()) > 4
    # Without padding and guidance, transformers' own generate plays the same.
    whole: Any = network.double()
    waves = whole.generate(
        encoder_outputs=BaseModelOutput(features[:1]),
        attention_mask=torch.ones(1, 4, dtype=torch.long),
        guidance_scale=1.0,
        do_sample=False,
        max_length=FRAMES + BOOKS,
    )
    alone = TextCondition(features[:1], mask[:1])
    tokens = ColumnAutoregressiveSampler()(model, alone, law=TokenLaw(temperature=0.0)).tokens
    codec = load_audiocraft_codec(tmp_path).double()
    wanted = decode_codes(codec, model.codes(tokens, alone), channels)
    assert waves.shape == (1, channels, FRAMES * 6) and (waves - wanted).abs().max() < 1e-8


def test_what_the_model_and_its_settings_are(tmp_path):
    model, duration = load(write_musicgen(tmp_path, 2))
    assert duration == 2.0 and isinstance(model, MusicgenForConditionalGeneration) and not model.training
    decoder = model.decoder.config
    assert (decoder.num_codebooks, decoder.audio_channels, decoder.vocab_size) == (6, 2, CODES)
    assert (decoder.hidden_size, decoder.num_hidden_layers) == (DIM, LAYERS)
    own = model.generation_config
    assert (own.do_sample, own.guidance_scale, own.temperature, own.top_k) == (True, 3.0, 1.0, 250)
    assert own.max_length == 2 * 67 and own.decoder_start_token_id == own.pad_token_id == CODES
    model.save_pretrained(tmp_path / "saved")
    again = MusicgenForConditionalGeneration.from_pretrained(tmp_path / "saved")
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_half_precision_becomes_float32_on_a_cpu(tmp_path):
    write_musicgen(tmp_path)
    halves = {name: value.half() for name, value in language_model_weights().items()}
    write(tmp_path, "state_dict.bin", halves, MUSICGEN_SETTINGS)
    dtypes = [load(tmp_path, **more)[0].decoder.dtype for more in ({}, {"dtype": None})]
    assert dtypes == [torch.float32, torch.float16]


def test_a_text_encoder_by_its_folder(tmp_path):
    tiny_t5(d_model=TEXT).save_pretrained(tmp_path / "t5")
    model: Any = load_musicgen(write_musicgen(tmp_path), tmp_path / "t5")[0]
    for name, value in tiny_t5(d_model=TEXT).state_dict().items():
        assert torch.equal(model.text_encoder.state_dict()[name], value)
    tiny_t5(d_model=TEXT).bfloat16().save_pretrained(tmp_path / "t5")
    model = load_musicgen(tmp_path, tmp_path / "t5")[0]
    assert model.text_encoder.dtype == torch.float32


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("lm_model", "transformer_lm_magnet", r"MAGNeT.*AudioPipeline\.from_magnet"),
        ("lm_model", "jasco", "'jasco'.*MusicGen.*'transformer_lm'"),
        ("transformer_lm.causal", False, r"transformer_lm\.causal=False.*True"),
        ("transformer_lm.num_layers", 3, "2 layers.*3"),
        ("transformer_lm.layer_scale", 0.1, r"transformer_lm\.layer_scale=0\.1.*None"),
        ("transformer_lm.qk_layer_norm", True, "transformer_lm.qk_layer_norm=True"),
        ("codebooks_pattern.modeling", "parallel", r"codebooks_pattern\.modeling='parallel'.*'delay'"),
        ("codebooks_pattern.delay.delays", [0, 2, 4], r"delays=\[0, 2, 4\]; .* by \[0, 1, 2\]"),
        ("codebooks_pattern.delay.delays", "x", r"codebooks_pattern\.delay\.delays='x'.*MusicGen.*3"),
        ("codebooks_pattern.delay.flatten_first", 2, r"codebooks_pattern\.delay\.flatten_first=2.*0"),
        (
            "interleave_stereo_codebooks.per_timestep",
            True,
            r"interleave_stereo_codebooks\.per_timestep=True.*False",
        ),
        ("interleave_stereo_codebooks.use", "yes", r"interleave_stereo_codebooks\.use='yes'"),
        ("interleave_stereo_codebooks.use", True, "3.*interleaved"),
        ("fuser.cross", [], r"fuser\.cross=\[\].*\['description'\]"),
        ("conditioners.description.t5.name", 3, "conditioners.description.t5.name=3"),
        ("dataset.segment_duration", "long", "dataset.segment_duration='long'"),
    ],
)
def test_settings_of_another_network_are_refused(tmp_path, name, value, message):
    write_musicgen(tmp_path)
    write_language_model(tmp_path, changed(MUSICGEN_SETTINGS, name, value))
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    assert "state_dict.bin" in str(error.value) and "\n" not in str(error.value)


def test_parts_that_do_not_fit_are_refused(tmp_path):
    write_musicgen(tmp_path)
    refuses(ValueError, "10 channels.*8.*t5", load_musicgen, tmp_path, tiny_t5())
    codec = load_audiocraft_codec(tmp_path)
    write_language_model(tmp_path, STEREO_SETTINGS, None, 4)
    with pytest.raises(
        ValueError, match=r"codebooks_pattern\.delay\.delays=\[0, 0, 1, 1, 2, 2\].*4.*\[0, 0, 1, 1\]"
    ):
        load(tmp_path)
    write_language_model(tmp_path, None, None, 2)
    refuses(ValueError, "attention heads", load, tmp_path)
    refuses(ValueError, "2 codebooks.*8.*3.*8", load, tmp_path, num_heads=4, codec=codec)
    wide = "condition_provider.conditioners.description.output_proj.weight"
    write_language_model(tmp_path, MUSICGEN_SETTINGS, random({wide: (DIM, DIM)}))
    refuses(ValueError, "projects.*24", load_musicgen, tmp_path, tiny_t5(d_model=DIM))


def test_keys_are_all_accounted_for(tmp_path):
    write_musicgen(tmp_path, **{"linears.2.weight": None, "emb.1.weight": torch.zeros(CODES, DIM)})
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    for part in (
        "a MusicGen of 3 codebooks, 2 layers and width 24",
        "1 missing: lm_heads.2.weight",
        "1 of another shape: model.decoder.embed_tokens.1.weight [8, 24] instead of [9, 24]",
    ):
        assert part in str(caught.value)
    write_language_model(tmp_path, SETTINGS)
    refuses(ValueError, "MAGNeT", load, tmp_path)
