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
        medium: a key of `visual_spec.records.MEDIA`.
        units: what a call commits, in the plural.
    """

    medium: str
    units: str

    @property
    def unit(self) -> str:
        """Return what a call commits, in the singular."""
        return self.units.removesuffix("s")

    @property
    def samples(self) -> str:
        """Return what is drawn or played, in the plural."""
        return MEDIA[self.medium].samples

    @property
    def truth(self) -> str:
        """Return what the true samples are called."""
        return MEDIA[self.medium].truth

    @property
    def caches(self) -> bool:
        """Return whether settings differ in the size of caches rather than in calls."""
        return self.units == "scales"

    @property
    def whole(self) -> str:
        """Return what is right if every attribute is."""
        return "class" if self.caches else "whole prompt"

    @property
    def kernels(self) -> bool:
        """Return whether kernel distances stand beside Frechet distances."""
        return self.medium == "audio"


def words_of(document: Mapping[str, Any]) -> Words:
    """The words for the results of an evaluation. Older results hold neither their medium nor their unit."""
    sound = "sampling_rate" in document.get("settings", {})
    units = document.get("unit")
    if units is None:
        units = "tokens" if document["rows"][0].get("cache") is None else "scales"
        units = "columns" if sound else units
    return Words(document.get("medium", "audio" if sound else "image"), units)
