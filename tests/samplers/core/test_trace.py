import time

import pytest
import torch

from visual_spec.samplers.core.trace import DecodeTrace, DivergenceMeter, Stopwatch


def trace(**changes) -> DecodeTrace:
    arguments = dict(
        sampler="Some",
        keeps="lossless",
        target_calls=torch.tensor([2, 4]),
        commit_call=torch.tensor([[0, 1, 1, 1], [0, 1, 2, 3]]),
        seconds=1.5,
        phase_seconds={},
    )
    return DecodeTrace(**{**arguments, **changes})


def test_tokens_per_call_counts_the_prefill_and_the_bonus_token():
    assert trace().tokens_per_call.tolist() == [2, 1]


@pytest.mark.parametrize(
    "changes, ending",
    [
        ({}, "lossless"),
        ({"keeps": "identical"}, "same tokens as autoregressive sampling"),
        ({"keeps": "lossy"}, "lossy"),
        ({"keeps": "lossy", "divergence": 0.25}, "lossy, measured divergence 0.2500"),
        ({"keeps": "lossy", "divergence": 0, "at_least": True}, "lossy, measured divergence at least 0.0000"),
        (
            {"keeps": "identical", "law_settings": {"steps": 16, "order": "raster", "eta": None}},
            "another law than plain decoding's (steps=16, order=raster)",
        ),
        ({"law_settings": {"steps": 16}, "plain_settings": {"steps": 16, "eta": None}}, "lossless"),
        (
            {"keeps": "lossy", "divergence": 0.25, "plain_settings": {"steps": 16}},
            "lossy, measured divergence 0.2500 from a law other than plain decoding's (steps=None)",
        ),
        ({"peak_memory": 3 * 2**20}, "1.50 s, 3 MiB peak, lossless"),
    ],
)
def test_summary_is_one_line(changes, ending):
    summary = trace(**changes).summary()
    assert summary.startswith("Some: 2 x 4 tokens, 3.0 target calls (1.50 tokens per call), 1.50 s")
    assert summary.endswith(ending) and "\n" not in summary


def test_meter_counts_what_a_rule_adds_to_tested_slots():
    meter = DivergenceMeter(2, torch.device("cpu"))
    assert meter.mean() == 0  # nothing tested
    nan = torch.nan
    probability = torch.tensor([[0.9, 0.5, nan], [0.2, nan, 1.0]], dtype=torch.float64)
    exact = torch.tensor([[0.4, 0.6, nan], [0.2, 1.0, 0.0]], dtype=torch.float64)
    tested = torch.tensor([[True, True, False], [True, False, False]])
    meter.add(probability, exact, tested)
    assert meter.moved.tolist() == [0.5, 0.0] and meter.tested.tolist() == [
        2,
        1,
    ]  # what it withholds is not counted
    meter.add(probability, exact, tested.flip(1) & probability.isfinite())
    assert meter.moved.tolist() == [0.5, 1.0] and meter.tested.tolist() == [3, 2]
    assert meter.mean() == pytest.approx(1.5 / 5)


def test_stopwatch_attributes_laps_to_phases():
    watch, device = Stopwatch(), torch.device("cpu")
    for phase in ("a", "b", "a"):
        time.sleep(0.01)
        watch.lap(phase, device)
    total, phases = watch.read()
    assert list(phases) == ["a", "b"]
    assert phases["a"] >= 0.02 and phases["b"] >= 0.01
    assert total >= sum(phases.values())
    assert watch.peak_memory(device) is None


def test_a_stopwatch_sums_its_laps_and_counts_out_what_only_measures(monkeypatch):
    monkeypatch.setattr("time.perf_counter", iter([10.0, 11.0, 14.0, 16.0, 19.0, 20.0]).__next__)
    watch = Stopwatch()
    for phase in ("prefill", "model", "measure", "model"):
        watch.lap(phase, torch.device("cpu"))
    seconds, phases = watch.read()
    assert phases == pytest.approx({"prefill": 1.0, "model": 6.0, "measure": 2.0})
    assert seconds == pytest.approx(10 - 2)
