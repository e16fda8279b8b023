"""Speed up a pipeline that the user already has, and undo it.

Samplers are components, so all this does is to swap one and to remember the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from visual_spec.pipelines import transformers_models, transformers_music
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.scale_plan import ScalePlan
from visual_spec.samplers.registry import by_name, sampler_class

_NAMED = ("drafter", "refiner")
_PLAIN = "_visual_spec_plain_sampler"


def make_sampler(name: str, **settings: Any) -> Any:
    """The sampler of a name, as the command line calls it.

    Raises:
        ValueError: an unknown name, a setting that this sampler does not have, or a value it refuses.
    """
    _check_settings(name, settings)
    return sampler_class(by_name(name))(**settings)


def make_row(name: str, **settings: Any) -> tuple[Any, ScalePlan]:
    """The sampler of a name, and what else a row says: for `scale-wise`, who draws which scales (see `ScalePlan`).

    Raises:
        ValueError: as `make_sampler` and `ScalePlan`.
    """
    plans = ScalePlan.names() if name == "scale-wise" else []
    _check_settings(name, settings, also=plans)
    plan = ScalePlan.take(settings) if plans else ScalePlan()
    return make_sampler(name, **settings), plan


def _check_settings(name: str, settings: Mapping[str, Any], also: Sequence[str] = ()) -> None:
    kind = sampler_class(by_name(name))
    known = {*also, *(key for key in kind().config if not key.startswith("_"))}
    unknown = sorted(set(settings) - known)
    if unknown:
        allowed = f"it takes {', '.join(sorted(known))}" if known else "it has none"
        raise ValueError(f"the {name} sampler has no setting {', '.join(unknown)}; {allowed}.")


def parse_sampler(text: str) -> tuple[str, dict[str, Any]]:
    """Read `name` or `name:setting=value,...`, such as `speculative-jacobi:window=32,acceptance=identical`.

    Values are whole numbers, decimal numbers, `true`, `false`, `none`, words, or several of these divided by `/`
    (`4/2/2`; a list of one: `4/`). What names a model, `drafter` and `refiner`, is taken as it stands.

    Returns:
        The name and the settings. Neither is looked at: `make_sampler` does that.

    Raises:
        ValueError: text of another form, or a setting twice.
    """
    name, colon, rest = text.strip().partition(":")
    settings: dict[str, Any] = {}
    for part in rest.split(",") if colon else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise ValueError(f"{part!r} in sampler {text!r}; write name:setting=value,setting=value")
        if key in settings:
            raise ValueError(f"sampler {text!r} sets {key} twice")
        settings[key] = value if key in _NAMED else _value(value)
    return name.strip(), settings


def _value(text: str) -> Any:
    if "/" in text:
        return [_value(part) for part in text.split("/") if part]
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


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
