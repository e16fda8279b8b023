"""What the metrics of `visual_spec.eval.quality.metric_table` compute from features of sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_spec.eval.intervals import rate
from visual_spec.eval.quality import neighbours, published
from visual_spec.eval.quality.accuracy import hits_of, summarise
from visual_spec.eval.quality.audio import kernel_figure
from visual_spec.eval.quality.discrepancy import Sums, gaussian_product_kernel
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.metric_table import NEIGHBOURS
from visual_spec.eval.quality.published import Gaussian

Report = Callable[[str], object]
Figures = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Sets:
    """What a statistic sees: features of the sets, by the metric's extractor.

    Attributes:
        figure: what the metric's figure is called.
        drawn, reference, beside: the sets, see `visual_spec.eval.quality.score.Scoring`.
        read: (set, kind) -> features [N, D], or scores [N], of that kind.
        moments: of the reference, where it states the moments of these features.
        device: where large matrices are multiplied.
        report: is called with how far long work is.
    """

    figure: str
    drawn: SampleFiles
    reference: SampleFiles | None
    beside: SampleFiles | None
    read: Callable[[SampleFiles, str], Tensor]
    moments: Gaussian | None = None
    device: str = "cpu"
    report: Report = lambda text: None

    def features(self, kind: str = "features") -> Tensor:
        """Features of the drawn samples."""
        return self.read(self.drawn, kind)

    def truth(self) -> Tensor:
        """Features of the reference."""
        assert self.reference is not None
        return self.read(self.reference, "features")

    def gaussian(self) -> Gaussian:
        """The moments of the reference: as it states them, else of its features."""
        return self.moments or Gaussian.of(self.truth())


def frechet(sets: Sets) -> Figures:
    """The distance, its limit for many samples, and its difference to the distance of the other set."""
    return _frechet(sets, sets.gaussian(), lambda samples: (sets.read(samples, "features"), None))


def frechet_audio(sets: Sets) -> Figures:
    """`frechet` over the embeddings of all seconds of clips, where seconds of one clip are left out together."""

    def seconds(samples: SampleFiles) -> tuple[Tensor, Tensor]:
        counts = sets.read(samples, "rows").long()
        rows = sets.read(samples, "features").unflatten(1, (int(counts.max()), -1))  # [N, W, D]
        present = torch.arange(rows.shape[1]) < counts[:, None]
        return rows[present], torch.arange(len(rows)).repeat_interleave(counts)

    assert sets.reference is not None
    return _frechet(sets, Gaussian.of(seconds(sets.reference)[0]), seconds)


def _frechet(
    sets: Sets, reference: Gaussian, rows: Callable[[SampleFiles], tuple[Tensor, Tensor | None]]
) -> Figures:
    """`rows`: (set) -> features [M, D], and the sample of each row [M]; None: one a sample."""
    (drawn, owners), strata = rows(sets.drawn), sets.drawn.prompts
    figure, limit = published.frechet_with_limit(drawn, reference, strata, owners)
    needed = published.limit_size(drawn.shape[1])
    note = "grows as samples get fewer, so only sets of one size compare"
    if limit is None:
        note += f"; its limit of many samples is reported from {needed} samples on"
    figures: Figures = {sets.figure: figure | {"note": note}}
    if limit is not None:
        figures[f"{sets.figure}_infinity"] = limit | {
            "note": "extrapolated to many samples from halves of the set (Chong and Forsyth 2020)"
        }
    if sets.beside is not None:
        other, others = rows(sets.beside)
        figures[f"{sets.figure}_difference"] = published.frechet_difference(
            drawn, other, reference, strata, (owners, others)
        )
    return figures


def frechet_inception(sets: Sets) -> Figures:
    figures = frechet(sets)
    figures[sets.figure]["note"] += (
        f". Papers use 50,000 samples (ImageNet) or 30,000 (COCO, MJHQ); these are {len(sets.drawn):,}. The "
        "interval is about the mean at this number: it held the limit in 19, 50 and 66 % of sets of 500, 1,000 and "
        "2,000"
    )
    return figures


def frechet_shapes(sets: Sets) -> Figures:
    """The distance, and precision and recall where both sets have as many samples as these need."""
    figures = frechet(sets)
    if min(len(sets.truth()), len(sets.features())) <= NEIGHBOURS:
        figures[sets.figure]["note"] += f"; precision and recall need {NEIGHBOURS + 1} pictures of each set"
        return figures
    return figures | {f"shapes_{name}": figure for name, figure in precision_recall(sets).items()}


def precision_recall(sets: Sets) -> Figures:
    """Precision and recall."""
    figures = neighbours.precision_recall(
        sets.truth(), sets.features(), neighbours=NEIGHBOURS, device=sets.device, report=sets.report
    )
    return dict(figures)


def inception_score(sets: Sets) -> Figures:
    return {sets.figure: published.inception_score(sets.features("logits"))}


def kernel_inception(sets: Sets) -> Figures:
    figure = published.kernel_inception_distance(sets.features(), sets.truth(), device=sets.device)
    return {sets.figure: figure}


def kernel_audio(sets: Sets) -> Figures:
    assert sets.reference is not None
    paired = sets.drawn.prompts is not None and sets.drawn.prompts == sets.reference.prompts
    return {sets.figure: kernel_figure(sets.truth(), sets.features(), paired=paired)}


def parsed(sets: Sets) -> Figures:
    """Shares of samples with all attributes of their prompts, of attributes, and of samples with each attribute; and of
    samples whose prompts the parser does not know, if there are any.
    """
    hits = hits_of(sets.features())
    summary = summarise(hits)
    each = {f"attribute_{name}": figure for name, figure in summary["attributes"].items()}
    if summary["unread"]:
        each["prompts_unread"] = rate([not answers for answers in hits])
    return {sets.figure: summary["all_correct"], "attributes_correct": summary["mean_attribute"], **each}


def scores(sets: Sets) -> Tensor:
    return sets.features("scores")


def label_divergence(sets: Sets) -> Tensor:
    """KL(truth || drawn) of each pair [N], from log probabilities [N, C]."""
    truth, drawn = sets.truth().double(), sets.features().double()
    if len(truth) != len(drawn):
        raise ValueError(
            f"{len(truth)} true and {len(drawn)} drawn clips; kl compares clip by clip, of one number"
        )
    return (truth.exp() * (truth - drawn)).sum(1)


def inception_score_adm(sets: Sets) -> Figures:
    return {sets.figure: published.inception_score_adm(sets.features("logits"), sets.drawn.prompts)}


def clip_discrepancy(sets: Sets) -> Figures:
    """CMMD (Jayasumana et al. 2024): 1000 times the biased estimate under a Gaussian kernel of bandwidth 10."""
    drawn, truth = (one.double().to(sets.device) for one in (sets.features(), sets.truth()))
    sums = Sums.of(drawn, truth, gaussian_product_kernel(10.0), paired=False)
    return {sets.figure: sums.figure(1000.0, biased=True)}


def psnr(sets: Sets) -> Tensor:
    """Peak signal to noise ratio in dB of each picture to that beside it; infinite where the two are equal."""
    return 10 * (255**2 / sets.features("squared_error").double()).log10()


def ssim(sets: Sets) -> Tensor:
    return sets.features("ssim")


def lpips(sets: Sets) -> Tensor:
    return sets.features("lpips")
