"""Score a set of samples by the figures that papers quote, each with its interval, its extractor and its sizes.

The metrics stand in `visual_spec.eval.quality.metric_table.METRICS`, what they see in
`visual_spec.eval.quality.extractors.EXTRACTORS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_spec.eval.intervals import mean_figure
from visual_spec.eval.quality import extractors, statistics
from visual_spec.eval.quality.beside import compared
from visual_spec.eval.quality.extractors import Setup
from visual_spec.eval.quality.feature_sets import FeatureFolder, SampleFiles
from visual_spec.eval.quality.metric_table import EXTRACTORS, METRICS, Metric, names_of
from visual_spec.eval.quality.published import Gaussian
from visual_spec.eval.quality.set_files import RUN, read_run
from visual_spec.eval.quality.statistics import Report, Sets
from visual_spec.records import MEDIA


@dataclass(frozen=True)
class Scoring:
    """What is scored, against what.

    Attributes:
        drawn: the set.
        reference: the true one, where a metric needs it.
        beside: another set with the same prompts and seeds, such as plain decoding's; `drawn` is compared with it
            sample by sample.
        metrics: names of `METRICS`.
        folder: where features are kept.
        setup: what extractors are made of.
        each: scores of every sample [N], by figure, once `figures` has been called.
    """

    drawn: SampleFiles
    reference: SampleFiles | None
    beside: SampleFiles | None
    metrics: tuple[str, ...]
    folder: Path
    setup: Setup = field(default_factory=Setup)
    each: dict[str, Tensor] = field(default_factory=dict)
    _extractors: dict[str, FeatureFolder] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what cannot be scored, before any network is loaded.

        Raises:
            ValueError: a metric that is unknown, or of the other medium; one that lacks reference, prompts or weights;
                a program that is not trusted; a damaged record of how a set was drawn; sets of different media; a set
                beside it of other samples.
        """
        known = names_of(self.drawn.medium)
        if wrong := [name for name in self.metrics if name not in known]:
            what = MEDIA[self.drawn.medium].samples
            raise ValueError(
                f"--metrics {' '.join(wrong)}: {self.drawn.path} holds {what}; pass some of {' '.join(known)}"
            )
        if not self.metrics:
            raise ValueError(f"no metrics; pass some of {' '.join(known)}")
        self._check_needs()
        self._check_sizes()
        for other in (self.reference, self.beside):
            if other is not None and other.files and other.medium != self.drawn.medium:
                raise ValueError(f"{self.drawn.path} holds {self.drawn.medium}, {other.path} {other.medium}")
        if self.reference is not None and not len(self.reference):
            lacking = [name for name in self._asked("reference") if self._stated(METRICS[name]) is None]
            if lacking:
                raise ValueError(
                    f"{self.reference.path} holds no samples as arr_0 ({self.reference.arrays}), and no moments that "
                    f"{' '.join(lacking)} could do with; pass the samples"
                )
        if self.beside is not None and (
            not self.drawn.lines
            or [key(line) for line in self.drawn.lines] != [key(line) for line in self.beside.lines]
        ):
            raise ValueError(
                f"{self.drawn.path} and {self.beside.path} are not drawn for the same prompts with the same seeds; "
                "draw both by visual-spec sample with the same --prompts, --num and --seed"
            )

    def _check_needs(self) -> None:
        if (names := self._asked("reference")) and self.reference is None:
            raise ValueError(
                f"--metrics {' '.join(names)} compare with true samples; pass --reference FOLDER or FILE.npz"
            )
        if (names := self._asked("beside")) and self.beside is None:
            raise ValueError(
                f"--metrics {' '.join(names)} compare sample by sample with another set; pass --compare-to FOLDER"
            )
        if (names := self._asked("prompts")) and self.drawn.prompts is None:
            raise ValueError(
                f"{self.drawn.path} has no manifest.jsonl, so its prompts are unknown; leave {' and '.join(names)} out"
            )
        for source in dict.fromkeys(METRICS[name].features for name in self.metrics):
            needs = EXTRACTORS[source]
            if needs.option and not needs.optional and self.setup.networks.get(needs.option) is None:
                names = [name for name in self.metrics if METRICS[name].features == source]
                raise ValueError(
                    f"--metrics {' '.join(names)} needs {needs.what}; pass --{needs.option.replace('_', '-')} "
                    f"{'FOLDER' if needs.folder else 'FILE'}"
                )
            if needs.program:
                extractors.trusted_program(self.setup.networks[needs.option], self.setup.trust_program)
        if self.beside is not None:
            compared(self.drawn, self.beside)
        self.run()

    def _check_sizes(self) -> None:
        for name in self.metrics:
            metric = METRICS[name]
            sets = [self.drawn, *(self._others(metric))]
            if few := [one for one in sets if len(one) < metric.fewest]:
                what, one = MEDIA[self.drawn.medium].samples, few[0]
                raise ValueError(
                    f"--metrics {name} needs {metric.fewest} {what} or more of each set, and {one.path} holds "
                    f"{len(one)}{'' if one.files else f' as arr_0 ({one.arrays})'}"
                )

    def run(self) -> dict[str, object] | None:
        """Return what fixed the samples, where `visual-spec sample` drew them."""
        there = (self.drawn.path / RUN).exists() or (self.drawn.path / RUN).is_symlink()
        return read_run(self.drawn.path) if self.drawn.files and there else None

    def _asked(self, need: str) -> list[str]:
        """The metrics that need a reference, prompts, or a set beside."""
        return [name for name in self.metrics if getattr(METRICS[name], need)]

    # -- features -----------------------------------------------------------------------------------------------------

    def extractor(self, name: str) -> FeatureFolder:
        """The features of a name, its network loaded once."""
        if name not in self._extractors:
            extract, networks, variant = getattr(extractors, EXTRACTORS[name].make)(self.setup)
            self._extractors[name] = FeatureFolder(self.folder, name, extract, networks, variant)
        return self._extractors[name]

    def wanted(self) -> list[tuple[str, SampleFiles]]:
        """Extractors and the sets that they see."""
        pairs: list[tuple[str, SampleFiles]] = []
        for metric in (METRICS[name] for name in self.metrics):
            sets = [self.drawn, *self._others(metric)]
            pairs += [(metric.features, one) for one in sets if (metric.features, one) not in pairs]
        return pairs

    def _others(self, metric: Metric) -> list[SampleFiles]:
        """The sets beside the drawn one whose features a metric takes."""
        sets = []
        if metric.reference and self.reference is not None and len(self.reference):
            if self._stated(metric) is None:
                sets.append(self.reference)
        if metric.distance and self.beside is not None:
            sets.append(self.beside)
        return sets

    def features(self, name: str, samples: SampleFiles, kind: str = "features") -> Tensor:
        features = self.extractor(name).read(samples)
        assert features is not None, "not complete"
        if kind not in features:
            raise ValueError(
                f"{self.folder} keeps features of {samples.path} of another form, {', '.join(features)} without "
                f"{kind}; remove {self.extractor(name).key}-*.npz there, or choose another folder"
            )
        return features[kind]

    def notes(self) -> list[str]:
        """Return what is to be known of the sets: sizes of pictures that differ."""
        others = [one for one in (self.reference, self.beside) if one is not None and len(one)]
        if self.drawn.medium != "image" or self.setup.size is not None:
            return []
        height, width = self.drawn.pictures(0, 1).shape[1:3]
        notes = []
        for other in others:
            high, wide = other.pictures(0, 1).shape[1:3]
            if (high, wide) != (height, width):
                notes.append(
                    f"pictures of {self.drawn.path} have {width} x {height} pixels, pictures of {other.path} {wide} x "
                    f"{high}, which moves every figure; --size N resizes both"
                )
        return notes

    # -- figures ------------------------------------------------------------------------------------------------------

    def figures(self, report: Report = lambda text: None) -> dict[str, object]:
        """All figures by name."""
        document: dict[str, object] = {}
        for metric in (METRICS[name] for name in self.metrics):
            facts: dict[str, object] = {"interval": metric.interval, "samples": len(self.drawn)}
            facts |= {"extractor": metric.features, "weights": self.extractor(metric.features).hash}
            if metric.reference and self.reference is not None:
                facts["reference_samples"] = len(self.reference) or None
            figures = getattr(statistics, metric.statistic)(self._sets(metric, report))
            if metric.each:
                self.each[metric.figure] = figures
                figures = {metric.figure: _mean(figures.double())}
            document |= {title: {**facts, **figure} for title, figure in figures.items()}
        return document

    def _sets(self, metric: Metric, report: Report) -> Sets:
        return Sets(
            metric.figure,
            self.drawn,
            self.reference,
            self.beside,
            lambda samples, kind: self.features(metric.features, samples, kind),
            self._stated(metric),
            self.setup.device,
            report,
        )

    def _stated(self, metric: Metric) -> Gaussian | None:
        """The moments of a metric's features that the reference states."""
        return None if self.reference is None else self.reference.moments(metric.moments)


def score(
    work: Scoring, *, rank: int = 0, shards: int = 1, report: Report = lambda text: None
) -> dict[str, Any] | None:
    """Extract the features that are missing of this process's share, and score once all are there.

    Features are kept chunk by chunk, and every figure is computed from all of them in the order of the samples. So it
    does not depend on how many processes shared the work.

    Returns:
        The document, or None as long as other processes have features to extract.

    Raises:
        ValueError, OSError, ImportError: as `Scoring.check`; a rank out of range; a sample that cannot be read, or
            features of it that are no finite rows.
    """
    if not 0 <= rank < shards:
        raise ValueError(f"rank={rank} of {shards}; pass a rank from 0 to shards - 1")
    work.check()
    for name, samples in work.wanted():
        work.extractor(name).extract_share(samples, rank, shards, report)
    lacking = [samples for name, samples in work.wanted() if work.extractor(name).read(samples) is None]
    if lacking and shards == 1:
        raise OSError(
            f"the features of {lacking[0].path} in {work.folder} cannot be read back; choose another folder"
        )
    if lacking:
        return None
    return {
        "kind": "scores",
        "folder": str(work.drawn.path),
        "run": work.run(),
        "samples": len(work.drawn),
        "reference": None if work.reference is None else str(work.reference.path),
        "resize": "none"
        if work.setup.size is None
        else f"to {work.setup.size} pixels, bicubic with antialiasing in floating point",
        "notes": work.notes(),
        "figures": work.figures(report),
        "comparison": None if work.beside is None else compared(work.drawn, work.beside),
    }


def key(line: Mapping[str, object]) -> tuple[object, ...]:
    """Return what makes two samples a pair."""
    return line["index"], line["prompt"], line["seed"]


def _mean(values: Tensor) -> Mapping[str, float | str]:
    """The mean of finite values with its interval: the ratio of signal to noise of equal pictures is infinite."""
    finite = values[values.isfinite()]
    if len(values) == 1:  # whose spread nobody knows
        return {"value": values.item(), "low": -math.inf, "high": math.inf}
    if len(finite) == len(values):
        return mean_figure(values.tolist())
    figure = (
        mean_figure(finite.tolist()) if len(finite) else dict.fromkeys(("value", "low", "high"), math.inf)
    )
    return figure | {"note": f"of {len(finite)} pairs; {len(values) - len(finite)} are equal and have none"}
