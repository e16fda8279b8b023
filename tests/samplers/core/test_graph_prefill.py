"""Prefills of recorded decodes: they write where the recorded calls read, and are recorded themselves.

Without a GPU a recorded call is stood in for by Python, as in `test_graph.py`, and a recorded prefill by its traced
operations: what these read and write is fixed, as it is in a graph, and no Python runs at a replay.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.helpers.cached_decoders import case, rows_of
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_transformer
from tests.helpers.without_numbers import NoHost, stand_in, without_numbers
from visual_spec.models.core import cache
from visual_spec.models.core.cache import StaticCache
from visual_spec.models.next_token import llamagen
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers.core import base, graph
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

MODELS = ("llamagen", "negative captions", "classes", "janus", "lumina", "emu3")
LAW = TokenLaw(guidance_scale=2.0, top_k=9)
SAMPLER = SpeculativeJacobiSampler(6)


@pytest.fixture
def replayed(monkeypatch) -> Iterator[dict[str, int]]:
    """Record on the CPU. Counts the recordings of calls and of prefills, and the prefills that are replayed."""
    counts = dict(calls=0, prefills=0, replays=0)

    def capture(run: Callable[[], Any], memory: Any) -> tuple[Callable[[], Any], Any]:
        if "prefilled" not in run.__qualname__:
            counts["calls"] += 1
            return run, "the pool"
        counts["prefills"] += 1
        with monkeypatch.context() as patch:
            patch.setattr(cache, "common_run", lambda slots: None)  # a device's values are not read
            traced = make_fx(run)()

        def replay() -> None:
            counts["replays"] += 1
            traced()

        return replay, "the pool"

    monkeypatch.setattr(base, "wants_graph", lambda choice, model: choice is not False)
    monkeypatch.setattr(graph, "capture", capture)
    graph.forget()
    yield counts
    graph.forget()


def captions(seed: int, count: int = 3) -> TextCondition:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) >= torch.randint(0, 6, (count, 1), generator=generator)
    return TextCondition(torch.randn(count, 6, 8, generator=generator), mask)


def model_and_condition(name: str, seed: int) -> tuple[Any, Any]:
    """A model, and one of several conditions of one shape."""
    if name == "llamagen":
        return tiny_transformer(), captions(seed)
    if name == "negative captions":
        return tiny_transformer(), replace(captions(seed), negative=captions(seed + 1))
    if name == "classes":
        return tiny_transformer(num_classes=5, caption_dim=None, prefix_length=1), torch.tensor(
            [seed % 5, 0, seed % 3]
        )
    model, condition = case(name)
    ids = condition.prompt.ids
    prompt = replace(condition.prompt, ids=ids.roll(seed, 0), mask=condition.prompt.mask.roll(seed, 0))
    return model, replace(condition, prompt=replace(prompt, positions=None, start=None))


def rows_in(condition: Any) -> int:
    if isinstance(condition, Tensor):
        return len(condition)
    return len(condition.features if isinstance(condition, TextCondition) else condition.prompt.ids)


def draw(model: Any, condition: Any, seed: int, law: TokenLaw = LAW, sampler: Any = SAMPLER) -> Any:
    count = rows_in(condition)
    return sampler(model, condition, law=law, generator=seeded(*range(seed, seed + count)), batch_size=count)


def plain(model: Any, condition: Any, seed: int, law: TokenLaw = LAW) -> Any:
    return draw(model, condition, seed, law, AutoregressiveSampler(graph=False))


def held_caches() -> list[StaticCache]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is StaticCache]


@pytest.mark.fast_sets(3)
@pytest.mark.parametrize("name", MODELS)
def test_later_decodes_replay_the_prefill_into_the_one_cache(replayed, monkeypatch, name):
    model, _ = model_and_condition(name, 0)
    before, allocated = len(held_caches()), []
    real = StaticCache.allocate.__func__

    def allocate(cls: type, like: Tensor, shape: Any, *rest: Any) -> StaticCache:
        allocated.append(real(cls, like, shape, *rest))
        return allocated[-1]

    monkeypatch.setattr(StaticCache, "allocate", classmethod(allocate))
    for number, seed in enumerate((1, 2, 3)):
        _, condition = model_and_condition(name, seed)
        found = draw(model, condition, seed)
        caches = len(allocated)
        assert replayed == dict(calls=1, prefills=int(number > 0), replays=number)
        want = plain(model, condition, seed)
        assert found.tokens.equal(want.tokens)
        assert found.trace.target_calls.le(want.trace.target_calls).all()
        if not number:
            of_a_decode = caches
        del allocated[caches:]
        assert caches == of_a_decode  # none by a later decode
    del want, found
    assert len(held_caches()) == before + of_a_decode  # one for each layer, or of all


@torch.no_grad()
def test_all_of_the_state_is_that_of_an_eager_prefill(replayed, monkeypatch):
    """Down to the last bit, after whatever the decodes before have left."""
    # Equal rows share an eager prefill on the host alone, and fewer rows round otherwise; recordings hold every row.
    monkeypatch.setattr(llamagen, "repeats", lambda *_: None)
    model, given = tiny_transformer(), dict[str, Any](guided=True, window=6)
    for seed in (1, 2, 3):
        draw(model, captions(seed), seed)
        ((recording,),) = (known.values() for known in graph._RECORDINGS.values())
    condition = captions(9)
    _, held, first = graph.prefilled(model, condition, _key(model), batch_size=3, **given)
    want = model.prefill(condition, batch_size=3, **given)
    assert held is recording.parts[0].cache and first is None and replayed["replays"] == 3
    for name in ("logits", "features", "prefix_mask", "rotary"):
        assert torch.equal(getattr(held, name), getattr(want, name))
    assert torch.equal(held.cache.keys, want.cache.keys) and torch.equal(held.cache.values, want.cache.values)


def _key(model: Any) -> Any:
    """The only key of a model's recordings, as it was given."""
    ((whole, *_),) = graph._RECORDINGS[model]
    return whole[0]


def test_each_shape_of_prompts_is_recorded_once(replayed):
    """Prompts of two lengths in turn, then another batch, and another guidance."""
    model, condition = case("janus")
    alone, short = rows_of(condition, [0]), rows_of(condition, [3])
    assert alone.prompt.ids.shape[1] > short.prompt.ids.shape[1]
    for seed in range(3):
        for prompt in (alone, short):
            assert draw(model, prompt, seed).tokens.equal(plain(model, prompt, seed).tokens)
    assert replayed == dict(calls=2, prefills=2, replays=4)
    for count, law in ((2, LAW), (1, TokenLaw(guidance_scale=3.0, top_k=9)), (1, TokenLaw())):
        prompt = rows_of(condition, [0, 0][:count])
        assert draw(model, prompt, 7, law).tokens.equal(plain(model, prompt, 7, law).tokens)
    assert replayed == dict(calls=5, prefills=2, replays=4)


def test_weights_that_moved_are_prefilled_anew(replayed):
    model = tiny_transformer()
    for seed in (1, 2):
        draw(model, captions(seed), seed)
    model.output.weight = torch.nn.Parameter(model.output.weight.detach() * 2)  # at another address
    for seed in (1, 2):
        assert draw(model, captions(seed), seed).tokens.equal(plain(model, captions(seed), seed).tokens)
    assert replayed == dict(calls=2, prefills=2, replays=2)


def test_what_a_bad_decode_leaves_does_not_spread(replayed):
    """A masked place of nan would make every later score nan."""
    model: Any = tiny_transformer()
    draw(model, captions(1), 1)
    good = model.layers[0].attention.wqkv.weight.clone()
    with torch.no_grad():
        model.layers[0].attention.wqkv.weight.fill_(torch.nan)
        with pytest.raises(FloatingPointError):
            draw(model, captions(2), 2)
        model.layers[0].attention.wqkv.weight.copy_(good)
    ((recording,),) = (known.values() for known in graph._RECORDINGS.values())
    assert recording.parts[0].cache.cache.keys.isnan().any()
    assert draw(model, captions(3), 3).tokens.equal(plain(model, captions(3), 3).tokens)


def test_a_condition_that_the_caller_keeps_is_not_changed(replayed):
    model, first = tiny_transformer(), captions(1)
    features, mask = first.features.clone(), first.mask.clone()
    for seed in (1, 2, 3):
        draw(model, first if seed == 1 else captions(seed), seed, TokenLaw(top_k=5))
    assert first.features.equal(features) and first.mask.equal(mask)


def test_a_prefill_that_cannot_be_recorded_runs_in_place(replayed, monkeypatch):
    capture = graph.capture

    def fails(run: Callable[[], Any], memory: Any) -> Any:
        if "prefilled" in run.__qualname__:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(run, memory)

    monkeypatch.setattr(graph, "capture", fails)
    model, before = tiny_transformer(), len(held_caches())
    draw(model, captions(1), 1)
    with pytest.warns(
        UserWarning, match="a prefill could not be recorded .*not permitted.*; going on without"
    ):
        found = draw(model, captions(2), 2)
    assert found.tokens.equal(plain(model, captions(2), 2).tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not tried again
        assert draw(model, captions(3), 3).tokens.equal(plain(model, captions(3), 3).tokens)
    assert len(held_caches()) == before + 1
    strict = SpeculativeJacobiSampler(6, graph=True)
    draw(model, captions(1), 1, sampler=strict)
    refuses(RuntimeError, "not permitted", draw, model, captions(2), 2, sampler=strict)


@pytest.mark.parametrize("name, guided", [*((name, True) for name in MODELS), ("glm large", False)])
def test_no_prompt_waits_for_the_host(monkeypatch, name, guided):
    model: Any
    own = name in ("llamagen", "negative captions", "classes")
    model, condition = model_and_condition(name, 1) if own else case(name, torch.float32)
    count, given = rows_in(condition), dict(guided=guided, window=4)
    prompt = model.prompt_of(condition, batch_size=count, guided=guided)
    held = model.run_prompt(prompt, **given)
    stand_in(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, prompt, held = without_numbers(model), without_numbers(prompt), without_numbers(held)
        with NoHost():
            new = model.run_prompt(prompt, **given, held=held)
        assert new.logits.device.type == "cuda" and new.logits.shape == held.logits.shape
        for fixed, now in zip(held.cache.buffers(), new.cache.buffers(), strict=True):
            assert now is fixed


def test_a_recorded_prefill_that_ignores_guided_is_refused(replayed, monkeypatch):
    model, condition = model_and_condition("classes", 1)
    run = model.run_prompt

    def unguided(prompt: Any, *, guided: bool, **more: Any) -> Any:
        state = run(prompt, guided=guided, **more)
        state.guided, state.logits = False, state.logits[:3]
        return state

    monkeypatch.setattr(model, "run_prompt", unguided)
    refuses(ValueError, "guided=True.*guided=False", draw, model, condition, 1)
