"""Parses captions of `tunes` into attributes, and scores a clip against its prompt.

Generated clips are scored as GenEval scores pictures (Ghosh et al. 2023, section 3): find what is there, then check
each attribute in the prompt. `visual_spec.data.tunes_finder` finds the attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from visual_spec.data.captions import CaptionError
from visual_spec.data.tunes import ATTRIBUTES, BACKING_PHRASES, MOODS, VOCABULARY, Tune
from visual_spec.data.tunes_finder import FoundNote, TuneFacts, parse_clip

__all__ = ["TuneFacts", "FoundNote", "WantedTune", "parse_caption", "parse_clip", "score", "score_facts"]


@dataclass(frozen=True)
class WantedTune:
    """Everything in a caption, under the names of `Tune`; None if the caption omits the contour or the rhythm."""

    instrument: str
    tonic: str
    mode: str
    tempo: str
    contour: str | None
    rhythm: str | None
    backing: str


def parse_caption(text: str) -> WantedTune:
    """Parse a caption of `visual_spec.data.tunes.caption` in any form; case, commas, colons and spaces do not matter.

    Form 0 may also be shortened: without its mood, its contour or its rhythm.

    Raises:
        ValueError: `caption` cannot have written the text, or the mood belongs to another mode.
    """
    plain = " ".join(re.sub("[,:]", " ", text.lower()).split())
    part = next((match.groupdict() for form in _patterns() if (match := form.fullmatch(plain))), None)
    if part is None:
        allowed = " ".join(
            f"{name.upper()}: {', '.join(words)}." for name, words in VOCABULARY.items() if name != "backing"
        )
        raise CaptionError(
            f"cannot read caption {text!r}; allowed: 'a TEMPO MOOD INSTRUMENT melody in TONIC MODE, CONTOUR in RHYTHM "
            f"rhythm', then nothing, 'over a drone' or 'over a bass line'. {allowed} MOOD: "
            f"{', '.join(f'{mood} ({mode})' for mode, mood in MOODS.items())}. Use these words, in this order."
        )
    mode = part["mode"]
    if part["mood"] not in (None, MOODS[mode]):
        raise CaptionError(
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
    """Return which attributes of a prompt a clip has: `wave` `[samples]`, mono at 16 kHz.

    Keys: the names of `ATTRIBUTES`, without those that a caption omits. A clip without an audible melody has none of
    them, except perhaps its backing.

    Raises:
        TypeError, ValueError: as in `parse_caption` and `parse_clip`.
    """
    return score_facts(parse_caption(prompt) if isinstance(prompt, str) else prompt, parse_clip(wave))


def score_facts(wanted: WantedTune | Tune, facts: TuneFacts) -> dict[str, bool]:
    """Score a caption and a clip that are already parsed; see `score`."""
    asked = [name for name in ATTRIBUTES if getattr(wanted, name) is not None]
    return {name: getattr(facts, name) == getattr(wanted, name) for name in asked}
