"""Stage 7 of the GPU hour: where the time of a call goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from visual_spec.eval.defaults import with_setting
from visual_spec.eval.machine import choose_device
from visual_spec.eval.settings import parse_setting
from visual_spec.eval.speed import gpu_tiny, official_sizes
from visual_spec.eval.speed.call_profile import profile_calls
from visual_spec.eval.speed.gpu_stages import JANUS, LLAMAGEN, Parts
from visual_spec.eval.speed.official_bench import Middle
from visual_spec.samplers.core.law import TokenLaw


def call_profiles(dry: bool) -> Parts:
    """Kernels, gaps and the longest kernels of a call, without and with a graph."""
    texts = ("autoregressive", "speculative-jacobi:window=32")
    if dry:
        gpu_tiny.add_sizes()
        return {"llamagen-tiny, autoregressive": partial(_profile, gpu_tiny.SIZES[LLAMAGEN], texts[0], "cpu")}
    return {
        f"{model}, {text}, graph={graph}": partial(
            _profile, model, with_setting(text, f"graph={graph}"), "cuda"
        )
        for model, text, graph in product((LLAMAGEN, JANUS), texts, ("false", "true"))
    }


@cache
def _official(model: str, device: str) -> Any:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    found = official_sizes.official_model(model)
    return official_sizes.fill(found, dtype=dtype, device=choose_device(device))


@torch.no_grad()
def _profile(model: str, text: str, device: str) -> dict[str, Any]:
    official = _official(model, device)
    law = TokenLaw(guidance_scale=official.guidance_scale, top_k=official.top_k)
    setting, middle = parse_setting(text, law, 0), Middle(official.model, 16)
    condition = official.condition(1)

    def decode(callback: Callable[[int, Tensor], Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        setting.sampler(middle, condition, law=law, generator=generator, batch_size=1, callback=callback)

    decode(lambda index, lengths: None)  # compiles and records
    return profile_calls(decode, official.model.device)
