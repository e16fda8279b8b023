"""Folders of audiocraft: the pipeline around an official MusicGen, and what convert makes of them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.audiocraft_files import MUSICGEN_SETTINGS, SETTINGS, TEXT, changed, write_language_model
from tests.helpers.musicgen import write_musicgen
from tests.helpers.tiny import quiet, seeded
from tests.helpers.tiny_t5 import tiny_t5, tiny_tokenizer
from visual_spec.models.columns.encodec import decode_codes
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.columns.musicgen_checkpoint import load_musicgen
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.pipelines.convert import convert
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler

PROMPTS = ["a red circle", "blue"]


@pytest.mark.parametrize("channels", [1, 2], ids=["mono", "stereo"])
def test_a_clip_is_drawn_with_the_published_law_and_the_padding_of_audiocraft(tmp_path, channels):
    write_musicgen(tmp_path, channels)
    encoder, tokenizer = tiny_t5(d_model=TEXT), tiny_tokenizer()
    pipe = quiet(AudioPipeline.from_audiocraft(tmp_path, encoder, tokenizer))
    assert isinstance(pipe.sampler, ColumnAutoregressiveSampler)
    assert pipe.config["max_audio_length_in_s"] == 2.0 and pipe.channels == channels
    pipe.sampler = ColumnJacobiSampler()
    output = pipe(PROMPTS, generator=seeded(1, 2), audio_length_in_s=8 * 6 / 400)
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert not inputs["attention_mask"].all()
    with torch.no_grad():
        features = encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    condition = TextCondition(features, inputs["attention_mask"].bool())
    network, _ = load_musicgen(tmp_path, encoder)
    model = MusicgenColumnModel(network, 8, padding="zeros")
    law = TokenLaw(guidance_scale=3.0, top_k=250)
    plain = ColumnAutoregressiveSampler()(model, condition, law=law, generator=seeded(1, 2), batch_size=2)
    codes = model.codes(plain.tokens, condition)
    assert output.codes.equal(codes)
    waves = decode_codes(network.audio_encoder, codes, channels)
    assert np.abs(output.audios - waves.detach().numpy()).max() < 1e-4


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    tiny_t5(d_model=TEXT).save_pretrained(tmp_path / "t5")
    tiny_tokenizer().save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


def test_convert_makes_a_folder_of_a_musicgen(tmp_path, t5):
    (tmp_path / "official").mkdir()
    official = write_musicgen(tmp_path / "official")
    facts = convert([official], tmp_path / "out", text_encoder=t5)
    assert facts["class"] == "AudioPipeline" and facts["files"] == {str(official): "MusicGen"}
    pipes = [
        load_pipeline(tmp_path / "out"),
        AudioPipeline.from_audiocraft(official, tiny_t5(d_model=TEXT), tiny_tokenizer()),
    ]
    found = []
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
        found.append(pipe(PROMPTS, generator=seeded(1, 2), audio_length_in_s=8 * 6 / 400).codes)
    assert torch.equal(*found)


def test_what_convert_cannot_make_of_audiocraft_names_the_way_out(tmp_path, t5):
    write_musicgen(tmp_path)
    for given, more, message in [
        ([tmp_path], {}, r"MusicGen.*text_encoder \(--text-encoder"),
        ([tmp_path], dict(text_encoder=t5, image_size=256), "image_size=256"),
        ([tmp_path, tmp_path / "state_dict.bin"], {}, "folder"),
        ([tmp_path / "state_dict.bin"], {}, r"state_dict\.bin"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert(given, tmp_path / "out", **more)
    write_language_model(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match=r"MAGNeT.*AudioPipeline\.from_magnet"):
        convert([tmp_path], tmp_path / "out", text_encoder=t5)
    write_language_model(tmp_path, changed(MUSICGEN_SETTINGS, "lm_model", "jasco"))
    with pytest.raises(ValueError, match="'jasco'"):
        convert([tmp_path], tmp_path / "out", text_encoder=t5)
    assert not (tmp_path / "out").exists()
