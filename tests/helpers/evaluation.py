"""Evaluations of tiny models of every kind, judged by scores that are plain counts of pixels or samples."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.music_settings import LAW, MASKED, MASKED_LAW, PROMPTS, masked_pipeline
from tests.helpers.tiny import tiny_pipeline
from tests.helpers.tiny_audio import HOP, RATE, tiny_audio_pipeline
from tests.helpers.tiny_continuous import tiny_latent_pipeline
from tests.helpers.tiny_scales import tiny_scale_pipeline
from visual_spec.data import shapes_parser, tunes, tunes_parser
from visual_spec.eval.pair import MaskedPair
from visual_spec.eval.quality import extractors
from visual_spec.eval.quality.evaluate import evaluate
from visual_spec.eval.quality.tasks import Task
from visual_spec.eval.settings import Setting, parse_setting
from visual_spec.models.shapes_features import ShapesFeatures
from visual_spec.samplers.core.law import TokenLaw

SCALES = "scale-wise:num_draft_scales=all"


def tiny_network() -> ShapesFeatures:
    torch.manual_seed(3)
    network = ShapesFeatures({"a": 2}, num_features=4, image_size=16, channels=2).eval()
    network.spread.fill_(0.01)  # features of an untrained network hardly vary
    return network


def count_score(prompt: str, sample: np.ndarray) -> dict[str, bool]:
    """Depends on the prompt and on every number; some prompts ask for less than others."""
    sound = sample.ndim == 1
    first, second = ("instrument", "tempo") if sound else ("colour", "shape")
    total = int(np.abs(sample.astype(np.float64) * (32768 if sound else 1)).round().sum())
    hits = {first: bool(total % 2), second: total % 3 == 0}
    return hits if len(prompt) % 2 else {first: hits[first]}


@dataclass(frozen=True)
class Kind:
    """A kind of model: its pipeline, prompts, law, and settings with their kinds; plain decoding is the first."""

    pipe: Callable[[], Any]
    prompts: tuple[str, ...]
    law: TokenLaw
    rows: dict[str, str]
    identical: tuple[str, ...]  # settings that promise the tokens of plain decoding under its law
    masked_law: TokenLaw | None = None
    sound: bool = False

    def settings(self, rows=None, **changes) -> list[Setting]:
        laws = {MASKED: self.masked_law or self.law}
        return [
            parse_setting(text, changes.get("law", laws.get(text, self.law)), changes.get("seed", 0))
            for text in (self.rows if rows is None else rows)
        ]

    def task(self) -> Task:
        prompts, numbers = [*self.prompts * 16][:16], np.random.default_rng(0)
        if self.sound:  # of 16 bits, as files keep them
            waves = numbers.integers(-16000, 16000, (16, 20 * HOP)).astype(np.float32) / 32768
            return Task(prompts, waves)
        return Task(prompts, numbers.integers(0, 256, (16, 8, 8, 3), np.uint8))


_JACOBI, _EXACT = "speculative-jacobi:window=4", "coupling=independent,acceptance=exact"
_COLUMNS = "column-jacobi:window=4"
_LANTERN = f"{_COLUMNS},coupling=maximal,acceptance=lantern,unit=codebook,neighbours=4"
_LABELS = ("0", "1", "2", "3", "4")
KINDS = {
    "tokens": Kind(
        tiny_pipeline,
        tuple(f"a {colour} {shape}" for colour in ("red", "blue") for shape in ("circle", "square")),
        TokenLaw(guidance_scale=2.0),
        {
            "autoregressive": "plain",
            "autoregressive:temperature=0.5": "control",
            _JACOBI: "lossless",
            f"{_JACOBI},{_EXACT}": "lossless",
        },
        (_JACOBI,),
    ),
    "scales": Kind(
        tiny_scale_pipeline,
        _LABELS,
        TokenLaw(guidance_scale=2.5, top_k=9),
        {
            SCALES: "plain",
            f"{SCALES},temperature=0.5": "control",
            "scale-wise:num_draft_scales=2": "lossy",
            f"{SCALES},cache_share=0.7": "lossy",
            f"{SCALES},cache_share=1.0": "lossless",
            "scale-wise:num_draft_scales=2,measure=true": "lossy",
        },
        (f"{SCALES},cache_share=1.0",),
    ),
    "vectors": Kind(
        tiny_latent_pipeline,
        _LABELS,
        TokenLaw(guidance_scale=2.0),
        {
            "continuous": "plain",
            "continuous:temperature=0.9": "control",
            "continuous:steps=5": "lossy",
            "continuous:head_steps=6,last_head_steps=2": "lossy",
            "head-speculation:levels=3": "lossless",
            "speculative-continuous:rule=aligned,tolerance=0.1": "lossy",
        },
        (),
    ),
    "columns": Kind(
        lambda: MaskedPair(tiny_audio_pipeline(), masked_pipeline()),
        tuple(PROMPTS),
        LAW,
        {
            "columns": "plain",
            "columns:temperature=0.5": "control",
            _COLUMNS: "lossless",
            _LANTERN: "lossy",
            MASKED: "lossy",
        },
        (_COLUMNS,),
        MASKED_LAW,
        True,
    ),
}


def judge_by_counts(patch: pytest.MonkeyPatch) -> None:
    """Make the parsers `count_score`, and the classifier of pictures a tiny one."""
    patch.setattr(shapes_parser, "score", count_score)
    patch.setattr(tunes_parser, "score", count_score)
    patch.setattr(tunes, "SAMPLE_RATE", RATE)
    patch.setattr(extractors, "load_shapes_features", tiny_network)


def evaluated(kind: str, folder: Path, *, rows=None, pipe=None, law=None, seed=0, **changes: Any) -> Any:
    """The document of an evaluation, 6 samples in batches of 3 unless `changes` says otherwise."""
    one = KINDS[kind]
    asked = {"seed": seed} | ({} if law is None else {"law": law})
    with pytest.MonkeyPatch.context() as patch:
        judge_by_counts(patch)
        return evaluate(
            pipe or one.pipe(),
            one.settings(rows, **asked),
            one.task(),
            folder,
            **{"samples": 6, "batch_size": 3, **changes},
        )


def timeless(document: Any) -> dict[str, Any]:
    """A document without what differs from run to run."""
    rows = [
        {key: value for key, value in row.items() if key not in ("wall_clock", "processor_time")}
        for row in document["rows"]
    ]
    return {**document, "rows": rows, "environment": None}
