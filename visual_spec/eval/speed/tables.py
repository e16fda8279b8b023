"""The Markdown tables of `visual-spec bench`: a column is a header and what it shows of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visual_spec.eval.tables import column, markdown

SETTING = [
    column("batch", "{}", "batch_size"),
    column("guidance", "{:g}", "guidance_scale"),
    column("sampler", "{}", "name"),
]
WINDOW = column("window", "{}", "window")
FLOOR = column("floor", "{:.2f}", "floor_ms_per_call")
# What a call spends its time on; of phases that a sampler does not tell apart there is a dash.
PHASES = [
    column("of floor", "{:.0f} %", "floor_share", times=100),
    column("forward", "{:.2f}", "phase_ms_per_call.model"),
    column("verify", "{:.2f}", "phase_ms_per_call.verify"),
    column("host gap", "{:.2f}", "gap_ms_per_call"),
]
_SPEED_UP = [
    column("speed-up", "{:.2f}x", "speed_up.p50"),
    column("speed-up p20 - p80", "{:.2f} - {:.2f}", "speed_up.p20", "speed_up.p80"),
    column("in processor time", "{:.2f}x", "processor_speed_up"),
]
_SAME = column("same as plain", "{} of {}", "identical_samples", "samples")
PEAK = column("peak MiB", "{:.0f}", "peak_memory_bytes", times=2**-20)
_CALLS = [*SETTING, WINDOW, column("calls", "{:.1f}", "calls")]
_MS_PER_CALL = column("ms/call", "{:.2f}", "ms_per_call")
TOKENS = [
    *_CALLS,
    column("tokens/call", "{:.2f}", "tokens_per_call"),
    _MS_PER_CALL,
    FLOOR,
    column("ms/image p50", "{:.0f}", "ms_per_image.p50"),
    column("p20 - p80", "{:.0f} - {:.0f}", "ms_per_image.p20", "ms_per_image.p80"),
    *_SPEED_UP,
    _SAME,
    *PHASES,
    PEAK,
]
COLUMNS = [
    *_CALLS,
    column("columns/call", "{:.2f} +- {:.2f}", "columns_per_call", "deviation"),
    _MS_PER_CALL,
    column("ms/clip p50", "{:.0f}", "ms_per_clip.p50"),
    column("p20 - p80", "{:.0f} - {:.0f}", "ms_per_clip.p20", "ms_per_clip.p80"),
    *_SPEED_UP,
    column("in calls", "{:.2f}x", "speed_up_calls"),
    _SAME,
    column("divergence", "{:.4f}", "divergence"),
    PEAK,
]
_COUNTED_SCALES = [
    column("GFLOP/image", "{:.2f}", "flops_per_image", times=1e-9),
    column("MB read/image", "{:.2f}", "bytes_per_image", times=1e-6),
    column("cache KiB/image", "{:.0f}", "cache_held_per_image", times=2**-10),
    column("of plain", "{:.0f} %", "cache_share", times=100),
    column("peak KiB/image", "{:.0f}", "cache_peak_per_image", times=2**-10),
]
COUNTED_SCALES = [*SETTING, *_COUNTED_SCALES]
TIMED_SCALES = [
    *SETTING,
    column("ms/image p50", "{:.1f}", "ms_per_image.p50"),
    column("p20 - p80", "{:.1f} - {:.1f}", "ms_per_image.p20", "ms_per_image.p80"),
    *_SPEED_UP,
    column("floor ms", "{:.2f}", "floor_ms_per_image"),
    _SAME,
    *_COUNTED_SCALES,
]


def curve_table(rows: Sequence[dict[str, Any]], unit: str = "tokens") -> str:
    """Markdown: tokens, or `unit`, per call, one line per guidance and setting, one column per window."""
    windows = sorted({row["window"] for row in rows}, key=_numbers_first)
    cells = {(row["guidance_scale"], row["name"], row["window"]): row for row in rows}
    lines = []
    for scale, name in dict.fromkeys((row["guidance_scale"], row["name"]) for row in rows):
        cells_of_row = [cells.get((scale, name, window)) for window in windows]
        values = [
            "-" if one is None else f"{one[f'{unit}_per_call']:.2f} +- {one['standard_error']:.2f}"
            for one in cells_of_row
        ]
        measured = [one for one in cells_of_row if one is not None]
        same = [one["identical_samples"] for one in measured]
        counted = "-" if None in same else f"{sum(same)} of {sum(one['samples'] for one in measured)}"
        lines.append([f"{scale:g}", name, *values, counted])
    columns = ["no window" if window is None else f"W={window}" for window in windows]
    return markdown(["guidance", f"{unit} per call", *columns, "same as plain"], lines)


def _numbers_first(window: int | str | None) -> tuple[bool, int, str]:
    return not isinstance(window, int), window if isinstance(window, int) else 0, str(window)
