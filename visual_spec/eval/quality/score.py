"""Score a set of samples by the figures that papers quote, each with its interval, its extractor and its sizes.

| metric | figure | features |
|---|---|---|
| `fid` | Frechet Inception distance | Inception, 2048 |
| `kid` | kernel Inception distance | Inception, 2048 |
| `is` | Inception score | Inception, logits without bias |
| `prc` | precision and recall, 3 neighbours | Inception, 2048, as ADM's evaluator has them |
| `clip` | CLIP score: 100 cos of picture and prompt, at least 0 | a CLIP model |
| `shapes` | Frechet distance, precision and recall; no FID | the embedded classifier of `shapes` pictures |
| `fad`, `kad` | Frechet and kernel audio distance | a CLAP model |
| `clap` | cosine of clip and prompt | a CLAP model |
| `mel` | Frechet distance; no FAD | mean and spread of 64 mel bands |
| `fvd` | Frechet video distance | I3D, 400 |
| `frames` | Frechet distance; no FVD | the classifier of `shapes` over the frames |
| `kl` | Kullback-Leibler divergence of a tagger's labels, reference to drawn, clip by clip | a tagger |

Distances under different extractors do not compare; nor do Frechet distances of sets of different size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_spec.eval.intervals import mean_figure
from visual_spec.eval.quality import published
from visual_spec.eval.quality.audio import kernel_figure
from visual_spec.eval.quality.beside import compared
from visual_spec.eval.quality.extractors import (
    clap_features,
    clip_features,
    frame_features,
    inception_features,
    mel_features,
    shapes_features,
    tag_features,
    trusted_program,
    video_features,
)
from visual_spec.eval.quality.feature_sets import FeatureFolder, SampleFiles
from visual_spec.eval.quality.metrics import precision_recall
from visual_spec.eval.quality.published import Gaussian

IMAGE_METRICS = ("fid", "kid", "is", "prc", "clip", "shapes")
AUDIO_METRICS = ("fad", "kad", "clap", "mel", "kl")
VIDEO_METRICS = ("fvd", "frames")
METRICS = {"image": IMAGE_METRICS, "audio": AUDIO_METRICS, "video": VIDEO_METRICS}
_SAMPLES = {"image": "pictures", "audio": "clips", "video": "videos"}
_NEED_REFERENCE = ("fid", "kid", "prc", "shapes", "fad", "kad", "mel", "kl", "fvd", "frames")
_FRECHET = ("fid", "shapes", "fad", "mel", "fvd", "frames")
_NEED_PROMPTS = ("clip", "clap")
_EXTRACTOR = {
    "fid": "inception",
    "kid": "inception",
    "is": "inception",
    "prc": "inception",
    "fad": "clap",
    "kad": "clap",
    "fvd": "i3d",
}
Report = Callable[[str], Any]


@dataclass(frozen=True)
class Scoring:
    """What is scored, against what.

    Attributes:
        drawn: the set.
        reference: the true one, where a metric needs it.
        beside: another set with the same prompts and seeds, such as that of plain decoding, which `drawn` is compared
            with sample by sample.
        metrics: names, see the table above.
        folder: where features are kept.
        size: pictures are resized to this side first; None: as they are.
        inception, clip, clap, tagger, i3d: files and folders of weights.
        trust_program: `i3d` is a program; it may be run.
        device: where networks run.
    """

    drawn: SampleFiles
    reference: SampleFiles | None
    beside: SampleFiles | None
    metrics: tuple[str, ...]
    folder: Path
    size: int | None = None
    inception: Path | None = None
    clip: Path | None = None
    clap: Path | None = None
    tagger: Path | None = None
    i3d: Path | None = None
    trust_program: bool = False
    device: str = "cpu"
    batch_size: int = 50
    _extractors: dict[str, FeatureFolder] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what cannot be scored, before any network is loaded.

        Raises:
            ValueError: a metric that is unknown, or of the other medium; one that lacks reference, prompts or weights;
                a program that is not trusted; sets of different media; a set beside it of other samples.
        """
        known = METRICS[self.drawn.medium]
        if wrong := [name for name in self.metrics if name not in known]:
            what = _SAMPLES[self.drawn.medium]
            raise ValueError(
                f"--metrics {' '.join(wrong)}: {self.drawn.path} holds {what}; pass some of {' '.join(known)}"
            )
        if not self.metrics:
            raise ValueError(f"no metrics; pass some of {' '.join(known)}")
        lacking = [name for name in self.metrics if name in _NEED_REFERENCE]
        if lacking and self.reference is None:
            raise ValueError(
                f"--metrics {' '.join(lacking)} compare with true samples; pass --reference FOLDER or FILE.npz"
            )
        if any(name in _NEED_PROMPTS for name in self.metrics) and self.drawn.prompts is None:
            raise ValueError(
                f"{self.drawn.path} has no manifest.jsonl, so its prompts are unknown; leave clip and clap out"
            )
        for name, path, option in (("clip", self.clip, "--clip"), ("kl", self.tagger, "--tagger")):
            if name in self.metrics and path is None:
                raise ValueError(f"--metrics {name} needs a model of transformers; pass {option} FOLDER")
        if "fvd" in self.metrics and self.i3d is None:
            raise ValueError("--metrics fvd needs the I3D network; pass --i3d i3d_torchscript.pt")
        if "fvd" in self.metrics:
            trusted_program(self.i3d, self.trust_program)
        if self.clap is None and set(self.metrics) & {"fad", "kad", "clap"}:
            raise ValueError(
                "--metrics fad, kad and clap need a CLAP model of transformers; pass --clap FOLDER"
            )
        for other in (self.reference, self.beside):
            if other is not None and other.files and other.medium != self.drawn.medium:
                raise ValueError(f"{self.drawn.path} holds {self.drawn.medium}, {other.path} {other.medium}")
        if self.reference is not None and not len(self.reference):
            moments_only = set(lacking) - {"fid"}
            if moments_only or self.reference.moments is None:
                raise ValueError(
                    f"{self.reference.path} holds no arr_0, only what FID needs; "
                    f"{', '.join(sorted(moments_only)) or 'FID'} need the samples"
                )
        if self.beside is not None and (
            not self.drawn.lines
            or [key(line) for line in self.drawn.lines] != [key(line) for line in self.beside.lines]
        ):
            raise ValueError(
                f"{self.drawn.path} and {self.beside.path} are not drawn for the same prompts with the same seeds; "
                "draw both by visual-spec sample with the same --prompts, --num and --seed"
            )

    # -- features -----------------------------------------------------------------------------------------------------

    def extractor(self, name: str) -> FeatureFolder:
        """The features of a name, its network loaded once."""
        if name not in self._extractors:
            make = {
                "inception": lambda: inception_features(
                    self.inception, self.size, self.device, self.batch_size
                ),
                "shapes": lambda: shapes_features(self.size, self.device, self.batch_size),
                "clip": lambda: clip_features(self.clip, self.size, self.device, self.batch_size),
                "clap": lambda: clap_features(self.clap, self.device, self.batch_size),
                "mel": lambda: mel_features(self.batch_size),
                "frames": lambda: frame_features(self.device, self.batch_size),
                "i3d": lambda: video_features(
                    self.i3d, self.device, self.batch_size, trust_program=self.trust_program
                ),
                "kl": lambda: tag_features(self.tagger, self.device, self.batch_size),
            }[name]
            extract, networks, variant = make()
            self._extractors[name] = FeatureFolder(self.folder, name, extract, networks, variant)
        return self._extractors[name]

    def wanted(self) -> list[tuple[str, SampleFiles]]:
        """Extractors and the sets that they see."""
        found: list[tuple[str, SampleFiles]] = []
        for metric in self.metrics:
            name = _EXTRACTOR.get(metric, metric)
            sets = [self.drawn]
            if metric in _NEED_REFERENCE and self.reference is not None and len(self.reference):
                if not (metric == "fid" and self.reference.moments is not None):
                    sets.append(self.reference)
            if metric in _FRECHET and self.beside is not None:
                sets.append(self.beside)
            found += [(name, one) for one in sets if (name, one) not in found]
        return found

    def features(self, name: str, samples: SampleFiles, kind: str = "features") -> Tensor:
        found = self.extractor(name).read(samples)
        assert found is not None, "not complete"
        return found[kind]

    def gaussian(self, name: str) -> Gaussian:
        """Of the reference: as it states them for FID, else of its features."""
        assert self.reference is not None
        stated = self.reference.moments if name == "inception" else None
        return stated or Gaussian.of(self.features(name, self.reference))

    # -- figures ------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """All figures by name."""
        found: dict[str, Any] = {}
        for metric in self.metrics:
            name = _EXTRACTOR.get(metric, metric)
            extractor = self.extractor(name)
            facts = {"samples": len(self.drawn), "extractor": name, "weights": extractor.hash}
            if metric in _NEED_REFERENCE and self.reference is not None:
                facts["reference_samples"] = len(self.reference) or None
            found |= {title: {**figure, **facts} for title, figure in self._figure(metric, name).items()}
        return found

    def _figure(self, metric: str, name: str) -> dict[str, Any]:
        if metric in ("clip", "clap"):
            return {
                f"{metric}_score": mean_figure(self.features(name, self.drawn, "scores").double().tolist())
            }
        if metric == "is":
            return {"inception_score": published.inception_score(self.features(name, self.drawn, "logits"))}
        drawn = self.features(name, self.drawn)
        if metric in _FRECHET:
            title = metric if metric in ("fid", "fad", "fvd") else f"frechet_{metric}"
            reference = self.gaussian(name)
            found = {title: published.frechet(drawn, reference)}
            if self.beside is not None:
                other = self.features(name, self.beside)
                found[f"{title}_difference"] = published.frechet_difference(drawn, other, reference)
            if metric == "shapes":
                found |= _with_prefix("shapes_", precision_recall(self._truth(name), drawn))
            return found
        if metric == "prc":
            return dict(precision_recall(self._truth(name), drawn))
        if metric == "kid":
            return {"kid": published.kernel_inception_distance(drawn, self._truth(name))}
        if metric == "kad":
            return {"kad": kernel_figure(self._truth(name), drawn)}
        assert metric == "kl"
        return {"kl": _divergence(self._truth(name), drawn)}

    def _truth(self, name: str) -> Tensor:
        assert self.reference is not None
        return self.features(name, self.reference)


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
    run = work.drawn.path / "run.json"
    return {
        "kind": "scores",
        "folder": str(work.drawn.path),
        "run": json.loads(run.read_text()) if run.is_file() else None,
        "samples": len(work.drawn),
        "reference": None if work.reference is None else str(work.reference.path),
        "resize": "none"
        if work.size is None
        else f"to {work.size} pixels, bicubic with antialiasing in floating point",
        "figures": work.figures(),
        "comparison": None if work.beside is None else compared(work.drawn, work.beside),
    }


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two samples a pair."""
    return line["index"], line["prompt"], line["seed"]


def _with_prefix(prefix: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: figure for name, figure in figures.items()}


def _divergence(truth: Tensor, drawn: Tensor) -> dict[str, float]:
    """The mean of KL(truth || drawn) over pairs, from log probabilities [N, C]."""
    if len(truth) != len(drawn):
        raise ValueError(
            f"{len(truth)} true and {len(drawn)} drawn clips; kl compares clip by clip, of one number"
        )
    truth, drawn = truth.double(), drawn.double()
    return mean_figure((truth.exp() * (truth - drawn)).sum(1).tolist())
