"""An evaluation: draw samples with every setting, judge them, and compare them as sets.

Settings are drawn block by block in turn, so a drift of the machine hits all of them alike, and every block that is
done is kept. Processes may share the blocks; whichever finds that nothing is missing writes `results.json`.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_spec.eval import draws
from visual_spec.eval.machine import environment
from visual_spec.eval.media import show
from visual_spec.eval.quality.figures import figures_of, picture_sheet, thumbnails
from visual_spec.eval.quality.samples import Judge, SampleFolder, Samples, judge_draws
from visual_spec.eval.quality.tasks import Task
from visual_spec.eval.report.drawing import png_bytes
from visual_spec.eval.settings import Setting, check_samplers
from visual_spec.eval.words import Words
from visual_spec.files.records import COUNT, LIST, read_object
from visual_spec.files.whole import write_atomically
from visual_spec.models.core.fingerprint import fingerprint

Report = Callable[[str], Any]
_SHOWN = 8  # prompts on the sheet of samples


def evaluate(
    pipe: Any,
    settings: Sequence[Setting],
    task: Task,
    judge: Judge,
    folder: str | Path,
    *,
    samples: int,
    batch_size: int,
    rank: int = 0,
    shards: int = 1,
    alone: int = 0,
    model: str = "",
    report: Report = lambda text: None,
) -> dict[str, Any] | None:
    """Draw, judge and compare, or go on where a run stopped.

    Args:
        pipe: draws; its sampler is left as it was.
        settings: what is measured. The first one is plain decoding, which the others are compared with.
        task: at least `samples` prompts, rounded up to whole batches.
        folder: a folder for each setting, `alone.json`, and once complete `results.json` and `pictures.png`.
        samples: of each setting; may be raised later.
        rank, shards: this process takes every `shards`-th block of `batch_size` samples, from block `rank`.
        alone: time that many samples of each setting at batch 1 too, in turn.
        model: its name, for the record.

    Returns:
        The document (see `figures.figures_of`), or None as long as other processes have samples to draw.

    Raises:
        ValueError: sizes out of range, too few prompts, or a folder with samples of other settings or prompts.
    """
    run = _Run(pipe, list(settings), task, judge, Path(folder), samples, batch_size, report)
    run.check(rank, shards, alone)
    run.open_folders(model)
    run.draw_blocks(rank, shards)
    timings = run.timings(alone, measure=rank == 0)
    if timings is None or not run.complete():
        return (
            None  # where only the timings are missing, process 0 is at it, and writes the document afterwards
        )
    report("comparing")
    drawn, encoded = [place.samples(samples) for place in run.places], run.tokenizer.samples(samples)
    document = run.document(drawn, encoded, timings or None)
    run.write_sheet(drawn, encoded)
    results = run.folder / "results.json"
    write_atomically(results, json.dumps(document, indent=1) + "\n", overwrite=True)
    return document


@dataclass
class _Run:
    """What `evaluate` was asked for, and the folders of its samples: `places` in the order of the settings."""

    pipe: Any
    settings: list[Setting]
    task: Task
    judge: Judge
    folder: Path
    samples: int
    batch_size: int
    report: Report

    @property
    def words(self) -> Words:
        """What its samples are called."""
        return Words(self.pipe.medium, self.pipe.unit)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Half-open ranges of samples."""
        starts = range(0, self.samples, self.batch_size)
        return [(first, min(first + self.batch_size, self.samples)) for first in starts]

    def check(self, rank: int, shards: int, alone: int) -> None:
        """Refuse sizes out of range."""
        fewest = self.words.fewest
        if self.samples < fewest or self.batch_size < 1 or alone < 0 or not 0 <= rank < shards:
            raise ValueError(
                f"samples={self.samples}, batch_size={self.batch_size}, alone={alone}, rank={rank} of {shards}; pass "
                f"at least {fewest} samples, a batch of at least 1, and a rank from 0 to shards - 1"
            )
        needed = len(self.blocks) * self.batch_size
        if len(self.task.prompts) < needed:
            raise ValueError(
                f"{len(self.task.prompts)} prompts for {self.samples} samples in batches of {self.batch_size}; pass "
                f"{needed}"
            )

    def open_folders(self, model: str) -> None:
        """Open the folders of samples, which refuse samples of another model or of other settings."""
        parts = (part for part in self.pipe.components.values() if hasattr(part, "state_dict"))
        self.shared = {
            "model": model,
            "weights": fingerprint(parts),
            "batch_size": self.batch_size,
            "dtype": str(self.pipe.transformer.dtype).removeprefix("torch."),
            "device": self.pipe.device.type,
        }
        if self.pipe.medium == "audio":
            self.shared["sampling_rate"] = self.pipe.sampling_rate
        check_samplers(self.pipe, self.settings)
        self.places = [
            SampleFolder(self.folder / folder_name(setting.text), {**self.shared, **setting.describe()})
            for setting in self.settings
        ]
        # What the tokenizer alone makes of true samples: the best that any sampler of its tokens can reach.
        self.tokenizer = SampleFolder(self.folder / "tokenizer", {**self.shared, "sampler": None})

    def draw_blocks(self, rank: int, shards: int) -> None:
        """Draw and judge what is missing of this process's share."""
        started, mine = time.monotonic(), self.blocks[rank::shards]
        for number, block in enumerate(mine):
            # Every second block runs backwards, so that no setting always follows the same one.
            for setting, place in list(zip(self.settings, self.places, strict=True))[:: (-1) ** number]:
                if missing := place.missing(*block):
                    prompts = self.task.prompts[slice(*missing)]
                    place.write("draws", *missing, draws.draw(self.pipe, setting, prompts, missing[0]))
                self._judge(place, block)
            if missing := self.tokenizer.missing(*block):
                part = slice(*missing)
                arrays = draws.encode(self.pipe, self.task.prompts[part], self.task.pictures[part])
                self.tokenizer.write("draws", *missing, arrays)
            self._judge(self.tokenizer, block)
            spent = time.monotonic() - started
            left = spent / (number + 1) * (len(mine) - number - 1)
            self.report(f"block {number + 1} of {len(mine)}: {spent:.0f} s, about {left:.0f} s left")

    def _judge(self, place: SampleFolder, block: tuple[int, int]) -> None:
        # The block without the cut at the number of samples, as an earlier run with more samples saw it.
        whole = block[0], block[0] + self.batch_size
        judge_draws(self.pipe, place, self.task.prompts, self.judge, whole)

    def timings(self, rounds: int, *, measure: bool) -> dict[str, Any] | None:
        """What `alone.json` holds, measured now if it is not there; {} for no rounds, None where it is not there yet.

        Args:
            measure: whether this process is the one that measures.
        """
        if not rounds:
            return {}
        path, texts = self.folder / "alone.json", [setting.text for setting in self.settings]
        found = _read_timings(path, texts, rounds)
        if found is None and measure:
            noun = self.words.samples
            self.report(f"timing {rounds} {noun} of each setting at batch 1")
            seconds = time_alone(self.pipe, self.settings, self.task.prompts, rounds)
            found = {"settings": texts, "pictures": rounds, **seconds}
            write_atomically(path, json.dumps(found, indent=1) + "\n", overwrite=True)
        return found

    def complete(self) -> bool:
        """Whether all samples of all settings are there and judged."""
        known = self.judge.fingerprint
        return all(place.complete(self.samples, known) for place in [*self.places, self.tokenizer])

    def document(
        self, drawn: list[Samples], encoded: Samples, timings: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The results, with what they were measured on."""
        first = self.settings[0]
        return {
            "kind": "quality",
            "medium": self.words.medium,
            "unit": self.words.units,
            "settings": {
                **self.shared,
                "samples": self.samples,
                "seed": first.seed,
                "law": first.pipeline_law,
                "judge": self.judge.fingerprint,
            },
            "environment": environment(self.pipe.device, self.pipe.transformer.dtype),
            **figures_of(
                self.settings,
                drawn,
                encoded,
                self.task.pictures[: self.samples],
                self.judge,
                timings,
                on_processor=self.pipe.device.type == "cpu",
                kernels=self.words.kernels,
            ),
        }

    def write_sheet(self, drawn: list[Samples], encoded: Samples) -> None:
        """Write `pictures.png`: the first samples of every setting below the true ones."""
        shown = min(self.samples, _SHOWN)
        sheet = {f"true {self.words.truth}": self.task.pictures[:shown]}
        titles = ["tokenizer alone", *(setting.text for setting in self.settings)]
        for title, found in zip(titles, [encoded, *drawn], strict=True):
            sheet[title] = show(self.pipe, found.stored[:shown])
        sheet = {title: thumbnails(self.pipe, samples) for title, samples in sheet.items()}
        write_atomically(self.folder / "pictures.png", png_bytes(picture_sheet(sheet)), overwrite=True)


def folder_name(text: str) -> str:
    """A setting as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", text)


def time_alone(
    pipe: Any, settings: Sequence[Setting], prompts: Sequence[str], rounds: int
) -> dict[str, list[list[float]]]:
    """Draw one sample at batch 1 with every setting in every round, after a warm-up.

    Returns:
        seconds and processor_seconds, both `[setting][round]`.
    """
    found: dict[str, list[list[float]]] = {
        kind: [[] for _ in settings] for kind in ("seconds", "processor_seconds")
    }
    for number in range(-1, rounds):
        index = max(number, 0)
        for place in list(range(len(settings)))[:: -1 if number % 2 else 1]:
            arrays = draws.draw(pipe, settings[place], prompts[index : index + 1], index)
            for kind, values in found.items():
                if number >= 0:
                    values[place].append(float(arrays[kind]))
    return found


def _read_timings(path: Path, texts: list[str], rounds: int) -> dict[str, Any] | None:
    """What `alone.json` holds, if it is of these settings and as many rounds; else None."""
    if not path.exists():
        return None
    try:
        there = read_object(path, {"settings": LIST, "pictures": COUNT})
        same = (there["settings"], there["pictures"]) == (texts, rounds)
    except ValueError as error:
        warnings.warn(f"{path} is damaged ({error}); times are measured again", stacklevel=2)
        return None
    return there if same else None
