"""An evaluation of tiny pipelines of every kind: interrupted, shared, extended, refused, and against plain counts."""

import json
import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.evaluation import (
    KINDS,
    SCALES,
    count_score,
    evaluated,
    judge_by_counts,
    timeless,
    tiny_network,
)
from tests.helpers.music_settings import MASKED, masked_pipeline
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_pipeline
from tests.helpers.tiny_audio import RATE, tiny_audio_pipeline
from tests.helpers.tiny_scales import tiny_scale_pipeline
from visual_spec.commands import eval as command
from visual_spec.commands import report as report_command
from visual_spec.data import shapes_classes, shapes_parser, tunes
from visual_spec.data.captions import CaptionError
from visual_spec.eval.draws import draw, stored_name
from visual_spec.eval.media import show
from visual_spec.eval.pair import MaskedPair
from visual_spec.eval.quality import evaluate as evaluate_module
from visual_spec.eval.quality import tasks
from visual_spec.eval.quality.audio import kernel_figure
from visual_spec.eval.quality.evaluate import evaluate, folder_name
from visual_spec.eval.quality.extractors import Setup
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.features import MelStatistics
from visual_spec.eval.quality.figures import clock_figures, quality_table
from visual_spec.eval.quality.published import frechet_distance
from visual_spec.eval.quality.tasks import Task
from visual_spec.eval.report import frontier
from visual_spec.models.next_scale.scale_budget import cache_bytes
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.trace import ScaleTrace

TOKENS = list(KINDS["tokens"].rows)


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, evaluated(request.param, folder, alone=1)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return folder, evaluated("tokens", folder)


def features_of(kind, samples):
    if kind == "columns":
        return MelStatistics(RATE)(torch.from_numpy(samples))
    with torch.no_grad():
        return tiny_network()(torch.from_numpy(samples).permute(0, 3, 1, 2))


def kept(kind, shown):
    """Samples as files keep them: sound has 16 bits."""
    return (shown.clip(-1, 1) * 32767).round().astype(np.float32) / 32768 if kind == "columns" else shown


def test_the_figures_are_plain_counts(whole):
    name, folder, document = whole
    kind, pipe = KINDS[name], KINDS[name].pipe()
    prompts, real = kind.task().prompts[:6], kind.task().pictures[:6]
    plain: Any = None
    for row, setting in zip(document["rows"], kind.settings(), strict=True):
        parts = [draw(pipe, setting, prompts[first : first + 3], first) for first in (0, 3)]
        shown = kept(name, np.concatenate([show(pipe, part[stored_name(part)]) for part in parts]))
        calls = np.concatenate([part["calls"] for part in parts])
        plain = plain or (shown, calls.sum(), features_of(name, shown))
        hits = [count_score(prompt, one) for prompt, one in zip(prompts, shown, strict=True)]
        assert (row["name"], row["kind"], row["samples"]) == (setting.text, kind.rows[setting.text], 6)
        assert row["lossless"] == (row["kind"] != "lossy")
        assert row["tokens_per_call"]["value"] == pytest.approx(6 * int(parts[0]["length"]) / calls.sum())
        assert row["speed_up_calls"]["value"] == pytest.approx(plain[1] / calls.sum())
        assert row["accuracy"]["all_correct"]["hits"] == sum(all(found.values()) for found in hits)
        for attribute, figure in row["accuracy"]["attributes"].items():
            asked = [found[attribute] for found in hits if attribute in found]
            assert (figure["hits"], figure["total"]) == (sum(asked), len(asked))
        (far,) = row["features"].values()
        own = features_of(name, shown)
        for to, other in (("real", features_of(name, real)), ("plain", plain[2])):
            expected = frechet_distance(own, other)
            assert far[f"frechet_to_{to}"]["value"] == pytest.approx(expected, rel=1e-3, abs=1e-3)
            if name == "columns":
                expected = kernel_figure(other, own)["value"]
                assert far[f"kernel_to_{to}"]["value"] == pytest.approx(expected, rel=1e-3, abs=1e-3)
        same = sum(np.array_equal(one, other) for one, other in zip(shown, plain[0], strict=True))
        promised = setting.text in (*kind.identical, kind.settings()[0].text)
        assert row["identical_samples"] == (same if promised else None)
        assert not promised or same == 6
        measured = [float(part["divergence"]) for part in parts]
        if math.isnan(measured[0]):
            assert row["divergence"] is None
        else:
            assert row["divergence"]["value"] == pytest.approx(sum(measured) / 2) and min(measured) > 0
        heads = [part["head_calls"] for part in parts if "head_calls" in part]
        assert (row["head_calls"] is None) == (name != "vectors")
        if heads:
            assert row["head_calls"]["value"] == pytest.approx(np.concatenate(heads).mean())
        for clock in ("wall_clock", "processor_time"):
            assert row[clock]["alone_seconds"]["p50"] > 0 and row[clock]["batch_size"] == 3
    reference = document["references"]["tokenizer"]["features"]
    assert all(far["frechet_to_real"]["value"] > 0 for far in reference.values())
    assert document["rows"][0]["wall_clock"]["alone_speed_up"] == {"p20": 1.0, "p50": 1.0, "p80": 1.0}
    assert Image.open(folder / "pictures.png").height > (len(kind.rows) + 2) * 96


def test_a_run_goes_on_rows_are_added_and_times_stay(whole, tmp_path):
    name, folder, document = whole
    rows = list(KINDS[name].rows)
    evaluated(name, tmp_path, rows=rows[:2], samples=4)
    grown = evaluated(name, tmp_path, rows=rows[:3])
    for row, want in zip(grown["rows"], document["rows"], strict=False):
        for figure in ("accuracy", "features", "tokens_per_call", "cache", "head_calls"):
            assert row[figure] == want[figure]
    drawn = {path: path.stat().st_mtime_ns for path in folder.glob("*/0*")}
    again = evaluated(name, folder, alone=1)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/0*")} == drawn
    assert again["rows"] == document["rows"]  # to the last digit: not measured anew
    refuses(ValueError, "num=4", evaluated, name, tmp_path, rows=rows[:2], samples=4)


def test_tables_and_pages_speak_of_the_medium(whole, tmp_path):
    name, folder, document = whole
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in quality_table(document, next(iter(document["rows"][0]["features"]))).splitlines()
    ]
    assert len({len(line) for line in lines}) == 1
    shown = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    assert [line["sampler"] for line in shown] == [*KINDS[name].rows, "(tokenizer alone)"]
    column = {"scales": "cache KiB", "columns": "columns/call"}.get(name, "tokens/call")
    for line, row in zip(shown, document["rows"], strict=False):
        if name == "scales":
            held = row["cache"]
            assert line[column] == f"{held['held'] / 1024:.0f} ({100 * held['share']:.0f} %)"
        else:
            assert line[column].startswith(f"{row['tokens_per_call']['value']:.2f} (")
        assert ("head calls" in line) == (name == "vectors") and ("s/clip" in line) == (name == "columns")
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    assert report_command.main([str(folder / "results.json"), "--out", str(page)]) == 0
    text = page.read_text()
    assert ("6 clips a row" if name == "columns" else "6 pictures a row") in text
    assert ("pictures" in text) == (name != "columns") and "http" not in text.replace("http://www.w3.org", "")
    assert ("cache a picture, KiB" in text) == (name == "scales")
    assert ("kernel distance to true clips" in text) == (name == "columns")


def test_caches_are_told_as_the_trace_tells_them(tmp_path):
    document, pipe = evaluated("scales", tmp_path), tiny_scale_pipeline()
    config = dict(pipe.transformer.config)
    full = cache_bytes(config, None, 1, True, torch.float32)
    rows = {row["name"]: row["cache"] for row in document["rows"]}
    for setting in KINDS["scales"].settings():
        with setting.on(pipe):
            trace = pipe(list("012"), generator=seeded(0, 1, 2), guidance_scale=2.5).trace
        assert isinstance(trace, ScaleTrace)
        held = (sum if "measure" in setting.text else max)(trace.cache_bytes)
        assert rows[setting.text]["held"] == held / 3
        assert rows[setting.text]["share"] == pytest.approx(held / 3 / full.held)
    assert (rows[SCALES]["held"], rows[SCALES]["peak"]) == (full.held, full.peak)
    assert rows[f"{SCALES},cache_share=0.7"]["share"] == pytest.approx(19 / 28)  # of 28 tokens of two layers
    # The large model's cache stays while it measures what the small one draws.
    small = cache_bytes({**config, "num_layers": 1}, None, 1, True, torch.float32, known=2)
    measured = rows["scale-wise:num_draft_scales=2,measure=true"]
    assert measured["held"] == full.held + small.held
    assert measured["peak"] == max(full.held + small.peak, full.peak + small.held)


def test_charts_of_scales_have_caches_and_speed_against_quality(tmp_path):
    pytest.importorskip("matplotlib")
    document = evaluated("scales", tmp_path)
    for place, row in enumerate(document["rows"]):  # tiny models are right by chance only
        row["accuracy"]["all_correct"] = {"value": 0.9 - 0.1 * place, "low": 0.1, "high": 0.95}
    cache_accuracy, clock_accuracy, cache_distance, _ = frontier.draw_frontier(document).axes[:4]
    assert cache_accuracy.get_xlabel() == "times less cache" == cache_distance.get_xlabel()
    assert cache_accuracy.get_ylabel() == "class accuracy, plain = 1"
    assert "processor time" in clock_accuracy.get_xlabel()
    bars = [(float(bar[0].get_xdata()[0]), float(bar[0].get_ydata()[0])) for bar in cache_accuracy.containers]
    shares = [row["cache"]["share"] for row in document["rows"]]
    assert bars == [pytest.approx((1 / share, 1 - 0.1 / 0.9 * place)) for place, share in enumerate(shares)]


def test_no_more_samples_are_timed_alone_than_there_are(tmp_path):
    document = evaluated("tokens", tmp_path, rows=TOKENS[:2], samples=4, alone=8)
    assert json.loads((tmp_path / "alone.json").read_text())["pictures"] == 4
    assert document["rows"][1]["wall_clock"]["alone_speed_up"]["p50"] > 0


def test_seconds_stand_beside_the_machine_that_measured_them(tmp_path, monkeypatch):
    """Another machine may judge what is there; it measures nothing beside it."""
    before = evaluated("tokens", tmp_path, rows=TOKENS[:2], samples=4, alone=1)["environment"]
    real = evaluate_module.environment
    monkeypatch.setattr(
        evaluate_module, "environment", lambda *of: real(*of) | {"device_name": "another", "commit": "new"}
    )
    again = evaluated("tokens", tmp_path, rows=TOKENS[:2], samples=4, alone=1)
    assert again["environment"] == before
    for more in (
        dict(rows=TOKENS[:3], alone=1),
        dict(rows=TOKENS[:2], samples=6),
        dict(rows=TOKENS[:2], alone=2),
    ):
        with pytest.raises(ValueError, match=f"device_name: {before['device_name']} there, another here"):
            evaluated("tokens", tmp_path, **{"samples": 4, **more})
    (tmp_path / "machine.json").unlink()  # as earlier versions left folders
    assert evaluated("tokens", tmp_path, rows=TOKENS[:2], samples=4, alone=1)["environment"] == before
    monkeypatch.setattr(evaluate_module, "environment", lambda *of: real(*of) | {"commit": "new"})
    commit = evaluated("tokens", tmp_path, rows=TOKENS[:2], samples=6, alone=1)["environment"]["commit"]
    assert commit == ", ".join(filter(None, [before["commit"], "new"]))
    for name in ("machine.json", "results.json"):
        (tmp_path / name).unlink()
    with pytest.warns(UserWarning, match="does not say which machine"):
        evaluated("tokens", tmp_path, rows=TOKENS[:2], samples=8, alone=1)


def test_a_judge_that_is_not_there_is_refused_before_anything_is_drawn(tmp_path):
    setup = Setup({"feature_weights": tmp_path / "none.pth"})
    with pytest.raises(FileNotFoundError, match="no Inception weights"):
        evaluated("tokens", tmp_path / "new", extractors=("shapes", "inception"), setup=setup)
    assert not list(tmp_path.rglob("*.png"))


class Stop(Exception):
    pass


def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(pictures, tmp_path, monkeypatch):
    calls = []

    def stopping(pipe, setting, prompts, first):
        calls.append(setting.text)
        now: Any = Interrupted(pipe) if len(calls) == 6 else pipe
        return draw(now, setting, prompts, first)

    monkeypatch.setattr("visual_spec.eval.draws.draw", stopping)
    with pytest.raises(Stop):
        evaluated("tokens", tmp_path)
    assert not (tmp_path / "results.json").exists()
    assert len(list(tmp_path.glob("*/batches/*.jsonl"))) == 5
    calls[:] = ["counted"] * 100
    assert timeless(evaluated("tokens", tmp_path)) == timeless(pictures[1])
    assert len(calls) - 100 == 4 * 2 - 5  # what was there is not drawn again


class Interrupted:
    """A pipeline that is stopped at the fifth target call of a batch."""

    def __init__(self, pipe):
        self.__dict__["pipe"] = pipe

    def __getattr__(self, name):
        return getattr(self.pipe, name)

    def __setattr__(self, name, value):
        setattr(self.pipe, name, value)

    def __call__(self, *args, **kwargs):
        def stop(pipe, step, *_):
            if step == 4:
                raise Stop

        return self.pipe(*args, callback_on_step_end=stop, **kwargs)


def test_damaged_files_are_made_again(pictures, tmp_path):
    shutil.copytree(pictures[0], tmp_path, dirs_exist_ok=True)
    one, two, *_ = sorted(tmp_path.glob("speculative-jacobi*/*.png"))
    one.write_bytes(b"")
    two.write_bytes(two.read_bytes()[:-100])
    next(tmp_path.glob("tokenizer/*.png")).unlink()
    next(tmp_path.glob("features/shapes-*")).write_bytes(b"PK")
    (tmp_path / "alone.json").write_text("{")
    assert timeless(evaluated("tokens", tmp_path)) == timeless(pictures[1])
    with pytest.warns(UserWarning, match="alone.json is damaged"):
        evaluated("tokens", tmp_path, alone=1)
    (tmp_path / "autoregressive" / "run.json").write_text('{"model"')
    refuses(ValueError, r"run\.json", evaluated, "tokens", tmp_path)


def test_processes_share_the_batches(pictures, tmp_path):
    assert evaluated("tokens", tmp_path, rank=1, shards=2) is None
    assert len(list(tmp_path.glob("autoregressive/*.png"))) == 3
    assert timeless(evaluated("tokens", tmp_path, rank=0, shards=2)) == timeless(pictures[1])
    assert timeless(json.loads((tmp_path / "results.json").read_text())) == timeless(pictures[1])


def test_a_folder_holds_one_setting_one_model_and_one_list_of_prompts(pictures, monkeypatch):
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"seed": 1}, "seed: 0.*1"),
        ({"law": TokenLaw(guidance_scale=3.0)}, "2.0.* there, .*3.0.* here"),
        ({"batch_size": 4}, "batch_size: 3.*4"),
        ({"model": "other"}, "model:.*other"),
    )
    for changes, message in others:
        refuses(ValueError, message, evaluated, "tokens", pictures[0], **changes)
    pipe = tiny_pipeline()
    with torch.no_grad():
        pipe.transformer.output.weight[0, 0] += 1e-3
    refuses(ValueError, "weights: [0-9a-f]{12}.*[0-9a-f]{12}", evaluated, "tokens", pictures[0], pipe=pipe)
    task = KINDS["tokens"].task()
    other = Task(task.prompts[::-1], task.pictures)
    with pytest.raises(ValueError, match="autoregressive"):
        settings = KINDS["tokens"].settings()
        evaluate(tiny_pipeline(), settings, other, pictures[0], samples=6, batch_size=3)


def test_smooth_pictures_differ_from_those_of_their_ids(tmp_path):
    smooth = f"{SCALES},smooth=true"
    document = evaluated("scales", tmp_path, rows=[SCALES, smooth], samples=4)
    assert [row["kind"] for row in document["rows"]] == ["plain", "lossy"]
    one, other = ((tmp_path / folder_name(text) / "000000.png").read_bytes() for text in (SCALES, smooth))
    assert one != other


def test_a_masked_model_alone_is_compared_with_itself(tmp_path):
    rows = (MASKED, f"{MASKED},seed=100", MASKED.replace("4/2/2", "2/1/1"))
    law = KINDS["columns"].masked_law
    document = evaluated("columns", tmp_path, rows=rows, pipe=masked_pipeline(), law=law, samples=4)
    assert [row["kind"] for row in document["rows"]] == ["plain", "control", "lossy"]
    assert [row["speed_up_calls"]["value"] for row in document["rows"]] == [1, 1, 2]


def test_clocks_by_hand():
    found = clock_figures(2, ([2.0, 3.0], [4.0, 1.5]), ([1.0, 2.0, 4.0], [3.0, 3.0, 3.0]))
    assert found["seconds_per_picture"]["p50"] == 1.25  # of 1 and 1.5
    assert found["speed_up"]["p50"] == pytest.approx((2.0 + 0.5) / 2)
    assert found["alone_seconds"]["p50"] == 2.0 and found["alone_speed_up"]["p50"] == 1.5
    assert clock_figures(2, ([2.0], [4.0]), None)["alone_speed_up"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 3}, "samples=3"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "shards": 2}, "rank=2 of 2"),
        ({"samples": 17}, "16 prompts.*17.*3.*18"),
    ],
)
def test_bad_input_is_refused_before_a_folder_is_made(tmp_path, changes, message):
    refuses(ValueError, message, evaluated, "tokens", tmp_path / "new", **changes)
    assert not (tmp_path / "new").exists()


def test_the_command(pictures, tmp_path, monkeypatch, capsys):
    judge_by_counts(monkeypatch)
    tiny_pipeline().save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(tasks, "shapes_task", lambda count, size: KINDS["tokens"].task())
    arguments = ["--model", str(tmp_path / "tiny"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    arguments += ["--alone", "0", "--samplers", *TOKENS[2:], TOKENS[0], "--controls", TOKENS[1]]
    arguments += ["--guidance-scale", "2", "--batch-size", "3", "--samples", "6"]
    assert command.main([*arguments, "--rank", "0", "--shards", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "other processes have samples to draw" in captured.err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "two")
    refuses(ValueError, "WORLD_SIZE='two' in the environment", command.main, arguments)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert document == json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["name"] for row in document["rows"]] == TOKENS  # plain decoding first, and once
    assert timeless(document)["rows"] == timeless(pictures[1])["rows"]
    assert "batch 1 of 1" in captured.err and "| autoregressive " in captured.out
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # as some launchers leave them
        monkeypatch.setenv(variable, "")
    assert command.main(arguments) == 0  # everything is there already
    shown = capsys.readouterr().out
    assert "| autoregressive " in shown and "{" not in shown
    refuses(ValueError, "'jacobi'", command.main, [*arguments, "--samplers", "jacobi"])
    refuses(ValueError, "--samples 2", command.main, [*arguments, "--samples", "2"])


def test_the_command_with_a_masked_model(tmp_path, monkeypatch, capsys):
    judge_by_counts(monkeypatch)
    tiny_audio_pipeline(default_guidance_scale=2.0, default_top_k=6).save_pretrained(tmp_path / "a")
    masked_pipeline().save_pretrained(tmp_path / "m")
    monkeypatch.setattr(tunes, "NUM_SAMPLES", 80)
    monkeypatch.setattr(tasks, "tunes_task", lambda count: KINDS["columns"].task())
    rows = list(KINDS["columns"].rows)
    arguments = ["--model", str(tmp_path / "a"), "--masked", str(tmp_path / "m"), "--device", "cpu"]
    arguments += ["--out", str(tmp_path / "out"), "--samples", "6", "--batch-size", "3", "--alone", "0"]
    arguments += ["--controls", rows[1], "--samplers", *rows[2:4]]
    assert command.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr().out
    document = json.loads(captured.splitlines()[-1])
    assert [row["name"] for row in document["rows"]] == rows
    assert [row["law"]["temperature"] for row in document["rows"]] == [1.0, 0.5, 1.0, 1.0, 1.7]
    again = evaluated("columns", tmp_path / "again")
    for row, want in zip(document["rows"], again["rows"], strict=True):
        assert row["accuracy"] == want["accuracy"] and row["features"] == want["features"]
    assert "features: mel" in captured and " columns/call " in captured
    tiny_pipeline().save_pretrained(tmp_path / "pictures")
    refuses(ValueError, "--masked", command.main, [*arguments, "--model", str(tmp_path / "pictures")])
    with pytest.raises(ValueError, match="MaskedSampler"):
        command.main([*arguments[:2], *arguments[4:], "--samplers", "masked"])


def test_pairs_that_are_none():
    pipe, masked = tiny_audio_pipeline(), masked_pipeline()
    refuses(ValueError, "--model tunes --masked", MaskedPair, masked, pipe)
    shorter = masked_pipeline()
    shorter.register_to_config(max_audio_length_in_s=0.15)
    refuses(ValueError, "20.*15", MaskedPair, tiny_audio_pipeline(), shorter)
    with torch.no_grad():
        layers: Any = masked.codec.quantizer.layers
        layers[0].codebook.embed += 1
    refuses(ValueError, "different tokenizers", MaskedPair, pipe, masked)


def test_tasks_are_held_out_prompts_and_what_they_describe(monkeypatch):
    from visual_spec.data import shapes, shapes_parser, tunes_parser

    task = tasks.shapes_task(3, 128)
    assert task.prompts == shapes.held_out_prompts(3)
    for prompt, picture in zip(task.prompts, task.pictures, strict=True):
        assert all(shapes_parser.score(prompt, picture).values())
    music = tasks.tunes_task(2)
    assert music.prompts == tunes.held_out_prompts(2)
    for prompt, wave in zip(music.prompts, music.pictures, strict=True):
        assert sum(tunes_parser.score(prompt, wave).values()) >= 6
    classes = tasks.classes_task(50, 128)
    assert classes.prompts == [*shapes_classes.CLASS_NAMES, *shapes_classes.CLASS_NAMES[:2]]
    for prompt, picture in zip(classes.prompts[::7], classes.pictures[::7], strict=True):
        assert all(shapes_classes.score_class(prompt, picture).values())
    pipe = tiny_scale_pipeline(num_classes=48, id2label=list(shapes_classes.CLASS_NAMES))
    found = tasks.task_of(pipe, 3)
    assert found.prompts == classes.prompts[:3] and found.pictures.shape == (3, 8, 8, 3)
    refuses(ValueError, "`shapes`", tasks.task_of, tiny_scale_pipeline(), 3)
    refuses(ValueError, "80.*400 Hz", tasks.task_of, tiny_audio_pipeline(), 2)


def test_prompts_of_a_file_are_compared_with_plain_decoding(tmp_path, monkeypatch, capsys):
    """Captions that the parser knows are scored; nobody knows the true scenes."""
    judge_by_counts(monkeypatch)

    def score(prompt, sample):
        if "circle" in prompt or "star" in prompt:
            return count_score(prompt, sample)
        raise CaptionError(prompt)

    monkeypatch.setattr(shapes_parser, "score", score)
    tiny_pipeline().save_pretrained(tmp_path / "tiny")
    known = [
        "a large red circle on a plain white background",
        "a small blue star on a plain white background",
    ]
    for name, prompts in {
        "known": known * 2,
        "strange": ["a cat on a fence", "a storm", "two", "three"],
    }.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(prompts))
        arguments = [
            "--model",
            str(tmp_path / "tiny"),
            "--out",
            str(tmp_path / name),
            "--device",
            "cpu",
            "--alone",
            "0",
        ]
        arguments += ["--prompts", str(tmp_path / f"{name}.txt"), "--samplers", TOKENS[2], "--controls"]
        assert command.main([*arguments, "--batch-size", "3"]) == 0
        document = json.loads((tmp_path / name / "results.json").read_text())
        assert document["settings"]["samples"] == 4 and document["references"] == {}
        assert not (tmp_path / name / "true").exists()
        assert SampleFiles.open(tmp_path / name / "autoregressive").prompts == prompts
        for row in document["rows"]:
            figures = row["features"]["shapes"]
            assert figures["frechet_to_real"] is None and figures["precision"] is None
            assert figures["frechet_to_plain"]["value"] >= 0
            assert (row["accuracy"]["mean_attribute"] is None) == (name == "strange")
        told = capsys.readouterr().out
        assert ("The parser knows none of these prompts" in told) == (name == "strange")
        page = frontier.write_page(
            frontier.read_results([tmp_path / name / "results.json"]), tmp_path / f"{name}.html", name
        )
        assert page.read_text().count("<svg") == (name == "known")
    refuses(ValueError, "no quality to draw", frontier.draw_frontier, document)
    again = ["--batch-size", "3", "--samples", "5", "--out", str(tmp_path / "five")]
    assert command.main([*arguments, *again]) == 0
    drawn = SampleFiles.open(tmp_path / "five" / "autoregressive").prompts
    assert drawn == [*prompts, prompts[0]]
