"""The benchmark of next-scale models: rows against raw seconds, single decodes and arithmetic; misfit options."""

import json
import math

import pytest
import torch

from benchmarks.sizes import official, room, scales
from tests.helpers.bench import benched, check_times
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_pipeline
from tests.helpers.tiny_scales import TINY_VQ, tiny_scale_pipeline
from visual_spec.commands import bench
from visual_spec.eval import measure
from visual_spec.eval.settings import parse_setting
from visual_spec.eval.speed import rounds, scale_cost
from visual_spec.eval.timing import Decoded, time_rounds
from visual_spec.models.next_scale import var
from visual_spec.models.next_scale.scale_budget import cache_bytes
from visual_spec.samplers.core.law import TokenLaw

CPU = torch.device("cpu")
ROWS = [
    "scale-wise:num_draft_scales=0",
    "scale-wise:num_draft_scales=2",
    "scale-wise:num_draft_scales=all,cache_share=0.7",
    "scale-wise:num_draft_scales=all,cache_share=1",
]
TINY = {"vocab_size": 12, "code_dim": 2, "dim": 16, "num_heads": 2, "num_classes": 5, "scales": (1, 2, 3, 4)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_scale_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch):
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e9)
    for name, layers in (("large", 2), ("small", 1)):
        monkeypatch.setitem(var.PRESETS, name, {**TINY, "num_layers": layers})
    build = scale_cost.pipeline_on_meta

    def tiny(transformer, vq_model, refiner=None, **settings):
        return build(transformer, {**TINY_VQ, **vq_model}, refiner, **settings)

    monkeypatch.setattr(scale_cost, "pipeline_on_meta", tiny)


def test_the_table_follows_from_the_raw_numbers(model, capsys, tmp_path):
    arguments = ["--model", model, "--batch-sizes", 1, 2, "--warmup", 0, "--samplers", *ROWS]
    document, table, text = benched(capsys, *arguments, "--out", tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == document and document["kind"] == "scale-bench"
    assert "tokens to pixels" in text.splitlines()[0] and document["environment"]["refiner_parameters"] > 0
    rows = document["rows"]
    assert len(rows) == len(table) == 2 * 5
    names = ["scale-wise:num_draft_scales=all", *ROWS]
    assert [row["name"] for row in rows] == names * 2
    config = dict(tiny_scale_pipeline().transformer.config)
    full = cache_bytes(config, None, 1, True, torch.float32)
    for place, (row, shown) in enumerate(zip(rows, table, strict=True)):
        plain, batch = rows[place - place % 5], row["batch_size"]
        assert len(row["seconds"]) == 5 and row["samples"] == 5 * batch
        check_times(row, shown, plain, digits=1)
        assert row["floor_ms_per_image"] == pytest.approx(row["bytes_per_image"] / 1e9 * 1000)
        # What the trace tells is what is counted; layers that share alike hold as many tokens in all.
        assert row["cache_held_measured"] == row["cache_held_per_image"]
        assert shown["of plain"] == f"{100 * row['cache_held_per_image'] / full.held:.0f} %"
    assert rows[0]["cache_held_per_image"] == full.held and rows[0]["cache_peak_per_image"] == full.peak
    assert [shown["same as plain"] for shown in table[:5]] == ["-", "-", "-", "-", "5 of 5"]
    assert rows[5]["weight_bytes_per_image"] == rows[0]["weight_bytes_per_image"] / 2
    assert rows[5]["flops_per_image"] == rows[0]["flops_per_image"] > 1.3 * rows[1]["flops_per_image"]


def test_rounds_draw_their_own_classes_and_seeds(model, monkeypatch):
    pipe = tiny_scale_pipeline()
    seen = {}

    def kept(count, prepare, decode, **options):
        def keeping(index, condition, first):
            found = decode(index, condition, first)
            seen[index, first] = found[0].tokens
            return found

        return time_rounds(count, prepare, keeping, **options)

    monkeypatch.setattr(rounds, "time_rounds", kept)
    law = TokenLaw(guidance_scale=2.5, top_k=5)
    settings = [parse_setting(text, law, 40) for text in ("scale-wise:num_draft_scales=all", ROWS[1])]
    labels = rounds.prompts_of(pipe, pipe.num_classes)
    rows = rounds.time_settings(pipe, settings, labels, batch_size=2, runs=5, warmup=0)
    for (index, first), tokens in seen.items():
        labels = [first % 5, (first + 1) % 5]
        want = pipe(
            labels, generator=seeded(40 + first, 41 + first), num_draft_scales=(4, 2)[index],
            guidance_scale=2.5, top_k=5, top_p=1.0,
        )  # fmt: skip
        assert tokens.equal(want.tokens)
    assert sorted({first for _, first in seen}) == [0, 2, 4, 6, 8] and len(seen) == 10
    assert rows[0]["speed_up"]["p50"] == 1 and rows[1]["identical_samples"] is None


def test_rounds_run_backwards_every_second_time():
    order = []

    def decode(index, condition, first):
        order.append((index, condition, first))
        return Decoded(torch.tensor([[index if first else 0]]), torch.tensor([3])), float(index)

    found = time_rounds(3, lambda first: -first, decode, device=CPU, batch_size=1, runs=2, warmup=1)
    assert order[:3] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)] == order[3:6]
    assert order[6:] == [(2, -1, 1), (1, -1, 1), (0, -1, 1)]
    assert found.seconds == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]] and found.identical == [2, 1, 1]
    assert found.calls == [[[3], [3]]] * 3


def test_the_rows_of_a_model_that_names_none(model, capsys):
    document, table, _ = benched(capsys, "--model", model, "--count-only", "--batch-sizes", 1)
    assert document["kind"] == "scale-count" and "speed-up" not in table[0]
    assert [row["name"].partition(":")[2] for row in document["rows"]] == [
        "num_draft_scales=all",
        *(f"num_draft_scales={split}" for split in (0, 1, 2, 3)),
        "num_draft_scales=all,cache_share=1.0",
        "num_draft_scales=2,cache_share=1.0",
        "num_draft_scales=3,cache_share=1.0",
    ]
    arguments = ["--model", model, "--count-only", "--batch-sizes", 1, "--guidance-scales", 1, 3]
    guided = benched(capsys, *arguments)[0]["rows"]
    assert [row["guidance_scale"] for row in guided] == [1.0] * 8 + [3.0] * 8
    assert guided[0]["cache_bytes_per_image"] == guided[8]["cache_bytes_per_image"] / 2


@pytest.mark.parametrize("name", ["var-large", "var-large+var-small"])
def test_official_sizes_have_random_weights_and_true_costs(capsys, name):
    arguments = ["--model", name, "--batch-sizes", 2, "--warmup", 0]
    document, table, _ = benched(
        capsys,
        *arguments,
        "--samplers",
        "scale-wise:num_draft_scales=all,cache_share=0.7",
        main=official.main,
    )
    assert document["kind"] == "scale-random-weights"
    assert all(math.isfinite(second) for row in document["rows"] for second in row["seconds"])
    counted = benched(capsys, *arguments, "--count-only", main=official.main)[0]
    shared = ("flops_per_image", "bytes_per_image", "cache_held_per_image")
    assert all(document["rows"][0][key] == counted["rows"][0][key] for key in shared)
    small = sum(parameter.numel() for parameter in var.VARTransformer(**var.PRESETS["small"]).parameters())
    assert counted["environment"]["refiner_parameters"] == (None if "+" not in name else small)
    assert document["rows"][1]["cache_held_measured"] == document["rows"][1]["cache_held_per_image"]
    assert document["settings"]["model"] == name and len(counted["rows"]) == (2 if "+" not in name else 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--windows", "8"], "--windows.*measured"),
        (["--curve"], "--curve"),
        (["--samplers", "gumbel+exact"], r"'gumbel\+exact'"),
        (["--samplers", "autoregressive"], "AutoregressiveSampler"),
        (["--samplers", "scale-wise:num_draft_scales=9"], "num_draft_scales=9.*0.*4"),
        (["--samplers", "scale-wise:cache_share=0.1"], "share=0.1 leaves"),
        (["--runs", "3"], "--runs 3.*5"),
    ],
)
def test_options_that_do_not_fit(model, arguments, message):
    refuses(ValueError, message, bench.main, ["--model", str(model), "--device", "cpu", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "var-d17"], "var-d16, var-d20.*CoDe"),
        (["--model", "var-d16+var-d16+var-d16"], "CoDe"),
        (["--model", "var-d16", "--image-size", "384"], "--image-size 384; VAR.*256.*512"),
    ],
)
def test_official_sizes_that_there_are_not(arguments, message):
    refuses(ValueError, message, official.main, ["--device", "cpu", *arguments])


def test_next_token_models_are_not_counted(tmp_path):
    tiny_pipeline().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--count-only"):
        bench.main(["--model", str(tmp_path), "--device", "cpu", "--count-only"])
    with pytest.raises(ValueError, match="ScaleWiseSampler"):
        bench.main(["--model", str(tmp_path), "--device", "cpu", "--samplers", "scale-wise"])


def test_what_does_not_fit_the_device_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(room, "available_memory", lambda device: 10**4)
    monkeypatch.setattr(scales, "random_pipeline", lambda *_, **__: pytest.fail("made"))
    refuses(ValueError, r"GB \(weights", official.main, ["--device", "cpu", "--model", "var-large"])


def test_a_model_is_timed_under_its_own_law(tmp_path, capsys):
    pipe = tiny_scale_pipeline(default_guidance_scale=1.7, default_top_k=3, default_top_p=0.8)
    pipe.save_pretrained(tmp_path)
    law = scale_cost.like_on_meta(pipe).make_law()
    assert (law.guidance_scale, law.top_k, law.top_p) == (1.7, 3, 0.8)
    document, table, _ = benched(capsys, "--model", tmp_path, "--count-only", "--samplers", ROWS[1])
    assert {row["guidance_scale"] for row in document["rows"]} == {1.7} and table[0]["guidance"] == "1.7"
