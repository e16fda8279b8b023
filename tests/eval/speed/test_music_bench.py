"""The benchmark of music: rows against clips decoded one by one, the table against raw seconds, misfit options."""

import json
import statistics
from typing import Any

import pytest

from tests.helpers.bench import benched, check_times
from tests.helpers.music_settings import LAW, MASKED, MASKED_LAW, PROMPTS, masked_pipeline
from tests.helpers.tiny import seeded, tiny_pipeline
from tests.helpers.tiny_audio import tiny_audio_pipeline
from visual_spec.commands import bench
from visual_spec.eval import draws, measure, timing
from visual_spec.eval.defaults import settings_of_model
from visual_spec.eval.pair import MaskedPair
from visual_spec.eval.settings import parse_setting
from visual_spec.eval.speed import groups, rounds
from visual_spec.eval.speed.curve import curve
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.registry import by_name

# Three codebooks of 20 frames in the delay pattern; a masked model has no delay, and fills whole spans of three.
COLUMNS, FRAMES = 22, 18
IDENTICAL = "column-jacobi:window=4,coupling=gumbel,acceptance=identical"
MAXIMAL = "column-jacobi:window=4,coupling=maximal,acceptance=exact,unit=codebook"
INDEPENDENT = "column-jacobi:coupling=independent,acceptance=exact"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_audio_pipeline(default_guidance_scale=2.0, default_top_k=6).save_pretrained(folder / "columns")
    masked_pipeline().save_pretrained(folder / "masked")
    return folder / "columns", folder / "masked"


@pytest.fixture(autouse=True)
def tiny_prompts(monkeypatch):
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(
        "visual_spec.data.tunes.held_out_prompts", lambda count: [PROMPTS[i % 4] for i in range(count)]
    )


def alone(pipe, text, law, prompt, seed):
    """One clip by a plain call of the pipeline."""
    pipe.sampler = parse_setting(text, law, 0).sampler
    settings = dict(guidance_scale=law.guidance_scale, temperature=law.temperature, top_k=law.top_k)
    return pipe(prompt, generator=seeded(seed), output_type="latent", **settings)


def test_rows_are_counted_clip_by_clip():
    pipe, masked = tiny_audio_pipeline(), masked_pipeline()
    before = pipe.sampler, masked.sampler
    laws = {"columns": LAW, IDENTICAL: LAW, MAXIMAL: LAW, MASKED: MASKED_LAW}
    settings = [parse_setting(text, law, 40) for text, law in laws.items()]
    rows = rounds.time_settings(MaskedPair(pipe, masked), settings, PROMPTS, batch_size=2, runs=3, warmup=0)
    assert (pipe.sampler, masked.sampler) == before
    calls = {}
    for text, law in laws.items():
        player = masked if text == MASKED else pipe
        calls[text] = [
            int(alone(player, text, law, PROMPTS[i % 4], 40 + i).trace.target_calls) for i in range(6)
        ]
    for row, text in zip(rows, laws, strict=True):
        columns = FRAMES if text == MASKED else COLUMNS
        each = [columns / count for count in calls[text]]
        assert [count for batch in row["calls_per_sample"] for count in batch] == calls[text]
        assert row["columns"] == columns and row["samples"] == 6 and len(row["seconds"]) == 3
        assert row["columns_per_call"] == pytest.approx(sum(each) / 6)
        assert row["deviation"] == pytest.approx(statistics.stdev(each))
        assert row["speed_up_calls"] == pytest.approx(6 * COLUMNS / sum(calls[text]))
    assert [row["identical_samples"] for row in rows] == [None, 6, None, None]
    assert calls["columns"] == [COLUMNS] * 6 and calls[MASKED] == [8] * 6
    assert rows[3]["columns_per_call"] == 18 / 8 and rows[3]["deviation"] == 0
    assert len(set(calls[MAXIMAL])) > 1  # so that the deviation says something
    assert [row["name"] for row in rows] == [text.replace("window=4,", "") for text in laws]


def test_samples_that_differ_are_not_called_the_same(monkeypatch):
    """A sampler that promises the plain codes and breaks the promise shows."""
    pipe = tiny_audio_pipeline()
    decode = draws.decode

    def broken(pipe, setting, prompts, first):
        output, busy = decode(pipe, setting, prompts, first)
        if setting.text == IDENTICAL and first == 2:
            output.codes[1, 2, 19] ^= 1
        return output, busy

    monkeypatch.setattr(draws, "decode", broken)
    settings = [parse_setting(text, LAW, 0) for text in ("columns", IDENTICAL)]
    rows = rounds.time_settings(pipe, settings, PROMPTS, batch_size=2, runs=2, warmup=0)
    assert rows[1]["identical_samples"] == 3
    (row,) = curve(pipe, settings, PROMPTS, batch_size=2)
    assert row["identical_samples"] == 3
    other = parse_setting(f"{IDENTICAL},temperature=0.5", LAW, 0)
    assert not timing.promises_plain(other, settings[0])


def test_a_relaxed_row_tells_its_divergence():
    pipe = tiny_audio_pipeline()
    text = "column-jacobi:window=4,coupling=maximal,acceptance=lantern,unit=codebook,neighbours=4"
    settings = [parse_setting(one, LAW, 0) for one in ("columns", text)]
    rows = rounds.time_settings(pipe, settings, PROMPTS, batch_size=1, runs=3, warmup=0)
    found: list[Any] = [alone(pipe, text, LAW, PROMPTS[i], i).trace.divergence for i in range(3)]
    assert rows[1]["divergence"] == pytest.approx(sum(found) / 3) and rows[1]["divergence"] > 0
    assert rows[0]["divergence"] is None and not rows[1]["lossless"]
    assert rows[1]["name"] == text.replace("window=4,", "")


def test_the_table_follows_from_the_raw_numbers(models, capsys, tmp_path):
    columns, masked = models
    samplers = ["column-jacobi", INDEPENDENT, "masked:steps=2"]
    document, table, text = benched(
        capsys, "--model", columns, "--masked", masked, "--samplers", *samplers, "--windows", 2, 4,
        "--batch-sizes", 1, 2, "--warmup", 0, "--out", tmp_path / "bench.json",
    )  # fmt: skip
    assert json.loads((tmp_path / "bench.json").read_text()) == document
    assert document["kind"] == "music-bench" and "codes to waves" in text.splitlines()[0]
    rows = document["rows"]
    assert len(rows) == len(table) == 2 * 7
    names = ["columns", *2 * ["column-jacobi"], *2 * [INDEPENDENT], "masked:steps=2", MASKED]
    assert [row["name"] for row in rows[:7]] == names
    for place, (row, shown) in enumerate(zip(rows, table, strict=True)):
        check_times(row, shown, rows[place - place % 7], "clip")
        assert shown["columns/call"] == f"{row['columns_per_call']:.2f} +- {row['deviation']:.2f}"
        assert row["peak_memory_bytes"] > 0
    # The laws are those of the models: a masked one has its own.
    laws = [(row["law"]["top_k"], row["law"]["temperature"]) for row in rows]
    assert (laws[0], laws[5], laws[6]) == ((6, 1.0), (0, 1.7), (0, 1.7))
    assert rows[5]["calls"] == 6 and rows[6]["calls"] == 8 and table[1]["same as plain"] == "5 of 5"
    assert document["environment"]["masked_parameters"] == document["environment"]["transformer_parameters"]


def test_the_curve_counts_calls(models, capsys):
    samplers = ["column-jacobi", INDEPENDENT]
    asked = "--curve --prompts 3 --batch-sizes 2 --guidance-scales 1 2 --windows 2 5".split()
    document, table, _ = benched(capsys, "--model", models[0], *asked, "--samplers", *samplers)
    assert document["kind"] == "music-curve" and len(document["rows"]) == 2 * 2 * 2
    pipe = tiny_audio_pipeline()
    for row in document["rows"]:
        law = TokenLaw(guidance_scale=row["guidance_scale"], top_k=6)
        settings = {name: row["sampler"][name] for name in ("window", "coupling", "acceptance", "unit")}
        text = "column-jacobi:" + ",".join(f"{name}={value}" for name, value in settings.items())
        found = [alone(pipe, text, law, PROMPTS[i], i) for i in range(3)]
        calls = [int(one.trace.target_calls) for one in found]
        assert row["calls_per_sample"] == calls
        assert row["columns_per_call"] == pytest.approx(3 * COLUMNS / sum(calls))
        assert row["deviation"] == pytest.approx(statistics.stdev([COLUMNS / count for count in calls]))
        assert row["identical_samples"] == (3 if row["name"] == samplers[0] else None)
    cells = {(row["guidance_scale"], row["name"], row["window"]): row for row in document["rows"]}
    assert [line["columns per call"] for line in table] == samplers * 2
    assert table[3]["W=5"].startswith(f"{cells[2.0, samplers[1], 5]['columns_per_call']:.2f} +- ")


def test_what_is_measured_where_nothing_is_named(models, capsys):
    parser = bench.argparse.ArgumentParser()
    bench.add_arguments(parser)
    known, beside = (settings_of_model(str(model)) for model in models)
    (group,) = groups.read_groups(parser.parse_args(["--model", str(models[0])]), known, beside)
    names = [(one.name, one.window) for one in group]
    half = MASKED.replace("4/2/2", "2/1/1")
    assert names[0] == ("columns", None) and names[-2:] == [(MASKED, None), (half, None)]
    registered = [f"column-jacobi:{text}".rstrip(":") for text in by_name("column-jacobi").settings]
    assert names[1:-2] == [(name, window) for name in registered for window in (8, 16, 32)]
    document, _, _ = benched(capsys, "--model", models[1], "--batch-sizes", 1, "--warmup", 0)
    assert [row["name"] for row in document["rows"]] == [MASKED, MASKED.replace("4/2/2", "2/1/1")]
    assert [row["speed_up_calls"] for row in document["rows"]] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samplers", "column+gumbel"], r"'column\+gumbel'"),
        (["--samplers", "column-jacobi:coupling=maximal"], "acceptance='identical' compares"),
        (["--samplers", "column-jacobi:acceptance=lantern"], "pass unit='codebook'"),
        (["--samplers", "autoregressive"], "AutoregressiveSampler"),
        (["--samplers", "masked"], "MaskedSampler"),
        (["--count-only"], "--count-only"),
        (["--windows", "0"], "window=0.*1"),
        (["--masked", "MODEL"], "--masked"),
        (["--curve", "--masked", "MASKED"], "--curve"),
    ],
)
def test_options_that_do_not_fit(models, arguments, message):
    names: dict[str, str] = {"MODEL": str(models[0]), "MASKED": str(models[1])}
    with pytest.raises(ValueError, match=message):
        bench.main(["--model", str(models[0]), "--device", "cpu", *(str(names.get(a, a)) for a in arguments)])


def test_a_masked_model_has_no_windows_and_pictures_no_masked_model(models, tmp_path):
    with pytest.raises(ValueError, match="--windows.*measured"):
        bench.main(["--model", str(models[1]), "--device", "cpu", "--windows", "8"])
    tiny_pipeline().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--model tunes --masked"):
        bench.main(["--model", str(tmp_path), "--device", "cpu", "--masked", str(models[1])])
