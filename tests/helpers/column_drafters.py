"""Column drafters over tabular targets, with their columns and conditions."""

from typing import Any

import torch

from tests.helpers.tiny_audio import BOOKS, CODES, tiny_decoder
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition
from visual_spec.prototype.drafted_columns.eagle import ColumnEagleDrafter

FRAMES, BATCH, SCALE = 9, 2, 2.5
LAYERS = 3


def columns(prompt_frames: int = 0, dtype: torch.dtype = torch.float64) -> MusicgenColumnModel:
    decoder = tiny_decoder(dtype, num_hidden_layers=LAYERS)
    return MusicgenColumnModel(decoder, FRAMES, prompt_frames=prompt_frames)


def drafter_for(target: MusicgenColumnModel, **settings: Any) -> ColumnEagleDrafter:
    torch.manual_seed(5)
    made = ColumnEagleDrafter.for_target(target.model, **{"taps": (1,), "num_blocks": 2} | settings)
    with torch.no_grad():
        for parameter in made.parameters():  # larger than a fresh network's, and no norm like another
            parameter.mul_(3) if parameter.ndim == 2 else parameter.add_(0.2 * torch.randn(parameter.shape))
    return made.to(target.heads[0].weight.dtype).eval()


def condition(prompt_frames: int = 0) -> MusicCondition:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(BATCH, 4, 32, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    codes = torch.randint(0, CODES, (BATCH, BOOKS, prompt_frames), generator=generator)
    return MusicCondition(features, mask, codes if prompt_frames else None)
