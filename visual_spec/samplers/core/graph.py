"""Recording one call of a decode as a CUDA graph: one launch in place of hundreds, without Python in between.

A step of a sampler is a function of the tensors in its state. It is recorded once, with all of them at fixed addresses.
At its end it copies every newly bound tensor back to its address. So one recording serves every call of a decode, and
later decodes of the same shape: their states are copied over the first one's.

The model's cache is not copied, where the model is a `PromptModel`: the prefill of a later decode writes it where the
recorded calls read it, and is recorded itself. A recording serves prompts of one shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from visual_spec.models.core.protocol import DecodeState, NextTokenModel, PromptModel, modules_of, owner_of
from visual_spec.models.core.settings import AUTO
from visual_spec.samplers.core.checks import CheckedLaw, check_guided
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.logprobs import keeping
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import Stopwatch

# Share of the device's memory that recordings may keep after their decodes; the oldest are dropped first.
_SHARE = 0.25

# State, law and noise of a decode: what a step reads and changes.
Parts = tuple[Any, CheckedLaw, CounterNoise]
Step = Callable[[State, CheckedLaw, CounterNoise], None]
Replay = Callable[[], object]


@dataclass
class Prefill:
    """A prefill of the state that a recording holds: its input and output at fixed addresses.

    Attributes:
        prompt: what it reads.
        fields: what the model's state holds after it. Calls bind some of these anew.
        replay: replays the graph; None before, or if recording failed.
    """

    prompt: tuple[Tensor, ...]
    fields: dict[str, Any]
    replay: Replay | None = None
    tried: bool = False


@dataclass
class Recording:
    """A step, the parts of a decode that it works on, and one graph for each recorded width.

    Attributes:
        parts: the parts of the first decode; later ones are copied over them.
        weights: addresses of the models' weights. A graph is valid only for these addresses.
        shapes: shapes of the tensors of the parts.
        replays: {width of the state, calls of the graph: function that replays it; None where recording failed}.
        steps: the recorded steps. Graphs read what these hold, such as tables, by address.
        memory: the memory pool that all graphs share.
        prefill: the model's, where it can be recorded.
    """

    parts: Parts
    weights: tuple[Hashable, ...]
    shapes: tuple[Hashable, ...]
    replays: dict[tuple[int | None, int], Replay | None] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    memory: Any = None
    prefill: Prefill | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of the parts."""
        return sum(tensor.nbytes for tensor in _tensors(self.parts))


# {owner of the weights: {the rest of the key: recording}}, each in the order of use.
_RECORDINGS: WeakKeyDictionary[object, dict[Any, Recording]] = WeakKeyDictionary()


def begin_recorded(
    sampler: Any,
    model: Any,
    condition: object,
    law: TokenLaw,
    keys: Tensor,
    watch: Stopwatch,
    parts: dict[str, Any],
    prefills: bool,
    output_logprobs: bool = False,
) -> tuple[Run, Any, Callable[[], int | None]]:
    """Begin a decode of a sampler whose steps are recorded, where they can be.

    Returns its run and state, and what makes calls: a replay, or the step itself. `prefills`: whether the sampler's
    prefill is the model's own, which can be recorded, too.
    """
    graph = sampler.config.graph
    strict = graph not in (False, AUTO)
    # What a recording depends on. Only the prefill uses `drafter_condition`.
    others = [part for name, part in parts.items() if name != "drafter_condition"]
    key: Hashable = (
        type(sampler),
        repr(sorted(sampler.config.items())),
        law,
        len(keys),
        output_logprobs,
        *others,
    )
    prefill = None

    def by_recording(run: Run) -> DecodeState:
        nonlocal key, prefill
        given: Any = dict(guided=law.guided, window=run.fixed_width or run.window, strict=strict)
        given |= dict(batch_size=len(keys), drafter=run.drafter)
        key, cache, prefill = prefilled(model, condition, key, **given)
        check_guided(cache, law.guided).fixed = run.fixed_width is not None
        return cache

    instead = by_recording if prefills and can_record_prefill(model) else None
    run = sampler.begin(model, condition, law, keys, watch, prefill=instead, **parts)
    run.keeps_scores = output_logprobs
    state = sampler.prepare(run)
    make_call = keeping(sampler, run, state) if output_logprobs else sampler.step
    if not strict and not can_record(state):
        return run, state, partial(make_call, run, state)
    # The recording outlives this decode. Of the prefill it reads only what the state holds.
    lasting = replace(run, condition=None, cache=None)

    def call(state: State, law: CheckedLaw, noise: CounterNoise) -> None:
        make_call(replace(lasting, cache=state.cache, law=law, noise=noise), state)

    state.round = torch.full((), state.round, dtype=torch.long, device=run.device)
    run.noise.keep = 0  # later decodes write their keys over these
    calls = graph if type(graph) is int else 1
    given = dict(drafter=run.drafter, prefill=prefill, strict=strict, calls=calls, planned=run.num_calls)
    (state, run.law, run.noise), advance = recorded(
        model, key, call, (state, run.law, run.noise), run.watch, **given
    )
    return run, state, advance


def forget(model: object = None) -> None:
    """Free the memory of a model's recordings, or of all recordings."""
    if model is None:
        _RECORDINGS.clear()
    else:
        _RECORDINGS.pop(owner_of(model), None)


def can_record_prefill(model: object) -> TypeGuard[PromptModel]:
    """Return whether the model is a `PromptModel`."""
    return hasattr(model, "prompt_of") and hasattr(model, "run_prompt")


def can_record(state: object) -> bool:
    """Return whether a model's state, or those in a sampler's state, declare the tensors that last between calls."""
    return all(_has_buffers(cache) for cache in _caches(state))


def prefilled(
    model: PromptModel,
    condition: object,
    key: Hashable,
    *,
    batch_size: int,
    guided: bool,
    window: int,
    drafter: object = None,
    strict: bool = False,
) -> tuple[tuple[Any, ...], Any, Prefill | None]:
    """Run the prefill of a decode that will be recorded.

    The first prefill of a key allocates the state, which the recording will hold. The second is recorded. It writes
    into that state, as do the replays of all others.

    Args:
        key: as in `recorded`.
        strict: raise if recording fails. False: warn, and run prefills in the held state without a graph.

    Returns:
        The key with the shapes of the prompt, the model's state, and what the recording must know of a first prefill.

    Raises:
        RuntimeError: the prefill cannot be recorded, and `strict` is set.
    """
    given: dict[str, Any] = dict(guided=guided, window=window)
    prompt = model.prompt_of(condition, batch_size=batch_size, guided=guided)
    key = (key, tuple((tensor.shape, tensor.dtype) for tensor in prompt))
    recording = _RECORDINGS.get(owner_of(model), {}).get(_whole_key(model, key))
    if recording is None or recording.prefill is None or recording.weights != _weights(model, drafter):
        # A copy, because the state may hold parts of it, which later prompts overwrite.
        prompt = tuple(map(torch.clone, prompt))
        state = model.run_prompt(prompt, **given)
        return key, state, Prefill(prompt, dict(vars(state)))
    known, held = recording.prefill, recording.parts[0].cache

    def run() -> None:
        """Write the cache in place, and copy all else that the prompt leaves to where it is held."""
        new = vars(model.run_prompt(known.prompt, **given, held=held))
        for name, fixed in known.fields.items():
            if isinstance(fixed, Tensor) and new[name] is not fixed:
                fixed.copy_(new[name])

    if not known.tried:
        known.tried = True
        if None not in recording.replays.values():  # a machine that records no calls records no prefill
            known.replay, recording.memory = _tried(run, recording.memory, "a prefill", strict)
    for fixed, new in zip(known.prompt, prompt, strict=True):
        fixed.copy_(new)
    (known.replay or run)()
    vars(held).update(known.fields)
    return key, held, None


def recorded(
    model: NextTokenModel,
    key: Hashable,
    step: Step,
    parts: Parts,
    watch: Stopwatch,
    *,
    drafter: object = None,
    prefill: Prefill | None = None,
    strict: bool = False,
    calls: int = 1,
    planned: int | None = None,
) -> tuple[Parts, Callable[[], int]]:
    """Move a decode to the addresses of a recording. Returns its parts there, and a function that makes calls.

    The first call of each width runs unrecorded, so that everything is compiled. Then the step is recorded. The
    function returns how many calls it has made.

    Args:
        key: hashable; everything that the step depends on, except the models and the tensors of the parts.
        step: binds tensors of the parts anew, or changes them in place. It is kept as long as its recording.
        parts: a prepared decode. Use the returned parts in its place.
        watch: times the replayed calls, as phase "step".
        drafter, prefill: another model that the step calls; what `prefilled` returned.
        strict: raise if recording fails. False: warn, and continue without a graph.
        calls: of a graph. Complete samples make those after their last one, too, which changes nothing.
        planned: how many calls there are in all, where that is known: none is made beyond.

    Raises:
        TypeError: a model's state does not say what its buffers are.
        RuntimeError: the step cannot be recorded, and `strict` is set.
    """
    state, device = parts[0], parts[0].lengths.device
    for cache in _caches(state):
        if not _has_buffers(cache):
            raise TypeError(f"{type(cache).__name__} has no `buffers`; pass graph=False for this model.")
    known = _RECORDINGS.setdefault(owner_of(model), {})
    key, weights = _whole_key(model, key), _weights(model, drafter)
    shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in _tensors(parts))
    recording = known.pop(key, None)
    if recording is None or (recording.weights, recording.shapes) != (weights, shapes):
        recording = Recording(parts, weights, shapes, prefill=prefill)
    else:
        for fixed, new in zip(_tensors(recording.parts), _tensors(parts), strict=True):
            if new is not fixed:  # as the buffers that the prefill has written in place
                fixed.copy_(new)
        if hasattr(state, "width"):
            recording.parts[0].width = state.width  # a window policy may have changed it
    known[key] = recording
    _make_room(device, recording)
    fixed_parts, made = recording.parts, 0

    def advance() -> int:
        nonlocal made
        count = calls if planned is None or planned - made >= calls else 1
        kind = getattr(fixed_parts[0], "width", None), count
        replay = recording.replays.get(kind)
        if replay is not None:
            replay()
            watch.lap("step", device)
        else:
            count = 1
            step_in_place(step, fixed_parts)
            if kind not in recording.replays:
                recording.replays[kind] = _record(step, recording, strict, kind[1])
        made += count
        return count

    return fixed_parts, advance


def step_in_place(step: Step, parts: Parts) -> None:
    """Run a step, then copy newly bound tensors back to their old addresses."""
    before = list(_places(parts))
    held = {id(fixed) for _, fixed in before}
    step(*parts)
    changed = []
    for path, fixed in before:
        now = getattr(_follow(parts, path[:-1]), path[-1])
        if now is not fixed:
            # A place may now hold the tensor of another place, which is about to be overwritten.
            changed.append((path, fixed, now.clone() if id(now) in held else now))
    for path, fixed, now in changed:
        fixed.copy_(now)
        setattr(_follow(parts, path[:-1]), path[-1], fixed)


def _record(step: Step, recording: Recording, strict: bool, calls: int) -> Replay | None:
    """Return a function that replays steps of the recording; None if they cannot be recorded. Computes nothing."""
    before, replay = list(_places(recording.parts)), None

    def run() -> None:
        for _ in range(calls):
            step_in_place(step, recording.parts)

    try:
        replay, recording.memory = _tried(run, recording.memory, "a call", strict)
    finally:
        if replay is None:
            for path, fixed in before:
                setattr(_follow(recording.parts, path[:-1]), path[-1], fixed)
    if replay is not None:
        recording.steps.append(step)
    return replay


# -- functions ---------------------------------------------------------------------------------------------------------


@dataclass
class _Fixed:
    """Inputs and output of a function at fixed addresses, and what replays it: None before, or if recording failed."""

    inputs: tuple[Tensor, ...]
    output: Tensor
    replay: Replay | None = None
    tried: bool = False


class RecordedFunction:
    """A function of tensors, recorded as a CUDA graph for each set of shapes.

    The first call of a set runs unrecorded, so that everything is compiled; the second records. Recording that fails is
    warned of, and not tried again.

    Args:
        model: whose weights the function reads. Recordings are dropped when they move.
        function: of tensors to a tensor. It computes on the device alone. Its result depends on nothing but its inputs,
            the weights, and numbers that never change.
    """

    def __init__(self, model: object, function: Callable[..., Tensor]) -> None:
        self.model, self.function = model, function
        self._weights: tuple[Hashable, ...] = ()
        self._known: dict[Hashable, _Fixed] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The function's output, in memory of its own."""
        weights = _addresses(self.model)
        if weights != self._weights:
            self._weights = weights
            self._known.clear()
        shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs)
        known = self._known.get(shapes)
        if known is None:
            output = self.function(*inputs)
            self._known[shapes] = _Fixed(tuple(map(torch.clone, inputs)), torch.empty_like(output))
            return output
        if not known.tried:
            known.tried = True
            known.replay, _ = _tried(
                lambda: known.output.copy_(self.function(*known.inputs)), None, "a function"
            )
        if known.replay is None:
            return self.function(*inputs)
        for fixed, new in zip(known.inputs, inputs, strict=True):
            fixed.copy_(new)
        known.replay()
        return known.output.clone()


def capture(run: Callable[[], object], memory: Any) -> tuple[Replay, Any]:
    """Return a function that replays `run`, and the graph's memory pool."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        run()
    return graph.replay, graph.pool()


def _tried(
    run: Callable[[], object], memory: Any, what: str, strict: bool = False
) -> tuple[Replay | None, Any]:
    """As `capture`; if `run` cannot be recorded, raise if `strict`, else warn and return None. Computes nothing."""
    try:
        return capture(run, memory)
    except RuntimeError as error:
        if strict:
            raise
        warnings.warn(
            f"{what} could not be recorded as a CUDA graph ({error}); going on without.", stacklevel=3
        )
        return None, memory


# -- the tensors of a decode -------------------------------------------------------------------------------------------


# The place of a tensor: the number of a part, then attribute names.
Path = tuple[Any, ...]


def _places(parts: Parts) -> Iterator[tuple[Path, Tensor]]:
    """Yield the places of all tensors, except those in model states."""
    for number, part in enumerate(parts):
        yield from _inside(part, (number,))


def _inside(part: object, path: Path) -> Iterator[tuple[Path, Tensor]]:
    for name, value in vars(part).items():
        if isinstance(value, Tensor):
            yield (*path, name), value
        elif hasattr(value, "select") and not _is_cache(value):  # a label, a meter
            yield from _inside(value, (*path, name))


def _follow(parts: Parts, path: Path) -> Any:
    owner = parts[path[0]]
    for name in path[1:]:
        owner = getattr(owner, name)
    return owner


def _is_cache(value: object) -> bool:
    """Whether this is a model's state, which says what its buffers are."""
    return isinstance(value, DecodeState) or (hasattr(value, "select") and hasattr(value, "buffers"))


def _caches(state: object) -> list[Any]:
    return [state] if _is_cache(state) else [value for value in vars(state).values() if _is_cache(value)]


def _has_buffers(cache: DecodeState) -> bool:
    return type(cache).buffers is not DecodeState.buffers


def _tensors(parts: Parts) -> list[Tensor]:
    """Return all tensors that last from call to call, in a fixed order."""
    buffers = [tensor for cache in _caches(parts[0]) for tensor in cache.buffers()]
    return [tensor for _, tensor in _places(parts)] + buffers


def _addresses(model: object) -> tuple[Hashable, ...]:
    """Return the addresses of the weights, and the state of adapters.

    Quantised weights have no address; they count as moved when the objects change.
    """
    from visual_spec.models.core.adapters import adapter_state  # on a GPU only

    weights = [parameter for module in modules_of(model) for parameter in module.parameters()]
    addresses = tuple(one.data_ptr() if type(one) is nn.Parameter else id(one) for one in weights)
    return addresses + adapter_state(modules_of(model))


def _weights(model: object, drafter: object) -> tuple[Hashable, ...]:
    return _addresses(model) + (() if drafter is None else _addresses(drafter))


def _whole_key(model: NextTokenModel, key: Hashable) -> Hashable:
    return key, type(model), model.grid


def _make_room(device: torch.device, needed: Recording) -> None:
    """Drop the oldest recordings until the rest fit their share of the device's memory."""
    if device.type != "cuda":
        return
    room = _SHARE * torch.cuda.get_device_properties(device).total_memory
    others = [(known, key) for known in _RECORDINGS.values() for key in known if known[key] is not needed]
    held = needed.nbytes + sum(known[key].nbytes for known, key in others)
    for known, key in others:
        if held <= room:
            return
        held -= known.pop(key).nbytes
