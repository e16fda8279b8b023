"""Speed up a pipeline that the user already has, and undo it.

Samplers are components, so all this does is to swap one and to remember the other.
"""

from __future__ import annotations

from typing import Any

from visual_spec.pipelines import transformers_models, transformers_music
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.sampler_text import make_row, make_sampler, parse_sampler  # noqa: F401

_PLAIN = "_visual_spec_plain_sampler"


def accelerate(pipe: Any, sampler: Any = None) -> Any:
    """Make a pipeline decode with another sampler; by default the one that returns the same tokens in fewer calls.

    Calling it again swaps again; `restore` always goes back to the sampler the pipeline had at first.

    Args:
        pipe: a pipeline of this package, an image generator of transformers, a diffusers pipeline that holds one, or a
            MusicGen of transformers: see `visual_spec.pipelines.transformers_models` and `transformers_music` for what
            those get.
        sampler: a sampler, or its name (see `visual_spec.samplers.registry`). None: "speculative-jacobi", of music
            "column-jacobi".

    Returns:
        The same pipeline.

    Raises:
        TypeError: `pipe` has no sampler to swap, or `sampler` does not fit it.
        ValueError: an unknown sampler name.
    """
    plays = transformers_music.is_music_model(pipe)
    if sampler is None:
        fast = pipe.fast_sampler if isinstance(pipe, VisualPipeline) else "speculative-jacobi"
        sampler = "column-jacobi" if plays else fast
    sampler = make_sampler(sampler) if isinstance(sampler, str) else sampler
    if plays:
        return transformers_music.accelerate(pipe, sampler)
    if not isinstance(pipe, VisualPipeline):
        return transformers_models.accelerate(pipe, sampler)
    plain = pipe.sampler
    pipe.sampler = sampler
    try:
        pipe.check_sampler()
    except TypeError:
        pipe.sampler = plain
        raise
    if not hasattr(pipe, _PLAIN):
        setattr(pipe, _PLAIN, plain)
    return pipe


def restore(pipe: Any) -> Any:
    """Undo `accelerate`; a pipeline that was not accelerated is left as it is. Returns the same pipeline."""
    if transformers_music.is_music_model(pipe):
        return transformers_music.restore(pipe)
    if not isinstance(pipe, VisualPipeline):
        return transformers_models.restore(pipe)
    if hasattr(pipe, _PLAIN):
        pipe.sampler = getattr(pipe, _PLAIN)
        delattr(pipe, _PLAIN)
    return pipe


def summary(pipe: Any) -> str:
    """One line on what the last pictures or clips of a pipeline cost: tokens, calls, tokens per call, seconds."""
    if transformers_music.is_music_model(pipe):
        return transformers_music.summary(pipe)
    if not isinstance(pipe, VisualPipeline):
        return transformers_models.summary(pipe)
    trace = getattr(pipe, "last_trace", None)
    return trace.summary() if trace is not None else f"{type(pipe.sampler).__name__}: nothing decoded yet"
