"""The chains of a call: equal to a walk level by level, without copies or waiting, and recorded once for each shape."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.bitdance import transformer_shapes
from tests.helpers.mar import random_weights
from tests.helpers.recordings import repeated
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.without_numbers import NoHost, stand_in, without_numbers
from tests.models.continuous.tiny import tiny_causal, tiny_mar
from visual_spec.kernels import philox
from visual_spec.kernels.head_step import head_step_reference, law_step
from visual_spec.models.continuous.bitdance import load_bitdance
from visual_spec.models.continuous.diffusion import DiffusionSchedule, FlowSchedule
from visual_spec.samplers.continuous import conditions, continuous, denoising, head_loop
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.continuous.drafted import SpeculativeContinuousSampler
from visual_spec.samplers.continuous.head import HeadSpeculativeSampler
from visual_spec.samplers.continuous.head_loop import HeadLoop
from visual_spec.samplers.continuous.jacobi import ContinuousJacobiSampler
from visual_spec.samplers.core import graph
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHAIN, CounterNoise, draw_keys

LAW = TokenLaw(guidance_scale=2.0, temperature=0.9)
SCHEDULES = {
    "noise": lambda: DiffusionSchedule(7),
    "velocity": lambda: DiffusionSchedule(7, velocity=True),
    "one level": lambda: DiffusionSchedule(1, velocity=True),
    "eta": lambda: DiffusionSchedule(7, velocity=True, eta=0.5),
    "deterministic": lambda: DiffusionSchedule(7, velocity=True, eta=0.0),
    "flow": lambda: FlowSchedule(7),
    "flow, eta": lambda: FlowSchedule(7, eta=0.8),
}


def calm(model: Any) -> Any:
    """With a head whose outputs are small, as a trained one's are: else chains of random heads run off to 1e10."""
    with torch.no_grad():
        for parameter in model.head.final_layer.linear.parameters():
            parameter.mul_(0.1)
    return model


def draw(sampler: Any, model: Any, seed: int = 3, law: TokenLaw = LAW) -> Any:
    labels = torch.tensor([seed % 5, 0, 4])
    return sampler(model, labels, law=law, generator=seeded(seed, seed + 1, seed + 2), batch_size=3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_laws_as_numbers_are_the_kernels_of_a_chain(name):
    schedule = SCHEDULES[name]()
    generator = torch.Generator().manual_seed(0)
    dim, outputs = 3, 6 if isinstance(schedule, DiffusionSchedule) else 3
    for level in range(schedule.num_steps):
        x = torch.randn(4, dim, generator=generator, dtype=torch.float64)
        output = torch.randn(4, outputs, generator=generator, dtype=torch.float64)
        _, mean, sigma = law_step(x, output, None, schedule.laws[level], None)
        expected = schedule.kernel(x, level, output)
        # The schedule's own tables are float32; what they multiply is as large as the token's prediction.
        size = float(schedule.predict(x, level, output)[0].abs().max())
        torch.testing.assert_close(mean, expected[0], rtol=1e-6, atol=1e-6 * max(1.0, size))
        torch.testing.assert_close(sigma, expected[1].double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", [{}, dict(head_kind="flow"), dict(head_kind="velocity")], ids=str)
@pytest.mark.parametrize("guided", [True, False])
@torch.no_grad()
def test_tokens_are_those_of_a_walk_level_by_level(settings, guided):
    model: Any = calm(tiny_mar(**settings)).double()
    schedule = model.schedule(9)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2 * (1 + guided), 3, 16, generator=generator, dtype=torch.float64)
    scales, places = torch.tensor([[1.5, 2.0, 1.0], [3.0, 1.2, 0.5]]), torch.tensor([[3, 0, 9], [5, 6, 7]])
    noise = CounterNoise(draw_keys(seeded(8)[0], 2), "cpu")
    loop = HeadLoop(model, [model.schedule(4), schedule], temperature=0.8, final_noise=0.3, guided=guided)
    found = loop(z, scales, noise, places, 9)

    expected = torch.zeros(2, 3, 3, dtype=torch.float64)
    for sample in range(2):
        for column in range(3):
            at = places[sample : sample + 1, column : column + 1]
            alone = CounterNoise(noise.keys[sample : sample + 1], "cpu")

            def fresh(level: int, at: Tensor = at, alone: CounterNoise = alone) -> Tensor:
                return alone.normal(at, 3, CHAIN, level, torch.float64)[0]

            x = fresh(9) * (0.8 if schedule.deterministic else 1.0)  # [1, d]
            for level in reversed(range(9)):
                time = schedule.times[level : level + 1]
                output = model.head(x, time, z[sample : sample + 1, column])
                if guided:
                    other = model.head(x, time, z[2 + sample : 3 + sample, column])[:, :3]
                    mixed = other + scales[sample, column] * (output[:, :3] - other)
                    output = torch.cat([mixed, output[:, 3:]], 1)
                mean, sigma = schedule.kernel(x, level, output)
                sigma = 0.3 if level == 0 else sigma
                x = mean + 0.8 * sigma * fresh(level)
            expected[sample, column] = x[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_modulations_are_computed_once_before_the_loop_or_in_stretches(monkeypatch):
    model = calm(tiny_mar(head_kind="velocity")).double()
    calls: list[int] = []
    real = type(model.head).modulations

    def counted(self: Any, z: Tensor, times: Tensor) -> Tensor:
        calls.append(len(times))
        return real(self, z, times)

    monkeypatch.setattr(type(model.head), "modulations", counted)
    sampler = ContinuousSampler(head_steps=10)
    whole = draw(sampler, model).tokens
    assert calls == [10] * 16
    calls.clear()
    # 4 levels of one token each
    monkeypatch.setattr(head_loop, "AT_ONCE", 4 * model.head.modulation_size * 8 * 6)
    parts = draw(sampler, model).tokens
    assert sum(calls) == 160 and calls[:3] == [4, 4, 2]
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-9)


def test_schedules_are_built_before_the_first_call_only(monkeypatch):
    made: list[int] = []
    real = DiffusionSchedule.__init__

    def counted(self: Any, num_steps: int = 100, **settings: Any) -> None:
        made.append(num_steps)
        real(self, num_steps, **settings)

    monkeypatch.setattr(DiffusionSchedule, "__init__", counted)
    called = len(made)

    def look(call: int, lengths: Tensor) -> None:
        nonlocal called
        if call == 0:
            called = len(made)

    sampler = ContinuousSampler(steps=5, head_steps=10, last_head_steps=2)
    sampler(calm(tiny_mar()), None, law=LAW, generator=seeded(1)[0], callback=look)
    assert called == len(made) and set(made) == {10, 8, 6, 4, 2}


def test_kernels_are_given_what_the_definition_is(monkeypatch):
    """Where the kernels run, they run in the place of the head and of guidance."""
    for model in (calm(tiny_mar(head_kind="velocity")), calm(tiny_causal(head_kind="flow"))):
        sampler = ContinuousSampler(head_steps=6)
        plain = draw(sampler, model).tokens
        with monkeypatch.context() as patch:
            patch.setattr(head_loop, "takes", lambda x, rows, weights: rows == 6 and len(weights) == 16)
            patch.setattr(head_loop, "head_step", head_step_reference)
            patch.setattr(type(model.head), "denoise", None)
            found = draw(sampler, model).tokens
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


SPECULATION: dict[str, Any] = {
    "chain": SpeculativeContinuousSampler("chain", 2, head_steps=6, final_noise=0.1),
    "path": SpeculativeContinuousSampler("path", 2, head_steps=6, eta=1.0, final_noise=0.1),
    "aligned": SpeculativeContinuousSampler("aligned", 2, head_steps=6),
    "jacobi": ContinuousJacobiSampler(3, head_steps=6, final_noise=0.1),
    "head": HeadSpeculativeSampler(3, head_steps=6, eta=1.0),
}


@pytest.mark.fast_sets(4)
@pytest.mark.parametrize(("head_kind", "guided"), [("velocity", True), ("flow", False)])
@pytest.mark.parametrize("name", SPECULATION)
def test_speculation_gives_the_kernels_what_the_definition_is(name, head_kind, guided, monkeypatch):
    """Of target and drafter, several slots, levels and widths at once: the tokens are those of the head itself."""
    sampler = SPECULATION[name]
    model, drafter = (calm(tiny_causal(head_kind=head_kind, num_layers=n)).double() for n in (2, 1))
    parts = {"drafter": drafter} if sampler.needs_drafter else {}

    def tokens() -> Any:
        law = LAW if guided else TokenLaw()
        return sampler(
            model, torch.tensor([3, 0, 4]), law=law, generator=seeded(3, 4, 5), batch_size=3, **parts
        )

    plain, rows = tokens(), []
    with monkeypatch.context() as patch:
        patch.setattr(denoising, "takes", lambda x, count, weights: rows.append(count) or True)
        patch.setattr(denoising, "head_step", head_step_reference)
        patch.setattr(head_loop, "takes", lambda *_: True)
        patch.setattr(head_loop, "head_step", head_step_reference)
        patch.setattr(type(model.head), "denoise", None)
        found = tokens()
    torch.testing.assert_close(found.tokens, plain.tokens, rtol=1e-9, atol=1e-9)
    for count in ("head_calls", "tested", "kept", "target_calls"):
        assert getattr(found.trace, count).equal(getattr(plain.trace, count))
    assert max(rows) > (6 if guided else 3)  # several slots or levels in one call


def test_heads_that_were_changed_are_called(monkeypatch):
    """Their weights would not tell what they do."""
    model = calm(tiny_mar(head_kind="velocity"))
    monkeypatch.setattr(head_loop, "takes", lambda *_: True)
    monkeypatch.setattr(head_loop, "head_step", None)
    seen: list[Any] = []
    first: Any = model.head.res_blocks[0]
    handle = first.mlp[0].register_forward_hook(lambda *told: seen.append(told))
    draw(ContinuousSampler(steps=2, head_steps=3), model)
    assert len(seen) == 6
    handle.remove()
    with pytest.raises(TypeError):  # the kernel, which is not there
        draw(ContinuousSampler(steps=2, head_steps=3), model)


# -- levels that fall from call to call --------------------------------------------------------------------------------


def test_levels_fall_evenly_from_call_to_call():
    model = calm(tiny_mar(head_kind="velocity"))
    sampler = ContinuousSampler(steps=10, head_steps=50, last_head_steps=5)
    assert [shape.levels for shape in sampler.shapes(model)] == [50, 45, 40, 35, 30, 25, 20, 15, 10, 5]
    found = draw(sampler, model)
    assert found.trace.head_calls.tolist() == [275] * 3 and found.trace.target_calls.tolist() == [10] * 3
    assert ContinuousSampler(steps=1, head_steps=50, last_head_steps=5).shapes(model)[0].levels == 50
    for wrong in (0, 1001, 2.5):
        refuses(ValueError, "last_head_steps=.*1000", ContinuousSampler, last_head_steps=wrong)


def test_levels_that_do_not_fall_are_those_of_all_calls():
    for model in (calm(tiny_mar(head_kind="velocity")), calm(tiny_causal(head_kind="velocity"))):
        same = ContinuousSampler(head_steps=8, last_head_steps=8)
        assert draw(same, model).tokens.equal(draw(ContinuousSampler(head_steps=8), model).tokens)


# -- recorded calls ----------------------------------------------------------------------------------------------------


@pytest.fixture
def recordings(monkeypatch) -> Iterator[list[Callable[[], None]]]:
    monkeypatch.setattr(continuous, "wants_graph", lambda choice, model: choice is not False)
    monkeypatch.setattr(conditions, "_ROOM", 6)
    yield from repeated(monkeypatch)


@pytest.mark.parametrize(
    "kind, settings, graphs",
    [
        # 16 tokens, one a call: room for 6, 12 or 16 of them
        ("mar", dict(head_steps=3), 3),
        ("mar", dict(steps=5, head_steps=3), 3),
        ("mar", dict(steps=4, head_steps=7, last_head_steps=1), 3),
        ("causal", dict(head_steps=3), 1),
        ("causal", dict(head_steps=3, last_head_steps=2), 2),
    ],
    ids=str,
)
def test_recorded_calls_give_the_same_tokens_and_are_recorded_once(recordings, kind, settings, graphs):
    model = calm((tiny_mar if kind == "mar" else tiny_causal)(head_kind="velocity")).double()
    sampler = ContinuousSampler(**settings)
    plain = ContinuousSampler(**settings, graph=False)
    assert len(set(sampler.shapes(model)[1:])) == graphs
    for seed in (3, 40, 500):
        found, eager = draw(sampler, model, seed), draw(plain, model, seed)
        torch.testing.assert_close(found.tokens, eager.tokens, rtol=1e-9, atol=1e-9)  # room adds up otherwise
        for name in ("target_calls", "commit_call", "head_calls"):
            assert getattr(found.trace, name).equal(getattr(eager.trace, name))
        assert "step" not in eager.trace.phase_seconds
        # The first decode records, and where no two calls are alike replays none.
        assert "step" in found.trace.phase_seconds or (seed == 3 and "last_head_steps" in settings)
        assert len(recordings) == graphs
    draw(sampler, model, 3, TokenLaw(guidance_scale=3.0))
    assert len(recordings) == 2 * graphs  # of another law


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["mar", "causal", "flow", "bitdance"])
def test_no_call_waits_for_the_host_or_copies_from_it(monkeypatch, kind, fused):
    model: Any = tiny_mar() if kind == "mar" else tiny_causal(head_kind="flow" if kind == "flow" else "noise")
    if kind == "bitdance":
        model = load_bitdance(random_weights(transformer_shapes(tokens=1)))
    sampler = ContinuousSampler(head_steps=4, last_head_steps=2)
    law = TokenLaw(guidance_scale=2.0)
    keys = draw_keys(seeded(1)[0], 3)
    run = sampler.begin(model, torch.tensor([1, 0, 2]), law, keys)
    stand_in(monkeypatch)
    monkeypatch.setattr(philox, "philox_normal_triton", lambda out, *_: out)
    monkeypatch.setattr(head_loop, "takes", lambda *_: fused)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, noise = without_numbers(model), without_numbers(CounterNoise(keys, "cpu"))
        checked = CheckedLaw(law, model.grid.num_tokens, deferred=True)
        run.model, run.condition, run.law, run.noise = model, None, checked, noise
        run.filled(without_numbers(run.cache))
        state: Any = sampler.prepare(run)
        shapes = sampler.shapes(model)
        with NoHost():
            state.round = torch.zeros((), dtype=torch.long, device="cuda")
            parts = (state, checked, noise)
            known = [(tensor.shape, tensor.dtype) for tensor in graph._tensors(parts)]
            for state.width in (shapes[1], shapes[9]):
                graph.step_in_place(lambda *_: sampler.step(run, state), parts)
            # No more and no other tensors than a decode that was only prepared has: it can be copied over this one.
            assert [(tensor.shape, tensor.dtype) for tensor in graph._tensors(parts)] == known


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["mar", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_and_kernels_on_a_gpu(kind, dtype):
    """In bfloat16 against float32: rounding moves a token by little, as the chains contract."""
    model: Any = calm((tiny_mar if kind == "mar" else tiny_causal)(head_kind="velocity"))
    want = draw(ContinuousSampler(head_steps=6), model).tokens
    on_gpu = model.to("cuda", dtype)
    labels = torch.tensor([3, 0, 4], device="cuda")
    for sampler in (
        ContinuousSampler(head_steps=6, graph=True),
        ContinuousSampler(head_steps=6, graph=False),
    ):
        for _ in range(2):
            result = sampler(on_gpu, labels, law=LAW, generator=seeded(3, 4, 5), batch_size=3)
            near = dict(rtol=1e-3, atol=1e-3) if dtype == torch.float32 else dict(rtol=0.2, atol=0.3)
            torch.testing.assert_close(result.tokens.float().cpu(), want, **near)  # pyright: ignore
    graph.forget(on_gpu)
