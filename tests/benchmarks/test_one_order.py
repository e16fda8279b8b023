"""The bench of linear layers in one order of sums, on a processor, where all steps take PyTorch's products."""

import json
import sys

import pytest

from benchmarks import one_order
from visual_spec.eval import measure
from visual_spec.models.next_token import llamagen


def test_every_step_has_a_row_for_every_width(tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    tiny = {"num_layers": 1, "num_heads": 2, "dim": 32, "vocab_size": 32, "grid_size": 4}
    monkeypatch.setitem(llamagen.PRESETS, "tiny", tiny)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e10)
    for module in (one_order.launch, one_order.project):
        monkeypatch.setattr(module, "dependent", one_order.dependent)  # to be put back
    out = tmp_path / "rows.json"
    options = ["calls", "--model", "tiny", "--device", "cpu", "--rounds", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["one_order", *options])
    one_order.main()
    document = json.loads(out.read_text())
    rows = {(row["step"], row["width"]): row for row in document["rows"]}
    assert document["kind"] == "one-order-calls" and set(rows) == {
        (step, width) for step in one_order.STEPS for width in one_order.WIDTHS
    }
    for row in rows.values():
        assert row["ms"] > 0 and 0 < row["floor_ms"] and row["equal"] <= row["tokens"] == min(row["width"], 8)
    # A layer of 4 x 32 x 32 and 3 x 32 x 256 numbers, two norms, and a head.
    assert rows["joined", 1]["weight_bytes"] == 2 * (4 * 32**2 + 3 * 32 * 256 + 2 * 32 + 32**2)
    first, last = (rows[step, 1]["weight_bytes"] for step in ("joined", "kernel, dependent launch, e4m3"))
    assert last < 0.6 * first
