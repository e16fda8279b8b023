"""What the bench of layers compares is the same computation, and the bytes are those that must move."""

from typing import Any

import pytest
import torch

from scripts import bench_kernels as kernel_bench


def test_kernels_and_chains_of_a_layer_compute_the_same(monkeypatch):
    results: list[Any] = []

    def run(call: Any, device: torch.device) -> float:
        results.append(call())
        return 2.0

    monkeypatch.setattr(kernel_bench, "milliseconds", run)
    sizes = (16, 32, 2, 3, 9)  # width, hidden, heads, prompt, picture
    found = list(kernel_bench.layer_rows(2, 1, device=torch.device("cpu"), bandwidth=1e6, sizes=sizes))
    assert [row["op"] for row in found] == ["add_norm", "gated", "rotary_write", "window_attention"]
    *plain, mixed, masked = results
    for kernel, chain in zip(plain[::2], plain[1::2], strict=True):
        torch.testing.assert_close(kernel, chain)
    torch.testing.assert_close(mixed, masked.transpose(1, 2), rtol=2e-2, atol=2e-2)
    rows, window, read = 2, 2, 3 + 4 + 2  # prompt, half a picture, the window
    numbers = {
        "add_norm": 4 * rows * window * 16,  # two in, two out
        "gated": 3 * rows * window * 32,
        "rotary_write": 2 * rows * window * 3 * 16,
        "window_attention": 2 * rows * 16 * read + 2 * rows * window * 16,
    }
    for row in found:
        assert row["gb_per_s"] == pytest.approx(2 * numbers[row["op"]] / 2e-3 / 1e9)


def test_both_ways_to_draw_are_compared_with_the_chain_that_they_replace(monkeypatch):
    results: list[Any] = []

    def run(call: Any, device: torch.device) -> float:
        results.append(call())
        return 2.0

    monkeypatch.setattr(kernel_bench, "milliseconds", run)
    found = list(kernel_bench.draw_rows(64, 3, 2, device=torch.device("cpu"), bandwidth=1e6))
    ways = ["draw, one program a slot", "draw, split"]
    assert [(row["filters"], row["op"]) for row in found] == [
        (name, way) for name in kernel_bench.FILTERS for way in ways
    ]
    for chain, one, other in zip(results[::3], results[1::3], results[2::3], strict=True):
        assert torch.equal(chain, one[0]) and torch.equal(chain, other[0])
    for row in found:
        assert row["gb_per_s"] == pytest.approx(2 * (4 * 3 * 64) / 2e-3 / 1e9)  # both rows, in bfloat16
