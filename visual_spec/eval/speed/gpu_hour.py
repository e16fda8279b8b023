"""Everything that only a GPU can tell, in stages: for a machine with a GPU that is borrowed for half an hour.

    python scripts/gpu_hour.py --out results                      all stages that are not done yet
    python scripts/gpu_hour.py --out results --budget 560         as many as fit into one command of ten minutes
    python scripts/gpu_hour.py --out results --stages 1,2 --again those again
    python scripts/gpu_hour.py --out results --dry-run            on a CPU, at tiny sizes: does every stage run?
    python scripts/gpu_hour.py --tables results                   the tables of docs/RESULTS.md from the results

Every stage runs in a process of its own with a time limit, and writes one small JSON file: what it measured, part by
part, where (device, versions, commit), and the error of each part that failed. A part that fails, and a stage that is
stopped at its limit, stop nothing else. A stage whose file says "ok" is not run again; of the others the parts that
are missing are run, those that were never tried first.

The machine needs a checkout of this repository, PyTorch with Triton, transformers and pytest, and no network. Where it
has no diffusers, prepare a folder of wheels before, on a machine with a network, and pass it as --wheels:

    pip download --no-deps --only-binary=:all: --dest wheels diffusers importlib_metadata zipp

(add any other package that is missing there; `pip show NAME` tells). The wheels are installed into a temporary folder,
without their dependencies.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_spec.eval.files import write_atomically
from visual_spec.eval.speed.gpu_results import (
    FAILED,
    OK,
    RUNNING,
    STOPPED,
    Stage,
    read_result,
    result_path,
)

# Of the figures of a file: where one of them changes, a stage that is not done begins afresh.
_SAME = ("device_name", "torch", "commit")
_LONGEST = 2000  # characters of an error that are kept
_LEAST = 30  # seconds that a stage needs to be worth starting


_HERE = "visual_spec.eval.speed.gpu_stages"
# In the order of what they are worth.
STAGES = (
    Stage("1", "kernels on the device", f"{_HERE}:kernel_tests", 120),
    Stage("2", "graphs against eager calls", f"{_HERE}:graphs", 150),
    Stage("3", "same tokens as plain decoding", f"{_HERE}:identity", 120),
    Stage("4", "bench of the embedded models", f"{_HERE}:embedded_models", 170),
    Stage("5a", "official sizes, token by token", f"{_HERE}:token_sizes", 420),
    Stage("5b", "official sizes, scales and music", f"{_HERE}:other_sizes", 240),
    Stage("5c", "official sizes, continuous tokens", f"{_HERE}:latent_sizes", 420, essential=False),
    Stage("5d", "official sizes, a speech model of transformers", f"{_HERE}:speech", 150, essential=False),
    Stage("5e", "official sizes, causal video", f"{_HERE}:video", 180, essential=False),
    Stage("6", "bandwidth of the kernels", f"{_HERE}:kernel_bandwidth", 90),
    Stage("7", "where the time of a call goes", "visual_spec.eval.speed.gpu_profiles:call_profiles", 90),
)


def chosen_stages(text: str | None, stages: Sequence[Stage] = STAGES) -> list[Stage]:
    """The stages that a text such as "1,5" names; "5" is 5a and all others behind 5. None: all.

    Raises:
        ValueError: a name that fits none; lists them.
    """
    if text is None:
        return list(stages)
    found: list[Stage] = []
    for name in (part.strip() for part in text.split(",")):
        fitting = [stage for stage in stages if name in (stage.name, stage.name.rstrip("abcde"))]
        if not fitting:
            raise ValueError(
                f"--stages {text}: no stage {name!r}; pass some of {', '.join(s.name for s in stages)}"
            )
        found += [stage for stage in fitting if stage not in found]
    return found


def run_stages(
    stages: Sequence[Stage],
    folder: Path,
    *,
    dry: bool = False,
    again: bool = False,
    budget: float | None = None,
    commit: str | None = None,
    report: Callable[[str], Any] = print,
) -> dict[str, str]:
    """Run the stages that are not done; {name of a stage: its status} of all that are.

    Args:
        again: also those that are.
        budget: seconds for all; what does not fit is left for the next run.
        commit: of the code, where the copy that runs cannot tell.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begun, found = time.monotonic(), {}
    for stage in stages:
        known = read_result(result_path(folder, stage))
        done = known.get("status") == OK and known.get("dry_run") is dry
        if done and not again:
            report(f"stage {stage.name}, {stage.title}: done before")
            found[stage.name] = OK
            continue
        left = stage.limit if budget is None else min(stage.limit, budget - (time.monotonic() - begun))
        if left < min(_LEAST, stage.limit):
            report(f"stage {stage.name}, {stage.title}: no time left for it")
            continue
        if again:
            result_path(folder, stage).unlink(missing_ok=True)
        document = run_stage(stage, folder, dry=dry, limit=left, commit=commit)
        found[stage.name] = document["status"]
        parts = document["parts"].values()
        count = f"{sum(part['status'] == OK for part in parts)} of {len(document['expected'] or parts)} parts"
        report(
            f"stage {stage.name}, {stage.title}: {document['status']}, {count}, {document['seconds']:.0f} s"
        )
        for name, part in document["parts"].items():
            if part["status"] != OK:
                report(f"  {name}: {part['status']}: {part.get('error', '')}")
        if document.get("error"):
            report(f"  {document['error']}")
    return found


def run_stage(
    stage: Stage, folder: Path, *, dry: bool, limit: float, commit: str | None = None
) -> dict[str, Any]:
    """Run one stage in a process of its own, and return what its file says in the end."""
    path = result_path(folder, stage)
    document = read_result(path)
    if document.get("dry_run") is not dry or document.get("stage") != stage.name:
        document = {"parts": {}, "seconds": 0.0, "environment": {}}
    document |= dict(stage=stage.name, title=stage.title, dry_run=dry, status=RUNNING, error=None)
    document["expected"] = []
    _write(path, document)
    # A fresh process knows nothing of the GPU yet. Dry runs need none, and share what one process has imported.
    context: Any = multiprocessing.get_context("forkserver" if dry else "spawn")
    if dry:
        context.set_forkserver_preload(["torch", "diffusers", "transformers", "pytest", _HERE])
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        process = context.Process(target=_work, args=(stage, path, dry, commit, log))
        process.start()
        try:
            process.join(limit)
            stopped = process.is_alive()
        finally:
            _end(process)
        document = read_result(path) or document
        if stopped:
            _name_the_broken(document, STOPPED)
            document.update(status=STOPPED, error=f"stopped after {limit:.0f} s")
        elif process.exitcode or document["status"] == RUNNING:
            _name_the_broken(document, FAILED)
            document.update(status=FAILED, error=f"ended with {process.exitcode}: {_tail(log)}")
    document["seconds"] += round(time.monotonic() - begun, 1)
    _write(path, document)
    return document


def _work(stage: Stage, path: Path, dry: bool, commit: str | None, log: Path) -> None:
    """What the process of a stage does: part by part, each written down when it is done."""
    os.setsid()  # a group of its own, which is stopped as a whole
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    document = read_result(path)
    here = _environment(commit)
    if any(document["environment"].get(name) != here[name] for name in _SAME):
        document["parts"] = {}  # figures of another machine or code do not stand beside these
    document["environment"] = here
    module, _, name = stage.parts.partition(":")
    parts: Mapping[str, Callable[[], Any]] = getattr(importlib.import_module(module), name)(dry)
    document["expected"] = list(parts)
    known = document["parts"] = {name: part for name, part in document["parts"].items() if name in parts}
    waiting = [one for one in parts if one not in known]
    waiting += [one for one in parts if one in known and known[one]["status"] != OK]
    for one in waiting:
        known[one] = {"status": RUNNING}
        _write(path, document)
        known[one] = _measured(parts[one])
        _write(path, document)
        _tidy()
    document["status"] = OK if all(part["status"] == OK for part in known.values()) else FAILED
    _write(path, document)


def _measured(part: Callable[[], Any]) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        result = part()
        problem = result.get("problem") if isinstance(result, Mapping) else None
        found = {"status": FAILED if problem else OK, "result": result} | (
            {"error": problem} if problem else {}
        )
    except (Exception, SystemExit) as error:  # whatever it is, it stops this part only
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        found = {"status": FAILED, "error": text[-_LONGEST:]}
        traceback.print_exc()
    return found | {"seconds": round(time.monotonic() - begun, 2)}


def _tidy() -> None:
    """Give back what a part has left on the device."""
    gc.collect()
    import torch

    if torch.cuda.is_available():
        from visual_spec.samplers.core.graph import forget

        forget()
        torch.cuda.empty_cache()


def _environment(commit: str | None) -> dict[str, Any]:
    import torch

    from visual_spec.eval.machine import choose_device, environment

    facts = environment(choose_device(None), torch.float32)
    del facts["dtype"]  # each part says its own
    facts["commit"] = facts["commit"] or commit
    return facts


def _end(process: Any) -> None:
    """Stop a process and all that it has started, if any of them still runs."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except (ProcessLookupError, PermissionError):  # it has ended, or has no group yet
            if process.is_alive():
                process.kill()
        process.join(5)


def _name_the_broken(document: dict[str, Any], status: str) -> None:
    for part in document["parts"].values():
        if part["status"] == RUNNING:
            part.update(status=status, error="the process ended in this part")


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return text[-_LONGEST:] or "no output"


def _write(path: Path, document: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(document, indent=1) + "\n", overwrite=True)


# -- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `scripts/gpu_hour.py`."""
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the result files go, and are looked for"
    )
    parser.add_argument("--stages", metavar="1,2", help="those only (default: all, in this order)")
    parser.add_argument("--list", action="store_true", help="list the stages with their limits, and end")
    parser.add_argument("--again", action="store_true", help="also run stages that are done")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds for all stages of this run")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels to install first, see above")
    parser.add_argument("--commit", metavar="ID", help="of the code, where its copy is no git checkout")
    parser.add_argument("--dry-run", action="store_true", help="walk every stage at a tiny size, on the CPU")
    parser.add_argument(
        "--tables", type=Path, metavar="FOLDER", help="write the tables of these results, and end"
    )
    parser.add_argument(
        "--document", type=Path, default=Path("docs/RESULTS.md"), metavar="FILE", help="where --tables writes"
    )


def main(argv: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Parse arguments and run; returns the exit status: 1 where a stage is not done."""
    parser = argparse.ArgumentParser(
        prog="gpu_hour.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.list:
        for stage in stages:
            print(f"{stage.name:>3}  {stage.title} (at most {stage.limit} s)")
        return 0
    if args.tables is not None:
        from visual_spec.eval.speed.gpu_tables import write_tables

        write_tables(args.document, args.tables, stages)
        return 0
    if args.out is None:
        parser.error("pass --out FOLDER, --list or --tables FOLDER")
    try:
        chosen = chosen_stages(args.stages, stages)
    except ValueError as error:
        parser.error(str(error))
    begun = time.monotonic()
    if args.wheels is not None:
        install(args.wheels)
    if args.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("PyTorch sees no GPU here; pass --dry-run to walk the stages without one")
    budget = None if args.budget is None else args.budget - (time.monotonic() - begun)
    options = dict(dry=args.dry_run, again=args.again, budget=budget, commit=args.commit)
    found = run_stages(chosen, args.out, **options, report=lambda text: print(text, flush=True))
    return 0 if [found.get(stage.name) for stage in chosen] == [OK] * len(chosen) else 1


def install(wheels: Path) -> None:
    """Install a folder of wheels without their dependencies, for this process and those that it starts.

    Raises:
        FileNotFoundError: no wheels in the folder.
        subprocess.CalledProcessError: pip refused them.
    """
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise FileNotFoundError(f"no wheels in {wheels}; see --help for how to prepare them")
    target = tempfile.mkdtemp(prefix="wheels-")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", target, *files], check=True)
    sys.path.insert(0, target)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [target, os.environ.get("PYTHONPATH")]))
    importlib.invalidate_caches()
