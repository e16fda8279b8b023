"""The tables of docs/RESULTS.md that come from a GPU, made of the files of `visual_spec.eval.speed.gpu_hour`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from visual_spec.eval.files import write_atomically
from visual_spec.eval.speed.gpu_results import OK, Stage, read_result, result_path
from visual_spec.eval.tables import markdown

BEGIN, END = "<!-- gpu tables: begin -->", "<!-- gpu tables: end -->"
NOTHING = "Not yet measured."
Part = tuple[str, dict[str, Any]]


def write_tables(document: Path, folder: Path, stages: Sequence[Stage]) -> None:
    """Replace what stands between the two marks of a document.

    Raises:
        ValueError: a document without the marks, or with more than one pair.
    """
    text = document.read_text()
    if not (text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)):
        raise ValueError(f"{document} needs one line {BEGIN!r} and one {END!r} behind it")
    before, rest = text.split(BEGIN)
    made = tables(folder, stages)
    write_atomically(document, f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}", overwrite=True)


def tables(folder: Path, stages: Sequence[Stage]) -> str:
    """One section a stage, in Markdown. Dry runs count as nothing."""
    return "\n\n".join(_section(stage, read_result(result_path(folder, stage))) for stage in stages)


def _section(stage: Stage, document: dict[str, Any]) -> str:
    found = [f"### Stage {stage.name}: {stage.title}"]
    if not document or document.get("dry_run", True):
        return "\n\n".join([*found, NOTHING])
    here = document.get("environment") or {}
    if here:
        versions = f"PyTorch {here['torch']}, CUDA {here['cuda']}"
        found.append(f"{here['device_name']}, {versions}, commit {here['commit'] or 'unknown'}.")
    measured = [(name, part["result"]) for name, part in document["parts"].items() if "result" in part]
    table = _TABLES.get(stage.name)
    if measured and table is not None:
        found.append(table(measured))
    missing = [name for name in document.get("expected") or () if name not in document["parts"]]
    troubles = [
        f"* {name}: {part['status']}: {_one_line(part.get('error', ''))}"
        for name, part in document["parts"].items()
        if part["status"] != OK
    ]
    troubles += [f"* {name}: not yet measured" for name in missing]
    if document.get("error"):
        troubles.append(f"* The stage: {_one_line(document['error'])}")
    if troubles:
        found.append("\n".join(troubles))
    return "\n\n".join(found if len(found) > 1 else [*found, NOTHING])


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()[:300]


# -- one function a stage: its parts that have a result, to a table --------------------------------------------------


def _tests(parts: Sequence[Part]) -> str:
    lines = [[name, *(str(one[count]) for count in ("passed", "failed", "skipped"))] for name, one in parts]
    return markdown(["tests", "passed", "failed", "skipped"], lines)


def _graphs(parts: Sequence[Part]) -> str:
    lines = [
        [
            name,
            one["model"],
            f"{one['same']} of {one['samples']}",
            f"{one['ms_per_call_eager']:.2f}",
            f"{one['ms_per_call_graph']:.2f}",
            f"{one['ms_per_call_eager'] / one['ms_per_call_graph']:.2f}x",
        ]
        for name, one in parts
    ]
    return markdown(["sampler", "model", "same tokens", "ms/call eager", "ms/call graph", "speed-up"], lines)


def _identity(parts: Sequence[Part]) -> str:
    lines = []
    for name, one in parts:
        model, dtype, sampler = name.split(", ", 2)
        ties, at = one["near_ties"], one["at_near_ties"]
        lines.append(
            [
                sampler,
                model,
                dtype,
                f"{one['plain_calls']:.0f} -> {one['calls']:.1f}",
                f"{one['same']} of {one['samples']}",
                "-" if ties is None else f"{ties} of {one['slots']}",
                "-" if at is None else f"{at} of {one['first_differences']}",
            ]
        )
    header = ["sampler", "model", "dtype", "calls", "same as plain", "near-ties", "differ at near-ties"]
    note = (
        "Near-ties are slots where the two best scores of plain decoding lie closer than the dtype rounds (a unit in "
        "the last place of the largest logit each). The last column counts samples by their first other token."
    )
    return f"{markdown(header, lines)}\n\n{note}"


def _bench(parts: Sequence[Part]) -> str:
    header = ["model", "batch", "sampler", "window", "tokens/call", "ms/call", "floor", "of floor"]
    header += ["host gap", "ms/sample", "speed-up", "same as plain", "peak MiB"]
    lines, stated = [], False
    for name, one in parts:
        stated = stated or "acceptance" in one
        for row in one["rows"]:
            lines.append([name.rpartition(", batch ")[0], *_cells(row)])
    table = markdown(header, lines)
    if stated:
        probability = next(one["acceptance"]["probability"] for _, one in parts if "acceptance" in one)
        table += (
            f"\n\nWeights are random: tokens per call of samplers with a window, and what follows from them, are not "
            f"measured, but stated for drafts that are accepted with probability {probability:g}. Milliseconds a call "
            "are measured."
        )
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    call = _median(row.get("ms_per_call"))
    sample = _median(row.get("ms_per_image") or row.get("ms_per_clip"))
    per_call = row.get("tokens_per_call", row.get("columns_per_call"))
    floor = row.get("floor_ms_per_call")
    share = row.get("floor_share")
    if (
        row.get("floor_ms_per_image") is not None and sample
    ):  # a picture of scales, whose calls are unlike each other
        floor, share = row["floor_ms_per_image"], row["floor_ms_per_image"] / sample
    same = row.get("identical_samples")
    return [
        str(row["batch_size"]),
        row["name"],
        str(row.get("window") or "-"),
        _number(per_call, 2),
        _number(call, 2),
        _number(floor, 2),
        "-" if share is None else f"{100 * share:.0f} %",
        _number(row.get("gap_ms_per_call"), 2),
        _number(sample, 0),
        _number(_median(row.get("speed_up")), 2, "x"),
        "-" if same is None else f"{same} of {row['samples']}",
        f"{row['peak_memory_bytes'] / 2**20:.0f}",
    ]


def _kernels(parts: Sequence[Part]) -> str:
    lines = [
        [
            row["op"],
            row["filters"],
            str(row["vocab"]),
            str(row["window"]),
            str(row["batch"]),
            f"{row['kernel_ms']:.4f}",
            f"{row['chain_ms']:.4f}",
            f"{row['faster']:.1f}x",
            f"{row['gb_per_s']:.0f}",
            f"{100 * row['share']:.0f} %",
        ]
        for _, one in parts
        for row in one["rows"]
    ]
    header = [
        "kernel",
        "filters",
        "vocabulary",
        "window",
        "batch",
        "ms",
        "ms of PyTorch's chain",
        "faster",
        "GB/s",
        "of a copy",
    ]
    return markdown(header, lines)


def _profiles(parts: Sequence[Part]) -> str:
    lines = [
        [
            name,
            _number(one["wall_ms_per_call"], 2),
            _number(one["busy_ms_per_call"], 2),
            _number(one["gap_ms_per_call"], 2),
            _number(one["kernels_per_call"], 0),
        ]
        for name, one in parts
    ]
    longest = [
        [
            name,
            f"`{one['name'].replace('|', '/')}`",
            f"{one['ms_per_call']:.3f}",
            f"{one['count_per_call']:.1f}",
        ]
        for name, profile in parts
        for one in profile["top"][:5]
    ]
    first = markdown(["call", "ms", "device works", "gaps", "kernels"], lines)
    return (
        f"{first}\n\n{markdown(['call', 'longest kernels', 'ms a call', 'launches'], longest)}"
        if longest
        else first
    )


def _median(value: Any) -> float | None:
    return value.get("p50") if isinstance(value, dict) else value


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


_TABLES: dict[str, Callable[[Sequence[Part]], str]] = {
    "1": _tests,
    "2": _graphs,
    "3": _identity,
    "4": _bench,
    "5a": _bench,
    "5b": _bench,
    "5c": _bench,
    "5d": _bench,
    "5e": _bench,
    "6": _kernels,
    "7": _profiles,
}
