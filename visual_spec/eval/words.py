"""What tables, charts and pages call the samples of a model, by what a call of the model commits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Words:
    """The words for one kind of model, and which figures it has.

    Attributes:
        unit: what a call commits, in the singular.
        samples: what is drawn or played, in the plural.
        truth: what the true samples are called.
        whole: what is right if every attribute is.
        caches: whether settings differ in the size of caches rather than in calls.
        kernels: whether kernel distances are told beside Frechet distances.
    """

    unit: str
    samples: str
    truth: str
    whole: str
    caches: bool = False
    kernels: bool = False

    @property
    def fewest(self) -> int:
        """The fewest samples whose figures have intervals."""
        return 3 if self.kernels else 2


WORDS = {
    "tokens": Words("token", "pictures", "scenes", "whole prompt"),
    "scales": Words("scale", "pictures", "scenes", "class", caches=True),
    "columns": Words("column", "clips", "clips", "whole prompt", kernels=True),
}


def words_of(document: Mapping[str, Any]) -> Words:
    """The words for the results of an evaluation; those of older versions do not hold their unit."""
    if "unit" in document:
        return WORDS[document["unit"]]
    if "sampling_rate" in document["settings"]:
        return WORDS["columns"]
    return WORDS["tokens" if document["rows"][0].get("cache") is None else "scales"]
