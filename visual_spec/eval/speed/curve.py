"""Tokens or columns per call of every setting: counted, nothing is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visual_spec.eval.intervals import ratio_with_error
from visual_spec.eval.settings import Setting
from visual_spec.eval.timing import Report, decoded, facts_of, mean_and_deviation, promises_plain

if TYPE_CHECKING:
    from visual_spec.eval.pair import Pipeline


def curve(
    pipe: Pipeline,
    settings: Sequence[Setting],
    prompts: Sequence[str],
    *,
    batch_size: int,
    report: Report = lambda text: None,
) -> list[dict[str, object]]:
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

    def decode(setting: Setting) -> tuple[Tensor, list[int], int]:
        parts = [decoded(pipe, setting, prompts[start : start + batch_size], start) for start in starts]
        tokens, calls = (torch.cat([getattr(one, name) for one, _ in parts]) for name in ("tokens", "calls"))
        return tokens, calls.tolist(), parts[0][1].commit_call.shape[1]

    promised = [promises_plain(setting, settings[0]) for setting in settings]
    plain = decode(settings[0])[0] if any(promised[1:]) else None
    rows = []
    for setting, equal in zip(settings[1:], promised[1:], strict=True):
        tokens, calls, length = decode(setting)
        value, error = ratio_with_error([length] * len(calls), calls)
        same = int((tokens == plain).flatten(1).all(1).sum()) if plain is not None and equal else None
        row = {
            **facts_of(setting, settings[0]),
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
