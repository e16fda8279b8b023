"""The benchmark's numbers, recomputed from raw seconds and from decodings of single samples."""

import json
import math
import statistics
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.bench import benched, check_times
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularModel
from tests.helpers.tiny import tiny_pipeline, tiny_transformer, tiny_video_pipeline
from visual_spec.commands import bench
from visual_spec.data import motion, shapes
from visual_spec.eval import draws, machine, measure, timing
from visual_spec.eval.intervals import quantiles, ratio_with_error
from visual_spec.eval.settings import parse_setting
from visual_spec.eval.speed import rounds
from visual_spec.eval.speed.call_cost import cost_of
from visual_spec.eval.speed.plain_loops import NO_CACHE, STRAIGHT
from visual_spec.files import whole
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.registry import by_name

PROMPTS = ["a red circle", "a blue square", "a red square on blue"]
IDENTICAL, INDEPENDENT = "speculative-jacobi", "speculative-jacobi:coupling=independent,acceptance=exact"
MAXIMAL = "speculative-jacobi:coupling=maximal,acceptance=exact"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def small_prompts(monkeypatch):
    monkeypatch.setattr(shapes, "held_out_prompts", lambda count: [PROMPTS[i % 3] for i in range(count)])
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(measure, "matmul_peak", lambda device, dtype: 2e10)


shared_pipeline = cache(tiny_pipeline)
LAW = shared_pipeline().make_law()


def decode_alone(sampler, prompt, seed, law):
    """Tokens and target calls of one sample in a batch of its own."""
    pipe = shared_pipeline()
    generator = torch.Generator().manual_seed(seed)
    result = sampler(pipe.transformer, pipe.make_condition([prompt]), law=law, generator=[generator])
    return result.tokens[0], int(result.trace.target_calls[0])


def settings_of(law, *texts, seed=0):
    """Plain decoding, and what else is written."""
    return [parse_setting(text, law, seed) for text in ("autoregressive", *texts)]


def run(capsys, model, *arguments):
    return benched(capsys, "--model", model, *arguments)[:2]


# -- timed rows -------------------------------------------------------------------------------------------------------


def test_the_table_follows_from_the_raw_numbers(model, capsys, tmp_path):
    out = tmp_path / "results" / "bench.json"
    arguments = ["--batch-sizes", "1", "2", "--windows", "4", "--guidance-scales", "2", "--prompts", "3"]
    arguments += ["--samplers", IDENTICAL, MAXIMAL]
    document, table = run(capsys, model, *arguments, "--out", str(out))
    assert json.loads(out.read_text()) == document
    assert list(out.parent.iterdir()) == [out]
    assert document["kind"] == "bench" and document["settings"]["seed"] == 0
    rows = document["rows"]
    settings = {"window": 4, "coupling": "gumbel", "acceptance": "identical", "initial_draft": "left"}
    assert {"class": "SpeculativeJacobiSampler", **settings}.items() <= rows[2]["sampler"].items()
    # Plain, two methods and the straight loop; without a cache at the first batch size.
    assert len(rows) == len(table) == 2 * 4 + 1
    for row, shown in zip(rows, table, strict=True):
        same = ("batch_size", "guidance_scale")
        plain = next(one for one in rows if all(one[name] == row[name] for name in same))
        assert plain["name"] == "autoregressive"
        batch, seconds, calls = row["batch_size"], row["seconds"], row["calls_per_sample"]
        assert len(seconds) == len(calls) == (1 if row["name"] == NO_CACHE else 5)
        assert all(len(counts) == batch for counts in calls)
        flat = [count for counts in calls for count in counts]
        assert shown["calls"] == f"{statistics.mean(flat):.1f}"
        assert shown["tokens/call"] == f"{16 * len(flat) / sum(flat):.2f}"
        check_times(row, shown, plain)
        if row["name"] != NO_CACHE:
            floor = (row["weight_bytes"] + row["cache_bytes"]) / 1e9 * 1000
            assert row["floor_ms_per_call"] == pytest.approx(floor)

    def same_as_plain(name):
        return [shown["same as plain"] for shown in table if shown["sampler"] == name]

    assert same_as_plain(IDENTICAL) == same_as_plain(STRAIGHT) == ["5 of 5", "10 of 10"]
    assert same_as_plain(NO_CACHE) == ["1 of 1"]
    assert all(shown["same as plain"] == "-" for shown in table if "exact" in shown["sampler"])


def test_clips_are_timed_by_captions_of_clips(capsys, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        rounds.motion, "held_out_prompts", lambda count: asked.append(count) or PROMPTS[:count]
    )
    tiny_video_pipeline().save_pretrained(tmp_path)
    options = ("--prompts", "1", "--batch-sizes", "1", "--warmup", "0", "--skip-uncached")
    document, rows = run(capsys, tmp_path, "--samplers", "speculative-jacobi:window=4", *options)
    assert asked and [row["name"] for row in document["rows"]][0] == "autoregressive"
    assert document["environment"]["picture_ms"] > 0 and len(rows) == len(document["rows"]) > 1


def test_a_round_decodes_its_own_prompts_and_seeds_with_every_sampler():
    law = TokenLaw(guidance_scale=2.0)
    settings = settings_of(law, f"{INDEPENDENT},window=3", seed=70)
    rows = rounds.time_settings(
        tiny_pipeline(), settings, PROMPTS, batch_size=2, runs=5, warmup=0, no_cache=False
    )
    assert rows.pop()["name"] == STRAIGHT
    for row, setting in zip(rows, settings, strict=True):
        expected = [decode_alone(setting.sampler, PROMPTS[i % 3], 70 + i, law)[1] for i in range(10)]
        assert [count for counts in row["calls_per_sample"] for count in counts] == expected
    assert rows[0]["calls"] == 16 and rows[1]["calls"] <= 16


def test_speed_up_pairs_the_rounds():
    plain, fast = [1.0, 4.0, 1.0, 1.0, 1.0], [0.5, 2.0, 0.25, 1.0, 0.5]
    row = timing.summarise_row(fast, [[4], [8], [4], [4], [4]], plain, 16)
    assert row["speed_up"] == pytest.approx({"p20": 1.8, "p50": 2.0, "p80": 2.4})
    assert row["ms_per_call"] == pytest.approx(125.0)  # of 125, 250, 62.5, 250, 125
    assert row["tokens_per_call"] == pytest.approx(80 / 24)


# -- the curve --------------------------------------------------------------------------------------------------------


def test_fused_projections_draw_the_same_in_fewer_products(model, capsys, monkeypatch):
    products = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: products.append(1) or linear(*args))
    counts = []
    for flag in ([], ["--fuse-projections"]):
        products.clear()
        rows = ["--samplers", IDENTICAL, "--windows", "4", "--batch-sizes", "1", "--warmup", "0"]
        document, _ = run(capsys, model, *rows, "--dtype", "float64", "--skip-uncached", *flag)
        assert document["settings"]["fuse_projections"] is bool(flag)
        assert [row["identical_samples"] for row in document["rows"]] == [None, 5, 5]
        counts.append(len(products))
    # A call of 2 layers: wqkv, wo, w1, w3, w2 each, and the head; fused one less a layer.
    assert counts[1] / counts[0] == pytest.approx(9 / 11, abs=0.01)


def test_the_curve_counts_what_single_samples_take(model, capsys):
    arguments = ["--curve", "--prompts", "3", "--batch-sizes", "2", "--seed", "9", "--windows", "2", "5"]
    document, table = run(
        capsys, model, *arguments, "--guidance-scales", "1", "2", "--samplers", IDENTICAL, INDEPENDENT
    )
    assert document["kind"] == "curve" and len(document["rows"]) == 2 * 2 * 2
    for row in document["rows"]:
        exact: dict[str, Any] = (
            {} if row["name"] == IDENTICAL else {"coupling": "independent", "acceptance": "exact"}
        )
        sampler = SpeculativeJacobiSampler(row["window"], **exact)
        law = TokenLaw(guidance_scale=row["guidance_scale"])
        calls = [decode_alone(sampler, PROMPTS[i % 3], 9 + i, law)[1] for i in range(3)]
        assert row["calls_per_sample"] == calls
        assert row["tokens_per_call"] == pytest.approx(3 * 16 / sum(calls))
        assert row["identical_samples"] == (None if exact else 3)
    assert len(table) == 2 * 2
    first = document["rows"][0]
    assert table[0]["W=2"] == f"{first['tokens_per_call']:.2f} +- {first['standard_error']:.2f}"
    assert table[0]["same as plain"] == "6 of 6"


def test_a_curve_has_samplers_with_and_without_windows(model, capsys):
    arguments = ["--curve", "--prompts", "2", "--windows", "3", "12", "--guidance-scales", "1"]
    asked = [IDENTICAL, "parallel-jacobi", "speculative-jacobi:window=5,coupling=maximal,acceptance=exact"]
    document, table = run(capsys, model, *arguments, "--samplers", *asked)
    windows = [row["window"] for row in document["rows"]]
    assert windows == [3, 12, None, 5]
    assert [*table[0]] == "guidance|tokens per call|W=3|W=5|W=12|no window|same as plain".split("|")
    measured = [[name for name, cell in line.items() if "+-" in cell] for line in table]
    assert measured == [["W=3", "W=12"], ["no window"], ["W=5"]]
    assert [line["same as plain"] for line in table] == ["4 of 4", "-", "-"]


def test_the_standard_error_of_tokens_per_call_agrees_with_the_jackknife():
    calls = [60, 75, 81, 66, 70, 90, 59, 77, 68, 73]
    rate, error = ratio_with_error([256] * 10, calls)
    assert rate == pytest.approx(10 * 256 / sum(calls))
    left_out = [9 * 256 / (sum(calls) - value) for value in calls]
    jackknife = math.sqrt(9 / 10 * sum((value - statistics.mean(left_out)) ** 2 for value in left_out))
    assert error == pytest.approx(jackknife, rel=0.02)
    assert ratio_with_error([256], [64]) == (4.0, 0.0)


# -- what is read off the machine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("guided", [False, True])
def test_bytes_of_a_call_are_weights_and_half_the_cache(guided):
    transformer = tiny_transformer()
    official = cost_of(transformer)
    assert official is not None
    with torch.no_grad():
        weights, cache = official.call_bytes(batch_size=3, guided=guided)
    skipped = ("tok_embeddings", "cls_embedding")
    assert weights == 4 * sum(
        p.numel() for n, p in transformer.named_parameters() if not n.startswith(skipped)
    )
    rows, prefix, slots = (6 if guided else 3), 6, 16 // 2
    assert cache == 4 * 2 * 2 * rows * 16 * (prefix + slots)  # keys and values of 2 layers, 16 channels
    assert not any(module._forward_pre_hooks for module in transformer.modules())


def test_the_floor_of_a_model_of_someone_else_is_left_out(model, capsys, monkeypatch):
    """A model that keeps the contract and says nothing of its layers is timed all the same."""

    class Foreign(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.device = TabularModel(TokenGrid(4, 4), 12, order=2), CPU
            self.dtype = torch.float32
            self.grid, self.vocab_size = self.inner.grid, self.inner.vocab_size
            self.scale = torch.nn.Parameter(torch.ones(()))

        def prefill(self, condition, **options):
            return self.inner.prefill(None, **options)

        def forward(self, state, tokens, slots):
            return self.inner(state, tokens, slots)

    pipe = tiny_pipeline()
    monkeypatch.setattr(type(pipe), "check_sampler", lambda self: None)
    pipe.transformer = Foreign()
    pipe.set_progress_bar_config(disable=True)
    monkeypatch.setattr(rounds, "load", lambda *_: pipe)
    arguments = ["--samplers", IDENTICAL, "--windows", "4", "--batch-sizes", "1", "--guidance-scales", "1"]
    document, table = run(capsys, model, *arguments)
    assert len(document["rows"]) == 3 and [line["floor"] for line in table] == ["-"] * 3
    for row in document["rows"]:
        measured = ("weight_bytes", "floor_ms_per_call", "floor_share", "flops_per_call")
        assert all(row[name] is None for name in measured)
        assert len(row["seconds"]) and math.isfinite(row["ms_per_call"])
    assert document["rows"][2]["identical_samples"] == 5


def test_any_registered_sampler_can_be_named(model, capsys, tmp_path):
    EagleDrafter.for_target(shared_pipeline().transformer).save_pretrained(tmp_path / "head")
    asked = ["zipar:window=2", f"tree:drafter={tmp_path / 'head'},depth=2,width=2", "speculative-jacobi"]
    arguments = ["--samplers", *asked, "--batch-sizes", "2", "--skip-uncached", "--windows", "5"]
    document, table = run(capsys, model, *arguments)
    rows = document["rows"]
    # `--windows` is for samplers that are not told one.
    assert [row["window"] for row in rows] == [None, 2, None, 5, None]
    names = ["autoregressive", "zipar", asked[1], "speculative-jacobi", STRAIGHT]
    assert [row["name"] for row in rows] == names
    assert rows[1]["calls"] < 16 and not rows[1]["lossless"] and rows[2]["lossless"]
    assert [line["sampler"] for line in table] == [row["name"] for row in rows]
    for row, text in zip(rows[1:-1], [*asked[:2], "speculative-jacobi:window=5"], strict=True):
        drawn = draws.draw(shared_pipeline(), parse_setting(text, LAW, 0), PROMPTS[:2], 0)
        assert row["calls_per_sample"][0] == drawn["calls"].tolist()


@pytest.mark.parametrize(
    "values", [[3.0], [2.0, 1.0], [5.0, 1.0, 4.0, 2.0, 3.0], [0.3, 9.0, 0.1, 0.2, 7.0, 0.4]]
)
def test_quantiles_are_those_of_torch(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    expected = {f"p{round(100 * q)}": float(tensor.quantile(q)) for q in (0.2, 0.5, 0.8)}
    assert quantiles(values) == pytest.approx(expected)


def test_no_values_have_no_quantile():
    refuses(ValueError, "least", quantiles, [])


def test_the_copy_bandwidth_counts_reads_and_writes(monkeypatch):
    monkeypatch.undo()
    laps = iter([0.5, 0.25, 1.0])
    monkeypatch.setattr(measure, "timed", lambda function, device: (function(), next(laps)))
    assert measure.copy_bandwidth(CPU, mebibytes=1, repeats=3) == 2 * 2**20 / 0.25


def test_seconds_memory_and_environment():
    result, seconds = measure.timed(lambda: time.sleep(0.05) or "done", CPU)
    assert result == "done" and 0.05 <= seconds < 5
    peak, status = measure.peak_memory(CPU), Path("/proc/self/status")
    if status.exists():  # the same mark by another way, in KiB
        mark = next(
            int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )
        assert peak == pytest.approx(mark * 1024, rel=0.05)
    assert 2**24 < peak < 2**40
    facts = json.loads(json.dumps(machine.environment(CPU, torch.bfloat16)))
    assert (
        facts["dtype"] == "bfloat16" and facts["device_name"] and facts["threads"] == torch.get_num_threads()
    )


def test_a_copy_outside_of_its_checkout_names_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.git_commit() is None


# -- bad input and interruption ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "4"], "--runs 4.*5"),
        (["--prompts", "0"], "--prompts 0 given"),
        (["--warmup", "-1"], "--warmup -1 given"),
        (["--batch-sizes", "0"], "1 sample"),
        (["--samplers", "speculative-jacobi:coupling=maximal"], "acceptance='identical' compares"),
        (["--samplers", "jacobi"], "'jacobi'"),
        (["--samplers", "autoregressive", "--windows", "4"], "--windows.*measured"),
        (["--fuse-projections", "--model", "tunes"], "--fuse-projections"),
        (["--windows", "0"], "window=0"),
        (["--samplers", "speculative-jacobi:initial_draft=down"], "initial_draft='down'"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(arguments, message, monkeypatch):
    monkeypatch.setattr(rounds, "load", lambda *_: pytest.fail("loaded"))
    refuses(ValueError, message, bench.main, arguments)


def test_results_are_not_overwritten_unasked_nor_left_half(model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "bench.json"
    out.write_text("mine")
    arguments = ["--batch-sizes", "1", "--windows", "4", "--prompts", "1", "--curve", "--samplers", IDENTICAL]
    arguments += ["--guidance-scales", "1", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "load", lambda *_: pytest.fail("loaded"))
        refuses(FileExistsError, "--overwrite", bench.main, arguments)
        refuses(IsADirectoryError, "is a folder", bench.main, [*arguments[:-1], str(tmp_path), "--overwrite"])

    def interrupt(*_):
        raise KeyboardInterrupt

    for place, name in ((rounds, "curve"), (whole.os, "fsync"), (whole.os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, interrupt if name != "curve" else lambda *_, **__: interrupt())
            with pytest.raises(KeyboardInterrupt):
                bench.main(["--model", str(model), "--device", "cpu", *arguments, "--overwrite"])
        assert out.read_text() == "mine" and list(tmp_path.iterdir()) == [out]
    document, _ = run(capsys, model, *arguments, "--overwrite")
    assert json.loads(out.read_text()) == document
    assert bench.main(["--model", str(model), "--device", "cpu", *arguments, "--overwrite"]) == 0
    shown = capsys.readouterr().out
    assert "| " in shown and "{" not in shown  # a table alone, unless --json asks for the document


@pytest.mark.parametrize(
    ("arguments", "windows"),
    [(["--curve"], (4, 8, 16, 32, 64)), ([], (16, 32, 64)), (["--windows", "7"], (7,))],
)
def test_what_is_measured_where_nothing_is_named_comes_from_the_registry(
    arguments, windows, model, monkeypatch
):
    seen = {}

    def stop(pipe, settings):
        seen["settings"] = settings
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds, "check_samplers", stop)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--model", str(model), "--device", "cpu", *arguments])
    plain, *others = seen["settings"]
    assert plain.text == "autoregressive"
    names = [f"speculative-jacobi:{text}".rstrip(":") for text in by_name("speculative-jacobi").settings]
    assert [(one.name, one.window) for one in others] == [(name, w) for name in names for w in windows]
    assert {one.law.guidance_scale for one in seen["settings"]} == {LAW.guidance_scale}  # the model's own


def test_processor_time_and_prompts_left_out_are_told():
    assert timing.processor_figures([1.0, 3.0], [4.0, 4.0])["processor_speed_up"] == 2.0
    assert timing.processor_figures([], [])["processor_speed_up"] is None
    assert timing.coverage_note(8, [1], 5) == (
        "At batch 1, 5 rounds drew the first 5 of 8 prompts; --runs 8 draws all."
    )
    assert timing.coverage_note(8, [2], 5) == ""
    clips = motion.sample_clips(40, 3)
    pans = sum(clip.camera != "still" for clip in clips)
    assert 0 < pans < 40
    note = timing.camera_note([motion.caption(clip) for clip in clips])
    assert f" {pans} of 40 clips ({pans / 40:.0%})" in note
    assert timing.camera_note(["a red circle"]) == ""

    def decode(index, condition, first):
        until = time.process_time() + (0.02 if index else 0.06)
        while time.process_time() < until:
            pass
        time.sleep(0.05)  # the clock counts it, the processor does not
        return timing.Decoded(torch.zeros(1, 1), torch.ones(1)), 1.0

    found = timing.time_rounds(
        2, lambda first: None, decode, device=torch.device("cpu"), batch_size=1, runs=3, warmup=0
    )
    figures = timing.processor_figures(found.processor_seconds[1], found.processor_seconds[0])
    assert 2 < figures["processor_speed_up"] < 4 and max(found.processor_seconds[0]) < 0.1
