"""The Markdown tables of `visual-spec bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visual_spec.eval.tables import markdown

# Columns of what a call spends its time on; those of phases that a sampler does not tell apart stay empty.
PHASES = ["forward", "verify", "host gap"]


def share_and_phases(row: dict[str, Any]) -> list[str]:
    """Cells of `floor_share` in per cent, and of the milliseconds of `PHASES`."""
    share, phases = row["floor_share"], row["phase_ms_per_call"]
    times = [phases.get("model"), phases.get("verify"), row["gap_ms_per_call"]]
    return [
        "-" if share is None else f"{100 * share:.0f} %",
        *(_number(value, 2) for value in times),
    ]


SPEED_UP = ["speed-up", "speed-up p20 - p80", "in processor time"]


def speed_up_cells(row: dict[str, Any]) -> list[str]:
    """Cells of `SPEED_UP`: `1.54x`, `1.49 - 1.60`, and `1.86x` or a dash where it was not measured."""
    rounds, busy = row["speed_up"], row["processor_speed_up"]
    spread = f"{rounds['p20']:.2f} - {rounds['p80']:.2f}"
    return [f"{rounds['p50']:.2f}x", spread, "-" if busy is None else f"{busy:.2f}x"]


def bench_table(rows: Sequence[dict[str, Any]]) -> str:
    """The Markdown table of timed rows, of tokens or of columns."""
    sound = "columns_per_call" in rows[0]
    sample = "clip" if sound else "image"
    header = ["batch", "guidance", "sampler", "window", "calls", f"{'columns' if sound else 'tokens'}/call"]
    header += ["ms/call", *([] if sound else ["floor"]), f"ms/{sample} p50", "p20 - p80", *SPEED_UP]
    header += ["in calls", "same as plain", "divergence"] if sound else ["same as plain", "of floor", *PHASES]
    lines = []
    for row in rows:
        each, same = row[f"ms_per_{sample}"], row["identical_samples"]
        if sound:
            committed = f"{row['columns_per_call']:.2f} +- {row['deviation']:.2f}"
        else:
            committed = f"{row['tokens_per_call']:.2f}"
        equal = "-" if same is None else f"{same} of {row['samples']}"
        lines.append(
            [
                str(row["batch_size"]),
                f"{row['guidance_scale']:g}",
                row["name"],
                str(row["window"] or "-"),
                f"{row['calls']:.1f}",
                committed,
                f"{row['ms_per_call']:.2f}",
                *([] if sound else [_number(row["floor_ms_per_call"], 2)]),
                f"{each['p50']:.0f}",
                f"{each['p20']:.0f} - {each['p80']:.0f}",
                *speed_up_cells(row),
                *([f"{row['speed_up_calls']:.2f}x"] if sound else []),
                equal,
                *([_number(row["divergence"], 4)] if sound else share_and_phases(row)),
                f"{row['peak_memory_bytes'] / 2**20:.0f}",
            ]
        )
    return markdown([*header, "peak MiB"], lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def curve_table(rows: Sequence[dict[str, Any]], unit: str = "tokens") -> str:
    """Markdown: tokens, or `unit`, per call, one line per guidance and setting, one column per window."""
    windows = sorted({row["window"] for row in rows}, key=_numbers_first)
    cells = {(row["guidance_scale"], row["name"], row["window"]): row for row in rows}
    lines = []
    for scale, name in dict.fromkeys((row["guidance_scale"], row["name"]) for row in rows):
        found = [cells.get((scale, name, window)) for window in windows]
        values = [
            "-" if one is None else f"{one[f'{unit}_per_call']:.2f} +- {one['standard_error']:.2f}"
            for one in found
        ]
        measured = [one for one in found if one is not None]
        same = [one["identical_samples"] for one in measured]
        counted = "-" if None in same else f"{sum(same)} of {sum(one['samples'] for one in measured)}"
        lines.append([f"{scale:g}", name, *values, counted])
    columns = ["no window" if window is None else f"W={window}" for window in windows]
    return markdown(["guidance", f"{unit} per call", *columns, "same as plain"], lines)


def _numbers_first(window: int | str | None) -> tuple[bool, int, str]:
    return not isinstance(window, int), window if isinstance(window, int) else 0, str(window)
