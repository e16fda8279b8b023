"""What tables, charts and pages call the samples of a model, by medium and by what a call commits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from visual_spec.records import MEDIA


@dataclass(frozen=True)
class Words:
    """The words for one kind of model, and which figures it has.

    Attributes:
        unit: what a call commits, in the singular.
        samples, truth: what is drawn or played, and what the true samples are called, in the plural.
        caches: whether settings differ in the size of caches rather than in calls.
        whole: what is right if every attribute is.
        kernels: whether kernel distances stand beside Frechet distances.
    """

    unit: str
    samples: str
    truth: str
    caches: bool
    whole: str
    kernels: bool


def words_of(document: Mapping[str, Any]) -> Words:
    """The words for the results of an evaluation. Older results hold neither their medium nor their unit."""
    sound = "sampling_rate" in document.get("settings", {})
    medium = document.get("medium", "audio" if sound else "image")
    units = document.get("unit")
    if units is None:
        units = "tokens" if document["rows"][0].get("cache") is None else "scales"
        units = "columns" if sound else units
    caches, said = units == "scales", MEDIA[medium]
    whole = "class" if caches else "whole prompt"
    return Words(units.removesuffix("s"), said.samples, said.truth, caches, whole, medium == "audio")
