"""Reads captions of `tunes` back into attributes, and scores a clip against its prompt.

Generated clips are scored as GenEval scores pictures (Ghosh et al. 2023, section 3): hear what is there, then check
each attribute the prompt asks for. The ear is `visual_spec.data.tunes_finder`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from visual_spec.data.tunes import ATTRIBUTES, BACKING_PHRASES, MOODS, VOCABULARY, Tune
from visual_spec.data.tunes_finder import ClipFacts, FoundNote, parse_clip

__all__ = [
    "ClipFacts",
    "FoundNote",
    "WantedTune",
    "all_correct",
    "parse_caption",
    "parse_clip",
    "prompt_accuracy",
    "score",
    "score_facts",
]


@dataclass(frozen=True)
class WantedTune:
    """All a caption says, under the names of `Tune`; None where it leaves the contour or the rhythm open."""

    instrument: str
    tonic: str
    mode: str
    tempo: str
    contour: str | None
    rhythm: str | None
    backing: str


def parse_caption(text: str) -> WantedTune:
    """Inverse of `visual_spec.data.tunes.caption`, of any form; case, commas, colons and white space do not matter.

    Form 0 may also be cut short: without its mood, its contour or its rhythm.

    Raises:
        ValueError: not a caption that `caption` could have written, or a mood of another mode.
    """
    plain = " ".join(re.sub("[,:]", " ", text.lower()).split())
    part = next((found.groupdict() for form in _patterns() if (found := form.fullmatch(plain))), None)
    if part is None:
        allowed = " ".join(
            f"{name.upper()}: {', '.join(words)}." for name, words in VOCABULARY.items() if name != "backing"
        )
        raise ValueError(
            f"cannot read caption {text!r}; allowed: 'a TEMPO MOOD INSTRUMENT melody in TONIC MODE, CONTOUR in RHYTHM "
            f"rhythm', then nothing, 'over a drone' or 'over a bass line'. {allowed} MOOD: "
            f"{', '.join(f'{mood} ({mode})' for mode, mood in MOODS.items())}. Use these words, in this order."
        )
    mode = part["mode"]
    if part["mood"] not in (None, MOODS[mode]):
        raise ValueError(
            f"caption {text!r} is {part['mood']} in {mode}; {mode} tunes are {MOODS[mode]}: name one mood"
        )
    backing = next(name for name, phrase in BACKING_PHRASES.items() if (part["backing"] or "") == phrase)
    tonic = next(name for name in VOCABULARY["tonic"] if name.lower() == part["tonic"])
    return WantedTune(
        part["instrument"], tonic, mode, part["tempo"], part.get("contour"), part.get("rhythm"), backing
    )


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    def one(name: str, words: Iterable[str]) -> str:
        return f"(?P<{name}>{'|'.join(words).lower()})"

    word = {name: one(name, words) for name, words in VOCABULARY.items()}
    mood, key = one("mood", MOODS.values()), f"{word['tonic']} {word['mode']}"
    shape, backing = (
        f"{word['contour']} in {word['rhythm']} rhythm",
        f"{one('backing', filter(None, BACKING_PHRASES.values()))}?",
    )
    return tuple(
        re.compile(text)
        for text in (
            f"a {word['tempo']}(?: {mood})? {word['instrument']} melody in {key}(?: {word['contour']})?"
            f"(?: in {word['rhythm']} rhythm)?{backing}",
            f"{word['tempo']} and {mood} {word['instrument']} tune in {key} "
            f"{word['rhythm']} and {word['contour']}{backing}",
            f"{word['tempo']} {mood} music in {key} for {word['instrument']}{backing} {shape}",
        )
    )


def score(prompt: str | Tune, wave: np.ndarray) -> dict[str, bool]:
    """Which attributes of a prompt a clip has: `wave` `[samples]`, mono at 16 kHz.

    Keys: the names of `ATTRIBUTES`, without those a caption leaves open. A clip in which no melody is heard has none
    of them, but for its backing.

    Raises:
        TypeError, ValueError: as `parse_caption` and `parse_clip`.
    """
    return score_facts(parse_caption(prompt) if isinstance(prompt, str) else prompt, parse_clip(wave))


def score_facts(wanted: WantedTune | Tune, found: ClipFacts) -> dict[str, bool]:
    """`score` of a caption and a clip that are already read."""
    asked = [name for name in ATTRIBUTES if getattr(wanted, name) is not None]
    return {name: getattr(found, name) == getattr(wanted, name) for name in asked}


def prompt_accuracy(
    waves: Sequence[np.ndarray] | np.ndarray, prompts: Sequence[str | Tune]
) -> dict[str, float]:
    """Share of clips that have each attribute, over the prompts that ask for it, and `all_correct`: of those with all.

    `visual_spec.eval.quality.accuracy.summarise` gives the same of a list of `score`, with intervals.

    Raises:
        ValueError: none, or not as many clips as prompts; else as `score`.
    """
    if len(waves) != len(prompts) or not len(prompts):
        raise ValueError(
            f"{len(waves)} clips and {len(prompts)} prompts given; pass as many of each, at least one"
        )
    hits = [score(prompt, wave) for prompt, wave in zip(prompts, waves, strict=True)]
    shares = {name: [found[name] for found in hits if name in found] for name in ATTRIBUTES}
    return {
        **{name: sum(values) / len(values) for name, values in shares.items() if values},
        "all_correct": sum(map(all_correct, hits)) / len(hits),
    }


def all_correct(hits: dict[str, bool]) -> bool:
    """Whether every attribute that `score` returned holds."""
    return all(hits.values())
