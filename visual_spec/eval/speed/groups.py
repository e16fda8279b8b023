"""What a benchmark is asked to measure: settings as the options name them, or the usual ones of the model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from visual_spec.eval.defaults import ModelSettings, settings_under, with_setting
from visual_spec.eval.settings import Setting
from visual_spec.pipelines.sampler_text import parse_sampler
from visual_spec.samplers.registry import by_name, sampler_class

# Windows that are measured when neither windows nor samplers are named, by what a call commits.
WINDOWS = {"tokens": (16, 32, 64), "columns": (8, 16, 32)}
CURVE_WINDOWS = (4, 8, 16, 32, 64)


def read_groups(
    args: argparse.Namespace, known: ModelSettings, beside: ModelSettings | None = None
) -> list[list[Setting]]:
    """For every guidance scale plain decoding, and what is measured beside it.

    Args:
        known: the settings of the model.
        beside: the settings of the masked model of `--masked`, under its own law.

    Raises:
        ValueError: a setting that cannot be read, a law out of range, or windows where no setting has one.
    """
    asked = known.others if args.samplers is None else args.samplers
    usual = WINDOWS.get(known.facts.unit, ())
    windows = args.windows or (() if args.samplers else CURVE_WINDOWS if args.curve and usual else usual)
    texts = [known.plain, *(text for one in asked for text in in_windows(one, windows))]
    if args.windows and not any(has_window(text) for text in asked):
        raise ValueError(
            f"--windows given, and none of the samplers that are measured has a window ({', '.join(asked)}); leave it "
            "out."
        )
    if beside is not None:
        texts += [beside.plain, *(beside.others if args.samplers is None else ())]
    groups = []
    for scale in args.guidance_scales or [None]:
        options = dict(guidance_scale=scale, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
        groups.append(settings_under(texts, known, beside, args.seed, **options))
    return groups


def in_windows(text: str, windows: Sequence[int]) -> list[str]:
    """A setting once for every window, if its sampler has one and the setting names none; else as it is."""
    if not windows or "window" in parse_sampler(text)[1] or not has_window(text):
        return [text]
    name = parse_sampler(text)[0]  # may be "module:class"
    rest = text.strip()[len(name) + 1 :]
    return [with_setting(f"{name}:window={window}", rest) for window in windows]


def has_window(text: str) -> bool:
    """Return whether the sampler of a setting has a window."""
    return "window" in sampler_class(by_name(parse_sampler(text)[0]))().config
