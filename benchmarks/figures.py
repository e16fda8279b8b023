"""Measure the figures of `things` and `shapes` again, and write their tables into README.md and docs/results/.

    make figures                                                 # what was measured with other weights than today's
    python benchmarks/figures.py --list                          # every figure, and whether it is current
    python benchmarks/figures.py --only shapes-calls --again     # one figure, though it is current
    python benchmarks/figures.py --tables                        # write the tables alone, from the stored results
    python benchmarks/figures.py --check                         # say whether the pages have what is stored, and stop

A table stands between `<!-- figure: NAME -->` and `<!-- end -->`. `results/measured.json` says with which weights and
on which machine each result was measured. A table of earlier weights says so in its first line. Times need an idle
machine. A run that is interrupted loses the figure that it was measuring, and no other.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from visual_spec.data.shapes import held_out_prompts
from visual_spec.eval.intervals import ratio_figure
from visual_spec.eval.machine import environment
from visual_spec.files.documents import json_text
from visual_spec.files.whole import write_atomically
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.pipelines.loading import load_pipeline

HOME = Path(__file__).resolve().parents[1]
RESULTS = HOME / "benchmarks" / "results"
PAGES = (HOME / "README.md", *sorted((HOME / "docs" / "results").glob("*.md")))
MARKED = re.compile(r"(<!-- figure: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """A result and its table.

    Attributes:
        command: arguments of Python from the root of the checkout; `{out}` stands for the JSON file, `{folder}` for a
            temporary folder.
        table: Markdown of the stored document.
        models: embedded models whose weights it depends on.
        drafts: whether their drafters take part.
        timed: compares seconds, so an idle machine is needed.
        copies: files of `{folder}` to keep: {name: path in the checkout}.
    """

    command: str
    table: Callable[[dict[str, Any]], str]
    models: tuple[str, ...] = ("shapes",)
    drafts: bool = True
    timed: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)


def share(figure: Mapping[str, float]) -> str:
    """`94.0 (92.1-95.8)`: a share in percent with its 95 % interval."""
    return f"{100 * figure['value']:.1f} ({100 * figure['low']:.1f}-{100 * figure['high']:.1f})"


def table(header: str, rows: list[list[str]], align: str) -> str:
    """Markdown. `header`: titles, separated by |. `align`: "l" or "r" for each column."""
    rule = [":--" if side == "l" else "--:" for side in align]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header.split("|"), rule, *rows])


def law_table(document: dict[str, Any]) -> str:
    asked = ("background", "texture", "colour", "size", "count", "relation", "shape", "thing")
    names = [name for name in asked if name in document["rows"][0]["attributes"]]
    rows = []
    for row in document["rows"]:
        law = {name: value for name, value in row["law"].items() if value is not None}
        text = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in law.items())
        shares = [f"{100 * row['attributes'][name]['value']:.1f}" for name in names]
        rows.append(
            [text or "the model's default", share(row["mean_attribute"]), share(row["all_correct"]), *shares]
        )
    return table(f"law|attributes right|whole prompts|{'|'.join(names)}", rows, "l" + "r" * (len(names) + 2))


def calls_table(document: dict[str, Any]) -> str:
    rows = []
    for name, row in document["rows"].items():
        drafts, _, window = name.partition(", window ")
        low, high = row["interval"]
        equal = f"{row['equal pictures']} of {document['prompts']}"
        mean = f"{row['tokens per call']:.2f} ({low:.2f}-{high:.2f})"
        rows.append([window, drafts, mean, str(row["most calls"]), equal])
    return table("window|drafts|tokens per call|most calls of a picture|equal pictures", rows, "rlrrr")


def times_table(document: dict[str, Any]) -> str:
    rows = []
    for batch in (key for key in document if key.startswith("batch ")):
        for name, row in document[batch].items():
            cells = [f"{row['seconds a picture']:.3f}", f"{row['speed-up']:.2f}x"]
            equal = f"{row['equal pictures']} of {document['prompts']}"
            rows.append([batch.removeprefix("batch "), name, *cells, f"{row['tokens per call']:.2f}", equal])
    return table("batch|sampler|seconds a picture|speed-up|tokens per call|equal pictures", rows, "rlrrrr")


def batches_table(document: dict[str, Any]) -> str:
    """The default beside plain decoding, by batch; times of the processor, and medians of the ratios of both clocks."""
    rows = []
    for size in sorted(int(key.removeprefix("batch ")) for key in document if key.startswith("batch ")):
        plain, default = document[f"batch {size}"].values()
        cells = [f"{row['processor time']['median seconds a picture']:.3f}" for row in (plain, default)]
        cells += [f"{default[f'{kind} time']['median speed-up']:.2f}x" for kind in ("processor", "clock")]
        equal = f"{default['equal pictures']} of {plain['equal pictures']}"
        rows.append([str(size), *cells, f"{default['tokens per call']:.2f}", equal])
    header = "batch|plain, s|default, s|speed-up|on the clock|tokens per call|equal pictures"
    return table(header, rows, "rrrrrrr")


def bits_table(document: dict[str, Any]) -> str:
    """Weights in few bits beside 16, a row for each model and kind of weights."""
    rows = []
    for row in document["rows"]:
        held, peak = (row[f"memory {when}"] / 1e6 for when in ("with the model", "at most in calls"))
        cells = [f"{row['weight bytes'] / 1e6:.1f}", f"{held:.0f}", f"{peak:.0f}"]
        for slots in (1, 16):
            ratio = row[f"processor speed-up over bfloat16, {slots} slots"]
            cells += [f"{row[f'processor ms, {slots} slots']:.1f} ({ratio:.2f}x)"]
        equal = f"{row['equal to plain']} of {row['pictures']}" if "pictures" in row else ""
        size = f"{row['parameters'] / 1e6:.1f} M"
        rows.append([row["model"], size, row["type"] or row["weights"], *cells, equal])
    header = "model|numbers|weights|weights, MB|held, MB|at most, MB|1 slot, ms|16 slots, ms|as plain"
    return table(header, rows, "lrlrrrrrr")


def prompts_table(document: dict[str, Any]) -> str:
    rows = document["comparison"]
    plain, fast = ([row[name] for row in rows] for name in ("plain_seconds", "seconds"))
    calls = [sum(row[name] for row in rows) / len(rows) for name in ("plain_calls", "calls")]
    gain = ratio_figure(plain, fast)
    cells = [
        str(len(rows)),
        f"{calls[0]:.0f} to {calls[1]:.1f}",
        f"{calls[0] / calls[1]:.2f}",
        f"{sum(plain) / len(rows):.2f} to {sum(fast) / len(rows):.2f}",
        f"{gain['value']:.2f}x ({gain['low']:.2f}-{gain['high']:.2f})",
        f"{sum(row['identical'] for row in rows)} of {len(rows)}",
    ]
    return table("prompts|calls|tokens per call|seconds a picture|speed-up|equal pictures", [cells], "rrrrrr")


def demo_table(document: dict[str, Any]) -> str:
    rows = []
    for row in document["comparison"]:
        times = f"{row['plain_seconds']:.2f} to {row['seconds']:.2f}"
        same = "yes" if row["identical"] else "no"
        gain = f"{row['plain_seconds'] / row['seconds']:.2f}x"
        calls = f"{row['plain_calls']} to {row['calls']}"
        rows.append([row["prompt"], calls, f"{row['tokens_per_call']:.2f}", times, gain, same])
    return table("prompt|calls|tokens per call|seconds|speed-up|same pixels", rows, "lrrrrl")


def grpo_times_table(document: dict[str, Any]) -> str:
    steps, rows = document["steps"], []
    for way in steps[0]["calls"]:
        calls = sum(step["calls"][way] for step in steps) / len(steps)
        seconds = [
            [sum(step["seconds"][part][kind] for step in steps) / len(steps) for part in (way, "training")]
            for kind in (0, 1)
        ]
        cells = [f"{drawn:.1f} + {trained:.1f}" for drawn, trained in seconds]
        shares = [f"{100 * drawn / (drawn + trained):.0f} %" for drawn, trained in seconds]
        equal = f"{sum(step['equal_tokens'] for step in steps)} of {len(steps)}"
        apart = f"{max(step['logprobs_apart'] for step in steps):.0e}"
        rows.append([way, f"{calls:.1f}", cells[0], shares[0], cells[1], shares[1]])
        rows[-1] += [equal, apart] if way == "default" else ["-", "-"]
    header = (
        "drawing|calls a picture|seconds a step: drawing + training|share of drawing|processor seconds|share"
    )
    return table(f"{header}|steps of equal tokens|log-probabilities apart", rows, "lrrrrrrr")


def grpo_table(document: dict[str, Any]) -> str:
    """What was right before and after training, of held-out captions; and the curve, in tenths of the steps."""
    names = {"whole": "all of it", "prompt": "what the caption says", "across": "the middle across"}
    names["down"] = "the middle from top to bottom"
    ends = [document[when] for when in ("before", "after")]
    rows = [[what, *(share(end[name]) for end in ends)] for name, what in names.items()]
    rows.append(["nats a picture", *(f"{end['nats']:.1f}" for end in ends)])
    first = table(f"{ends[0]['whole']['total']} held-out captions, % right|before|after", rows, "lrr")
    curve, rows = document["curve"], []
    size = -(-len(curve) // 10)
    for start in range(0, len(curve), size):
        some = curve[start : start + size]
        mean = {name: sum(row[name] for row in some) / len(some) for name in some[0]}
        cells = [f"{100 * mean[name]:.1f}" for name in ("whole", "across", "down", "thing")]
        cells = [f"{mean['reward']:.3f}", *cells, f"{mean['nats']:.1f}", f"{mean['drawing']:.1f}"]
        rows.append([f"{start + 1}-{start + len(some)}", *cells, f"{mean['training']:.1f}"])
    header = "steps|reward|all, %|across, %|down, %|thing, %|nats|drawing, s|training, s"
    return f"{first}\n\n{table(header, rows, 'lrrrrrrrr')}"


DEMO = (
    "a penguin above a fish on a sky background",
    "a frog above a mushroom on a pink background",
    "a fox left of a pizza on a mint background",
    "a castle on a pink background",
)

FIGURES = {
    "shapes-law": Figure(
        "benchmarks/laws.py --prompts 2000 --first 200 --temperature 0.6 --top-p 1 --guidance-scale 1.5 --out {out}",
        law_table,
    ),
    "shapes-times": Figure(
        "benchmarks/windows.py --batch 1 --prompts 24 --windows 16 --out {out}", times_table, timed=True
    ),
    **{
        f"{name}-batches": Figure(
            f"benchmarks/windows.py --model {name} --batch {batches} --default-only --out {{out}}",
            batches_table,
            models=(name,),
            timed=True,
        )
        for name, batches in {
            "shapes": "1 4 8 16 32 64 --rounds 4 --prompts 128",
            "things": "1 4 8 16 32 64 --rounds 4 --prompts 128",
            "motion": "1 4 8 16 32 --rounds 3 --prompts 48",
        }.items()
    },
    "weights-in-few-bits": Figure(
        "benchmarks/quantised.py --models B shapes things --rounds 7 --prompts 4 --out {out}",
        bits_table,
        models=("shapes", "things"),
        drafts=False,
        timed=True,
    ),
    "shapes-calls": Figure(
        "benchmarks/second_sources.py --prompts 200 --first 200 --batch-size 10 --out {out}", calls_table
    ),
    "shapes-pictured": Figure(
        "benchmarks/second_sources.py --prompts 200 --first 200 --batch-size 10 --pictures shapes_nar "
        '--only "pictured, window 32" "pictured, window 64" "pictured, window 256" --out {out}',
        calls_table,
        models=("shapes", "shapes_nar"),
    ),
    "shapes-fifty": Figure(
        f"-m visual_spec generate {shlex.join(held_out_prompts(50))} --compare --out {{folder}} --overwrite",
        prompts_table,
        timed=True,
        copies={"comparison.json": "benchmarks/results/shapes-fifty.json"},
    ),
    "things-law": Figure(
        "benchmarks/laws.py --model things --prompts 2000 --first 200 --out {out}",
        law_table,
        models=("things",),
        drafts=False,
    ),
    "things-times": Figure(
        "benchmarks/windows.py --model things --batch 1 --prompts 24 --windows --out {out}",
        times_table,
        models=("things",),
        drafts=False,
        timed=True,
    ),
    "things-calls": Figure(
        "benchmarks/second_sources.py --model things --prompts 2000 --first 200 --batch-size 10 "
        "--only 'repaired, window 32' --out {out}",
        calls_table,
        models=("things",),
        drafts=False,
    ),
    "things-demo": Figure(
        f"-m visual_spec generate {shlex.join(DEMO)} --seed 4 --compare --out {{folder}} --overwrite",
        demo_table,
        models=("things",),
        drafts=False,
        timed=True,
        copies={"comparison.png": "docs/demo.png", "comparison.json": "benchmarks/results/things-demo.json"},
    ),
    "things-grpo": Figure(
        "examples/grpo.py --output_dir {folder}",
        grpo_table,
        models=("things",),
        drafts=False,
        copies={"grpo.json": "benchmarks/results/things-grpo.json"},
    ),
    "things-grpo-times": Figure(
        "examples/grpo.py --output_dir {folder} --time",
        grpo_times_table,
        models=("things",),
        drafts=False,
        timed=True,
        copies={"times.json": "benchmarks/results/things-grpo-times.json"},
    ),
}


def headline(documents: Mapping[str, Any]) -> str:
    """README's table of the default sampler, on both embedded models of captions."""
    rows = []
    for name, what in (("things", "drawings of 40 things"), ("shapes", "coloured shapes")):
        times, law = documents[f"{name}-times"], documents[f"{name}-law"]["rows"][0]
        row = times["batch 1"]["default"]
        cells = [f"{row['tokens per call']:.2f}", f"{row['speed-up']:.2f}x"]
        cells += [f"{row['equal pictures']} of {times['prompts']}"]
        rows.append([f"`{name}`: {what}", *cells, share(law["mean_attribute"]), share(law["all_correct"])])
    header = "model|tokens per call|speed-up|equal pictures|attributes right, %|whole prompts right, %"
    return table(header, rows, "lrrrrr")


def rows_of(name: str) -> dict[str, Any]:
    """The rows of a stored result, by name."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows if isinstance(rows, dict) else {row["name"]: row for row in rows}


def gain(figure: Mapping[str, float]) -> str:
    """`2.46x (2.07-2.69)`: a median with its spread, or a mean with its interval."""
    names = ("p50", "p20", "p80") if "p50" in figure else ("value", "low", "high")
    value, low, high = (figure[name] for name in names)
    return f"{value:.2f}x ({low:.2f}-{high:.2f})"


def methods_table() -> str:
    """README's table of other methods: the fast rows beside the plain ones of the same file."""

    def shares(rows: dict[str, Any], names: tuple[str, ...], what: str = "mean_attribute") -> list[str]:
        return [share(rows[name]["accuracy"][what]) for name in names]

    zipar, name = rows_of("shapes-quality"), "zipar:measure=true"
    tokens = f"{zipar[name]['tokens_per_call']['value']:.2f} tokens"
    first = ["images: ZipAR, earlier weights", "lossy", "1", tokens]
    first += [gain(zipar[name]["wall_clock"]["alone_speed_up"]), *shares(zipar, (name, "autoregressive"))]

    clips = rows_of("motion-plain")["default"]
    cameras = ("all clips", next(name for name in clips if name.endswith("camera still")))
    moving, still = (clips[name]["tokens per call"]["value"] for name in cameras)
    second = ["video: the default, drafts that follow a pan", "same tokens", "1"]
    second += [f"{moving:.1f} tokens (still camera {still:.1f})"]
    second += [f"{gain(clips['all clips']['seconds of the first row over its own'])}, total time", "as plain"]
    second += shares(rows_of("motion-quality"), ("autoregressive",))

    scales, name = rows_of("shapes-var-8-bits-quality"), "scale-wise:num_draft_scales=7"
    processor = scales[name]["processor_time"]
    third = ["images by scale: CoDe", "lossy", str(processor["batch_size"]), "a scale"]
    third += [f"{gain(processor['speed_up'])}, of processor time"]
    third += shares(scales, (name, "scale-wise:num_draft_scales=all"), "all_correct")

    music, name = rows_of("tunes-8-bits-quality"), "masked:steps=10/5/5/5,clock=magnet,temperature=falling"
    alone, batched = rows_of("tunes-cpu-2-threads")[name], music[name]["processor_time"]["speed_up"]
    last = [f"music: MAGNeT, {alone['calls']:.0f} calls", "its own law", "1"]
    last += [f"{alone['columns_per_call']:.0f} columns"]
    last += [f"{gain(alone['speed_up'])}; in the batches of the accuracies {batched['p50']:.2f}x"]
    last += shares(music, (name, "columns"))
    header = "method|output|batch|per call|speed-up|accuracy|plain"
    return table(header, [first, second, third, last], "llrrrrr")


def measure(name: str, figure: Figure) -> None:
    """Run the command of a figure and keep what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        command = figure.command.format(out=RESULTS / f"{name}.json", folder=folder)
        arguments = [sys.executable, *shlex.split(command)]
        subprocess.run(arguments, check=True, cwd=HOME, stdout=subprocess.DEVNULL)
        for file, home in figure.copies.items():
            if file.endswith(".json"):  # where its files were is nobody's business
                text = (Path(folder) / file).read_text().replace(f"{folder}/", "")
                text = json_text(json.loads(text), separators=(",", ":")) + "\n"
                write_atomically(HOME / home, text, overwrite=True)
            else:
                shutil.copyfile(Path(folder) / file, HOME / home)


def weights_of(figure: Figure) -> dict[str, str]:
    """Fingerprints of the weights that draw with each model of a figure."""
    found = {}
    for name in figure.models:
        parts = load_pipeline(name).components
        own = [name for name, part in parts.items() if hasattr(part, "state_dict")]
        found[name] = fingerprint(parts[part] for part in own if figure.drafts or part != "drafter")
    return found


def marked(text: str, blocks: Mapping[str, str]) -> str:
    """`text` with new contents of its marked places; a place without a block stays as it is."""

    def fill(place: re.Match[str]) -> str:
        return f"{place[1]}\n{blocks[place[2]]}\n\n{place[3]}" if place[2] in blocks else place[0]

    return MARKED.sub(fill, text)


def pages(measured: Mapping[str, Any], weights: Mapping[str, Mapping[str, str]]) -> dict[Path, str]:
    """The pages with all tables as of the stored results."""
    documents = {
        name: json.loads((RESULTS / f"{name}.json").read_text()) for name in FIGURES if name in measured
    }
    blocks = {"methods": methods_table()}
    for name, document in documents.items():
        entry = measured[name]
        load = "" if entry["load"] is None else f", load {entry['load']} at the start"
        where = f"{entry['machine']}, {entry['threads']} threads{load}."
        note = f", {entry['note']}" if "note" in entry else ""
        current = entry["weights"] == weights[name]
        earlier = "" if current else f" **Measured with earlier weights{note}.**"
        blocks[name] = f"{FIGURES[name].table(document)}\n\n`{name}.json`: {where}{earlier}"
    if {"shapes-times", "shapes-law", "things-times", "things-law"} <= documents.keys():
        blocks["headline"] = headline(documents)
    return {page: marked(page.read_text(), blocks) for page in PAGES}


def main() -> None:
    record = RESULTS / "measured.json"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--again", action="store_true", help="measure what is current, too")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--list", action="store_true", help="say what is current, and stop")
    parser.add_argument("--check", action="store_true", help="say whether the pages are, and stop")
    args = parser.parse_args()
    measured = json.loads(record.read_text()) if record.exists() else {}
    weights = {name: weights_of(figure) for name, figure in FIGURES.items()}
    for name in args.only:
        figure, current = FIGURES[name], measured.get(name, {}).get("weights") == weights[name]
        if args.list:
            print(f"{name:16} {'current' if current else 'to measure'}{', idle machine' * figure.timed}")
        elif not args.tables and not args.check and (args.again or not current):
            here = environment(torch.device("cpu"), torch.float32)
            print(f"{name}: python {figure.command}", flush=True)
            measure(name, figure)
            measured[name] = {
                "weights": weights[name],
                "machine": here["device_name"],
                "threads": here["threads"],
                "load": here["load_average"],
                "commit": here["commit"],
                "command": figure.command,
            }
            write_atomically(
                record, json_text(measured, separators=(",", ":"), sort_keys=True) + "\n", overwrite=True
            )
    new = {} if args.list else pages(measured, weights)
    stale = [page.name for page, text in new.items() if page.read_text() != text]
    if args.check:
        sys.exit(f"{', '.join(stale)}: run python benchmarks/figures.py --tables" if stale else 0)
    for page, text in new.items():
        write_atomically(page, text, overwrite=True)


if __name__ == "__main__":
    main()
