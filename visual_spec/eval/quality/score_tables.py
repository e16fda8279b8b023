"""Scores as files that spreadsheets and papers take: CSV and LaTeX of all figures, and CSV of the means of prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from visual_spec.eval.tables import csv_text, escaped

_FACTS = ("value", "low", "high", "samples", "reference_samples", "extractor", "weights", "interval", "note")


def scores_csv(figures: Mapping[str, Mapping[str, object]]) -> str:
    """One line a figure: its value, its interval and what it was computed from."""
    lines = [[name, *(figure.get(fact, "") for fact in _FACTS)] for name, figure in figures.items()]
    return csv_text([["figure", *_FACTS], *lines])


def scores_latex(figures: dict[str, dict[str, Any]]) -> str:
    """A `tabular` for `booktabs`: the figure, its value and its interval."""
    lines = [
        f"{escaped(name.replace('_', ' '))} & ${_rounded(figure)}$ & {figure['samples']} \\\\"
        for name, figure in figures.items()
    ]
    return "\n".join(
        [r"\begin{tabular}{lrr}", r"\toprule", r"figure & value & samples \\", r"\midrule", *lines]
        + [r"\bottomrule", r"\end{tabular}", ""]
    )


def prompts_csv(prompts: list[str], scores: dict[str, Tensor]) -> str:
    """One line a prompt, in the order of the first sample: its samples, and the mean of each score [N] over them."""
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(prompt, []).append(place)
    lines = [
        [
            prompt,
            len(chosen),
            *(values[torch.tensor(chosen)].double().mean().item() for values in scores.values()),
        ]
        for prompt, chosen in places.items()
    ]
    return csv_text([["prompt", "samples", *scores], *lines])


def _rounded(figure: dict[str, Any]) -> str:
    """A value with half the width of its interval, or with both ends where they are not equally far; to two digits of
    the half."""
    value, low, high = (figure[name] for name in ("value", "low", "high"))
    reach = (high - low) / 2
    if not math.isfinite(value) or not math.isfinite(reach):
        return f"{value:.4g}".replace("inf", r"\infty")
    digits = 3 if reach <= 0 else max(0, 1 - math.floor(math.log10(reach)))
    if abs(high + low - 2 * value) > 0.1 * reach:
        return f"{value:.{digits}f}\\ [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{value:.{digits}f} \\pm {reach:.{digits}f}"
