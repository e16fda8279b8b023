"""`visual-spec generate` with music models, run on a tiny real model."""

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.command import check_refused, last_line
from tests.helpers.music_settings import magnet_sampler
from tests.helpers.tiny import tiny_pipeline
from tests.helpers.tiny_audio import RATE, tiny_audio_pipeline
from visual_spec import cli
from visual_spec.pipelines import embedded
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler

PROMPT = "a slow organ"
JACOBI = ("--sampler", "column-jacobi")
MASKED = (PROMPT, "--model", "tunes_masked")
BESIDE = ("--compare", "--masked", "tunes_masked")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_audio_pipeline(default_guidance_scale=1.0).save_pretrained(folder / "tunes")
    tiny_audio_pipeline(magnet_sampler(), masked=True, reach=4).save_pretrained(folder / "tunes_masked")
    tiny_pipeline().save_pretrained(folder / "shapes")
    return folder


@pytest.fixture(autouse=True)
def use_tiny_models(folder, monkeypatch):
    monkeypatch.setattr(embedded, "weights_folder", lambda: folder)


def play(out: Path, *arguments: str) -> int:
    return cli.main(["generate", "--music", *arguments, "--out", str(out), "--device", "cpu"])


def samples(path: str | Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        assert file.getframerate() == RATE
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_a_clip_per_seed_and_each_can_be_played_again_alone_and_plainly(tmp_path, capsys):
    assert play(tmp_path / "all", PROMPT, "sad melody", "--num-images", "2", "--seed", "5", "--json") == 0
    document = last_line(capsys)
    assert [clip["seed"] for clip in document["clips"]] == [5, 6, 7, 8]
    assert document["model"] == "tunes" and document["sampler"]["name"] == "columns"
    names = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert names[0] == "000-a-slow-organ-seed5.wav" and len(names) == 4
    third = document["clips"][2]
    assert play(tmp_path / "one", "sad melody", "--seed", "7", "--sampler", "column-jacobi", "--json") == 0
    again = last_line(capsys)["clips"][0]
    both = [samples(clip["file"]).astype(int) for clip in (third, again)]
    assert len(both[0]) == 80 and np.abs(both[0] - both[1]).max() <= 1  # the codec rounds in another order
    assert again["calls"] < third["calls"] == 22


def test_compare_proves_equality_and_writes_the_page(tmp_path, capsys):
    length = ["--seconds", "0.5", "--extend-stride", "0.1"]
    assert play(tmp_path, PROMPT, "sad melody", "--compare", *JACOBI, "--window", "4", *length) == 0
    out = capsys.readouterr().out
    header, _, *rows = out.splitlines()
    assert header.split() == ["prompt", "calls", "columns/call", "seconds", "speed-up", "identical"]
    assert rows[0].startswith(PROMPT) and rows[0].endswith("yes") and rows[1].endswith("yes")
    assert "Every clip is the same, code for code and sample for sample." in out
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["identical"] for row in document["comparison"]] == [True, True]
    assert all(row["calls"] < row["plain_calls"] == 58 for row in document["comparison"])
    page = (tmp_path / "comparison.html").read_text()
    assert page.count("data:audio/wav;base64,") == 2 and page.count("data:image/png;base64,") == 2
    assert PROMPT in page and "window=4" in page and "http" not in page
    assert len(samples(tmp_path / "000-a-slow-organ-seed0.wav")) == 200
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".json", ".wav", ".wav"]


def test_compare_says_when_codes_differ_and_fails_when_a_promise_is_broken(tmp_path, capsys, monkeypatch):
    exact = ["--coupling", "independent", "--acceptance", "exact"]
    assert play(tmp_path / "a", PROMPT, "--compare", *JACOBI, *exact) == 0
    assert "The output is: lossless." in capsys.readouterr().out
    assert (tmp_path / "a" / "comparison.html").read_text().count("data:audio/wav") == 2
    plain = ColumnAutoregressiveSampler.__call__

    def wrong(self, *args, **kwargs):
        result = plain(self, *args, **kwargs)
        result.tokens[:, 5] = (result.tokens[:, 5] + 1) % 16
        return result

    monkeypatch.setattr(ColumnAutoregressiveSampler, "__call__", wrong)
    assert play(tmp_path / "b", PROMPT, "--compare", *JACOBI) == 1
    assert "promises the plain codes, and did not give them" in capsys.readouterr().err


def test_a_masked_model_plays_by_the_sampler_it_was_saved_with(tmp_path, capsys):
    masked = ["--model", "tunes_masked", "--json"]
    assert play(tmp_path / "own", PROMPT, "--seed", "3", *masked) == 0
    document = last_line(capsys)
    assert document["sampler"]["name"] == "masked" and document["sampler"]["steps"] == [4, 2, 2]
    (clip,) = document["clips"]
    assert clip["calls"] == 4 + 2 + 2 and clip["output_law"] == "the law of masked decoding"
    pipe: Any = AudioPipeline.from_pretrained("tunes_masked")
    pipe.set_progress_bar_config(disable=True)
    waves = pipe(PROMPT, generator=[torch.Generator().manual_seed(3)]).audios[0, 0]
    assert np.abs(samples(clip["file"]) / 32767 - waves).max() < 1e-4
    assert play(tmp_path / "fewer", PROMPT, "--sampler", "masked:steps=2/1/1", "--seed", "3", *masked) == 0
    assert last_line(capsys)["sampler"]["steps"] == [2, 1, 1]


def test_a_masked_model_is_compared_with_the_model_of_columns_beside_it(tmp_path, capsys):
    assert play(tmp_path / "both", PROMPT, "--seed", "3", *BESIDE, "--json") == 0
    document = last_line(capsys)
    assert document["masked"] == "tunes_masked" and document["sampler"]["steps"] == [4, 2, 2]
    (row,) = document["comparison"]
    assert (row["plain_calls"], row["calls"], row["identical"]) == (22, 4 + 2 + 2, False)
    page = (tmp_path / "both" / "comparison.html").read_text()
    assert "fills in hidden codes" in page and "another law" in page and "codes differ" not in page
    assert page.count("data:audio/wav") == 2
    # What is played is what the masked model plays alone.
    assert play(tmp_path / "alone", PROMPT, "--seed", "3", "--model", "tunes_masked") == 0
    files = [next((tmp_path / folder).glob("*.wav")).read_bytes() for folder in ("both", "alone")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [PROMPT, "--compare"],
            "tunes decodes plainly by default, and --compare would compare that with itself",
        ),
        ([PROMPT, "--masked", "tunes_masked"], "--masked tunes_masked given without --compare"),
        ([PROMPT, "--compare", "--masked", "tunes"], "takes a masked model beside one of the same tokens"),
        ([PROMPT, "--compare", "--masked", "shapes"], "takes a masked model beside one of the same tokens"),
        (
            [*MASKED, "--compare"],
            "tunes_masked has one way to decode; there is no plain decoding to compare it with",
        ),
        ([*MASKED, "--window", "4"], "the masked sampler has no setting window"),
        ([*MASKED, *JACOBI], "does not fill in hidden codes; those that do: MaskedSampler"),
        ([""], "has no words"),
        ([PROMPT, "--seconds", "0"], "audio_length_in_s=0.0; pass at least one frame"),
        ([PROMPT, "--seconds", "9"], "trained on clips of 0.2 s; pass at most that, or extend_stride_in_s"),
        ([PROMPT, "--extend-stride", "1"], "extend_stride_in_s=1.0"),
        ([PROMPT, "--sampler", "autoregressive"], "does not decode several codebooks; those that do: Column"),
        ([PROMPT, *JACOBI, "--coupling", "maximal"], "acceptance='identical'"),
        ([PROMPT, "--window", "4"], "the columns sampler has no setting window"),
        ([PROMPT, "--temperature", "nan"], "temperature=nan"),
        ([PROMPT, "--model", "shapes"], "shapes makes pictures; leave --music out"),
        (
            [PROMPT, "--model", "tunez"],
            "unknown model 'tunez'; embedded models are shapes, tunes, tunes_masked",
        ),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, arguments, message):
    check_refused(play(tmp_path / "out", *arguments), message, capsys, tmp_path / "out")


def test_a_missing_writer_is_named_before_anything_is_played(tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setattr("visual_spec.pipelines.loading.load_pipeline", lambda *_: pytest.fail("loaded"))
    assert play(tmp_path, PROMPT, "--format", "flac") == 2
    assert "writing flac needs soundfile: pip install '.[audio]' in a checkout" in capsys.readouterr().err


def test_the_medium_is_that_of_the_model(tmp_path, capsys):
    """`--music` names no more than the usual model."""
    plain = ["--out", str(tmp_path), "--device", "cpu", "--json"]
    assert cli.main(["generate", PROMPT, "--model", "tunes", "--seed", "4", *plain]) == 0
    named = last_line(capsys)
    heard = samples(named["clips"][0]["file"])
    assert play(tmp_path / "flag", PROMPT, "--seed", "4", "--json") == 0
    by_flag = last_line(capsys)
    assert np.array_equal(samples(by_flag["clips"][0]["file"]), heard)
    assert {**named, "clips": None} == {**by_flag, "clips": None}


def test_lengths_are_of_music(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("visual_spec.pipelines.loading.load_pipeline", lambda *_: pytest.fail("loaded"))
    assert cli.main(["generate", PROMPT, "--seconds", "3", "--out", str(tmp_path)]) == 2
    assert "--seconds and --extend-stride are of music, and things makes pictures" in capsys.readouterr().err
    assert play(tmp_path, PROMPT, "--model", "shapes") == 2
    assert "shapes makes pictures; leave --music out" in capsys.readouterr().err


def test_models_lists_the_rate(capsys):
    assert cli.main(["models"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("tunes "))
    assert "AudioPipeline" in line and "0.4 kHz" in line
