"""An evaluation of tiny music models: clips and features by hand, figures against plain counts, resumed, refused."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.audio_utils import mel_filter_bank

from tests.helpers.music_settings import LAW, MASKED, MASKED_LAW, PROMPTS, masked_pipeline
from tests.tiny import seeded, tiny_pipeline
from tests.tiny_audio import HOP, RATE, tiny_audio_pipeline, tiny_codec
from visual_spec.data import tunes, tunes_parser
from visual_spec.eval.defaults import settings_of_model
from visual_spec.eval.draws import draw
from visual_spec.eval.intervals import Z_95
from visual_spec.eval.media import clips_of, codes_of
from visual_spec.eval.pair import MaskedPair
from visual_spec.eval.quality import command, figures, tasks
from visual_spec.eval.quality.audio import kernel_audio_distance, kernel_figure
from visual_spec.eval.quality.evaluate import evaluate
from visual_spec.eval.quality.features import MelStatistics
from visual_spec.eval.quality.figures import quality_table, thumbnails
from visual_spec.eval.quality.metrics import frechet_distance
from visual_spec.eval.quality.samples import Judge
from visual_spec.eval.quality.tasks import Task, task_of
from visual_spec.eval.report import frontier
from visual_spec.eval.settings import parse_setting
from visual_spec.models.columns.encodec import encode_waves

ASKED = (PROMPTS * 3)[:10]
LANTERN = "column-jacobi:window=4,coupling=maximal,acceptance=lantern,unit=codebook,neighbours=4"
ROWS = ("columns", "columns:temperature=0.5", "column-jacobi:window=4", LANTERN, MASKED)
KINDS = ["plain", "control", "lossless", "lossy", "lossy"]
COLUMNS = [22, 22, 22, 22, 18]


def score(prompt, clip):
    """Depends on the prompt and on the samples; some prompts ask for less than others."""
    total = int(np.abs(clip.astype(np.float64) * 1e6).sum())
    hits = {"instrument": bool(total % 2), "tempo": total % 3 == 0}
    return hits if "slow" in prompt else {"instrument": hits["instrument"]}


def make_judge() -> Judge:
    return Judge(score, {"mel": MelStatistics(RATE)})


def true_clips(count: int = 10) -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.5, 0.5, (count, 20 * HOP)).astype(np.float32)


def settings_of(rows):
    return [parse_setting(text, MASKED_LAW if text == MASKED else LAW, 0) for text in rows]


def run(folder, rows=ROWS, pipe=None, **changes):
    pair = pipe or MaskedPair(tiny_audio_pipeline(), masked_pipeline())
    options = {"samples": 7, "batch_size": 4, **changes}
    return evaluate(pair, settings_of(rows), Task(ASKED, true_clips()), make_judge(), folder, **options)


@pytest.fixture(autouse=True, scope="module")
def few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_RESAMPLES", 5)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("music")
    return folder, run(folder, alone=1)


def test_clips_are_those_of_the_pipeline_and_codes_those_of_its_codec():
    pipe = tiny_audio_pipeline()
    arrays = draw(pipe, parse_setting("column-jacobi:window=4", LAW, 40), ASKED[2:5], 2)
    assert arrays["tokens"].shape == (3, 3, 20) and arrays["length"] == 22
    for place, prompt in enumerate(ASKED[2:5]):
        output = pipe(prompt, generator=seeded(42 + place), guidance_scale=2.0, top_k=6)
        assert np.array_equal(output.codes[0].numpy(), arrays["tokens"][place])
        assert np.array_equal(clips_of(pipe, arrays["tokens"][place : place + 1]), output.audios[:, 0])
    waves = true_clips(2)
    assert codes_of(pipe, waves).equal(encode_waves(pipe.codec, torch.from_numpy(waves)[:, None]))
    assert thumbnails(pipe, waves, 16).shape == (2, 16, 16, 3)


def test_mel_statistics_by_hand():
    clips, rate = np.random.default_rng(1).uniform(-1, 1, (2, 1500)), 16_000
    clips[1, 700:] = 0  # silence counts as -60 dB
    filters = mel_filter_bank(513, 64, 0.0, rate / 2, rate, None, "htk")
    window = np.array([0.5 - 0.5 * math.cos(2 * math.pi * i / 1024) for i in range(1024)])
    found = MelStatistics(rate)(torch.from_numpy(clips))
    for clip, features in zip(clips, found, strict=True):
        padded, frames = np.pad(clip, 512), []
        for start in range(0, len(clip) + 1, 256):
            magnitude = np.abs(np.fft.rfft(padded[start : start + 1024] * window)) * 2 / window.sum()
            frames.append(20 * np.log10(np.maximum(magnitude @ filters, 1e-3)))
        expected = np.concatenate([np.mean(frames, 0), np.std(frames, 0)])
        assert np.abs(features.numpy() - expected).max() < 1e-3
    assert found.shape == (2, MelStatistics.num_features) and found.dtype == torch.float32


def test_the_interval_of_the_kernel_distance_leaves_one_prompt_out_at_a_time():
    generator = torch.Generator().manual_seed(0)
    reference, drawn = (torch.randn(9, 3, generator=generator) + shift for shift in (0.0, 0.4))
    width = torch.pdist(reference.double()).median().item()
    found = kernel_figure(reference, drawn)
    assert found["value"] == pytest.approx(kernel_audio_distance(reference, drawn), abs=1e-9)

    def others(count, out):
        return [place for place in range(count) if place != out]

    left = [
        kernel_audio_distance(reference[others(9, out)], drawn[others(9, out)], bandwidth=width)
        for out in range(9)
    ]
    error = math.sqrt(8 / 9 * sum((one - np.mean(left)) ** 2 for one in left))
    assert found["high"] - found["value"] == pytest.approx(Z_95 * error)
    assert found["value"] - found["low"] == pytest.approx(Z_95 * error)
    # Sets of different size: the variance is the sum of what the samples of either set do.
    apart = kernel_figure(reference, drawn[:8])
    wide = [
        [kernel_audio_distance(reference[others(9, out)], drawn[:8], bandwidth=width) for out in range(9)]
    ]
    wide += [[kernel_audio_distance(reference, drawn[others(8, out)], bandwidth=width) for out in range(8)]]
    variance = sum((len(one) - 1) * np.var(one) for one in wide)
    assert apart["value"] == pytest.approx(kernel_audio_distance(reference, drawn[:8]), abs=1e-9)
    assert apart["high"] - apart["value"] == pytest.approx(Z_95 * math.sqrt(variance))
    with pytest.raises(ValueError, match="9 and 8 clips given; pass at least 3 of each, and pairs"):
        kernel_figure(reference, drawn[:8], paired=True)
    with pytest.raises(ValueError, match="2 and 2 clips"):
        kernel_figure(reference[:2], drawn[:2])


def test_the_figures_are_plain_counts(whole):
    _, document = whole
    assert [row["kind"] for row in document["rows"]] == KINDS
    pair: Any = MaskedPair(tiny_audio_pipeline(), masked_pipeline())
    mel, plain, features = MelStatistics(RATE), None, {}
    real = mel(torch.from_numpy(true_clips(7)))
    for row, setting, columns in zip(document["rows"], settings_of(ROWS), COLUMNS, strict=True):
        codes, calls = [], []
        for place in range(7):  # one by one, by plain calls of the pipelines
            player = pair.masked if row["name"] == MASKED else pair.first
            player.sampler = setting.sampler
            law = {name: value for name, value in setting.pipeline_law.items() if value is not None}
            output = player(ASKED[place], generator=seeded(place), output_type="latent", **law)
            codes.append(output.codes[0].numpy())
            calls.append(int(output.trace.target_calls))
        clips = clips_of(pair, np.stack(codes))
        plain = codes if plain is None else plain
        hits = [score(prompt, clip) for prompt, clip in zip(ASKED, clips, strict=False)]
        assert row["accuracy"]["all_correct"]["hits"] == sum(all(found.values()) for found in hits)
        assert row["accuracy"]["attributes"]["tempo"]["total"] == sum("slow" in text for text in ASKED[:7])
        assert row["tokens_per_call"]["value"] == pytest.approx(7 * columns / sum(calls))
        assert row["speed_up_calls"]["value"] == pytest.approx(7 * 22 / sum(calls))
        features[row["name"]] = own = mel(torch.from_numpy(clips))
        far = row["features"]["mel"]
        for name, other in (("real", real), ("plain", features["columns"])):
            frechet, kernel = frechet_distance(own, other), kernel_audio_distance(other, own)
            assert far[f"frechet_to_{name}"]["value"] == pytest.approx(frechet, rel=1e-3, abs=1e-3)
            assert far[f"kernel_to_{name}"]["value"] == pytest.approx(kernel, rel=1e-3, abs=1e-3)
        same = sum(np.array_equal(one, two) for one, two in zip(codes, plain, strict=True))
        assert row["identical_samples"] == (
            same if row["name"] in ("columns", "column-jacobi:window=4") else None
        )
        if row["name"] == LANTERN:
            law = {name: value for name, value in setting.pipeline_law.items() if value is not None}
            batches = [range(4), range(4, 7)]
            found: list[Any] = [
                pair.first(
                    [ASKED[place] for place in batch], generator=seeded(*batch), output_type="latent", **law
                ).trace.divergence
                for batch in batches
            ]
            assert row["divergence"]["value"] == pytest.approx(sum(found) / 2) and min(found) > 0
        else:
            assert row["divergence"] is None
        assert row["wall_clock"]["alone_seconds"]["p50"] > 0
    assert document["rows"][2]["identical_samples"] == 7
    codec = clips_of(pair, codes_of(pair, true_clips(7)).numpy())
    reference = document["references"]["tokenizer"]
    expected = frechet_distance(mel(torch.from_numpy(codec)), real)
    assert reference["features"]["mel"]["frechet_to_real"]["value"] == pytest.approx(expected, rel=1e-3)


def test_a_run_goes_on_and_rows_are_added(whole, tmp_path):
    run(tmp_path, ROWS[:2], samples=4)
    grown = run(tmp_path)
    assert grown is not None
    for row, want in zip(grown["rows"], whole[1]["rows"], strict=True):
        assert row["accuracy"] == want["accuracy"] and row["tokens_per_call"] == want["tokens_per_call"]
    drawn = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/draws-*")}
    assert len(drawn) == 2 * 6  # five rows and the codec alone
    run(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/draws-*")} == drawn
    other = tiny_audio_pipeline()
    with torch.no_grad():
        other.transformer.lm_heads[0].weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match="weights: [0-9a-f]{12} there"):
        run(tmp_path, ROWS[:2], pipe=MaskedPair(other, masked_pipeline()))


def test_the_table_and_the_page_speak_of_clips(whole, tmp_path):
    folder, document = whole
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in quality_table(document, "mel").splitlines()
    ]
    shown = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    assert [line["sampler"] for line in shown] == [*ROWS, "(tokenizer alone)"]
    for line, row in zip(shown, document["rows"], strict=False):
        assert line["columns/call"].startswith(f"{row['tokens_per_call']['value']:.2f} (")
        clock = row["processor_time"]["alone_seconds"]["p50"]
        assert line["s/clip"] == f"{clock:.2f}"
        assert line["kernel to real"].startswith(f"{row['features']['mel']['kernel_to_real']['value']:.2f} (")
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    assert frontier.main([str(folder / "results.json"), "--out", str(page)]) == 0
    text = page.read_text()
    assert "columns per call" in text and "7 clips a row" in text and "kernel distance to true clips" in text
    assert "true clips through the codec" in text and "pictures" not in text


def test_the_rows_of_a_model_follow_from_what_it_is(tmp_path):
    tiny_audio_pipeline(default_guidance_scale=2.0, default_temperature=0.8).save_pretrained(tmp_path / "a")
    masked_pipeline().save_pretrained(tmp_path / "m")
    rows, masked = settings_of_model(str(tmp_path / "a")), settings_of_model(str(tmp_path / "m"))
    assert rows.facts.unit == "columns" and not rows.masked and rows.plain == "columns"
    assert rows.controls == ("columns:temperature=0.72", "columns:seed=1000000")
    assert rows.law == {"guidance_scale": 2.0, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
    found = [parse_setting(text, LAW, 0) for text in rows.others]
    assert [(one.sampler.identical, one.sampler.lossless) for one in found] == [
        (True, True),
        *[(False, True)] * 3,
        *[(False, False)] * 2,
    ]
    assert masked.plain == MASKED and masked.law["temperature"] == 1.7 and masked.masked
    assert masked.others == (MASKED.replace("4/2/2", "2/1/1"),)
    saved = parse_setting(masked.plain, MASKED_LAW, 0)
    assert saved.law == MASKED_LAW
    ours, theirs = ({**one.config} for one in (saved.sampler, masked_pipeline().sampler))
    assert list(ours.pop("steps")) == list(theirs.pop("steps"))
    assert {name: ours[name] for name in theirs if name[0] != "_"} == {
        name: value for name, value in theirs.items() if name[0] != "_"
    }


def test_a_masked_model_alone_is_compared_with_itself(tmp_path):
    half = MASKED.replace("4/2/2", "2/1/1")
    rows = (MASKED, f"{MASKED},seed=100", half)
    settings = [parse_setting(text, MASKED_LAW, 0) for text in rows]
    document = evaluate(
        masked_pipeline(),
        settings,
        Task(ASKED, true_clips()),
        make_judge(),
        tmp_path,
        samples=3,
        batch_size=3,
    )
    assert document is not None
    assert [row["kind"] for row in document["rows"]] == ["plain", "control", "lossy"]
    assert [row["speed_up_calls"]["value"] for row in document["rows"]] == [1, 1, 2]
    with pytest.raises(ValueError, match="pass at least 3 samples"):
        run(tmp_path / "new", samples=2)


def test_pairs_that_are_none():
    pipe, masked = tiny_audio_pipeline(), masked_pipeline()
    with pytest.raises(
        ValueError, match="decodes in order and a masked one of the same medium, in this order"
    ):
        MaskedPair(masked, pipe)
    codec = tiny_codec()
    with torch.no_grad():
        layers: Any = codec.quantizer.layers
        layers[0].codebook.embed += 1
    other = masked_pipeline()
    other.codec = codec
    with pytest.raises(ValueError, match="different tokenizers"):
        MaskedPair(pipe, other)
    with pytest.raises(ValueError, match="clips of 20 and of 15 frames"):
        MaskedPair(tiny_audio_pipeline(), _shorter(masked))


def _shorter(pipe):
    pipe.register_to_config(max_audio_length_in_s=0.15)
    return pipe


def test_the_task_is_the_held_out_captions_and_their_tunes(monkeypatch):
    task = tasks.tunes_task(2)
    assert task.prompts == tunes.held_out_prompts(2)
    for prompt, wave in zip(task.prompts, task.pictures, strict=True):
        assert sum(tunes_parser.score(prompt, wave).values()) >= 6
    with pytest.raises(
        ValueError, match="plays 80 samples at 400 Hz, and the tunes that the parser reads have 64000"
    ):
        task_of(tiny_audio_pipeline(), 2)
    monkeypatch.setattr(tunes, "SAMPLE_RATE", RATE)
    monkeypatch.setattr(tunes, "NUM_SAMPLES", 80)
    monkeypatch.setattr(tasks, "tunes_task", lambda count: Task(ASKED[:count], true_clips(count)))
    task, scorer = task_of(tiny_audio_pipeline(), 2)
    assert task.prompts == ASKED[:2] and scorer is tunes_parser.score


def test_the_command(tmp_path, monkeypatch, capsys):
    tiny_audio_pipeline(default_guidance_scale=2.0, default_top_k=6).save_pretrained(tmp_path / "a")
    masked_pipeline().save_pretrained(tmp_path / "m")
    monkeypatch.setattr(tunes, "SAMPLE_RATE", RATE)
    monkeypatch.setattr(tunes, "NUM_SAMPLES", 80)
    monkeypatch.setattr(tasks, "tunes_task", lambda count: Task(ASKED[:count], true_clips(count)))
    monkeypatch.setattr(tunes_parser, "score", score)
    arguments = ["--model", str(tmp_path / "a"), "--masked", str(tmp_path / "m"), "--device", "cpu"]
    arguments += ["--out", str(tmp_path / "out"), "--samples", "7", "--batch-size", "4", "--alone", "0"]
    arguments += ["--controls", ROWS[1], "--samplers", *ROWS[2:4]]
    assert command.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr().out
    document = json.loads(captured.splitlines()[-1])
    assert [row["name"] for row in document["rows"]] == list(ROWS)
    assert [row["law"]["temperature"] for row in document["rows"]] == [1.0, 0.5, 1.0, 1.0, 1.7]
    again = run(tmp_path / "again")
    assert again is not None
    for row, want in zip(document["rows"], again["rows"], strict=True):
        assert row["accuracy"] == want["accuracy"] and row["features"] == want["features"]
    assert "features: mel" in captured and " columns/call " in captured
    tiny_pipeline().save_pretrained(tmp_path / "pictures")
    with pytest.raises(ValueError, match="it takes a masked model beside one of the same tokens"):
        command.main([*arguments, "--model", str(tmp_path / "pictures")])
    with pytest.raises(ValueError, match="masked: sampler is MaskedSampler"):
        command.main([*arguments[:2], *arguments[4:], "--samplers", "masked"])
