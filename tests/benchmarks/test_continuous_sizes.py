"""The rows of MAR at official size: which calls are timed, and what they cannot but read and do."""

import json

import pytest
import torch

from benchmarks.sizes import continuous as continuous_sizes
from benchmarks.sizes import official
from benchmarks.sizes.continuous import SomeCalls, costs, mar
from tests.helpers.refusals import refuses
from visual_spec.eval import measure
from visual_spec.kernels import head_step
from visual_spec.models.continuous.mar import PRESETS, MARTransformer

CPU = torch.device("cpu")
TINY = dict(
    grid_size=4, token_dim=4, dim=16, num_layers=1, num_heads=2, head_width=16, head_depth=1, num_classes=5,
    buffer_size=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(measure, "matmul_peak", lambda device, dtype: 1e11)


@pytest.fixture(scope="module")
def model() -> MARTransformer:
    return mar(TINY, dtype=torch.float32, device=CPU)


def test_calls_are_spread_over_the_schedule_and_run_with_its_shapes(model, monkeypatch):
    with torch.device("meta"):
        whole = MARTransformer(**PRESETS["B"])  # pyright: ignore
    assert SomeCalls(8, steps=256).chosen(whole) == [16, 48, 80, 112, 144, 176, 208, 240]
    assert SomeCalls(8, steps=4).chosen(model) == [1, 2, 3]
    seen = []
    real = SomeCalls.step

    def step(self, run, state):
        seen.append((state.width[:3], int(state.lengths[0])))
        real(self, run, state)

    monkeypatch.setattr(SomeCalls, "step", step)
    rows = continuous_sizes.measure_calls(model, ((6, 5), (16, 3)), batch_size=2, runs=2, warmup=0, sampled=3)
    assert [row["name"] for row in rows] == ["6 x 5, operators", "16 x 3, operators"]
    # Of 16 tokens in 6 calls, as the cosine schedule leaves 15, 13, 11, 8, 4 and none of them hidden.
    assert seen[:3] == [((2, 1, 5), 1), ((3, 5, 5), 5), ((4, 12, 5), 12)] and seen[:3] == seen[3:6]
    assert [row["calls"] for row in rows] == [[3, 3]] * 2


def test_pictures_are_their_calls(model):
    (row,) = continuous_sizes.measure_calls(model, ((8, 3),), batch_size=2, runs=3, warmup=0, sampled=2)
    assert row["ms_per_image"]["p50"] == pytest.approx(row["ms_per_call"]["p50"] * 8 / 2)
    assert row["tokens_per_call"] == 2 and row["calls_per_image"] == 8 and row["speed_up"] == 1
    assert row["floor_share"] == pytest.approx(row["floor_ms_per_call"] / row["ms_per_call"]["p50"])


def test_costs_are_those_of_a_count_by_hand(model):
    """Of one call of 16: 8 tokens known, one drawn, 3 levels, 2 samples with guidance."""
    sampler = SomeCalls(1, steps=16, head_steps=3)
    (number,) = sampler.chosen(model)
    found = costs(model, sampler, 2)
    sizes = {name: value.numel() for name, value in model.named_parameters()}
    modulating = sum(
        n for name, n in sizes.items() if "adaLN" in name or "time_embed" in name or "cond_embed" in name
    )
    rest = sum(n for name, n in sizes.items() if name.startswith("diffloss")) - modulating
    layers = sum(n for name, n in sizes.items() if "coder_blocks" in name)
    rows, modulations = 2 * 2, 16 * (3 * 1 + 2)
    assert found["levels"] == (3 * rest * 4, 3 * 2 * rest * rows)
    assert found["modulations"] == (
        modulating * 4 + 2 * 3 * rows * modulations * 4,
        2 * modulating * 3 * rows,
    )
    attention = sum(4 * 16 * width**2 for width in (2 + number, 2 + 16))
    products = sum(2 * layers / 2 * width for width in (2 + number, 2 + 16))
    assert found["trunk"] == (layers * 4, rows * (products + attention))


def bench_of(capsys, *arguments: str) -> tuple[dict, str]:
    assert official.main(["--device", "cpu", *arguments, "--json"]) == 0
    out = capsys.readouterr().out.strip()
    return json.loads(out.splitlines()[-1]), out


def test_the_bench_counts_official_sizes_without_running_them(capsys):
    document, text = bench_of(
        capsys, "--model", "mar-h", "--dtype", "bfloat16", "--batch-sizes", "1", "--count-only"
    )
    assert document["kind"] == "latent-count"
    assert document["environment"]["transformer_parameters"] == 942_403_104
    assert [row["name"] for row in document["rows"]] == ["256 x 100", "64 x 100", "64 x 25"]
    long, short = document["rows"][1:]
    # Fewer levels read the head fewer times, of 151 million weights less what the modulations have.
    assert long["weight_bytes"] > short["weight_bytes"] > 2 * 0.7 * 942_403_104
    assert "| 64 x 25 | 1 | 64 |" in " ".join(text.split())


def test_the_bench_times_them_with_the_floor(capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "B", TINY)
    monkeypatch.setattr(continuous_sizes, "SCHEDULES", ((6, 3),))
    document, text = bench_of(capsys, "--model", "mar-b", "--batch-sizes", "1", "2", "--warmup", "0")
    assert document["kind"] == "latent-random-weights" and document["architecture"] == "mar-b"
    assert [row["batch_size"] for row in document["rows"]] == [1, 2]
    for row in document["rows"]:
        assert row["ms_per_image"]["p50"] == pytest.approx(row["ms_per_call"]["p50"] * 6 / row["batch_size"])
        assert row["floor_share"] == pytest.approx(row["floor_ms_per_call"] / row["ms_per_call"]["p50"])
    assert text.count("| 6 x 3, operators |") == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "mar-xl"], "--model.*MAR"),
        (["--model", "mar-b", "--windows", "4"], "--windows.*MAR"),
        (["--model", "mar-b", "--fuse-projections"], "--fuse-projections"),
    ],
)  # fmt: skip
def test_what_the_rows_do_not_have_is_refused(arguments, told):
    refuses(ValueError, told, official.main, ["--device", "cpu", *arguments])


def test_kernels_are_switched_off_within_only():
    most = head_step.MOST_ROWS
    with pytest.raises(RuntimeError), continuous_sizes._kernels(False):
        assert head_step.MOST_ROWS == 0
        raise RuntimeError
    assert head_step.MOST_ROWS == most == 128
