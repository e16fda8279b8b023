"""Tokens or columns per call of every setting: counted, nothing is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from visual_spec.eval import draws
from visual_spec.eval.intervals import ratio_with_error
from visual_spec.eval.settings import Setting
from visual_spec.eval.speed.timing import Report, facts_of, mean_and_deviation, promises_plain


def curve(
    pipe: Any,
    settings: Sequence[Setting],
    prompts: Sequence[str],
    *,
    batch_size: int,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """What a call commits under every setting but the first, one sample per prompt; sample i has seed `seed + i`.

    Args:
        settings: the first is plain decoding.

    Returns:
        One dict per setting; `tokens` stands for what a call commits, of music `columns`. `tokens`: of a sample;
        `calls_per_sample`; `tokens_per_call`: all tokens over all calls, and `standard_error` of it over samples;
        `deviation` of a sample's own; `identical_samples`: of `samples`, those with the tokens of plain decoding; None
        where not promised.
    """
    starts = range(0, len(prompts), batch_size)

    def decode(setting: Setting) -> list[dict[str, np.ndarray]]:
        return [draws.draw(pipe, setting, prompts[start : start + batch_size], start) for start in starts]

    def joined(parts: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
        return np.concatenate([part[name] for part in parts])

    plain = None
    if any(promises_plain(setting, settings[0]) for setting in settings[1:]):
        plain = joined(decode(settings[0]), "tokens")
    rows = []
    for setting in settings[1:]:
        parts = decode(setting)
        calls, length = joined(parts, "calls").tolist(), int(parts[0]["length"])
        value, error = ratio_with_error([length] * len(calls), calls)
        same = None
        if plain is not None and promises_plain(setting, settings[0]):
            same = int((joined(parts, "tokens") == plain).reshape(len(plain), -1).all(1).sum())
        row = {
            **facts_of(setting),
            pipe.unit: length,
            "samples": len(prompts),
            "calls_per_sample": calls,
            f"{pipe.unit}_per_call": value,
            "standard_error": error,
            "deviation": mean_and_deviation([length / count for count in calls])[1],
            "identical_samples": same,
        }
        rows.append(row)
        where = f"guidance {row['guidance_scale']:g}, {row['name']}, W={row['window']}"
        report(f"{where}: {value:.2f} {pipe.unit} per call")
    return rows
