"""A tiny MAGNeT, with the settings that tests of masked samplers draw by."""

from typing import Any

from tests.helpers.musicgen import IDS, MASK, musicgen, rows_of
from visual_spec.models.columns.musicgen import MagnetModel
from visual_spec.models.columns.musicgen_modules import text_condition
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.presets import PRESETS

FRAMES = 10


def magnet(frames: int = FRAMES, **changes: Any) -> MagnetModel:
    return MagnetModel(musicgen(), frames, reach=2, **changes)


def text(rows: list[int] | None = None) -> TextCondition:
    condition = text_condition(musicgen(), IDS, MASK)
    return condition if rows is None else rows_of(condition, rows)


MAGNET = PRESETS["magnet"].settings | dict(span=3)
LAW = TokenLaw(guidance_scale=4.0, temperature=2.0, top_p=0.9)
STEPS = [5, 3, 2, 1]
