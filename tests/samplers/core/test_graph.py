"""Calls recorded as CUDA graphs: what is recorded is the step, nothing in it waits for the host, and it is reused.

Recording needs a GPU. Without one a recording is stood in for by Python that does the same at every replay, which shows
what is kept at which address; and that nothing in a step reads the device, or copies to it, is shown on tensors that
have a CUDA device and no numbers.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.cached_decoders import case, rows_of
from tests.helpers.column_drafters import columns as music_columns
from tests.helpers.column_drafters import drafter_for
from tests.helpers.columns import MODEL as COLUMNS
from tests.helpers.columns import POOR as POOR_COLUMNS
from tests.helpers.recordings import repeated
from tests.helpers.refusals import refuses
from tests.helpers.sampler_settings import lossy
from tests.helpers.tabular import TabularColumnState, TabularModel
from tests.helpers.tiny import seeded, tiny_transformer
from tests.helpers.without_numbers import NoHost, stand_in, without_numbers
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition
from visual_spec.models.core.protocol import DecodeState, TokenGrid
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.next_token import cached_decoder
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler
from visual_spec.prototype.proactive import ProactiveJacobiSampler
from visual_spec.samplers.core import base, graph
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise, draw_keys
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.tree import TreeSampler
from visual_spec.samplers.raster.window import WindowPolicy

SAMPLERS = {
    "plain": AutoregressiveSampler(),
    "identical": SpeculativeJacobiSampler(6),
    "gumbel": SpeculativeJacobiSampler(6, acceptance="exact"),
    "maximal": SpeculativeJacobiSampler(6, "maximal", "exact", "uniform"),
    "independent": SpeculativeJacobiSampler(6, "independent", "exact", "last_law"),
    "grouped": SpeculativeJacobiSampler(6, "independent", **lossy("grouped", code_distance=None)),
    "drafted": DraftedSampler(3),
    "drafted, identical": DraftedSampler(3, 0.1, "identical"),
    "drafted, grouped": DraftedSampler(3, **lossy("grouped", code_distance=None)),
    "tree": TreeSampler(3, 3),
    "tree, top-k": TreeSampler(3, 3, 6, "top-k", **lossy("grouped", code_distance=None)),
    "proactive": ProactiveJacobiSampler(5, 2, 2),
    "proactive, identical": ProactiveJacobiSampler(5, 3, 1, "gumbel", "identical"),
}
COLUMN_SAMPLERS = {
    "plain": ColumnAutoregressiveSampler(),
    "identical": ColumnJacobiSampler(6),
    "maximal": ColumnJacobiSampler(6, "maximal", "exact"),
    "by codebook": ColumnJacobiSampler(6, "independent", "exact", "codebook", "last_law"),
    "grouped": ColumnJacobiSampler(6, unit="codebook", **lossy("grouped", code_distance=None)),
    "drafted": DraftedColumnSampler(3),
    "drafted, identical": DraftedColumnSampler(3, "identical"),
}
LAW = TokenLaw(guidance_scale=2.0, top_k=9)


def captions(seed: int) -> TextCondition:
    features = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(seed))
    return TextCondition(features, torch.ones(3, 6, dtype=torch.bool))


def draw(sampler: Any, model: Any, seed: int, law: TokenLaw = LAW, **settings: Any) -> Any:
    generator = seeded(seed, seed + 1, seed + 2)
    if sampler.needs_drafter:
        settings = {"drafter": drafter(), "drafter_condition": captions(seed), **settings}
    return sampler(model, captions(seed), law=law, generator=generator, batch_size=3, **settings)


@cache
def drafter() -> Any:
    """One layer of another network, which knows what the target says next no better than chance, or a little."""
    return tiny_transformer(num_layers=1)


def draw_columns(sampler: Any, seed: int, **settings: Any) -> Any:
    condition = torch.tensor([seed % 3, 0, 2])
    if sampler.needs_drafter:
        settings = {"drafter": POOR_COLUMNS, **settings}
    law = TokenLaw(guidance_scale=2.0, top_k=5)
    generator = seeded(seed, seed + 1, seed + 2)
    return sampler(COLUMNS, condition, law=law, generator=generator, batch_size=3, **settings)


@pytest.fixture
def recordings(monkeypatch) -> Iterator[list[Callable[[], None]]]:
    yield from repeated(monkeypatch)


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
    assert len(recordings) == 2  # of calls, and of the prefill
    draw(sampler, model, 3, TokenLaw(guidance_scale=2.0, top_k=8))
    assert len(recordings) == 3  # of another law


@pytest.mark.parametrize("name", ["plain", "identical", "gumbel"])
def test_several_calls_a_graph_give_the_same_tokens(recordings, name):
    """The host looks after every fifth call. Plain decoding, whose calls are known, makes the last ones one by one."""
    model, sampler = tiny_transformer(), SAMPLERS[name]
    plain, five = (type(sampler).from_config(sampler.config, graph=graph) for graph in (False, 5))
    for seed in (3, 40, 500):
        seen: list[int] = []
        found = draw(five, model, seed, callback=lambda call, lengths: seen.append(call))  # noqa: B023
        eager = draw(plain, model, seed)
        assert found.tokens.equal(eager.tokens)
        assert found.trace.target_calls.equal(eager.trace.target_calls)
        assert found.trace.commit_call.equal(eager.trace.commit_call)
        # The first call of all runs as it is, so that what it needs is compiled.
        begin, calls = (1 if seed == 3 else 0), int(eager.trace.target_calls.max()) - 1
        if name == "plain":
            by_five = list(range(begin, calls + 1, 5))
            assert seen == [*range(begin), *by_five, *range(by_five[-1] + 1, calls + 1)]
        else:
            assert seen == [*range(begin), *range(begin, calls + 5, 5)][: len(seen)] and seen[-1] >= calls
    # The prefill, calls by five, and of plain decoding single ones.
    assert len(recordings) == (3 if name == "plain" else 2)


def test_several_calls_a_graph_have_one_window():
    auto = "graph=2 with window='auto'.*pass graph='auto'"
    refuses(ValueError, auto, SpeculativeJacobiSampler, "auto", graph=2)


@pytest.mark.parametrize("name", [*SAMPLERS, *COLUMN_SAMPLERS])
def test_recorded_calls_keep_log_probabilities(recordings, monkeypatch, name):
    """Also of the second and third decode, which find the recording; a decode without them has one of its own."""
    if name in SAMPLERS:
        sampler, draws = SAMPLERS[name], functools.partial(draw, model=tiny_transformer())
    else:
        monkeypatch.setattr(TabularColumnState, "buffers", lambda state: [state.tokens, state.tables])
        sampler, draws = COLUMN_SAMPLERS[name], draw_columns
    plain = type(sampler).from_config(sampler.config, graph=False)
    draws(sampler, seed=7)
    before = len(recordings)
    for seed in (3, 40, 500):
        found, eager = (draws(one, seed=seed, output_logprobs=True).trace for one in (sampler, plain))
        assert "step" in found.phase_seconds and "step" not in eager.phase_seconds
        assert found.logprobs.isfinite().all() and (found.logprobs < 0).any()
        # Rows that end stay in a recorded batch: products of another width round otherwise.
        for name in ("logprobs", "model_logprobs"):
            torch.testing.assert_close(getattr(found, name), getattr(eager, name), rtol=0, atol=1e-5)
    assert len(recordings) > before


@pytest.mark.parametrize("name", COLUMN_SAMPLERS)
def test_recorded_calls_give_the_same_columns_and_are_recorded_once(recordings, monkeypatch, name):
    def buffers(state: TabularColumnState) -> list[Tensor]:
        return [state.tokens, state.tables]

    monkeypatch.setattr(TabularColumnState, "buffers", buffers)
    sampler = COLUMN_SAMPLERS[name]
    plain = type(sampler).from_config(sampler.config, graph=False)
    for seed in (3, 40, 500):
        found, eager = draw_columns(sampler, seed), draw_columns(plain, seed)
        assert found.tokens.equal(eager.tokens)
        assert found.trace.target_calls.equal(eager.trace.target_calls)
        assert found.trace.commit_call.equal(eager.trace.commit_call)
        # These laws are float64, and a recording counts as it began, in float32.
        if eager.trace.divergence is not None:
            assert found.trace.divergence == pytest.approx(eager.trace.divergence, rel=1e-6)
        assert "step" in found.trace.phase_seconds and "step" not in eager.trace.phase_seconds
    assert len(recordings) == 1


@pytest.mark.parametrize("name", ["plain", "identical", "by codebook", "drafted", "drafted, identical"])
def test_recorded_calls_of_musicgen_and_its_drafter_give_the_same_columns(recordings, name):
    sampler = COLUMN_SAMPLERS[name]
    eager_sampler = type(sampler).from_config(sampler.config, graph=False)
    law = TokenLaw(guidance_scale=2.0, top_k=5)

    known = music_columns()
    parts = {"drafter": drafter_for(known)} if sampler.needs_drafter else {}

    def draw_music(sampler: Any, seed: int) -> Any:
        target = MusicgenColumnModel(known.model, known.num_frames)  # a new one, as pipelines make
        words = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        condition = MusicCondition(words, torch.tensor([[1, 1, 1, seed % 2], [1, 1, 1, 1]]).bool())
        return sampler(
            target, condition, law=law, generator=seeded(seed, seed + 1), batch_size=2, **parts
        ).tokens

    drawn = [draw_music(sampler, seed) for seed in (3, 40, 500)]
    for seed, tokens in zip((3, 40, 500), drawn, strict=True):
        assert tokens.equal(draw_music(eager_sampler, seed))
    assert not drawn[0].equal(drawn[1]) and not drawn[1].equal(drawn[2])
    assert len(recordings) == 1


@pytest.mark.parametrize("name", ["drafted", "drafted, identical", "tree", "tree, top-k"])
def test_recorded_calls_of_an_eagle_drafter_give_the_same_tokens(recordings, name):
    model, sampler = tiny_transformer(), SAMPLERS[name]
    torch.manual_seed(5)
    eagle: Any = EagleDrafter.for_target(model)
    eagle = eagle.to(model.dtype).eval()
    plain = type(sampler).from_config(sampler.config, graph=False)
    for seed in (3, 40, 500):
        tokens, eager = (
            one(
                model, captions(seed), law=LAW, generator=seeded(seed, 1, 2), batch_size=3, drafter=eagle
            ).tokens
            for one in (sampler, plain)
        )
        assert tokens.equal(eager)
    assert len(recordings) == 2  # of calls, and of the prefill


def test_a_place_that_takes_over_another_ones_tensor_keeps_its_value():
    """As `fed` takes over `lengths`, which the same step then moves on."""
    state: Any = SimpleNamespace(lengths=torch.tensor([1, 2]), fed=torch.tensor([0, 0]))
    places = state.lengths, state.fed

    def step(state: Any, law: Any, noise: Any) -> None:
        state.fed = state.lengths
        state.lengths = state.lengths + 3

    parts: Any = (state, SimpleNamespace(), SimpleNamespace())
    for call in range(3):
        graph.step_in_place(step, parts)
        assert state.lengths is places[0] and state.fed is places[1]
        assert state.fed.tolist() == [1 + 3 * call, 2 + 3 * call]
        assert state.lengths.tolist() == [4 + 3 * call, 5 + 3 * call]


def test_recordings_keep_what_their_steps_read_and_no_prefill(recordings):
    """A graph knows tensors by their address, such as the tables of a rule: they must not be freed before it."""
    model = tiny_transformer()
    sampler = SpeculativeJacobiSampler(6, **lossy("grouped", code_distance=2.0))
    codebook = torch.randn(12, 3, dtype=torch.bfloat16)  # the rule makes a table of it
    draw(sampler, model, 3, codebook=codebook)
    ((recording,),) = (known.values() for known in graph._RECORDINGS.values())
    (run,) = [
        cell.cell_contents
        for cell in recording.steps[0].__closure__ or ()
        if isinstance(cell.cell_contents, base.Run)
    ]
    assert run.rule.probability.keywords["codebook"].dtype == torch.float32
    assert run.cache is None and run.condition is None


def test_a_drafter_that_moved_is_recorded_anew(recordings):
    model, sampler, other = tiny_transformer(), DraftedSampler(3), tiny_transformer(num_layers=1)
    draw(sampler, model, 1, drafter=other)
    other.output.weight = nn.Parameter(other.output.weight.detach() * 2)  # at another address
    eager = draw(DraftedSampler(3, graph=False), model, 1, drafter=other)
    assert draw(sampler, model, 1, drafter=other).tokens.equal(eager.tokens)
    assert len(recordings) == 2


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
        # The last one of a sample is left out.
        assert 3 * 63 - 64 <= sum(count for _, count in committed) <= 3 * 63
        want = draw(AutoregressiveSampler(graph=False), model, seed)
        assert found.tokens.equal(want.tokens)
    (known,) = graph._RECORDINGS.values()
    (recording,) = known.values()
    assert len(recordings) == 3 + 1 and set(recording.replays) == {(4, 1), (8, 1), (64, 1)}


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
    refuses(FloatingPointError, "slot 0", draw, sampler, model, 1)


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
    assert len(recordings) == 2


def test_recordings_serve_prompts_of_other_lengths(recordings, monkeypatch):
    model, condition = case("janus")
    fewer = rows_of(condition, [3])
    assert fewer.prompt.ids.shape[1] < condition.prompt.ids.shape[1] == 7
    alone = rows_of(condition, [0])
    for fixed, made in ((False, 2), (True, 4)):
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

    monkeypatch.setattr(graph, "capture", fails)
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
        refuses(TypeError, "TabularState.*`buffers`.*graph=False", sampler, model, None, **settings)


def test_a_graph_asked_for_where_there_can_be_none_is_refused_before_any_computation(monkeypatch):
    model = tiny_transformer()
    monkeypatch.setattr(type(model), "prefill", None)
    for sampler in (AutoregressiveSampler(graph=True), SpeculativeJacobiSampler(4, graph=True)):
        refuses(ValueError, "graph=True.*CUDA.*graph='auto'", draw, sampler, model, 1)


def test_weights_that_come_and_go_are_not_recorded():
    layer = nn.Linear(2, 2)
    model = SimpleNamespace(device="cuda", decoder=nn.Sequential(layer))
    assert base.wants_graph("auto", model) and base.wants_graph(True, model)
    assert not base.wants_graph(False, model)
    layer._hf_hook = object()  # pyright: ignore[reportArgumentType]
    assert not base.wants_graph("auto", model)
    refuses(ValueError, "graph=True.*model", base.wants_graph, True, model)


@dataclass
class Held(DecodeState):
    """A model's state of one tensor."""

    held: Tensor

    def buffers(self) -> list[Tensor]:
        return [self.held]


def test_the_oldest_recordings_make_room(monkeypatch):
    def recording(numbers: int) -> graph.Recording:
        cache = Held(torch.zeros(0), False, 1, torch.zeros(numbers, dtype=torch.int8))
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


# The drafters of the tests draft LlamaGen's tokens. Every sampler and every model: a sampler does not know the model.
FILTERS: dict[str, Any] = {"top_k": 5, "top_p": 0.9}
DECODES = [
    pytest.param(
        name,
        sampler,
        filters,
        marks=[]
        if name == "llamagen" or (filters and sampler in ("plain", "maximal"))
        else [pytest.mark.slow],
    )
    for filters in ({}, FILTERS)
    for name in ("llamagen", "janus", "lumina", "emu3")
    for sampler in SAMPLERS
    if name == "llamagen" or not SAMPLERS[sampler].needs_drafter
]


@pytest.mark.fast_sets(16)
@pytest.mark.parametrize("name, sampler, filters", DECODES)
def test_no_step_waits_for_the_host(monkeypatch, name, sampler, filters):
    model: Any
    model, condition = (tiny_transformer(), captions(1)) if name == "llamagen" else case(name, torch.float32)
    law, chosen = TokenLaw(guidance_scale=2.0, **filters), SAMPLERS[sampler]
    batch_size = 3 if name == "llamagen" else 4
    given: dict[str, Any] = dict(drafter=drafter()) if chosen.needs_drafter else {}
    chosen.check(model, law, batch_size, given)
    keys = draw_keys(seeded(1)[0], batch_size)
    run = chosen.begin(model, condition, law, keys, **given)
    stand_in(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, noise = without_numbers(model), without_numbers(CounterNoise(keys, "cpu"))
        checked = CheckedLaw(law, model.grid.num_tokens, deferred=True)
        given = {part: without_numbers(value) for part, value in given.items()}
        run.model, run.condition, run.law, run.noise = model, without_numbers(condition), checked, noise
        run.parts, run.rule = given, chosen.rule(model, given, torch.device("cuda"))
        run.filled(without_numbers(run.cache))
        # Looks at it, once.
        monkeypatch.setattr(type(model), "check_condition", lambda *_: None, raising=False)
        state: Any = chosen.prepare(run)
        if isinstance(chosen, ProactiveJacobiSampler):
            chosen.tree(model).layout(run.device)  # made once for all decodes
        with NoHost():
            state.round = torch.zeros((), dtype=torch.long, device="cuda")
            step: Any = lambda *_: chosen.step(run, state)  # noqa: E731
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SAMPLERS)
def test_graphs_on_a_gpu(name):
    model: Any = tiny_transformer()
    model.to("cuda")
    sampler = type(SAMPLERS[name]).from_config(SAMPLERS[name].config, graph=True)
    plain = type(sampler).from_config(sampler.config, graph=False)
    for seed in (3, 40, 500):
        condition = captions(seed)
        condition = TextCondition(condition.features.cuda(), condition.mask.cuda())
        settings: dict[str, Any] = dict(law=LAW, batch_size=3)
        if sampler.needs_drafter:
            on_gpu: Any = tiny_transformer(num_layers=1)
            on_gpu.to("cuda")
            settings["drafter"] = on_gpu
        found = sampler(model, condition, generator=seeded(seed, 1, 2), **settings)
        want = plain(model, condition, generator=seeded(seed, 1, 2), **settings)
        assert found.tokens.equal(want.tokens) and "step" in found.trace.phase_seconds
    graph.forget(model)
