"""MAR of official size with random weights: what a call costs, and with it a picture.

What a call costs depends on sizes, not on what the weights are. A picture takes up to 256 calls, each of the encoder,
the decoder and up to 100 levels of the head, so some calls are timed, evenly spread over the schedule. Rows differ in
whether the calls are recorded as graphs, and in whether the head's levels run as kernels or as PyTorch's operators.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.sizes import room
from benchmarks.sizes.models import fill_at_random
from benchmarks.sizes.next_token import time_sampler
from visual_spec.eval import measure
from visual_spec.eval.defaults import ModelSettings
from visual_spec.eval.machine import environment
from visual_spec.eval.settings import Setting, sampler_settings
from visual_spec.eval.speed.tables import FLOOR, PHASES
from visual_spec.eval.tables import column, table
from visual_spec.eval.timing import Report
from visual_spec.kernels import head_step
from visual_spec.models.continuous.mar import PRESETS, MARTransformer
from visual_spec.models.core.settings import register_to_config
from visual_spec.pipelines.placing import choose_device
from visual_spec.samplers.continuous import conditions
from visual_spec.samplers.continuous.continuous import ContinuousSampler, PlainState
from visual_spec.samplers.core.graph import forget
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run

# Calls and levels of a picture: the published evaluation, a quarter of its calls, and a quarter of its levels too.
SCHEDULES = ((256, 100), (64, 100), (64, 25))
GUIDANCE = 3.0  # Li et al. 2024, appendix B: 2.9 to 3.2
CALLS = 8  # that are timed
SIZES = {f"mar-{size.lower()}": size for size in PRESETS}
# Options of `visual-spec bench` that these rows do not have.
_OTHERS = ("samplers", "windows", "guidance_scales", "temperature", "top_k", "top_p", "image_size")

CONTINUOUS = [
    column("sampler", "{}", "name"),
    column("batch", "{}", "batch_size"),
    column("calls", "{}", "calls_per_image"),
    column("MB/call", "{:.0f}", "weight_bytes", times=1e-6),
    column("GFLOP/call", "{:.1f}", "flops_per_call", times=1e-9),
    column("ms/call", "{:.2f}", "ms_per_call.p50"),
    FLOOR,
    PHASES[0],
    column("ms/picture", "{:.0f}", "ms_per_image.p50"),
]


def run(args: argparse.Namespace, known: ModelSettings | None, report: Report) -> tuple[dict[str, Any], str]:
    """Document and table of `python -m benchmarks.sizes.official` for MAR.

    Args:
        known: None; the rows follow from `SCHEDULES`.

    Raises:
        ValueError: a size that is unknown or does not fit the device, or options that do not apply; before any work.
    """
    if args.model not in SIZES:
        raise ValueError(f"--model {args.model}; of MAR pass one of {', '.join(SIZES)}.")
    others = [name for name in _OTHERS if getattr(args, name) is not None]
    if others:
        raise ValueError(
            f"--{others[0].replace('_', '-')} given; MAR of official size is measured by the schedules "
            f"{', '.join(f'{calls} x {levels}' for calls, levels in SCHEDULES)} with guidance {GUIDANCE:g}. Leave it "
            "out."
        )
    device, dtype, size = choose_device(args.device), getattr(torch, args.dtype), PRESETS[SIZES[args.model]]
    with torch.device("meta"):
        counted: MARTransformer = MARTransformer(**size).to(dtype)  # pyright: ignore[reportArgumentType]
    facts = environment(device, dtype)
    facts["transformer_parameters"] = sum(parameter.numel() for parameter in counted.parameters())
    rows: list[dict[str, Any]] = []
    if args.count_only:
        for batch_size in args.batch_sizes:
            for steps, levels in SCHEDULES:
                sampler = SomeCalls(CALLS, steps, head_steps=levels)
                rows.append(counted_row(counted, sampler, batch_size, f"{steps} x {levels}"))
    else:
        weights = facts["transformer_parameters"] * dtype.itemsize
        room.refuse_what_does_not_fit({"weights": weights}, device)
        model = mar(size, dtype=dtype, device=device)
        for batch_size in args.batch_sizes:
            rows += measure_calls(
                model, SCHEDULES, batch_size=batch_size, runs=args.runs, warmup=args.warmup, report=report
            )
    kind = "latent-count" if args.count_only else "latent-random-weights"
    return {"kind": kind, "environment": facts, "architecture": args.model, "rows": rows}, table(
        rows, CONTINUOUS
    )


def counted_row(model: MARTransformer, sampler: SomeCalls, batch_size: int, name: str) -> dict[str, Any]:
    """Return what is known of a row without running it; see `measure_calls`."""
    parts, steps = costs(model, sampler, batch_size), sampler.num_steps(model)
    return dict(
        name=name,
        window=None,
        batch_size=batch_size,
        sampler=sampler_settings(sampler),
        guidance_scale=GUIDANCE,
        weight_bytes=round(sum(size for size, _ in parts.values())),
        cache_bytes=0,
        flops_per_call=round(sum(flops for _, flops in parts.values())),
        tokens_per_call=model.grid.num_tokens / steps,
        calls_per_image=steps,
    )


def mar(size: str | dict[str, int], *, dtype: torch.dtype, device: torch.device) -> MARTransformer:
    """A MAR with random weights, made on the device.

    Args:
        size: "B", "L" or "H", or arguments of `MARTransformer`.
    """
    arguments: dict[str, Any] = dict(PRESETS[size] if isinstance(size, str) else size)
    with torch.device("meta"):
        model = MARTransformer(**arguments)
    return fill_at_random(model, dtype=dtype, device=device)


class SomeCalls(ContinuousSampler):
    """Some calls of plain decoding, evenly spread, as if the tokens of the calls between them were there.

    Args:
        sampled: how many calls follow the first.
        steps, head_steps, graph: as `ContinuousSampler`.
    """

    @register_to_config
    def __init__(
        self,
        sampled: int = CALLS,
        steps: int | None = None,
        order: str = "random",
        guidance: str = "linear",
        head_steps: int | None = None,
        eta: float | None = None,
        final_noise: float | None = None,
        last_head_steps: int | None = None,
        graph: bool | str = "auto",
    ) -> None:
        pass

    def planned_calls(self, model: Any, parts: dict[str, Any]) -> int:
        return 1 + len(self.chosen(model))

    def chosen(self, model: Any) -> list[int]:
        """Numbers of the calls, in order."""
        last = self.num_steps(model) - 1
        count = min(self.config.sampled, last)
        return [1 + (2 * index + 1) * last // (2 * count) for index in range(count)]

    def plan(self, run: Run) -> None:
        super().plan(run)
        run.pace = self.jumping

    def jumping(self, advance: Callable[[], None], run: Run, state: PlainState) -> Callable[[], None]:
        """Return `advance`, each time of the next chosen call."""
        edges, shapes = (
            conditions.step_edges(run.num_tokens, self.num_steps(run.model)),
            self.shapes(run.model),
        )
        left = iter(self.chosen(run.model))

        def call() -> None:
            number = next(left)
            state.width = shapes[number]
            state.lengths.fill_(edges[number])
            advance()

        return call


@torch.no_grad()
def measure_calls(
    model: MARTransformer,
    schedules: Sequence[tuple[int, int]] = SCHEDULES,
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    sampled: int = CALLS,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time calls of plain decoding by every schedule of calls and levels.

    Returns:
        One dict per row: what `time_sampler` gives, `peak_memory_bytes`, `weight_bytes`, `cache_bytes` and
        `flops_per_call` (see `costs`), `floor_ms_per_call` and `floor_share`; and of the whole picture
        `tokens_per_call`, `calls_per_image` and `ms_per_image` (quantiles). `speed_up` is over the first row of the
        schedule.
    """
    device, dtype = model.device, model.dtype
    labels = torch.arange(batch_size, device=device) % model.config["num_classes"]
    bandwidth, peak = measure.copy_bandwidth(device), measure.matmul_peak(device, dtype)
    variants = [("operators", False, False)]
    if device.type == "cuda":
        variants += [("operators, graph", True, False), ("kernels, graph", True, True)]
    rows: list[dict[str, Any]] = []
    for steps, levels in schedules:
        begun = len(rows)
        for name, graph, kernels in variants:
            sampler = SomeCalls(sampled, steps, head_steps=levels, graph=graph)
            setting = Setting(name, sampler, TokenLaw(guidance_scale=GUIDANCE), 0)
            measure.reset_peak_memory(device)
            with _kernels(kernels):
                timed = time_sampler(setting, model, labels, batch_size, runs, warmup)
            timed["peak_memory_bytes"] = measure.peak_memory(device)
            forget(model)  # its memory would count for the next row
            parts = costs(model, sampler, batch_size)
            floor = 1000 * sum(max(size / bandwidth, flops / peak) for size, flops in parts.values())
            timed |= counted_row(model, sampler, batch_size, f"{steps} x {levels}, {name}")
            timed |= dict(floor_ms_per_call=floor, floor_share=floor / timed["ms_per_call"]["p50"])
            timed["ms_per_image"] = {
                key: value * steps / batch_size for key, value in timed["ms_per_call"].items()
            }
            rows.append(timed)
            report(f"batch {batch_size}, {timed['name']}: {timed['ms_per_call']['p50']:.2f} ms per call")
        for row in rows[begun:]:
            row["speed_up"] = rows[begun]["ms_per_image"]["p50"] / row["ms_per_image"]["p50"]
    return rows


def costs(model: MARTransformer, sampler: SomeCalls, batch_size: int) -> dict[str, tuple[float, float]]:
    """Bytes and operations of a call, a mean over the timed ones, of each of its parts: trunk, modulations, levels.

    Bytes count the weights, read once by the trunk and by the modulations and once a level by the rest of the
    head, and of the modulations, written and read once. Operations are two a weight and row, and attention's.
    The rest of a head whose weights fit into the second-level cache can be faster than its bytes say.
    """
    config, head = model.config, model.head
    size, rows = next(model.parameters()).element_size(), 2 * batch_size
    chosen = sampler.chosen(model)
    edges, shapes = (
        conditions.step_edges(model.grid.num_tokens, sampler.num_steps(model)),
        sampler.shapes(model),
    )
    places, dim, layers = config["buffer_size"] + model.grid.num_tokens, config["dim"], config["num_layers"]
    layer = sum(parameter.numel() for parameter in model.encoder_blocks[0].parameters())
    of_levels = sum(weight.numel() for weight in head.step_weights() or [])
    of_modulations = sum(parameter.numel() for parameter in head.parameters()) - of_levels

    costs_by_part = {"trunk": (0.0, 0.0), "modulations": (0.0, 0.0), "levels": (0.0, 0.0)}
    for number in chosen:
        tokens, levels, seen = (
            shapes[number].count,
            shapes[number].levels,
            config["buffer_size"] + edges[number],
        )
        flops = sum(rows * layers * (2 * layer * width + 4 * dim * width * width) for width in (seen, places))
        modulated = levels * rows * tokens
        here = {
            "trunk": (2 * layers * layer * size, flops),
            "modulations": (
                of_modulations * size + 2 * modulated * head.modulation_size * size,
                2 * of_modulations * modulated,
            ),
            "levels": (levels * of_levels * size, 2 * of_levels * modulated),
        }
        for name, (more, work) in here.items():
            costs_by_part[name] = (
                costs_by_part[name][0] + more / len(chosen),
                costs_by_part[name][1] + work / len(chosen),
            )
    return costs_by_part


@contextmanager
def _kernels(wanted: bool) -> Iterator[None]:
    """Within, the head's levels run as kernels where they can, or nowhere."""
    before = head_step.MOST_ROWS
    head_step.MOST_ROWS = before if wanted else 0
    try:
        yield
    finally:
        head_step.MOST_ROWS = before
