"""The speed of next-token models at their true sizes, without their checkpoints: measured calls, stated acceptance.

What a call costs depends on sizes, not on what the weights are, so it is measured on random weights, with the real
sampler. How many drafts are accepted does depend on the weights, so it is not measured: it is stated, as the
probability that a draft is accepted, and every figure that follows from it is labelled so. Plain decoding takes a call
a token, whatever the weights: its figures are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from visual_spec.eval.speed import measure
from visual_spec.eval.speed.official_sizes import OfficialModel
from visual_spec.eval.speed.official_sizes import fill_at_random as fill_at_random
from visual_spec.eval.speed.timing import PLAIN, Entry, with_graphs
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.core.graph import can_record, forget
from visual_spec.samplers.core.law import TokenLaw

Report = Callable[[str], Any]


def refuse_what_does_not_fit(
    needed: dict[str, int],
    device: torch.device,
    *,
    at: Callable[[int, int], dict[str, int]] | None = None,
    batch_size: int = 1,
    window: int = 1,
) -> None:
    """Refuse, before anything is allocated, what the device has no room for.

    Args:
        needed: bytes by what they are for.
        at: what is needed for a batch and a window; the message then says what fits.
        batch_size, window: those of `needed`.

    Raises:
        ValueError: names what is needed, what is free, and what helps.
    """
    available, total = measure.available_memory(device), sum(needed.values())
    if total <= available:
        return
    parts = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in needed.items())
    remedy = "pass a smaller --model, --dtype bfloat16, or smaller --batch-sizes and --windows."
    if at is not None:
        found = what_fits(at, available, batch_size, window)
        if found is None:
            least = sum(at(1, 1).values()) / 1e9
            remedy = (
                f"one sample with window 1 needs {least:.1f} GB: pass a smaller --model, or --dtype bfloat16."
            )
        elif found[1] == window:
            remedy = (
                f"with window {window} the largest batch that fits is {found[0]}: pass smaller --batch-sizes."
            )
        else:
            remedy = f"at batch 1 the largest window that fits is {found[1]}: pass smaller --batch-sizes and --windows."
    raise ValueError(
        f"this needs {total / 1e9:.1f} GB ({parts}), and {device} has {available / 1e9:.1f} GB free; {remedy}"
    )


def what_fits(
    at: Callable[[int, int], dict[str, int]], available: int, batch_size: int, window: int
) -> tuple[int, int] | None:
    """The largest batch that fits with this window, or with a batch of 1 the largest window; None: nothing does."""
    for batch in range(batch_size, 0, -1):
        if sum(at(batch, window).values()) <= available:
            return batch, window
    for width in range(window, 0, -1):
        if sum(at(1, width).values()) <= available:
            return 1, width
    return None


class Middle:
    """The `count` slots in the middle of a model's grid as a model of their own, so that a sampler runs for some calls
    at the mean cost of a whole picture. The cache before them is empty, which costs no less to read.
    """

    def __init__(self, model: Any, count: int) -> None:
        self.model = model
        self.grid = TokenGrid(1, min(count, model.grid.num_tokens))
        self.vocab_size = model.vocab_size
        self.first = (model.grid.num_tokens - self.grid.num_tokens) // 2
        self.device = model.device
        # Recorded graphs belong to what owns the weights; see `visual_spec.samplers.core.graph`.
        self.decoder = getattr(model, "decoder", model)

    def prefill(self, condition: Any, **options: Any) -> Any:
        return self.model.prefill(condition, **options)

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor) -> Tensor:
        return self.model(state, tokens, slots + self.first)


def stated_tokens_per_call(probability: float, window: int) -> float:
    """Mean tokens of a call whose every draft is accepted with `probability`, whatever its place: one is certain, and
    the k-th draft counts when it and all before it are accepted. 1 + p + ... + p ** (window - 1).
    """
    return sum(probability**place for place in range(window))


@torch.no_grad()
def measure_calls(
    official: OfficialModel,
    samplers: Sequence[Entry],
    law: TokenLaw,
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    slots: int,
    probability: float,
    baselines: Sequence[Any] = (),
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time the calls of plain decoding and of every sampler over `slots` slots in the middle of the grid.

    On CUDA every sampler has two rows: its calls one operation after the other, and as a recorded graph where the
    model can be recorded.

    Args:
        official: filled.
        baselines: of `visual_spec.eval.speed.baselines`; their rows come first.

    Returns:
        One dict per row. Measured: `seconds` and `calls` of every round without the prefill, `ms_per_call`
        (quantiles), `phase_ms_per_call` and `gap_ms_per_call` (see `measure.phase_figures`), `prefill_ms`,
        `peak_memory_bytes`. Counted: `weight_bytes`, `cache_bytes`, `flops_per_call`. Stated, but for rows that are
        `autoregressive`: `tokens_per_call`. From these: `calls_per_image`, `ms_per_image` (quantiles), and `speed_up`
        over the fastest autoregressive row.
    """
    model, device = official.model, official.model.device
    weight_bytes, cache_bytes = official.call_bytes(batch_size=batch_size, guided=law.guided)
    rows: list[dict[str, Any]] = []

    def add(name: str, window: int, found: dict[str, Any], **more: Any) -> None:
        rows.append(
            {
                "name": name,
                "window": window,
                "batch_size": batch_size,
                "guidance_scale": law.guidance_scale,
                "tokens": model.grid.num_tokens,
                "weight_bytes": weight_bytes,
                "cache_bytes": cache_bytes,
                "flops_per_call": official.call_flops(
                    weight_bytes, batch_size=batch_size, guided=law.guided, window=window
                ),
                "peak_memory_bytes": measure.peak_memory(device),
                **found,
                **more,
            }
        )
        p50 = rows[-1]["ms_per_call"]["p50"]
        report(f"batch {batch_size}, {name}, window {window}: {p50:.2f} ms per call")

    for baseline in baselines:
        measure.reset_peak_memory(device)
        found = _time_baseline(baseline, official, law, batch_size, runs, warmup, slots)
        calls = official.length
        per_call = model.grid.num_tokens / calls
        add(
            baseline.name,
            1,
            found,
            sampler=None,
            autoregressive=True,
            tokens_per_call=per_call,
            calls_per_image=calls,
        )
    middle, condition = Middle(model, slots), official.condition(batch_size)
    entries = [Entry(PLAIN, AutoregressiveSampler(), 1), *samplers]
    recordable = can_record(model.prefill(condition, batch_size=batch_size, guided=law.guided, window=1))
    entries = with_graphs(entries, device, recordable=recordable)
    for entry in entries:
        measure.reset_peak_memory(device)
        found = _time_sampler(entry.sampler, middle, condition, law, batch_size, runs, warmup)
        plain = isinstance(entry.sampler, AutoregressiveSampler)
        window = entry.window or 1
        per_call = 1.0 if plain else stated_tokens_per_call(probability, window)
        # The prefill yields the first token.
        calls = 1 + (model.grid.num_tokens - 1) / per_call
        settings = measure.sampler_settings(entry.sampler)
        add(
            entry.name, window, found,
            sampler=settings, autoregressive=plain, tokens_per_call=per_call, calls_per_image=calls,
        )  # fmt: skip
        forget(middle)  # its memory would count for the next row
    add_picture_times(rows)
    return rows


def add_picture_times(rows: Sequence[dict[str, Any]]) -> None:
    """Add `ms_per_image`, quantiles of the prefill and so many calls over the batch, and `speed_up`: how much faster a
    picture is than by the fastest autoregressive row, medians of both. All rows are of one batch size and law.
    """
    for row in rows:
        row["ms_per_image"] = {
            name: (row["prefill_ms"] + (row["calls_per_image"] - 1) * value) / row["batch_size"]
            for name, value in row["ms_per_call"].items()
        }
    best = min(row["ms_per_image"]["p50"] for row in rows if row["autoregressive"])
    for row in rows:
        row["speed_up"] = best / row["ms_per_image"]["p50"]


def _time_sampler(
    sampler: Any, middle: Middle, condition: Any, law: TokenLaw, batch_size: int, runs: int, warmup: int
) -> dict[str, Any]:
    """What was measured of a sampler: see `measure_calls`."""
    counted, seconds, phases, prefills = [], [], [], []

    def decode(number: int, callback: Callable[[int, Tensor], Any]) -> Any:
        generator = [torch.Generator().manual_seed(number * batch_size + i) for i in range(batch_size)]
        options = dict(law=law, generator=generator, batch_size=batch_size, callback=callback)
        return sampler(middle, condition, **options).trace

    for number in range(warmup + runs):
        # A recorded step runs no Python; the callback is called once a call, and once after the prefill.
        called: list[int] = []
        trace = decode(number, lambda index, lengths, called=called: called.append(index))
        if number >= warmup:
            laps = dict(trace.phase_seconds)
            prefills.append(laps.pop("prefill"))
            seconds.append(trace.seconds - prefills[-1])
            counted.append(len(called) - 1)
            phases.append(laps)
    busy = measure.busy_ms_per_call(lambda callback: decode(0, callback), middle.device)
    return {
        "seconds": seconds,
        "calls": counted,
        "ms_per_call": measure.quantiles([1000 * s / c for s, c in zip(seconds, counted, strict=True)]),
        "prefill_ms": measure.quantiles([1000 * s for s in prefills])["p50"],
        **measure.phase_figures(seconds, phases, counted, device=middle.device, busy_ms=busy),
    }


def _time_baseline(
    baseline: Any, official: OfficialModel, law: TokenLaw, batch_size: int, runs: int, warmup: int, slots: int
) -> dict[str, Any]:
    """The same of a baseline, whose phases are not known."""
    from visual_spec.eval.speed.baselines import time_baseline

    found = [
        time_baseline(baseline, official, law, batch_size=batch_size, slots=max(slots, 3))
        for _ in range(warmup + runs)
    ][warmup:]
    return {
        "seconds": [seconds for seconds, _, _ in found],
        "calls": [calls for _, calls, _ in found],
        "ms_per_call": measure.quantiles([1000 * seconds / calls for seconds, calls, _ in found]),
        "prefill_ms": measure.quantiles([1000 * prefill for _, _, prefill in found])["p50"],
        "phase_ms_per_call": {},
        "gap_ms_per_call": None,
    }


def acceptance_statement(probability: float) -> dict[str, Any]:
    """What the document says about where acceptance comes from."""
    return {
        "measured": False,
        "profile": "constant",
        "probability": probability,
        "meaning": "every draft is accepted with this probability, whatever its place, sampler and sample",
    }
