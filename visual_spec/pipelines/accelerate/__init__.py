"""Speed up a pipeline that the user already has, and undo it.

Samplers are components, so all this does is to swap one and to remember the other.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

from visual_spec.pipelines.accelerate.adapter import Adapter, is_accelerated, is_of, promise, unwrapped
from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler, read_sampler
from visual_spec.samplers.registry import all_samplers, by_name, sampler_class

if TYPE_CHECKING:
    from visual_spec.pipelines.base import VisualPipeline
    from visual_spec.samplers.core.base import Sampler

logger = logging.getLogger("visual_spec")
_PLAIN = "_visual_spec_plain_sampler"


def accelerate(
    pipe: Any, sampler: Any = None, drafter: Any = None, *, codes: Any = None, end: int | None = None
) -> Any:
    """Make a pipeline decode with another sampler; by default the fastest one that returns the same tokens.

    Calling it again swaps again; `restore` always goes back to the sampler the pipeline had at first. A sampler that is
    refused changes nothing. Copies and pickles of an accelerated model of another library are plain. The logger
    "visual_spec" says at level INFO what was done and what to expect, in the line that `summary` returns before the
    first call.

    Args:
        pipe: a pipeline of this package, an image generator of transformers, a diffusers pipeline that holds one, a
            MusicGen, VibeVoice, PocketTTS, CSM, Moshi, Qwen2.5-Omni or Qwen3-Omni of transformers, a Qwen3-TTS, a
            Chatterbox, a CosyVoice 2 or 3, the handler of ACE-Step 1.5's language model, a causal language model of
            transformers that writes codes, a NextStep, or a Wan or a MiniMax-Music 3 of diffusers: the modules beside
            this one say what each gets.
        sampler: a sampler, or its text (`visual_spec.pipelines.sampler_text`). None: the pipeline's `fast_sampler`,
            "speculative-jacobi"; on models of transformers with "window=auto", which times its first calls and goes on
            plainly where no window pays. A pipeline that has a sampler of this class keeps it. So does one of music or
            of continuous tokens: there no sampler has been faster without changing what is drawn, as a warning says.
            Speech takes none; a depth decoder takes "depth-window". A Wan takes a policy of its cache in its place
            (`visual_spec.models.video.frame_cache`), or its text; None: "full".
        drafter: of an image generator or a MusicGen of transformers, for samplers that draft with a second model. A
            pipeline of this package has its own, `pipe.drafter`.
        codes: of a causal language model: (first, last + 1), the ids of its codes, or a list of such ranges.
        end: of a causal language model: the id that ends a text; None: texts have `max_new_tokens` codes.

    Returns:
        The same pipeline.

    Raises:
        TypeError: `pipe` has no sampler to swap, or `sampler` or `drafter` does not fit it.
        ValueError: an unknown sampler name, or a sampler that drafts with a model that the pipeline does not have.
    """
    adapter = _adapter(pipe)
    if adapter is None and not _is_ours(pipe):
        names = ", ".join(name for path, *_ in ADAPTERS for name in _loaded(path).takes)
        raise TypeError(
            f"cannot accelerate a {type(pipe).__name__}; pass a visual_spec pipeline, one of {names}, or a pipeline of "
            "diffusers that holds an image generator."
        )
    options = {n: v for n, v in dict(drafter=drafter, codes=codes, end=end).items() if v is not None}
    unknown = [name for name in options if adapter is None or name not in adapter.options]
    if unknown:
        advice = "set pipe.drafter" if adapter is None and drafter is not None else "leave out"
        raise TypeError(f"a {type(pipe).__name__} takes no {' and '.join(unknown)} here; {advice}.")
    plain_is_fastest = adapter is None and pipe.facts.comparable and pipe.fast_sampler == pipe.plain_sampler
    if sampler is None and plain_is_fastest:
        other = pipe.facts.shorter_sampler
        choice = f" Name one that does: accelerate(pipe, {other!r})." if other else ""
        warnings.warn(
            f"{type(pipe).__name__} keeps its {type(pipe.sampler).__name__}: no sampler has been faster without "
            f"changing what is drawn.{choice}",
            stacklevel=2,
        )
        return pipe
    if sampler is None and adapter is not None:
        sampler = adapter.fast_sampler
    elif sampler is None:
        fastest = sampler_class(by_name(parse_sampler(pipe.fast_sampler)[0]))
        # Its own settings may belong to its law: how guidance grows, the steps of a masked model.
        sampler = pipe.sampler if type(pipe.sampler) is fastest else pipe.fast_sampler
    if isinstance(sampler, str):
        sampler = read_sampler(sampler) if adapter is None else adapter.read_text(sampler)
    if adapter is not None:
        adapter.accelerate(pipe, sampler, **options)
        for model in filter(is_accelerated, adapter.models(pipe)):  # one that cannot gain is left as it is
            logger.info(adapter.promised(model))
    else:
        before = _set_sampler(pipe, sampler)
        if not hasattr(pipe, _PLAIN):
            setattr(pipe, _PLAIN, before)
        logger.info(_promised(pipe))
    return pipe


def _set_sampler(pipe: VisualPipeline, sampler: Sampler) -> Sampler:
    """Set a sampler that fits, and return the one before; a refusal leaves that one."""
    before = pipe.sampler
    try:
        pipe.sampler = sampler
        pipe.check_sampler()
    except BaseException:
        pipe.sampler = before
        raise
    return before


def refusals(pipe: VisualPipeline) -> dict[str, str]:
    """What `accelerate(pipe, name)` says to each sampler of the registry, by name; empty where it fits."""
    said: dict[str, str] = {}
    for entry in all_samplers():
        try:
            pipe.sampler = _set_sampler(pipe, make_sampler(entry.name))
            said[entry.name] = ""
        except (TypeError, ValueError) as error:
            said[entry.name] = " ".join(str(error).split())
    return said


def restore(pipe: Any) -> Any:
    """Undo `accelerate`; a pipeline that was not accelerated is left as it is. Returns the same pipeline."""
    adapter = _adapter(pipe)
    if adapter is not None:
        return adapter.restore(pipe)
    if hasattr(pipe, _PLAIN):
        pipe.sampler = getattr(pipe, _PLAIN)
        delattr(pipe, _PLAIN)
    return pipe


def summary(pipe: object) -> str:
    """One line on what the last pictures or clips of a pipeline cost: tokens, calls, tokens per call, seconds.

    Before the first ones: the sampler, and whether it keeps tokens.
    """
    adapter = _adapter(pipe)
    if adapter is not None:
        return adapter.summary(pipe)
    if not _is_ours(pipe):
        return f"{type(pipe).__name__}: not accelerated"
    trace = pipe.last_trace
    return trace.summary() if trace is not None else _promised(pipe)


def _promised(pipe: VisualPipeline) -> str:
    # A sampler that tests nothing makes plain decoding's calls, as wide as these.
    tests = "acceptance" in getattr(pipe.sampler, "config", ())
    return f"{promise(pipe.sampler, pipe.plain, pipe.transformer if tests else None)}; nothing decoded yet"


# What `accelerate` takes from other libraries, asked in turn: an adapter, the library, and how its classes are called.
# An adapter is imported once an object of such a class comes; whether it takes the object, it says itself.
ADAPTERS = (
    ("video:VideoAdapter", "diffusers", ("WanPipeline", "WanTransformer3DModel")),
    ("speech:SpeechAdapter", "transformers", ("VibeVoice*", "PocketTTS*")),
    ("depth:DepthAdapter", "transformers", ("Csm*", "Moshi*", "Qwen3OmniMoe*")),
    ("depth:DepthAdapter", "", ("Qwen3TTS*",)),  # of the package qwen-tts, or of transformers
    ("minimax_music:MiniMaxMusicAdapter", "diffusers", ("MiniMaxMusic3ModularPipeline",)),
    ("nextstep:NextStepAdapter", "", ("FlowMatchingHead",)),
    ("music:MusicAdapter", "transformers", ("Musicgen*",)),
    (
        "speech_codes:SpeechCodeAdapter",
        "",
        ("Qwen2_5Omni*", "T3", "Chatterbox*TTS", "Qwen2LM", "CosyVoice3LM", "CosyVoice2*", "CosyVoice3*"),
    ),
    ("ace_step:AceStepAdapter", "", ("LLMHandler",)),
    ("images:ImageAdapter", "", ("*ForConditionalGeneration", "MammothModa2")),
    ("codes:CodeAdapter", "", ("*ForCausalLM", "*LMHeadModel")),
)


def _loaded(path: str) -> Adapter:
    module, _, name = path.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)()


def _adapter(thing: object) -> Adapter | None:
    """The adapter of a model of another library, or of what holds one; None for a pipeline of ours and what nobody
    takes."""
    if _is_ours(thing):
        return None
    for path, library, names in ADAPTERS:
        if any(is_of(part, names, library) for part in _parts(thing)):
            adapter = _loaded(path)
            if adapter.claims(thing):
                return adapter
    return None


def _parts(thing: object) -> Iterator[object]:
    """A model, what it wraps, the components of a pipeline, and the head of a NextStep."""
    inner = unwrapped(thing)
    yield inner
    components = getattr(inner, "components", None)
    yield from map(unwrapped, components.values() if isinstance(components, dict) else ())
    for one in (thing, getattr(thing, "model", None)):
        yield getattr(one, "image_head", None)


def _is_ours(pipe: object) -> TypeGuard[VisualPipeline]:
    """Whether it is a pipeline of this package; their base is not imported to find out."""
    return any(kind.__name__ == "VisualPipeline" for kind in type(pipe).__mro__)
