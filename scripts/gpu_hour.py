"""All that only a GPU can tell, as a list of commands, for a machine with a GPU that is borrowed for half an hour.

    python scripts/gpu_hour.py --out results                 every command that is not done yet
    python scripts/gpu_hour.py --out results --budget 560    as many as fit into one command of ten minutes
    python scripts/gpu_hour.py --out results --only tests bench-shapes --again
    python scripts/gpu_hour.py --list

Each command runs in a process group of its own with a time limit, and leaves `results/NAME.json`: its status, seconds,
commit, the JSON document that it wrote, and the end of what it said. A command that fails or is stopped stops no other.
Run it again, and what is done is left alone. The machine needs a checkout, PyTorch with Triton, transformers, diffusers
and pytest, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = "{out}"  # in a command: the file for its results
_LEAST = 30  # seconds that a command needs to be worth starting
_LONGEST = 4000  # characters of what a command said that are kept


@dataclass(frozen=True)
class Job:
    """A command line after `python`, and the seconds after which it is stopped."""

    name: str
    limit: int
    command: tuple[str, ...]


def _bench(name: str, limit: int, text: str) -> Job:
    return Job(name, limit, ("-m", "visual_spec", "bench", *text.split(), "--out", OUT))


def _script(name: str, limit: int, text: str) -> Job:
    script, *options = text.split()
    program = (f"scripts/{script}",) if script.endswith(".py") else ("-m", script)
    return Job(name, limit, (*program, *options, "--out", OUT))


def _jobs() -> list[Job]:
    """In the order of what they are worth."""
    jobs = [Job("tests", 420, ("-m", "pytest", "-q", "-m", "gpu", "tests", f"--junitxml={OUT}"))]
    for what, limit in (("calls", 240), ("pictures", 480), ("tiles", 240)):
        jobs.append(_script(f"one-order-{what}", limit, f"benchmarks.one_order {what}"))
    shapes = "--model shapes --samplers speculative-jacobi --windows 16 32 64"
    things = (
        "--model things --samplers speculative-jacobi"  # with the window that is the default of each batch
    )
    scales = "--model shapes_var --samplers scale-wise:num_draft_scales=7"
    scales += " scale-wise:num_draft_scales=all,cache_share=0.1"
    tunes = "--model tunes --masked tunes_masked --samplers column-jacobi:window=4"
    clips = "--model motion --samplers speculative-jacobi:initial_draft=panned_frame"
    for name, options, dtype, batch in (
        ("shapes", shapes, "float32", 1),
        ("shapes", shapes, "bfloat16", 1),
        ("shapes", shapes, "bfloat16", 8),
        ("shapes_var", scales, "bfloat16", 1),
        ("tunes", tunes, "float32", 1),
        ("shapes", shapes, "bfloat16", 64),
        *(("things", things, "bfloat16", batch) for batch in (1, 16, 32, 64)),
        ("shapes_var", scales, "bfloat16", 64),
        ("tunes", tunes, "float32", 64),
        ("motion", clips, "float32", 1),
    ):
        options = f"{options} --dtype {dtype} --batch-sizes {batch} --skip-uncached"
        jobs.append(_bench(f"bench-{name}-{dtype}-{batch}", 120, options))
    random = "benchmarks.sizes.official --dtype bfloat16 --batch-sizes"
    windows = {1: "16 32 64", 8: "8 16 32", 64: "4 8", 16: "8 16", 32: "4 8"}
    for batch, model in product(windows, ("llamagen-xl-t2i", "janus-pro-7b")):
        options = f"{random} {batch} --model {model} --samplers speculative-jacobi --windows {windows[batch]}"
        jobs.append(_script(f"bench-{model}-{batch}", 240, f"{options} --slots 16"))
    parts = ("0", "8", "6", "all,cache_share=0.1", "8,cache_share=0.1")
    samplers = " ".join(f"scale-wise:num_draft_scales={part}" for part in parts)
    for batch in (1, 8, 64):
        options = f"{random} {batch} --model var-d30+var-d16 --samplers {samplers}"
        jobs.append(_script(f"bench-var-d30-{batch}", 120, options))
        jobs.append(_script(f"musicgen-medium-{batch}", 120, f"benchmarks.sizes music --batch {batch}"))
    few_bits = "benchmarks.quantised --device cuda --prompts 0 --models XL 3B"
    jobs.append(_script("weights-in-few-bits", 300, few_bits))
    jobs.append(_script("kernels", 120, "bench_kernels.py --window 1 32"))
    jobs.append(_script("kernels-64", 120, "bench_kernels.py --vocab 16384 --window 1 32 --batch 64"))
    for model, text, graph in product(
        ("llamagen-xl-t2i", "janus-pro-7b"),
        ("autoregressive:", "speculative-jacobi:window=32,"),
        ("false", "true", "4"),  # 4: so many calls a graph
    ):
        name = f"profile-{model}-{text.split(':')[0]}-graph-{graph}"
        options = f"benchmarks.sizes profile --size {model} --sampler {text}graph={graph}"
        jobs.append(_script(name, 90, options))
    for batch, size in product((1, 64, 8), "lbh"):
        jobs.append(_script(f"bench-mar-{size}-{batch}", 120, f"{random} {batch} --model mar-{size}"))
    jobs += [
        _script(f"vibevoice-{batch}", 120, f"benchmarks.sizes speech --batch {batch}") for batch in (1, 8)
    ]
    return [*jobs, _script("wan-causal", 180, "benchmarks.sizes video")]


JOBS = _jobs()


def chosen(names: Sequence[str] | None, jobs: Sequence[Job]) -> list[Job]:
    """The jobs whose names begin with one of `names`, in the order of these; None: all.

    Raises:
        ValueError: a name with which none begins; lists them.
    """
    picked: list[Job] = []
    for name in names if names is not None else [""]:
        fitting = [job for job in jobs if job.name.startswith(name)]
        if not fitting:
            raise ValueError(
                f"--only {name}: no such job; pass some of {', '.join(job.name for job in jobs)}"
            )
        picked += [job for job in fitting if job not in picked]
    return picked


def run(jobs: Sequence[Job], folder: Path, *, again: bool = False, budget: float | None = None) -> list[str]:
    """Run the jobs whose files do not say "ok"; returns the names of those that are not done in the end.

    Args:
        again: also those that are done.
        budget: seconds for all; what does not fit is left for the next run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begun, missing = time.monotonic(), []
    for job in jobs:
        path = folder / f"{job.name}.json"
        if not again and path.exists() and json.loads(path.read_text())["status"] == "ok":
            continue
        left = job.limit if budget is None else min(job.limit, budget - (time.monotonic() - begun))
        if left < min(_LEAST, job.limit):
            status = "no time left"
        else:
            document = run_job(job, left)
            scratch = path.with_suffix(".part")
            scratch.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
            os.replace(scratch, path)
            status = f"{document['status']}, {document['seconds']:.0f} s"
        print(f"{job.name}: {status}", flush=True)
        if not status.startswith("ok"):
            missing.append(job.name)
    return missing


def run_job(job: Job, limit: float) -> dict[str, Any]:
    """Run a command, and say how it ended: its status is "ok", "failed" or "stopped"."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        command = [sys.executable, *(word.replace(OUT, str(out)) for word in job.command)]
        paths = [str(ROOT), str(ROOT / "weights"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        # The machine may have neither the package nor the models installed.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with (Path(scratch) / "log").open("w+") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                status = "failed" if process.wait(limit) else "ok"
            except subprocess.TimeoutExpired:
                status = "stopped"
            finally:
                _end(process)
            log.seek(0)
            said = log.read()
        result = read_result(out)
    if status == "ok" and result.get("passed") == 0:
        status = "failed"  # tests that were all skipped tell nothing
    return {
        "status": status,
        "seconds": round(time.monotonic() - begun, 1),
        "commit": _commit(),
        "command": list(job.command),
        "result": result,
        "said": said[-_LONGEST:],
    }


def read_result(path: Path) -> dict[str, Any]:
    """What a command has written: JSON, or counts and failures of pytest's XML. Empty where there is nothing whole."""
    try:
        text = path.read_text()
        if not text.startswith("<"):
            return json.loads(text)
        tree = ElementTree.fromstring(text)
    except (OSError, ValueError, ElementTree.ParseError):
        return {}
    outcomes: dict[str, list[str]] = {"failed": [], "skipped": [], "passed": []}
    for case in tree.iter("testcase"):
        kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        kind = next((kinds[part.tag] for part in case if part.tag in kinds), "passed")
        outcomes[kind].append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "passed": len(outcomes["passed"]),
        "skipped": len(outcomes["skipped"]),
        "failed": outcomes["failed"],
    }


def _end(process: subprocess.Popen) -> None:
    """Stop a process and all that it has started, if any of them still runs."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def main(arguments: Sequence[str] | None = None, jobs: Sequence[Job] = JOBS) -> int:
    """Parse arguments and run; returns the exit status: 1 where a job is not done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the results go, and are looked for")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="those whose names begin so (default: all)")
    parser.add_argument("--list", action="store_true", help="list the commands with their limits, and end")
    parser.add_argument("--again", action="store_true", help="also run what is done")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds for this run")
    args = parser.parse_args(arguments)
    try:
        picked = chosen(args.only, jobs)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        for job in picked:
            print(f"{job.name} (at most {job.limit} s): python {' '.join(job.command)}")
        return 0
    if args.out is None:
        parser.error("pass --out FOLDER, or --list")
    return 1 if run(picked, args.out, again=args.again, budget=args.budget) else 0


if __name__ == "__main__":
    sys.exit(main())
