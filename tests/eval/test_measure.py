"""What a call is said to spend its time on, what a machine is said to reach, and what a device computes in."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.sizes import next_token as official_bench
from benchmarks.sizes import official
from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_pipeline
from visual_spec.eval import measure
from visual_spec.eval.defaults import with_setting
from visual_spec.eval.settings import parse_setting
from visual_spec.eval.speed import plain_loops, rounds
from visual_spec.models.core.protocol import DecodeState
from visual_spec.pipelines import placing
from visual_spec.samplers.core.graph import can_record
from visual_spec.samplers.core.law import TokenLaw

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LAW = TokenLaw()
SETTINGS = [parse_setting(text, LAW, 0) for text in ("autoregressive", "speculative-jacobi:window=4")]


@pytest.mark.parametrize("seed", range(5))
def test_covered_time_is_the_union_of_intervals(seed):
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 60, (12,), generator=generator).tolist()
    spans = [(start, start + int(torch.randint(0, 9, (1,), generator=generator))) for start in starts]
    assert measure.covered(spans) == len({tick for start, stop in spans for tick in range(start, stop)})
    assert measure.covered([]) == 0


def test_phases_and_gap_add_up_to_a_call_on_a_processor():
    seconds, calls = [1.0, 2.0, 4.0], [10, 10, 20]
    phases = [{"model": 0.6, "verify": 0.3}, {"model": 1.5, "verify": 0.4}, {"model": 3.0, "verify": 0.8}]
    found = measure.phase_figures(seconds, phases, calls, device=CPU)
    assert found["phase_ms_per_call"] == pytest.approx({"model": 150.0, "verify": 40.0})
    assert found["gap_ms_per_call"] == pytest.approx(10.0)
    phases = [{**laps, "measure": 5.0} for laps in phases]  # which `seconds` do not hold
    assert measure.phase_figures(seconds, phases, calls, device=CPU)["gap_ms_per_call"] == pytest.approx(10.0)


def test_the_prefill_is_in_no_call_and_in_no_gap():
    """Of every round, with raw seconds by hand: 10 calls after a prefill of 100 s, and a gap of 1 s a call."""
    laps = {"prefill": 100.0, "model": 20.0, "verify": 5.0}
    trace: Any = SimpleNamespace(seconds=135.0, phase_seconds=laps, target_calls=torch.tensor([7, 11]))
    setting: Any = SimpleNamespace(text="row", law=None)
    expected = {"phase_ms_per_call": {"model": 2000.0, "verify": 500.0}, "gap_ms_per_call": 1000.0}
    pipe: Any = SimpleNamespace(device=CPU)
    assert rounds._phases(pipe, setting, 3 * [trace], 2) == expected

    def sampler(model, condition, *, callback, **options):
        for call in range(11):
            callback(call, torch.zeros(2))
        return SimpleNamespace(trace=trace)

    setting.sampler = sampler
    middle: Any = SimpleNamespace(device=CPU)
    found = official_bench.time_sampler(setting, middle, None, batch_size=2, runs=3, warmup=1)
    assert found["seconds"] == 3 * [35.0] and found["prefill_ms"] == 100_000
    assert {name: found[name] for name in expected} == expected
    assert laps["prefill"] == 100  # the trace is left as it is


def test_on_a_gpu_the_gap_is_the_time_without_work():
    seconds, phases, calls = [1.0, 2.0, 3.0], [{"model": 0.9}, {"model": 1.9}, {"model": 2.9}], [10, 10, 10]
    found = measure.phase_figures(seconds, phases, calls, device=GPU, busy_ms=150.0)
    assert found["gap_ms_per_call"] == pytest.approx(50.0)
    assert measure.phase_figures(seconds, phases, calls, device=GPU)["gap_ms_per_call"] is None
    assert measure.phase_figures(seconds, phases, calls, device=GPU, busy_ms=999.0)["gap_ms_per_call"] == 0
    assert measure.busy_ms_per_call(lambda callback: pytest.fail("decoded"), CPU) is None


def test_busy_time_is_that_of_the_device_after_the_prefill(monkeypatch):
    """A profiler that saw two kernels of the device, one of the host, and a mark that somebody set."""

    class Event:
        def __init__(self, kind: Any, start: float, end: float, is_user_annotation: bool = False) -> None:
            self.name, self.device_type, self.is_user_annotation = "kernel", kind, is_user_annotation
            self.time_range = type("Range", (), {"start": start, "end": end})

    kinds: Any = vars(torch.autograd)["DeviceType"]
    log: list[str] = []

    class Profiler:
        def __init__(self, activities: Any) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def start(self) -> None:
            log.append("start")

        def stop(self) -> None:
            log.append("stop")

        def events(self) -> list[Event]:
            return [
                Event(kinds.CUDA, 1000.0, 3000.0),
                Event(kinds.CUDA, 2000.0, 5000.0),
                Event(kinds.CPU, 0.0, 90000.0),
                Event(kinds.CUDA, 0.0, 90000.0, is_user_annotation=True),
            ]

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))

    def decode(callback: Any) -> None:
        log.append("prefill")
        for index in range(5):
            callback(index, torch.zeros(1))
            log.append("call")

    assert measure.busy_ms_per_call(decode, GPU) == pytest.approx(4.0 / 4)  # milliseconds over calls
    assert log[:4] == ["prefill", "wait", "start", "call"] and log[-2:] == ["wait", "stop"]


def test_the_matmul_peak_counts_two_operations_a_product(monkeypatch):
    laps = iter([0.5, 0.25, 1.0])
    monkeypatch.setattr(measure, "timed", lambda function, device: (function(), next(laps)))
    assert measure.matmul_peak(CPU, torch.float32, size=32, repeats=3) == 2 * 32**3 / 0.25


def test_a_processor_computes_in_the_dtypes_whose_products_are_right(monkeypatch):
    asked = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    assert all(measure._computes_in(CPU, dtype) for dtype in asked)
    measure.refuse_dtype(CPU, torch.float16)
    everything = "float32, bfloat16, float16, float64"
    with pytest.raises(
        ValueError, match=f"does not compute in bool; pass --dtype with one of {everything}[.]"
    ):
        measure.refuse_dtype(CPU, torch.bool)
    ones = torch.ones
    right = torch.float64
    monkeypatch.setattr(
        torch, "ones", lambda *size, dtype, device: ones(size, dtype=dtype, device=device) * (dtype == right)
    )
    measure.refuse_dtype(CPU, right)
    refuses(ValueError, "float32", measure.refuse_dtype, CPU, torch.float32)


def test_a_dtype_that_the_device_lacks_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(measure, "device_name", lambda device: "An old chip")
    computes = measure._computes_in
    monkeypatch.setattr(
        measure, "_computes_in", lambda device, dtype: dtype != torch.bfloat16 or computes(device, dtype)
    )
    refuses(ValueError, "bfloat16", measure.refuse_dtype, GPU, torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16"):
        monkeypatch.setattr(placing, "choose_device", lambda name: GPU)
        official.main(["--model", "llamagen-b", "--dtype", "bfloat16"])


@pytest.mark.parametrize(
    ("name", "message"), [("gpu", "--device gpu"), ("cuda:99", "--device.*99.*PyTorch.*GPUs")]
)
def test_devices_that_are_not_there_are_refused(name, message):
    refuses(ValueError, message, placing.choose_device, name)


# -- rows with and without a recorded graph ----------------------------------------------------------------------------


def test_on_cuda_every_sampler_has_a_row_without_and_with_a_graph():
    texts = [
        "autoregressive",
        "speculative-jacobi:window=7,coupling=maximal,acceptance=exact",
        "zipar:window=2",  # records nothing
        "speculative-jacobi:graph=true",  # says itself
    ]
    settings = [parse_setting(text, LAW, 3) for text in texts]
    found = rounds.with_graphs(settings, GPU, recordable=True)
    assert [(one.text, one.window, one.sampler.config.get("graph")) for one in found] == [
        ("autoregressive:graph=false", None, False),
        ("autoregressive:graph=true", None, True),
        (f"{texts[1]},graph=false", 7, False),
        (f"{texts[1]},graph=true", 7, True),
        ("zipar:window=2", 2, None),
        ("speculative-jacobi:graph=true", "by batch", True),
    ]
    # They are what their text says.
    assert [parse_setting(one.text, LAW, 3).describe() for one in found] == [one.describe() for one in found]
    alone = rounds.with_graphs(settings[:2], GPU, recordable=False)
    assert [one.text for one in alone] == ["autoregressive:graph=false", f"{texts[1]},graph=false"]
    assert rounds.with_graphs(settings, CPU, recordable=True) == settings


def test_only_states_that_name_their_buffers_are_recorded():
    pipe = tiny_pipeline()
    state = pipe.transformer.prefill(pipe.make_condition("a"), batch_size=1, guided=False, window=1)
    assert can_record(state)
    assert not can_record(DecodeState(logits=torch.zeros(1, 3), guided=False, window=1))


def test_phases_of_embedded_rows_are_those_of_their_decodes(monkeypatch):
    monkeypatch.setattr(measure, "phase_figures", lambda *given, device, busy_ms: {"given": given})
    rows = rounds.time_settings(
        tiny_pipeline(), SETTINGS, ["a red circle"], batch_size=2, runs=5, warmup=1, no_cache=False
    )
    assert rows.pop()["name"] == plain_loops.STRAIGHT  # it has no phases
    for row in rows:
        seconds, phases, calls = row["given"]
        assert len(seconds) == len(phases) == 5
        assert [{*laps} for laps in phases] == [{"model", "verify"}] * 5
        assert calls == [max(counts) - 1 for counts in row["calls_per_sample"]]
        for whole, laps, row_seconds in zip(seconds, phases, row["seconds"], strict=True):
            assert sum(laps.values()) <= whole < row_seconds  # which has the prefill too


def test_the_rows_of_a_gpu_are_measured_twice_where_its_model_can_be_recorded(monkeypatch):
    """The pairing itself, on a processor: graph rows decode as "auto" there."""
    asked = []

    def pairs(settings, device, *, recordable):
        asked.append(recordable)
        return [
            replace(one, text=with_setting(one.text, f"graph={word}"))
            for one in settings
            for word in ("false", "true")
        ]

    monkeypatch.setattr(rounds, "with_graphs", pairs)
    rows = rounds.time_settings(
        tiny_pipeline(), SETTINGS, ["a red circle"], batch_size=1, runs=5, warmup=0, no_cache=True
    )
    assert asked == [True] and [row["name"] for row in rows] == [
        "autoregressive:graph=false",
        plain_loops.NO_CACHE,
        "autoregressive:graph=true",
        *(f"speculative-jacobi:graph={word}" for word in ("false", "true")),
        plain_loops.STRAIGHT,
    ]
    plain = [rows[0]["seconds"], rows[2]["seconds"]]
    best = min(plain, key=lambda seconds: sorted(seconds)[2])
    for row in (rows[0], *rows[2:]):
        ratios = sorted(b / s for b, s in zip(best, row["seconds"], strict=True))
        assert row["speed_up"]["p50"] == pytest.approx(ratios[2])
    assert [row["identical_samples"] for row in rows[2:]] == [5, 5, 5, 5]
