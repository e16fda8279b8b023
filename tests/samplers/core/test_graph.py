"""Calls recorded as CUDA graphs: what is recorded is the step, nothing in it waits for the host, and it is reused.

Recording needs a GPU. Without one a recording is stood in for by Python that does the same at every replay, which shows
what is kept at which address; and that nothing in a step reads the device, or copies to it, is shown on tensors that
have a CUDA device and no numbers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.next_token.test_cached_decoder import case, rows_of
from tests.samplers.without_numbers import NoHost, stand_in, without_numbers
from tests.tiny import seeded, tiny_transformer
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.tabular import TabularModel
from visual_spec.models.next_token import cached_decoder
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers import autoregressive, jacobi
from visual_spec.samplers.autoregressive import AutoregressiveSampler, AutoregressiveState
from visual_spec.samplers.core import graph
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise, draw_keys
from visual_spec.samplers.core.trace import Stopwatch
from visual_spec.samplers.core.window import WindowPolicy
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

SAMPLERS = {
    "plain": AutoregressiveSampler(),
    "identical": SpeculativeJacobiSampler(6),
    "gumbel": SpeculativeJacobiSampler(6, acceptance="exact"),
    "maximal": SpeculativeJacobiSampler(6, "maximal", "exact", "uniform"),
    "independent": SpeculativeJacobiSampler(6, "independent", "exact", "last_law"),
    "grouped": SpeculativeJacobiSampler(6, "independent", "grouped", code_distance=None),
}
LAW = TokenLaw(guidance_scale=2.0, top_k=9)


def captions(seed: int) -> TextCondition:
    features = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(seed))
    return TextCondition(features, torch.ones(3, 6, dtype=torch.bool))


def draw(sampler: Any, model: Any, seed: int, law: TokenLaw = LAW, **settings: Any) -> Any:
    generator = seeded(seed, seed + 1, seed + 2)
    return sampler(model, captions(seed), law=law, generator=generator, batch_size=3, **settings)


@pytest.fixture
def recordings(monkeypatch) -> Iterator[list[Callable[[], None]]]:
    """Record on the CPU: replays run the step again. As on a GPU, recording itself computes nothing."""
    made: list[Callable[[], None]] = []

    def capture(run: Callable[[], None], memory: Any) -> tuple[Callable[[], None], Any]:
        made.append(run)
        return run, "the pool"

    for module in (autoregressive, jacobi):
        monkeypatch.setattr(module, "wants_graph", lambda choice, model: choice is not False)
    monkeypatch.setattr(graph, "_capture", capture)
    graph.forget()
    yield made
    graph.forget()


def compare(told: tuple[int, Tensor], want: tuple[int, Tensor]) -> None:
    assert told[0] == want[0] and told[1].equal(want[1])


# -- what is recorded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLERS)
def test_recorded_calls_give_the_same_tokens_and_are_recorded_once(recordings, name):
    model, sampler = tiny_transformer(), SAMPLERS[name]
    plain = type(sampler).from_config(sampler.config, graph=False)
    for seed in (3, 40, 500):
        seen: list[tuple[int, Tensor]] = []
        found = draw(sampler, model, seed, callback=lambda *told: seen.append(told))  # noqa: B023
        eager = draw(plain, model, seed, callback=lambda *told: compare(seen.pop(0), told))  # noqa: B023
        assert not seen
        assert found.tokens.equal(eager.tokens)
        assert found.trace.target_calls.equal(eager.trace.target_calls)
        assert found.trace.commit_call.equal(eager.trace.commit_call)
        assert found.trace.divergence == eager.trace.divergence
        assert "step" in found.trace.phase_seconds and "step" not in eager.trace.phase_seconds
    assert len(recordings) == 1
    draw(sampler, model, 3, TokenLaw(guidance_scale=2.0, top_k=8))
    assert len(recordings) == 2  # of another law


def test_results_are_not_those_of_the_next_decode(recordings):
    model = tiny_transformer()
    for sampler in (AutoregressiveSampler(), SpeculativeJacobiSampler(6)):
        first = draw(sampler, model, 3)
        kept = first.tokens.clone()
        assert not draw(sampler, model, 90).tokens.equal(kept)
        assert first.tokens.equal(kept)


def test_all_that_lasts_from_call_to_call_stays_at_its_address(recordings):
    model = tiny_transformer()
    places: list[set[int]] = []

    def look(call: int, lengths: Tensor) -> None:
        ((recording,),) = (known.values() for known in graph._RECORDINGS.values())
        places.append({tensor.data_ptr() for tensor in graph._tensors(recording.parts)})

    for sampler in (SAMPLERS["maximal"], SAMPLERS["grouped"], AutoregressiveSampler()):
        for seed in (1, 2):
            draw(sampler, model, seed, callback=look)
        assert places and all(place == places[0] for place in places)
        graph.forget(model)
        assert not graph._RECORDINGS
        places.clear()


def test_a_recording_for_each_width_that_the_policy_asks_for(recordings, monkeypatch):
    model = tiny_transformer(grid_size=8)
    sampler, committed = SpeculativeJacobiSampler("auto"), []
    monkeypatch.setattr(
        WindowPolicy, "saw", lambda self, width, tokens, _: committed.append((width, tokens.sum()))
    )
    monkeypatch.setattr(WindowPolicy, "choose", lambda self: (8, 64, 4)[len(committed) % 3])
    for seed in (3, 4):
        committed.clear()
        found = draw(sampler, model, seed)
        assert (
            3 * 63 - 64 <= sum(count for _, count in committed) <= 3 * 63
        )  # the last one of a sample is left out
        want = draw(AutoregressiveSampler(graph=False), model, seed)
        assert found.tokens.equal(want.tokens)
    (known,) = graph._RECORDINGS.values()
    (recording,) = known.values()
    assert len(recordings) == 3 and set(recording.replays) == {4, 8, 64}


def test_a_fixed_window_is_not_the_last_one_that_a_policy_chose(recordings, monkeypatch):
    model = tiny_transformer(grid_size=8)
    monkeypatch.setattr(WindowPolicy, "choose", lambda self: 2)
    draw(SpeculativeJacobiSampler("auto"), model, 3)
    found = draw(SpeculativeJacobiSampler(64), model, 3)  # decodes of the same shapes
    want = draw(SpeculativeJacobiSampler(64, graph=False), model, 3)
    assert found.trace.target_calls.equal(want.trace.target_calls)


def test_other_shapes_and_moved_weights_are_recorded_anew(recordings):
    model, sampler = tiny_transformer(), SpeculativeJacobiSampler(6)
    draw(sampler, model, 1)
    sampler(
        model, TextCondition(torch.randn(1, 6, 8), torch.ones(1, 6).bool()), law=LAW, generator=seeded(1)[0]
    )
    assert len(recordings) == 2
    model.output.weight = nn.Parameter(model.output.weight.detach() * 2)  # at another address
    eager = draw(SpeculativeJacobiSampler(6, graph=False), model, 1)
    assert draw(sampler, model, 1).tokens.equal(eager.tokens)
    assert len(recordings) == 3


def test_bad_logits_are_named_though_looked_for_at_the_end(recordings):
    model = tiny_transformer()
    sampler = SpeculativeJacobiSampler(6)
    draw(sampler, model, 1)
    with torch.no_grad():
        model.output.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="slot 0"):
        draw(sampler, model, 1)


def test_adapters_share_the_recording_of_their_decoder(recordings):
    model, condition = case("emu3")
    for seed in (1, 20):
        settings: dict[str, Any] = dict(law=TokenLaw(), batch_size=4)
        anew = copy.copy(model)  # as a pipeline makes one for every request
        found = SpeculativeJacobiSampler(4)(
            anew, condition, generator=seeded(*range(seed, seed + 4)), **settings
        )
        plain = AutoregressiveSampler(graph=False)
        want = plain(model, condition, generator=seeded(*range(seed, seed + 4)), **settings)
        assert found.tokens.equal(want.tokens)
    assert len(recordings) == 1


def test_recordings_serve_prompts_of_other_lengths(recordings, monkeypatch):
    model, condition = case("janus")
    fewer = rows_of(condition, [3])
    assert fewer.prompt.ids.shape[1] < condition.prompt.ids.shape[1] == 7
    alone = rows_of(condition, [0])
    for fixed, made in ((False, 2), (True, 3)):
        monkeypatch.setattr(cached_decoder, "on_host", lambda tensor, fixed=fixed: not fixed)
        for prompt in (fewer, alone):
            settings: dict[str, Any] = dict(law=TokenLaw(guidance_scale=2.0), generator=seeded(5)[0])
            found = SpeculativeJacobiSampler(4)(model, prompt, **settings)
            settings["generator"] = seeded(5)[0]
            want = AutoregressiveSampler(graph=False)(model, prompt, **settings)
            assert found.tokens.equal(want.tokens)
        assert len(recordings) == made


# -- where it is refused, or cannot be done ----------------------------------------------------------------------------


def test_what_cannot_be_recorded_goes_on_without_unless_it_was_asked_for(recordings, monkeypatch):
    def fails(run: Callable[[], None], memory: Any) -> Any:
        state = next(iter(next(iter(graph._RECORDINGS.values())).values())).parts[0]
        state.tokens = state.tokens + 1  # as a step that was recorded half
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph, "_capture", fails)
    model = tiny_transformer()
    with pytest.warns(UserWarning, match="not permitted when stream is capturing.*; going on without"):
        found = draw(SpeculativeJacobiSampler(6), model, 3)
    assert found.tokens.equal(draw(AutoregressiveSampler(graph=False), model, 3).tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not tried again
        assert draw(SpeculativeJacobiSampler(6), model, 3).tokens.equal(found.tokens)
    with pytest.raises(RuntimeError, match="not permitted"):
        draw(SpeculativeJacobiSampler(6, graph=True), model, 4, TokenLaw())


def test_states_that_do_not_name_their_buffers(recordings):
    model = TabularModel(TokenGrid(4, 4), 8, order=2)
    settings: dict[str, Any] = dict(law=TokenLaw(), generator=seeded(1)[0])
    want = AutoregressiveSampler(graph=False)(model, None, **settings).tokens
    settings["generator"] = seeded(1)[0]
    assert SpeculativeJacobiSampler(4)(model, None, **settings).tokens.equal(want) and not recordings
    for sampler in (AutoregressiveSampler(graph=True), SpeculativeJacobiSampler(4, graph=True)):
        with pytest.raises(TypeError, match="TabularState has no `buffers`; pass graph=False"):
            sampler(model, None, **settings)


def test_a_graph_asked_for_where_there_can_be_none_is_refused_before_any_computation(monkeypatch):
    model = tiny_transformer()
    monkeypatch.setattr(type(model), "prefill", None)
    for sampler in (AutoregressiveSampler(graph=True), SpeculativeJacobiSampler(4, graph=True)):
        with pytest.raises(
            ValueError, match="graph=True on cpu: only CUDA records graphs; pass graph='auto'"
        ):
            draw(sampler, model, 1)
    for wrong in ("yes", None, 1.0):
        with pytest.raises(ValueError, match="pass True, False or 'auto'"):
            AutoregressiveSampler(graph=wrong)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="pass True, False or 'auto'"):
            SpeculativeJacobiSampler(graph=wrong)  # pyright: ignore[reportArgumentType]


def test_weights_that_come_and_go_are_not_recorded():
    layer = nn.Linear(2, 2)
    model = SimpleNamespace(device="cuda", decoder=nn.Sequential(layer))
    assert graph.wants_graph("auto", model) and graph.wants_graph(True, model)
    assert not graph.wants_graph(False, model)
    layer._hf_hook = object()  # pyright: ignore[reportArgumentType]
    assert not graph.wants_graph("auto", model)
    with pytest.raises(ValueError, match="graph=True for a model that is offloaded"):
        graph.wants_graph(True, model)


def test_the_oldest_recordings_make_room(monkeypatch):
    def recording(numbers: int) -> graph.Recording:
        cache = SimpleNamespace(buffers=lambda: [torch.zeros(numbers, dtype=torch.int8)])
        parts: Any = (SimpleNamespace(cache=cache), SimpleNamespace(), SimpleNamespace())
        return graph.Recording(parts, (), ())

    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=4 * 100)
    )
    owner, kept = nn.Linear(1, 1), {name: recording(size) for name, size in [("a", 40), ("b", 30), ("c", 50)]}
    for needed, left in [("c", "bc"), ("b", "bc"), ("a", "ca")]:
        graph.forget()
        graph._RECORDINGS[owner] = dict(kept)
        graph._make_room(torch.device("cuda"), kept[needed])
        assert set(graph._RECORDINGS[owner]) == set(left)
    graph.forget()


# -- nothing waits for the host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llamagen", "janus", "lumina", "emu3"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}])
def test_no_step_waits_for_the_host(monkeypatch, name, sampler, filters):
    model: Any
    model, condition = (tiny_transformer(), captions(1)) if name == "llamagen" else case(name, torch.float32)
    law, options = TokenLaw(guidance_scale=2.0, **filters), getattr(SAMPLERS[sampler], "options", None)
    batch_size = 3 if name == "llamagen" else 4
    window = 1 if options is None else options.window
    cache = model.prefill(condition, batch_size=batch_size, guided=True, window=window)
    stand_in(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, cache = without_numbers(model), without_numbers(cache)
        noise = without_numbers(CounterNoise(draw_keys(seeded(1)[0], batch_size), "cpu"))
        checked = CheckedLaw(law, model.grid.num_tokens, deferred=True)
        with NoHost():
            state: Any
            if options is None:
                slots = torch.ones(batch_size, 1, dtype=torch.long, device="cuda")
                tokens = torch.zeros(batch_size, model.grid.num_tokens, dtype=torch.long, device="cuda")
                state = AutoregressiveState(cache, tokens, slots)
                step: Any = lambda *given: autoregressive.step(model, given[0], checked, noise, Stopwatch())  # noqa: E731
            else:
                relaxation = SAMPLERS[sampler].relaxation
                options = jacobi.replace(options, rule=relaxation.rule(None, torch.device("cuda")))
                state = jacobi.prepare(model, cache, checked, noise, options)
                state.round = torch.zeros((), dtype=torch.long, device="cuda")
                step = lambda *given: jacobi.step(model, given[0], checked, noise, options, Stopwatch())  # noqa: E731
            checked.remember(torch.zeros(batch_size, 1, dtype=torch.bool, device="cuda"), state.tokens[:, :1])
            parts = (state, checked, noise)
            known = [(tensor.shape, tensor.dtype) for tensor in graph._tensors(parts)]
            for _ in range(2):
                graph.step_in_place(step, parts)
            # No more and no other tensors than a decode that was only prepared has: it can be copied over this one.
            assert [(tensor.shape, tensor.dtype) for tensor in graph._tensors(parts)] == known


@pytest.mark.parametrize("line", ["int(state.lengths.sum())", "state.lengths + torch.tensor([1]).to('cuda')"])
def test_that_test_sees_what_waits(line):
    state = SimpleNamespace(lengths=torch.zeros(3, dtype=torch.long))
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = without_numbers(state)
        with NoHost(), pytest.raises((AssertionError, RuntimeError)):
            eval(line, {"torch": torch, "state": state})


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SAMPLERS)
def test_graphs_on_a_gpu(name):
    model: Any = tiny_transformer()
    model.to("cuda")
    sampler = type(SAMPLERS[name]).from_config(SAMPLERS[name].config, graph=True)
    plain = type(sampler).from_config(sampler.config, graph=False)
    for seed in (3, 40):
        condition = captions(seed)
        condition = TextCondition(condition.features.cuda(), condition.mask.cuda())
        settings: dict[str, Any] = dict(law=LAW, batch_size=3)
        found = sampler(model, condition, generator=seeded(seed, 1, 2), **settings)
        want = plain(model, condition, generator=seeded(seed, 1, 2), **settings)
        assert found.tokens.equal(want.tokens) and "step" in found.trace.phase_seconds
    graph.forget(model)
