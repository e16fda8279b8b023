"""Speed at official sizes: that calls are counted and placed as stated, and that nothing stated passes for measured."""

import json
import os
from typing import Any

import pytest
import torch

from tests.official import add_tiny_presets
from visual_spec.eval import bench, measure, timing, true_size
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.law import TokenLaw

CPU = torch.device("cpu")
SMALL = [
    "--random-weights",
    "--device",
    "cpu",
    "--image-size",
    "64",
    "--batch-sizes",
    "1",
    "--windows",
    "3",
    "5",
]


@pytest.fixture(autouse=True)
def tiny_presets(monkeypatch):
    add_tiny_presets(monkeypatch)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e9)


def tiny(name="llamagen-tiny", **changes):
    settings = dict(image_size=64, dtype=torch.float32, device=CPU)
    return true_size.random_transformer(true_size.architecture(name), **{**settings, **changes})


def run(capsys, *arguments):
    assert bench.main([*SMALL, *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    shown = [dict(zip(table[0], cells, strict=True)) for cells in table[2:]]
    return json.loads(lines[-1]), shown, "\n".join(lines[:-1])


@pytest.mark.parametrize("name", ["llamagen-tiny", "llamagen-tiny-t2i"])
def test_measured_calls_and_stated_acceptance_give_the_picture(capsys, name):
    document, table, text = run(capsys, "--model", name, "--accept-probability", "0.6", "--slots", "8")
    assert document["kind"] == "random-weights"
    assert document["acceptance"]["measured"] is False and document["acceptance"]["probability"] == 0.6
    assert "* not measured: random weights; follows from the stated acceptance of 0.6" in text
    defaults = (7.5, 1000) if name.endswith("t2i") else (2.0, 0)
    assert (document["settings"]["guidance_scales"], document["settings"]["top_k"]) == (
        [defaults[0]],
        defaults[1],
    )
    rows = document["rows"]
    assert [(row["name"], row["window"]) for row in rows] == [
        ("autoregressive", 1),
        *(
            (f"jacobi {method}", window)
            for method in ("gumbel+identical", "maximal+exact")
            for window in (3, 5)
        ),
    ]
    for row, shown in zip(rows, table, strict=True):
        window = row["window"]
        # One certain token, and the k-th draft with the probability that it and all before it are accepted.
        stated = sum(0.6**k for k in range(window))
        assert row["tokens_per_call"] == pytest.approx(stated) == pytest.approx((1 - 0.6**window) / 0.4)
        assert shown["tokens/call*"] == f"{stated:.2f}"
        per_call = sorted(1000 * s / c for s, c in zip(row["seconds"], row["calls"], strict=True))
        assert len(per_call) == 5 and row["ms_per_call"]["p50"] == pytest.approx(per_call[2])
        assert row["ms_per_image"] == pytest.approx(row["prefill_ms"] + 15 / stated * per_call[2])
        assert row["speed_up"] == pytest.approx(rows[0]["ms_per_image"] / row["ms_per_image"])
        assert row["floor_ms_per_call"] == pytest.approx((row["weight_bytes"] + row["cache_bytes"]) / 1e6)
        assert all(1 <= calls <= 7 for calls in row["calls"])
    assert rows[0]["calls"] == [7] * 5  # 8 slots, the first from the prefill


def test_a_batch_shares_its_calls(capsys):
    document, _, _ = run(
        capsys, "--model", "llamagen-tiny", "--slots", "4", "--batch-sizes", "3", "--guidance-scales", "1"
    )
    for row in document["rows"]:
        per_call = sorted(1000 * s / c for s, c in zip(row["seconds"], row["calls"], strict=True))[2]
        expected = row["prefill_ms"] + 15 / row["tokens_per_call"] * per_call
        assert row["ms_per_image"] == pytest.approx(expected / 3)


@pytest.mark.parametrize("sampler", [AutoregressiveSampler(), SpeculativeJacobiSampler(window=4)])
def test_the_middle_of_the_grid_is_what_is_timed(sampler):
    model: Any = tiny()
    seen = []
    forward = model.forward

    def recorded(state, tokens, slots, **options):
        seen.extend(slots.flatten().tolist())
        return forward(state, tokens, slots, **options)

    model.forward = recorded
    middle = true_size.Middle(model, 6)
    trace = sampler(middle, torch.tensor([1]), law=TokenLaw(guidance_scale=2.0)).trace
    assert middle.grid.num_tokens == 6 and middle.first == 5
    assert min(seen) == 5 and set(range(5, 10)) <= set(seen)  # the last slot is not fed
    assert middle.calls == int(trace.target_calls[0]) - 1


def test_needed_memory_is_what_the_model_and_its_cache_take():
    model = tiny("llamagen-tiny-t2i")
    empty = true_size.on_meta(true_size.architecture("llamagen-tiny-t2i"), 64)
    needed = true_size.needed_bytes(empty, dtype=torch.float32, batch_size=2, window=3, guided=True)
    assert needed["weights"] == sum(parameter.nbytes for parameter in model.parameters())
    state = model.prefill(true_size.random_condition(model, 2), batch_size=2, guided=True, window=3)
    assert needed["cache"] == state.keys.nbytes + state.values.nbytes
    assert needed["logits"] >= 4 * 3 * 16384 * 4
    half = true_size.needed_bytes(empty, dtype=torch.bfloat16, batch_size=2, window=3, guided=False)
    assert (half["weights"], half["cache"]) == (needed["weights"] // 2, needed["cache"] // 4)


def test_what_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(true_size, "random_transformer", lambda *_, **__: pytest.fail("made"))
    monkeypatch.setattr(measure, "available_memory", lambda device: 8 * 10**9)
    with pytest.raises(
        ValueError, match=r"needs 2\d\.\d GB \(weights 26\.5, .*\), and cpu has 8\.0 GB free; pass a smaller"
    ):
        bench.main(["--random-weights", "--model", "llamagen-7b", "--device", "cpu", "--batch-sizes", "1"])


def test_available_memory_is_below_that_of_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < measure.available_memory(CPU) <= total


def test_weights_are_random_of_the_asked_kind_and_the_same_every_time():
    one, two = tiny(dtype=torch.bfloat16), tiny(dtype=torch.bfloat16)
    assert one.dtype == torch.bfloat16 and one.device == CPU
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all() and a.float().std() < 0.03
    assert (one.norm.weight == 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "shapes"], "--random-weights with --model shapes; pass one of llamagen-b, llamagen-l"),
        (["--model", "llamagen-xs-t2i"], "pass one of llamagen-b"),
        (["--model", "llamagen-b", "--image-size", "100"], "--image-size 100; pass a multiple of 16"),
        (
            ["--model", "llamagen-b", "--accept-probability", "1.5"],
            "--accept-probability 1.5 given; pass a number from",
        ),
        (["--model", "llamagen-b", "--slots", "1"], "--slots 1 given; pass at least 2"),
        (["--model", "llamagen-b", "--curve"], "--curve counts accepted drafts"),
        (["--model", "llamagen-b", "--runs", "2"], "--runs 2 given"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(arguments, message, monkeypatch):
    monkeypatch.setattr(true_size, "random_transformer", lambda *_, **__: pytest.fail("made"))
    with pytest.raises(ValueError, match=message):
        bench.main(["--random-weights", "--device", "cpu", *arguments])


def test_plain_timing_of_a_schedule_passes_the_slots():
    """Decoding without a cache knows which slot it is at, too."""
    model, law = tiny(), TokenLaw(guidance_scale=3.0, guidance_until=5, top_k=4)
    generator = [torch.Generator().manual_seed(3)]
    tokens, _ = timing.decode_without_cache(
        model, torch.tensor([2]), law=law, generator=generator, batch_size=1
    )
    generator = [torch.Generator().manual_seed(3)]
    assert tokens.equal(
        AutoregressiveSampler()(model, torch.tensor([2]), law=law, generator=generator).tokens
    )
