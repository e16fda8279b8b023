"""Hidden states of a tiny MiniMax-Music, as its pipeline hands them to its depth decoder."""

from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import Tensor

FRAMES = 6


def hiddens(pipe: Any, seed: int, seconds: float = FRAMES / 25) -> tuple[Tensor, Tensor]:
    """What the block writes, and what its generator draws next."""
    generator = torch.Generator().manual_seed(seed)
    state = PipelineState()
    ids = torch.tensor([[5, 9, 2, 7], [5, 3, 2, 7]])
    for name, value in dict(text_ids=ids, audio_duration=seconds, generator=generator).items():
        state.set(name, value)
    pipe._blocks.sub_blocks["generate"](pipe, state)
    written = state.get("frame_hiddens")
    assert isinstance(written, Tensor)
    return written, torch.rand(4, generator=generator)
