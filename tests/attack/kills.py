"""Work that is killed at random moments: nothing half-written stands under a final name, and a second run completes it.

The work runs in children of this process that share what is imported, so a kill hits work and not the start of Python.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from tqdm import tqdm

from tests.attack.ground import Ground, generate
from tests.helpers.drafter_training import train_tiny_drafter
from tests.helpers.evaluation import evaluated, timeless
from tests.helpers.sample_sets import content, work_in
from tests.helpers.tiny import tiny_pipeline
from visual_spec import cli
from visual_spec.eval.quality.sample_set import sample
from visual_spec.pipelines.loading import load_pipeline

KILLS = 10  # of each kind


@dataclass(frozen=True)
class Work:
    """Something that is killed.

    Attributes:
        run: does it, in a folder where a killed run may have left something.
        result: what it came to, to be compared with that of a run that was not killed.
        prepare: what is there before the first run.
    """

    run: Callable[[Path], Any]
    result: Callable[[Path], Any]
    prepare: Callable[[Path], Any] = lambda folder: None


def works(ground: Ground) -> dict[str, Work]:
    """The kinds of work by name."""

    def draw(folder: Path) -> None:
        prompts = ["a blue square", "a circle", "a red square", "red"]
        command = generate("pictures", ground.folder / "pictures", folder / "out", "--num-images", "3")
        command[2:2] = prompts  # beside the first one: argparse takes them from one place only
        assert cli.main([*command, "--batch-size", "2", "--overwrite"]) == 0

    def change(folder: Path) -> None:
        command = ["convert", *map(str, ground.files), "--image-size", "8", "--out", str(folder / "out")]
        assert cli.main([*command, "--overwrite"]) == 0

    def save(folder: Path) -> None:
        pipe = tiny_pipeline()
        with torch.no_grad():
            for part in (pipe.transformer, pipe.vq_model):
                for parameter in part.parameters():
                    parameter.add_(1.0)
        pipe.save_pretrained(folder / "out")

    def earlier(folder: Path) -> None:
        shutil.copytree(ground.folder / "converted", folder / "out")

    def other(folder: Path) -> None:
        shutil.copytree(ground.folder / "pictures", folder / "out")

    return {
        "generate": Work(draw, _files),
        "eval": Work(lambda folder: evaluated("tokens", folder / "out"), _results),
        "training": Work(lambda folder: train_tiny_drafter(folder / "out", every=2), _files_but_seconds),
        "convert": Work(change, _files, earlier),
        "save": Work(save, _files, other),
        "sample": Work(
            lambda folder: sample(work_in(folder / "out")), lambda folder: content(folder / "out")
        ),
    }


def attack(ground: Ground, folder: Path, seed: int, kills: int = KILLS) -> Iterator[tuple[str, str]]:
    """Kill every kind of work `kills` times. Yields its name, and what is wrong, "" for nothing."""
    for name, work in works(ground).items():
        rng, whole = Random(f"{seed} {name}"), folder / f"{name}-whole"
        whole.mkdir(parents=True)
        work.prepare(whole)
        seconds = run(work, whole, None)
        assert seconds is not None, f"{name} was killed, and nobody killed it"
        expected, done, number = work.result(whole), 0, 0
        while done < kills:
            number += 1
            assert number < 20 * kills, f"{name} always ends before it is killed"
            place = folder / f"{name}-{number}"
            place.mkdir()
            work.prepare(place)
            if run(work, place, rng.uniform(0, seconds)) is None:
                done += 1
                yield name, _wrong(work, place, expected)
            shutil.rmtree(place)


def run(work: Work, folder: Path, after: float | None) -> float | None:
    """Do the work in a child; seconds that it took. None: it was killed, `after` so many seconds.

    Raises:
        RuntimeError: the work failed.
    """
    started, child = time.monotonic(), os.fork()
    if child == 0:
        status = 1
        try:
            # tqdm's own lock is shared by all children, and one that dies with it would stop all others.
            tqdm.set_lock(threading.RLock())
            with open(folder / "log.txt", "w") as log, contextlib.redirect_stdout(log):
                with contextlib.redirect_stderr(log), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        work.run(folder)
                        status = 0
                    except BaseException as error:
                        print(repr(error), file=log)
        finally:
            os._exit(status)
    if after is not None:
        while time.monotonic() - started < after:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    if os.WEXITSTATUS(status):
        raise RuntimeError((folder / "log.txt").read_text())
    return time.monotonic() - started


def _wrong(work: Work, folder: Path, expected: Any) -> str:
    """What is wrong after a kill, and after a second run; "" for nothing."""
    if broken := half_written(folder):
        return f"half-written after the kill: {broken}"
    try:
        run(work, folder, None)
    except RuntimeError as error:
        return f"the second run failed: {error}"
    if broken := half_written(folder):
        return f"half-written after the second run: {broken}"
    left = sorted(path.name for path in folder.rglob("*.tmp"))
    if left:
        return f"left over: {left}"
    return "" if work.result(folder) == expected else "the second run came to something else"


def half_written(folder: Path) -> list[str]:
    """Files under final names that cannot be read whole, and pipelines that name what is not there."""
    found = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_dir() or hidden or path.suffix == ".tmp":
            continue
        try:
            _read(path)
        except Exception as error:  # whatever a half file raises
            found.append(f"{path.relative_to(folder)} ({error})")
    for index in sorted(folder.rglob("model_index.json")):
        if not any(part.startswith(".") for part in index.relative_to(folder).parts):
            try:
                load_pipeline(index.parent)
            except Exception as error:
                found.append(f"{index.parent.relative_to(folder)} ({error})")
    return found


def _read(path: Path) -> None:
    if path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".png":
        with Image.open(path) as picture:
            picture.load()
    elif path.suffix == ".npz":
        with np.load(path) as arrays:
            for name in arrays.files:
                arrays[name]
    elif path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                file.get_tensor(key)
    elif path.suffix == ".pt":
        torch.load(io.BytesIO(path.read_bytes()), weights_only=False)
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():
            raise ValueError("damaged archive")


# -- results -----------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> dict[str, bytes]:
    out = folder / "out"
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def _files_but_seconds(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = _files(folder)
    for name in found:
        if name.endswith("training.json"):
            record = json.loads(found[name])
            found[name] = {key: value for key, value in record.items() if "seconds" not in key}
    return found


def _results(folder: Path) -> Any:
    document = json.loads((folder / "out" / "results.json").read_text())
    return json.dumps(timeless(document), sort_keys=True)
