"""The embedded models on a GPU: recorded calls draw what eager calls draw, and fast samplers what plain decoding draws.

Without a GPU these tests are skipped. `python -m pytest -m gpu` runs them together with those of the kernels.
"""

import inspect
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from visual_spec.data.shapes import held_out_prompts as captions_of_pictures
from visual_spec.data.shapes_classes import CLASS_NAMES
from visual_spec.data.tunes import held_out_prompts as captions_of_clips
from visual_spec.eval import draws
from visual_spec.eval.defaults import settings_of_model, with_setting
from visual_spec.eval.settings import Setting, parse_setting
from visual_spec.pipelines.placing import load
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.noise import CounterNoise, draw_keys
from visual_spec.samplers.core.state import draw_near
from visual_spec.samplers.registry import (
    COLUMNS,
    CONTINUOUS,
    MASKED,
    RASTER,
    TREE,
    all_samplers,
    sampler_class,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

COUNT = 4  # pictures or clips that are compared
CONTINUOUS_MODELS = {"shapes_causal": [""], "shapes_mar": ["", "steps=16,last_head_steps=5"]}
IDENTICAL = {
    "shapes": (
        "speculative-jacobi:window=16",
        "speculative-jacobi:window=64",
        "speculative-jacobi:window=32,exact_width=true",
        "drafted:acceptance=identical",
        "proactive-jacobi:coupling=gumbel,acceptance=identical",
    ),
    "tunes": (
        "column-jacobi:window=8",
        "column-jacobi:window=8,exact_width=true",
    ),
}


@cache
def pipe_of(model: str, dtype: str) -> Any:
    return load(model, None, dtype)


def prompts_of(model: str) -> list[str]:
    if model in CONTINUOUS_MODELS:
        return list(CLASS_NAMES[:COUNT])
    return (captions_of_clips if model == "tunes" else captions_of_pictures)(COUNT)


def setting_of(model: str, text: str) -> Setting:
    return parse_setting(text, settings_of_model(model).law_with(), 0)


def recorded() -> list[tuple[str, str]]:
    """Every sampler that records its calls, in the settings that `bench` measures: (model, setting)."""
    found = [("shapes", "drafted:acceptance=identical")]
    for entry in all_samplers():
        if "graph" not in inspect.signature(sampler_class(entry)).parameters:
            continue
        if entry.calls == CONTINUOUS:
            texts = CONTINUOUS_MODELS.items()
            found += [(model, with_setting(entry.name, text)) for model, some in texts for text in some]
        elif entry.calls == MASKED:
            texts = ("steps=16", *["steps=16,reuse=2"] * (entry.name == "reusing-masked"))
            found += [("shapes_masked", with_setting(entry.name, text)) for text in texts]
        else:
            assert entry.calls in (RASTER, TREE, COLUMNS), f"no embedded model for {entry.name}"
            model = "tunes" if entry.calls == COLUMNS else "shapes"
            found += [(model, with_setting(entry.name, text)) for text in entry.settings or ("",)]
    return found


@pytest.mark.parametrize(("model", "text"), recorded())
def test_recorded_calls_draw_what_eager_calls_draw(model, text):
    pipe, prompts = pipe_of(model, "float32"), prompts_of(model)
    settings = [setting_of(model, with_setting(text, f"graph={graph}")) for graph in ("false", "true")]
    for first in (0, 100):  # the recording has to serve other texts and seeds too
        asked = prompts[:: -1 if first else 1]
        eager, graph = (draws.draw(pipe, setting, asked, first) for setting in settings)
        if "canvas" in eager:  # vectors may differ by rounding, as recorded calls have more room
            np.testing.assert_allclose(graph["canvas"], eager["canvas"], rtol=1e-3, atol=1e-3)
        else:
            np.testing.assert_array_equal(graph["tokens"], eager["tokens"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "text"), [(model, text) for model in IDENTICAL for text in IDENTICAL[model]]
)
def test_fast_samplers_draw_what_plain_decoding_draws(model, text, dtype):
    """In half precision a picture's first other token stands at a near-tie; clips are then not compared.

    With `exact_width` nothing differs from plain decoding with `exact_width`.
    """
    setting = setting_of(model, text)
    assert setting.sampler.identical
    exact = bool(setting.sampler.config.get("exact_width"))
    plain, ties = plain_decoding(model, dtype, exact)
    fast = draws.draw(pipe_of(model, dtype), setting, prompts_of(model), 0)
    assert fast["calls"].mean() < plain["calls"].mean()
    one, two = (torch.from_numpy(arrays["tokens"]).flatten(1) for arrays in (plain, fast))
    differs = one != two  # [N, L]
    if ties is not None:
        changed = differs.any(1)
        assert ties[torch.arange(len(one)), differs.int().argmax(1)][changed].all()
    elif exact or dtype == "float32":
        assert not differs.any()


@cache
def plain_decoding(model: str, dtype: str, exact: bool) -> tuple[Any, Tensor | None]:
    """Plain decoding, `exact` with `exact_width`; and without it the near-ties of pictures, bool [N, L]."""
    text = with_setting(settings_of_model(model).plain, "exact_width=true" if exact else "")
    pipe, setting = pipe_of(model, dtype), setting_of(model, text)
    arrays = draws.draw(pipe, setting, prompts_of(model), 0)
    if exact or model != "shapes":
        return arrays, None
    tokens = torch.from_numpy(arrays["tokens"]).long().flatten(1)
    return arrays, near_ties(pipe, setting, prompts_of(model), tokens)


@torch.no_grad()
def near_ties(pipe: Any, setting: Setting, prompts: list[str], tokens: Tensor) -> Tensor:
    """Where the two best scores (law plus noise) of plain decoding lie closer than the dtype rounds: bool [N, L].

    Args:
        tokens: what plain decoding drew, long [N, L].
    """
    model, law, count = pipe.transformer, setting.law, len(prompts)
    keys = draw_keys([torch.Generator().manual_seed(setting.seed + index) for index in range(count)], count)
    noise, tokens = CounterNoise(keys, pipe.device), tokens.to(pipe.device)
    checked = CheckedLaw(law, tokens.shape[1], deferred=True)
    state = model.prefill(pipe.make_condition(prompts), batch_size=count, guided=law.guided, window=1)
    logits, near = state.logits[:, None], []  # [R, 1, V]
    for slot in range(tokens.shape[1]):
        here = torch.full((count, 1), slot, device=pipe.device)
        near.append(
            draw_near(checked, noise, logits, here, law.guided, torch.finfo(model.dtype).eps)[1][:, 0]
        )
        if slot + 1 < tokens.shape[1]:
            logits = model(state, tokens[:, slot : slot + 1], here)
    return torch.stack(near, 1).cpu()
