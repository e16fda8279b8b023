"""Official MAGNeT files: random weights in audiocraft's layout, computed by plain functions that read that layout,
against the modules they are loaded into."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.audiocraft_files import (
    BOOKS,
    HEADS,
    SETTINGS,
    changed,
    clips,
    codec_weights,
    language_model_weights,
    straight_logits,
    write,
    write_language_model,
)
from tests.helpers.refusals import refuses
from visual_spec.models.columns.musicgen import MagnetModel
from visual_spec.models.masked.magnet_checkpoint import load_magnet


def test_logits_are_those_of_a_plain_computation_in_the_official_layout(tmp_path):
    write_language_model(tmp_path)
    network, settings = load_magnet(tmp_path, dtype=torch.float64)
    model = MagnetModel(network, 8, reach=settings.reach, padding="zeros")
    weights, (condition, codes) = language_model_weights(), clips()
    assert settings.reach == 2
    state = model.prepare(condition, batch_size=2, guided=True)
    nothing, all_ = torch.zeros_like(condition.mask[0]), torch.ones(8, 8, dtype=torch.bool)
    near = torch.tensor([[abs(query - key) <= 2 for key in range(8)] for query in range(8)])
    for stage in range(BOOKS):
        got = model(state, codes.transpose(1, 2), stage)
        for row in range(2):
            for guided, mask in ((0, condition.mask[row]), (2, nothing)):
                wanted = straight_logits(
                    weights, codes[row], condition.features[row], mask, near if stage else all_
                )
                assert (got[row + guided] - wanted[:, stage]).abs().max() < 1e-5
        scored = model.logits(codes, condition, torch.full((2,), stage))
        assert (scored - got[:2]).abs().max() < 1e-10
    assert (got[:2] - got[2:]).abs().max() > 0.1


def test_settings_of_the_file(tmp_path):
    settings = load_magnet(write_language_model(tmp_path))[1]
    assert (settings.duration, settings.frame_rate, settings.num_frames) == (2.0, 4, 6)
    assert (settings.span, settings.reach, settings.steps) == (3, 2, (5, 3, 2))
    assert (settings.temperature, settings.top_p, settings.top_k) == (3.5, 0.8, 0)
    assert (settings.guidance_scale, settings.least_guidance) == (20.0, 1.0)


@pytest.mark.parametrize("duration, frames", [(10, 498), (30, 1500)])
def test_clips_have_whole_spans(tmp_path, duration, frames):
    official = changed(
        changed(SETTINGS, "dataset.segment_duration", duration),
        "transformer_lm.compression_model_framerate",
        50,
    )
    assert load_magnet(write_language_model(tmp_path, official))[1].num_frames == frames


def test_top_k_counts_only_where_there_is_no_top_p(tmp_path):
    settings = changed(SETTINGS, "generate.lm.top_k", 5)
    loaded = load_magnet(write_language_model(tmp_path, settings))[1]
    assert (loaded.top_k, loaded.top_p) == (0, 0.8)
    settings = changed(settings, "generate.lm.top_p", 0.0)
    loaded = load_magnet(write_language_model(tmp_path, settings))[1]
    assert (loaded.top_k, loaded.top_p) == (5, 1.0)


def test_settings_that_the_file_lacks(tmp_path):
    few = {"dataset": {"segment_duration": 30}, "transformer_lm": {"num_heads": 4, "subcodes_context": -1}}
    settings = load_magnet(write_language_model(tmp_path, few))[1]
    assert settings.steps == (60, 10, 10) and settings.num_frames == 1500 and settings.reach is None
    assert (settings.temperature, settings.top_p, settings.guidance_scale) == (3.0, 0.9, 10.0)
    path = write_language_model(tmp_path, None)
    refuses(ValueError, "attention heads", load_magnet, path)
    assert load_magnet(path, num_heads=4)[1].steps == (20, 10, 10)
    refuses(ValueError, "num_heads=5.*24", load_magnet, path, num_heads=5)


# -- bad files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("lm_model", "transformer_lm", r"'transformer_lm'.*MAGNeT.*MusicGen.*AudioPipeline\.from_audiocraft"),
        ("transformer_lm.norm_first", False, r"transformer_lm\.norm_first=False.*True"),
        ("transformer_lm.activation", "relu", r"transformer_lm\.activation='relu'.*'gelu'"),
        (
            "transformer_lm.positional_embedding",
            "rope",
            r"transformer_lm\.positional_embedding='rope'.*'sin'",
        ),
        ("transformer_lm.causal", True, "transformer_lm.causal=True"),
        ("codebooks_pattern.modeling", "delay", r"codebooks_pattern\.modeling='delay'.*'parallel'"),
        ("fuser.prepend", ["self_wav"], r"fuser\.prepend=\['self_wav'\].*\[\]"),
        ("fuser.cross_attention_pos_emb", True, "fuser.cross_attention_pos_emb=True"),
    ],
)
def test_settings_of_another_network_are_refused(tmp_path, name, value, message):
    refuses(ValueError, message, load_magnet, write_language_model(tmp_path, changed(SETTINGS, name, value)))


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    refuses(FileNotFoundError, r"state_dict\.bin", load_magnet, tmp_path)
    path = tmp_path / "state_dict.bin"
    torch.save({"best_state": SimpleNamespace(a=1), "xp.cfg": "a: 1"}, path)
    refuses(ValueError, r"pickle.*\"best_state\", \"xp.cfg\"", load_magnet, path)
    torch.save({"model": {"a": torch.zeros(1)}}, path)
    refuses(ValueError, r"'best_state' \('model'", load_magnet, path)
    torch.save({"best_state": {"a.weight": torch.zeros(1)}, "xp.cfg": "- 1"}, path)
    refuses(ValueError, r"state_dict\.bin.*mapping", load_magnet, path)
    write(tmp_path, "state_dict.bin", codec_weights(), None)
    refuses(ValueError, r"MAGNeT.*encoder\.model\.0.*weight_g", load_magnet, path)
    path.write_bytes(b"<html>")
    refuses(ValueError, "web page", load_magnet, path)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)
NO_SETTINGS = {
    "aliases without end": (LAUGHS + "transformer_lm: {norm_first: *a29}\n", "YAML"),
    "a tree in itself": ("a: &a [*a]\n", "YAML"),
    "deep": ("[" * 5000, "YAML"),
    "a tag": ("a: !!python/object/apply:os.system ['true']\n", "YAML"),
    "broken": ("a: [1, 2", "YAML"),
    "a list": ("- 1\n", r"xp\.cfg.*mapping"),
    "a number": (3, r"xp\.cfg.*mapping"),
    "a circle": ("dataset: {segment_duration: '${a}'}\na: '${b}'\nb: '${a}'\n", r"xp\.cfg"),
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
    ],
)
def test_settings_of_another_kind_are_named(tmp_path, name, value):
    path = write_language_model(tmp_path, changed(SETTINGS, name, value))
    refuses(ValueError, rf"{name}=.*no such", load_magnet, path)
