"""An evaluation: a set of samples for every setting (`sample_set`), judged by extractors (`score`), and one table.

Settings are drawn batch by batch in turn, so a drift of the machine hits all of them alike, and every batch that is
done is kept. Processes may share the batches; whichever finds that nothing is missing judges the sets and writes
`results.json`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from visual_spec.eval import draws
from visual_spec.eval.machine import environment
from visual_spec.eval.quality import extractors
from visual_spec.eval.quality.extractors import Setup
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.figures import Judged, figures_of, picture_sheet, thumbnails
from visual_spec.eval.quality.metric_table import EXTRACTORS, OWN
from visual_spec.eval.quality.prompt_files import PromptSet
from visual_spec.eval.quality.sample_set import SampleSet, draw_share, held, keep_true_samples, weights_of
from visual_spec.eval.quality.score import Scoring
from visual_spec.eval.quality.set_files import read_times
from visual_spec.eval.quality.tasks import Task
from visual_spec.eval.settings import Setting, check_samplers
from visual_spec.eval.timing import Decoded, decoded, time_rounds
from visual_spec.files.documents import write_json
from visual_spec.files.pictures import png_bytes
from visual_spec.files.reading import COUNT, LIST, OBJECT, read_object
from visual_spec.files.whole import write_atomically
from visual_spec.records import MEDIA

if TYPE_CHECKING:
    from visual_spec.eval.pair import Pipeline

Report = Callable[[str], object]
PARSER = "parser"
FEWEST = 4  # samples whose figures have intervals
_SHOWN = 8  # prompts on the sheet of samples
_TIMED_ON = (
    "device",
    "device_name",
    "threads",
    "torch",
    "cuda",
    "python",
    "platform",
)  # what seconds depend on


def evaluate(
    pipe: Pipeline,
    settings: Sequence[Setting],
    task: Task,
    folder: str | Path,
    *,
    samples: int,
    batch_size: int,
    extractors: Sequence[str] | None = None,
    setup: Setup | None = None,
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
        folder: a set of samples for each setting, the true samples, where there are any, and what the tokenizer makes
            of them, features,
            `alone.json`, `machine.json` with the facts of what measures, and once complete `results.json` and
            `pictures.png`.
        samples: of each setting; may be raised later, not lowered.
        extractors: names of `metric_table.EXTRACTORS` that sets are compared by; None: the medium's own.
        setup: what extractors are made of.
        rank, shards: this process takes every `shards`-th batch of `batch_size` samples, from batch `rank`.
        alone: time that many samples of each setting at batch 1 too, in turn, at most `samples`.
        model: its name, for the record.

    Returns:
        The document (see `figures.figures_of`), or None as long as other processes have samples to draw.

    Raises:
        ValueError: sizes out of range, too few prompts, a folder with samples of other settings or prompts, or
            something to be timed where the seconds in the folder are of another machine.
        FileNotFoundError, ImportError: an extractor's network or its library is not there.
        OSError: another process is at this share.
    """
    if samples < FEWEST or batch_size < 1 or alone < 0 or not 0 <= rank < shards:
        raise ValueError(
            f"samples={samples}, batch_size={batch_size}, alone={alone}, rank={rank} of {shards}; pass at least "
            f"{FEWEST} samples, a batch of at least 1, and a rank from 0 to shards - 1"
        )
    setup = setup or Setup(device=str(pipe.device))
    extractors = (OWN[pipe.medium],) if extractors is None else tuple(extractors)
    run = _Run(
        pipe, list(settings), task, Path(folder), samples, batch_size, extractors, setup, model, report
    )
    run.open()
    with held(run.folder / f".lock-{rank}"):
        draw_share(run.sets, rank, shards, report, before=run.settle_machine)
        timings = run.timings(min(alone, samples), measure=rank == 0)
        # Where only the timings are missing, process 0 is at it, and writes the document afterwards.
        finished = [one.finish() for one in run.sets]
        if timings is None or None in finished:
            return None
        report("comparing")
        run.keep_references()
        document = run.document(timings or None)
        write_json(run.folder / "results.json", document, indent=1)
        run.write_sheet()
    return document


@dataclass
class _Run:
    """What `evaluate` was asked for, and the sets of its settings, in their order."""

    pipe: Pipeline
    settings: list[Setting]
    task: Task
    folder: Path
    samples: int
    batch_size: int
    judges: Sequence[str]
    setup: Setup
    model: str
    report: Report
    sets: list[SampleSet] = field(default_factory=list)

    @cached_property
    def shared(self) -> dict[str, Any]:
        """Return what all sets have in common."""
        facts = {
            "model": self.model,
            "weights": weights_of(self.pipe),
            "batch_size": self.batch_size,
            "dtype": str(self.pipe.transformer.dtype).removeprefix("torch."),
            "device": self.pipe.device.type,
        }
        return facts | ({"sampling_rate": self.pipe.sampling_rate} if self.pipe.medium == "audio" else {})

    def open(self) -> None:
        """Open the sets; ValueError for too few prompts, or samples of another model or of other settings."""
        needed = -(-self.samples // self.batch_size) * self.batch_size
        if len(self.task.prompts) < needed:
            raise ValueError(
                f"{len(self.task.prompts)} prompts for {self.samples} samples in batches of {self.batch_size}; pass "
                f"{needed}"
            )
        check_samplers(self.pipe, self.settings)
        prompts = PromptSet(tuple(self.task.prompts), source=self.task.source)
        self.sets = [
            SampleSet(
                self.pipe, setting, prompts, self.folder / folder_name(setting.text), self.samples, self.batch_size,
                self.model, self.shared["weights"],
            )
            for setting in self.settings
        ]  # fmt: skip
        for name in self.judges:
            if EXTRACTORS[name].option:  # a network that is not there is refused now, not once all is drawn
                getattr(extractors, EXTRACTORS[name].make)(self.setup)
        for one in self.sets:
            one.open()

    def machine(self) -> dict[str, Any] | None:
        """The facts of the machine that measured what the folder holds; None where it holds none."""
        if (path := self.folder / "machine.json").exists():
            return read_object(path)
        # Earlier versions kept them there alone.
        results = self.folder / "results.json"
        return read_object(results, {"environment": OBJECT})["environment"] if results.exists() else None

    def settle_machine(self) -> None:
        """Keep the facts of this machine, which is about to measure; ValueError where another one did before."""
        here = environment(self.pipe.device, self.pipe.transformer.dtype)
        there = self.machine()
        if there is None and any(self.folder.glob("*/batches/*.seconds")):
            warnings.warn(
                f"{self.folder} does not say which machine its seconds are of; they count as this one's",
                stacklevel=2,
            )
        there = there or here
        if changes := [
            f"{name}: {there.get(name)} there, {here[name]} here"
            for name in _TIMED_ON
            if there.get(name) != here[name]
        ]:
            raise ValueError(
                f"{self.folder} holds seconds that another machine measured ({'; '.join(changes)}), which do not "
                "compare with this one's; go on there, or pass another folder"
            )
        commits = filter(None, dict.fromkeys([*(there.get("commit") or "").split(", "), here["commit"]]))
        facts = there | {"commit": ", ".join(commits) or None}
        write_json(self.folder / "machine.json", facts, indent=1)

    def timings(self, rounds: int, *, measure: bool) -> dict[str, Any] | None:
        """What `alone.json` holds, measured now if it is not there; {} for no rounds, None where it is not there yet.

        Args:
            measure: whether this process is the one that measures.
        """
        if not rounds:
            return {}
        path, texts = self.folder / "alone.json", [setting.text for setting in self.settings]
        stored = _read_timings(path, texts, rounds)
        if stored is None and measure:
            self.settle_machine()
            self.report(f"timing {rounds} {MEDIA[self.pipe.medium].samples} of each setting at batch 1")
            seconds = time_alone(self.pipe, self.settings, self.task.prompts, rounds)
            stored = {"settings": texts, "pictures": rounds, **seconds}
            write_json(path, stored, indent=1)
        return stored

    def keep_references(self) -> None:
        """Write the true samples, and what the tokenizer makes of them: the best that samplers of its tokens reach."""
        prompts, true = self.task.prompts[: self.samples], self.task.pictures
        if true is None:
            return
        facts = {"medium": self.pipe.medium, "prompts": self.task.source}

        def coded(index: int) -> np.ndarray:
            return draws.through_tokenizer(self.pipe, true[index : index + 1])[0]

        keep_true_samples(self.folder / "true", self.pipe, facts, prompts, lambda index: true[index])
        keep_true_samples(self.folder / "tokenizer", self.pipe, {**self.shared, **facts}, prompts, coded)

    @cached_property
    def scoring(self) -> Scoring:
        """Extractors, each made once, and where features are kept."""
        first = SampleFiles.open(self.sets[0].folder) if self.true is None else self.true
        return Scoring(first, None, None, (), self.folder / "features", self.setup)

    @cached_property
    def true(self) -> SampleFiles | None:
        """The true samples, if there are any."""
        return None if self.task.pictures is None else SampleFiles.open(self.folder / "true")

    def features(self, samples: SampleFiles, name: str) -> Tensor:
        """Features of a set, extracted where they are not there yet."""
        self.scoring.extractor(name).extract_share(samples, 0, 1, self.report)
        return self.scoring.features(name, samples)

    def judged(self, folder: Path) -> Judged:
        """A set, and what was read off it; ValueError for samples of other prompts."""
        samples = SampleFiles.open(folder)
        if samples.prompts != self.task.prompts[: self.samples]:
            raise ValueError(f"the samples in {folder} were drawn for other prompts; pass another folder")
        features = {name: self.features(samples, name) for name in self.judges}
        times = read_times(folder) if folder.name != "tokenizer" else []
        return Judged(samples, times, self.features(samples, PARSER), features)

    def document(self, timings: dict[str, Any] | None) -> dict[str, object]:
        """The results, with what they were measured on."""
        first, true = self.settings[0], self.true
        return {
            "kind": "quality",
            "medium": self.pipe.medium,
            "unit": self.pipe.unit,
            "settings": {
                **self.shared,
                "samples": self.samples,
                "seed": first.seed,
                "law": first.pipeline_law,
                "judge": " ".join(self.scoring.extractor(name).key for name in self.judges),
            },
            "environment": self.machine() or environment(self.pipe.device, self.pipe.transformer.dtype),
            **figures_of(
                self.settings,
                [self.judged(one.folder) for one in self.sets],
                None if true is None else self.judged(self.folder / "tokenizer"),
                None if true is None else {name: self.features(true, name) for name in self.judges},
                timings,
                on_processor=self.pipe.device.type == "cpu",
                kernels=self.pipe.medium == "audio",
            ),
        }

    def write_sheet(self) -> None:
        """Write `pictures.png`: the first samples of every setting below the true ones."""
        names = {f"true {MEDIA[self.pipe.medium].truth}": "true", "tokenizer alone": "tokenizer"}
        folders = {} if self.true is None else {title: self.folder / name for title, name in names.items()}
        folders |= {one.setting.text: one.folder for one in self.sets}
        shown = min(self.samples, _SHOWN)
        sheet = {title: thumbnails(SampleFiles.open(path), shown) for title, path in folders.items()}
        write_atomically(self.folder / "pictures.png", png_bytes(picture_sheet(sheet)), overwrite=True)


def folder_name(text: str) -> str:
    """A setting as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", text)


def time_alone(
    pipe: Pipeline, settings: Sequence[Setting], prompts: Sequence[str], rounds: int
) -> dict[str, list[list[float]]]:
    """Draw one sample at batch 1 with every setting in every round, after a warm-up.

    Returns:
        seconds and processor_seconds, see `timing.Rounds`.
    """

    def decode(index: int, chosen: Sequence[str], first: int) -> tuple[Decoded, float]:
        drawn, trace = decoded(pipe, settings[index], chosen, first)
        return drawn, trace.seconds

    times = time_rounds(
        len(settings),
        lambda first: prompts[first : first + 1],
        decode,
        device=pipe.device,
        batch_size=1,
        runs=rounds,
        warmup=1,
    )
    return {"seconds": times.seconds, "processor_seconds": times.processor_seconds}


def _read_timings(path: Path, texts: list[str], rounds: int) -> dict[str, Any] | None:
    """Return what `alone.json` holds, if it is of these settings and as many rounds; else None."""
    if not path.exists():
        return None
    try:
        there = read_object(path, {"settings": LIST, "pictures": COUNT})
        same = (there["settings"], there["pictures"]) == (texts, rounds)
    except ValueError as error:
        warnings.warn(f"{path} is damaged ({error}); times are measured again", stacklevel=2)
        return None
    return there if same else None
