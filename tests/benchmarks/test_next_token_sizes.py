"""Speed at official sizes: that calls are counted and placed as stated, and that nothing stated passes for measured."""

import os
from typing import Any

import pytest
import torch
from transformers import JanusForConditionalGeneration

from benchmarks.sizes import models, official, room
from benchmarks.sizes import next_token as official_bench
from tests.helpers.bench import benched
from tests.helpers.official import add_tiny_presets
from tests.helpers.official_sizes import tiny as tiny_of
from tests.helpers.refusals import refuses
from visual_spec.eval import measure
from visual_spec.eval.speed import plain_loops
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.registry import by_name

CPU = torch.device("cpu")
SMALL = "--device cpu --image-size 64 --batch-sizes 1 --windows 3 5".split()


@pytest.fixture(autouse=True)
def tiny_presets(monkeypatch):
    add_tiny_presets(monkeypatch)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(measure, "matmul_peak", lambda device, dtype: 2e10)


def tiny(name="llamagen-tiny", dtype=torch.float32) -> Any:
    return models.fill(models.official_model(name, 64), dtype=dtype, device=CPU).model


def run(capsys, *arguments):
    return benched(capsys, *SMALL, *arguments, main=official.main)


JACOBI = "speculative-jacobi"
NAMES = [f"{JACOBI}:{text}".rstrip(":") for text in by_name(JACOBI).settings]


@pytest.mark.parametrize("name", ["llamagen-tiny", "llamagen-tiny-t2i"])
def test_measured_calls_and_stated_acceptance_give_the_picture(capsys, name):
    document, table, text = run(capsys, "--model", name, "--accept-probability", "0.6", "--slots", "8")
    assert document["kind"] == "random-weights" and document["left_out"] == []
    assert document["acceptance"]["measured"] is False and document["acceptance"]["probability"] == 0.6
    assert "* not measured: random weights; follows from the stated acceptance of 0.6" in text
    defaults = (7.5, 1000) if name.endswith("t2i") else (2.0, 0)
    asked = document["settings"]
    assert (asked["guidance_scales"], asked["top_k"]) == ([defaults[0]], defaults[1])
    rows = document["rows"]
    assert [(row["name"], row["window"]) for row in rows] == [
        ("autoregressive", 1),
        *((name, window) for name in NAMES for window in (3, 5)),
    ]
    for row, shown in zip(rows, table, strict=True):
        window = row["window"]
        # One certain token, and the k-th draft with the probability that it and all before it are accepted.
        stated = sum(0.6**k for k in range(window))
        assert row["tokens_per_call"] == pytest.approx(stated) == pytest.approx((1 - 0.6**window) / 0.4)
        assert shown["tokens/call*"] == f"{stated:.2f}" and shown["calls*"] == f"{1 + 15 / stated:.0f}"
        per_call = sorted(1000 * s / c for s, c in zip(row["seconds"], row["calls"], strict=True))
        assert len(per_call) == 5 and row["ms_per_call"]["p50"] == pytest.approx(per_call[2])
        image = row["ms_per_image"]
        assert image["p50"] == pytest.approx(row["prefill_ms"] + 15 / stated * per_call[2])
        assert image["p20"] == pytest.approx(
            row["prefill_ms"] + 15 / stated * (0.2 * per_call[0] + 0.8 * per_call[1])
        )
        assert row["speed_up"] == pytest.approx(rows[0]["ms_per_image"]["p50"] / image["p50"])
        floor = (row["weight_bytes"] + row["cache_bytes"]) / 1e6
        assert row["floor_ms_per_call"] == pytest.approx(floor)
        assert row["floor_share"] == pytest.approx(floor / per_call[2])
        assert shown["of floor"] == f"{100 * floor / per_call[2]:.0f} %"
        assert all(1 <= calls <= 7 for calls in row["calls"])
        phases = row["phase_ms_per_call"]
        assert set(phases) == {"model", "verify"} and shown["forward"] == f"{phases['model']:.2f}"
        assert 0 <= row["gap_ms_per_call"] < per_call[-1]
    assert rows[0]["calls"] == [7] * 5  # 8 slots, the first from the prefill


@pytest.mark.parametrize(("family", "plain"), [("janus", 2), ("chameleon", 1), ("emu3", 1)])
def test_models_of_transformers_have_the_rows_of_today_beside_ours(
    capsys, monkeypatch, tmp_path, family, plain
):
    monkeypatch.setitem(models.TRANSFORMERS, "tiny", lambda size: tiny_of(family))
    plot = tmp_path / "roof.svg"
    arguments = ["--slots", "5", "--samplers", JACOBI, "--guidance-scales", "3", "--plot", str(plot)]
    document, table, _ = run(capsys, "--model", "tiny", *arguments)
    rows = document["rows"]
    assert [row["autoregressive"] for row in rows] == [True] * (plain + 1) + [False] * 2
    assert [row["name"] for row in rows[:plain]] == {
        "janus": ["transformers generate", "official loop"],
        "chameleon": ["official loop"],
        "emu3": ["transformers generate"],
    }[family]
    tokens, length = {"janus": (16, 16), "chameleon": (16, 20), "emu3": (15, 18)}[family]
    for row, shown in zip(rows[:plain], table, strict=False):
        # They pay a call for every row end too; 5 slots have 3 calls between the second token and the last.
        assert (row["calls_per_image"], row["tokens_per_call"]) == (length, tokens / length)
        assert row["calls"] == [3] * 5 and row["sampler"] is None
        assert shown["verify"] == shown["forward"] == shown["host gap"] == "-"
    ours = rows[plain]
    assert (ours["name"], ours["calls_per_image"], ours["tokens_per_call"]) == ("autoregressive", tokens, 1.0)
    best = min(row["ms_per_image"]["p50"] for row in rows[: plain + 1])
    for row in rows:
        assert row["speed_up"] == pytest.approx(best / row["ms_per_image"]["p50"])
    assert max(row["speed_up"] for row in rows[: plain + 1]) == 1.0
    assert plot.read_text().count("% of the roof") == len(rows)


def test_baselines_that_do_not_fit_or_do_not_apply_are_said_to_be_left_out(capsys, monkeypatch):
    monkeypatch.setitem(models.TRANSFORMERS, "tiny", lambda size: tiny_of("chameleon"))
    arguments = ["--model", "tiny", "--slots", "4", "--samplers", JACOBI, "--windows", "2"]
    document, _, _ = run(capsys, *arguments, "--batch-sizes", "1", "2")
    left = {"name": "official loop", "batch_size": 2, "guidance_scale": 1.0}
    assert document["left_out"] == [left | {"guidance_scale": 1.0, "batch_size": 1}, left]
    document, _, _ = run(capsys, *arguments, "--batch-sizes", "1", "2", "--guidance-scales", "3")
    assert document["left_out"] == [left | {"guidance_scale": 3.0}]
    assert [row["name"] for row in document["rows"]].count("official loop") == 1
    official = tiny_of("chameleon")
    settings: dict[str, Any] = dict(dtype=torch.float32, batch_size=1, guided=True)
    with_baseline = sum(official.needed_bytes(**settings, window=1, baseline=True).values())
    without = sum(official.needed_bytes(**settings, window=2).values())
    assert without < with_baseline
    monkeypatch.setattr(room, "available_memory", lambda device: with_baseline - 1)
    document, _, _ = run(capsys, *arguments, "--guidance-scales", "3")
    assert document["left_out"] == [left | {"batch_size": 1, "guidance_scale": 3.0}]


def test_a_baseline_that_fails_costs_its_row_only(capsys, monkeypatch):
    """As `generate` of another version of transformers."""
    monkeypatch.setitem(models.TRANSFORMERS, "tiny", lambda size: tiny_of("janus"))

    def fails(*args: Any, **settings: Any) -> None:
        raise TypeError("missing 1 required positional argument")

    monkeypatch.setattr(JanusForConditionalGeneration, "generate", fails)
    arguments = ["--model", "tiny", "--slots", "5", "--samplers", JACOBI, "--guidance-scales", "3"]
    document, _, _ = run(capsys, *arguments)
    names = [row["name"] for row in document["rows"]]
    assert names[:2] == ["official loop", "autoregressive"] and len(names) == 4
    (left,) = document["left_out"]
    assert left["name"] == "transformers generate"
    assert left["error"] == "TypeError: missing 1 required positional argument"


def test_speed_ups_are_over_the_fastest_row_that_draws_a_token_a_call():
    def row(plain, prefill, calls, *per_call) -> dict[str, Any]:
        quantiles = dict(zip(("p20", "p50", "p80"), per_call, strict=True))
        times = {"ms_per_call": quantiles, "batch_size": 2}
        return dict(autoregressive=plain, prefill_ms=prefill, calls_per_image=calls, **times)

    rows = [row(True, 4.0, 11, 2, 3, 4), row(True, 2.0, 9, 1, 2, 5), row(False, 2.0, 5, 1, 1, 1)]
    official_bench.add_picture_times(rows)
    assert [r["ms_per_image"]["p50"] for r in rows] == [17.0, 9.0, 3.0]
    assert rows[0]["ms_per_image"] == {"p20": 12.0, "p50": 17.0, "p80": 22.0}
    assert [r["speed_up"] for r in rows] == [9 / 17, 1.0, 3.0]


def test_a_batch_shares_its_calls(capsys):
    document, _, _ = run(
        capsys, "--model", "llamagen-tiny", "--slots", "4", "--batch-sizes", "3", "--guidance-scales", "1"
    )
    for row in document["rows"]:
        per_call = sorted(1000 * s / c for s, c in zip(row["seconds"], row["calls"], strict=True))[2]
        expected = row["prefill_ms"] + 15 / row["tokens_per_call"] * per_call
        assert row["ms_per_image"]["p50"] == pytest.approx(expected / 3)


@pytest.mark.parametrize("sampler", [AutoregressiveSampler(), SpeculativeJacobiSampler(window=4)])
def test_the_middle_of_the_grid_is_what_is_timed(sampler):
    model: Any = tiny()
    seen = []
    forward = model.forward

    def recorded(state, tokens, slots, **options):
        seen.extend(slots.flatten().tolist())
        return forward(state, tokens, slots, **options)

    model.forward = recorded
    middle = official_bench.Middle(model, 6)
    called = []
    law = TokenLaw(guidance_scale=2.0)
    trace = sampler(middle, torch.tensor([1]), law=law, callback=lambda index, _: called.append(index)).trace
    assert middle.grid.num_tokens == 6 and middle.first == 5
    assert min(seen) == 5 and set(range(5, 10)) <= set(seen)  # the last slot is not fed
    assert len(called) == int(trace.target_calls[0])  # the prefill is one
    assert (middle.device, middle.decoder) == (CPU, model)


def test_needed_memory_is_what_the_model_and_its_cache_take():
    official = models.official_model("llamagen-tiny-t2i", 64)
    settings: dict[str, Any] = dict(batch_size=2, window=3)
    needed = official.needed_bytes(dtype=torch.float32, guided=True, **settings)
    half = official.needed_bytes(dtype=torch.bfloat16, guided=False, **settings)
    model = models.fill(official, dtype=torch.float32, device=CPU).model
    assert needed["weights"] == sum(parameter.nbytes for parameter in model.parameters())
    state = model.prefill(official.condition(2), batch_size=2, guided=True, window=3)
    assert needed["cache"] == state.cache.nbytes
    assert needed["logits"] >= 4 * 3 * 16384 * 4
    assert (half["weights"], half["cache"]) == (needed["weights"] // 2, needed["cache"] // 4)


@pytest.mark.parametrize(
    ("gigabytes", "arguments", "message"),
    [
        (8, [], r"27\.9 GB.*26\.5.*8\.0 GB.*1.*27\.7"),
        (40, ["--batch-sizes", "1", "64", "--windows", "16"], r"107\.1 GB.*40\.0 GB.*16"),
        (28, ["--windows", "512"], "1.*--batch-sizes"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_made(monkeypatch, gigabytes, arguments, message):
    monkeypatch.setattr(models, "fill", lambda *_, **__: pytest.fail("made"))
    monkeypatch.setattr(room, "available_memory", lambda device: gigabytes * 10**9)
    with pytest.raises(ValueError, match=message):
        start = ["--model", "llamagen-7b", "--device", "cpu", "--batch-sizes", "1"]
        official.main([*start, *arguments])


@pytest.mark.parametrize("free", range(0, 400, 7))
def test_what_is_said_to_fit_fits_and_nothing_larger(free):
    def needed(batch_size, window):
        fed = batch_size * window
        return {"weights": 50, "cache": 9 * batch_size + fed, "logits": 2 * fed}

    found = room.what_fits(needed, free, 10, 12)
    fits = [(b, w) for b in range(1, 11) for w in range(1, 13) if sum(needed(b, w).values()) <= free]
    full = [b for b, w in fits if w == 12]
    if full:
        assert found == (max(full), 12)
    elif fits:
        assert found == (1, max(w for b, w in fits if b == 1))
    else:
        assert found is None


def test_available_memory_is_below_that_of_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < room.available_memory(CPU) <= total


def test_weights_are_random_of_the_asked_kind_and_the_same_every_time():
    one, two = tiny(dtype=torch.bfloat16), tiny(dtype=torch.bfloat16)
    assert one.dtype == torch.bfloat16 and one.device == CPU
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all() and a.float().std() < 0.03
    assert (one.norm.weight == 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "shapes"], "--model shapes; pass one of"),
        (["--model", "janus-pro-7b", "--image-size", "512"], "Janus-Pro.*384"),
        (["--model", "llamagen-b", "--plot", "roof.gif"], r"--plot roof\.gif"),
        (["--model", "var-d16", "--plot", "roof.svg"], "--plot"),
        (["--model", "llamagen-xs-t2i"], "llamagen-xs-t2i"),
        (["--model", "llamagen-b", "--image-size", "100"], "--image-size 100.*16"),
        (["--model", "llamagen-b", "--accept-probability", "1.5"], r"--accept-probability 1\.5"),
        (["--model", "llamagen-b", "--slots", "1"], "--slots 1.*2"),
        (["--model", "llamagen-b", "--curve"], "--curve"),
        (["--model", "llamagen-b", "--runs", "2"], "--runs 2 given"),
        (["--model", "llamagen-b", "--samplers", "tree"], "random weights time"),
        (["--model", "llamagen-b", "--samplers", "zipar"], "random weights time"),
        (["--model", "llamagen-b", "--samplers", f"{JACOBI}:window=auto"], "window=auto.*random weights"),
        (["--model", "llamagen-b", "--masked", "tunes_masked"], "--model tunes --masked"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(arguments, message, monkeypatch):
    monkeypatch.setattr(models, "fill", lambda *_, **__: pytest.fail("made"))
    refuses(ValueError, message, official.main, ["--device", "cpu", *arguments])


def test_plain_timing_of_a_schedule_passes_the_slots():
    """Decoding without a cache knows which slot it is at, too."""
    model, law = tiny(), TokenLaw(guidance_scale=3.0, guidance_until=5, top_k=4)
    generator = [torch.Generator().manual_seed(3)]
    tokens = plain_loops.decode_without_cache(
        model, torch.tensor([2]), law=law, generator=generator, batch_size=1
    )
    generator = [torch.Generator().manual_seed(3)]
    assert tokens.equal(
        AutoregressiveSampler()(model, torch.tensor([2]), law=law, generator=generator).tokens
    )
