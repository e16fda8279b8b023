"""The chosen window is the one with the most tokens a second; the tokens are plain sampling's whatever it is."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.columns import MODEL as COLUMNS
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_pipeline
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.pipelines.texts import as_condition
from visual_spec.samplers.core.checks import WIDTHS
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.raster import jacobi_identical
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import COLUMN_DRAFTS, ColumnJacobiSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.jacobi_identical import window_of_rows
from visual_spec.samplers.raster.window import START, WindowPolicy

PROMPTS = ["a red square", "a blue circle", "red"]


# Seconds of a call of the embedded `shapes` on two idle cores at batch 1, 4 and 8, and two machines made up.
COSTS = {
    "batch 1": dict(zip(WIDTHS, (6.4, 7.5, 8.4, 10.2, 14.1, 20.8), strict=True)),
    "batch 4": dict(zip(WIDTHS, (8.7, 12.9, 16.2, 21.4, 30.3, 49.8), strict=True)),
    "batch 8": dict(zip(WIDTHS, (13.8, 21.2, 29.7, 41.3, 57.2, 100.8), strict=True)),
    "a slot for nothing": {width: 5.0 + 0.005 * width for width in WIDTHS},
    "every slot at full price": {width: float(width) for width in WIDTHS},
}
# Drafts that a call keeps on average: `shapes` at guidance 1.5, columns of music, and a gain that wide windows lack.
GAINS = {
    "shapes": dict(zip(WIDTHS, (0.0, 0.77, 1.45, 2.37, 3.69, 4.5), strict=True)),
    "music": {width: 0.06 * (width > 1) for width in WIDTHS},
    "saturated": dict(zip(WIDTHS, (0.0, 1.0, 1.2, 1.2, 1.2, 1.2), strict=True)),
}


def tokens_of(width: int, kept: float, batch: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens that each sample of a batch gets in a call which keeps `kept` drafts on average, long [batch]."""
    return np.minimum(rng.geometric(1 / (1 + kept), batch), width)


def speed_of_policy(
    cost: dict[int, float], gain: dict[int, float], *, busy: bool, batch: int, seed: int
) -> float:
    """Tokens a second over 45 pictures after the first 15. Prompts differ; other work doubles the time of calls."""
    rng, policy, tokens, seconds = np.random.default_rng(seed), WindowPolicy(), 0.0, 0.0
    for picture in range(60):
        ease, done = np.exp(rng.normal(0, 0.3)), 0.0
        while done < 256:
            width = policy.choose()
            got = tokens_of(width, min(gain[width] * ease, width - 1), batch, rng)
            price = cost[width] * (3.0 if rng.random() < 0.02 else 1.0)
            slowed = (
                price
                * np.exp(abs(rng.normal(0, 0.15 if busy else 0.03)))
                * (2.0 if busy and tokens // 400 % 2 else 1.0)
            )
            policy.saw(width, got, slowed)
            done += got.mean()
            if picture >= 15:
                tokens, seconds = tokens + got.mean(), seconds + price
    return tokens / seconds


def best_speed(cost: dict[int, float], gain: dict[int, float], seed: int) -> float:
    """Tokens a second of the best of the fixed windows, over the prompts of `speed_of_policy`."""
    speeds = []
    for width in WIDTHS:
        rng, calls = np.random.default_rng(seed), 0.0
        for _ in range(400):
            ease = np.exp(rng.normal(0, 0.3))
            calls += 1 / tokens_of(width, min(gain[width] * ease, width - 1), 500, rng).mean()
        # .04: two calls in a hundred take three times as long
        speeds.append(400 / calls / (cost[width] * 1.04))
    return max(speeds)


@pytest.mark.fast_sets(4)
@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.slow), True])  # idle is easier
@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("cost", COSTS)
def test_no_fixed_window_is_much_faster(cost, gain, busy):
    batch = int(cost[-1]) if cost.startswith("batch") else 1
    asked: Any = dict(busy=busy, batch=batch)
    speeds = [speed_of_policy(COSTS[cost], GAINS[gain], **asked, seed=seed) for seed in range(3)]
    assert np.mean(speeds) > 0.9 * best_speed(COSTS[cost], GAINS[gain], seed=9)


def shown(policy: WindowPolicy, cost: dict[int, float], kept: float, calls: int) -> list[int]:
    """The windows of the next calls of a policy that sees these seconds, and calls that keep `kept` drafts."""
    seen = []
    for _ in range(calls):
        seen.append(policy.choose())
        policy.saw(seen[-1], np.full(4, 1 + min(kept, seen[-1] - 1)), cost[seen[-1]])
    return seen


def test_the_first_calls_compare_the_narrowest_window_with_the_start():
    assert shown(WindowPolicy(), COSTS["batch 1"], 3.7, 9) == [8, 8, 1, 8, 1, 8, 1, 8, 1]


def test_the_cost_is_fitted_to_the_ratios_of_neighbouring_calls():
    """Exact where the cost is a + b W, whatever the machine's speed at the time, and though one call was disturbed."""
    policy, speed = WindowPolicy(), 1.0
    for call, width in enumerate([32, 1, 8] * 2 + [32, 1, 8, 64] * 6):
        speed *= 2.0 if call == 9 else 1.01
        policy.saw(width, np.array([2]), (5 + 0.3 * width) * speed)
    expected = 1 + 0.06 * np.array(WIDTHS)
    assert np.abs(policy.cost / expected - 1).max() < 0.06


def test_the_first_call_of_a_window_hardly_counts():
    for first in (0.001, 99.0):
        policy = WindowPolicy()
        for seconds in ([first] * 2, *[[1.0, 2.0]] * 4):
            policy.saw(1, np.array([1]), seconds[0])
            policy.saw(32, np.array([4]), seconds[1])
        assert policy.cost[4] / policy.cost[0] == pytest.approx(2, rel=0.05)


def test_a_machine_that_changes_is_noticed():
    policy = WindowPolicy()
    assert set(shown(policy, COSTS["a slot for nothing"], 3.7, 300)[200:]) >= {64}
    dear = shown(policy, COSTS["every slot at full price"], 3.7, 4000)[3500:]
    assert dear.count(1) > 0.9 * len(dear)


def test_calls_after_a_change_of_the_window_do_not_count_for_the_new_one():
    """They still test drafts that a window of the old width has refined."""
    policy = WindowPolicy()
    shown(policy, COSTS["a slot for nothing"], 3.7, 9)
    before = policy.tokens.copy()
    assert policy.choose() == 64
    for _ in range(4):
        policy.saw(64, np.array([1]), 5.0)
    assert np.array_equal(policy.tokens, before)
    policy.saw(64, np.array([1]), 5.0)
    assert policy.tokens[-1] < before[-1]


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("prices", ["real", "flat", "steep", "changing"])
def test_tokens_are_those_of_plain_sampling(monkeypatch, prices, guidance_scale):
    """Whatever is chosen: by the clock of this machine, always the widest, always the narrowest, another every time."""
    widths: list[int] = []
    if prices == "changing":
        order = np.random.default_rng(0).choice([1, 2, 4, 8, 16], 500).tolist()
        monkeypatch.setattr(
            WindowPolicy, "choose", lambda self: widths.append(order[len(widths)]) or widths[-1]
        )
    elif prices != "real":
        monkeypatch.setattr(WindowPolicy, "choose", lambda self: 64 if prices == "flat" else 1)
    pipe = tiny_pipeline(AutoregressiveSampler())
    asked: Any = dict(output_type="latent", guidance_scale=guidance_scale)
    plain = pipe(PROMPTS, generator=seeded(1, 2, 3), **asked).images
    pipe.sampler = SpeculativeJacobiSampler(window="auto")
    for _ in range(2):
        output = pipe(PROMPTS, generator=seeded(1, 2, 3), **asked)
        assert torch.equal(output.images, plain)
        if prices == "steep":
            assert output.trace.target_calls.tolist() == [16] * 3
        if prices == "flat":
            assert output.trace.target_calls.max() < 16
    alone = pipe(PROMPTS[1], generator=seeded(2), **asked)
    assert torch.equal(alone.images, plain[1:2])


@pytest.mark.parametrize(
    ("rows", "window"),
    [(1, 32), (4, 32), (5, 16), (8, 16), (9, 8), (16, 8), (17, 4), (32, 4), (33, 1), (500, 1)],
)
def test_without_a_window_a_call_has_128_positions_at_most_or_on_a_gpu_4_a_row(rows, window):
    assert window_of_rows(rows) == window
    assert window_of_rows(rows, "cuda") == max(window, 4)


@pytest.mark.parametrize("drafts", ["carried", "repaired", "chosen"])
def test_a_large_batch_decodes_plainly_until_rows_leave(monkeypatch, drafts):
    monkeypatch.setattr(jacobi_identical, "_POSITIONS", 12)  # of three rows
    pipe = tiny_pipeline(AutoregressiveSampler())
    pipe.drafter = EagleDrafter.for_target(pipe.transformer).eval()
    asked: Any = dict(output_type="latent", guidance_scale=1.0)
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(5)]
    plain = pipe(prompts, generator=seeded(1, 2, 3, 4, 5), **asked).images
    pipe.sampler = SpeculativeJacobiSampler(drafts=drafts)
    many = pipe(prompts, generator=seeded(1, 2, 3, 4, 5), **asked)
    assert torch.equal(many.images, plain) and many.trace.target_calls.tolist() == [16] * 5
    few = pipe(prompts[:3], generator=seeded(1, 2, 3), **asked)
    assert torch.equal(few.images, plain[:3]) and few.trace.target_calls.max() < 16


class Counted(TorchDispatchMode):
    """Counts the operations of PyTorch, and the numbers that they return."""

    operations = numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        self.operations += 1
        self.numbers += returned.numel() if isinstance(returned, Tensor) else 0
        return returned


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("drafts", [None, "chosen"])
def test_a_large_batch_costs_what_plain_decoding_costs(monkeypatch, drafts, guidance_scale):
    """The same calls of the same positions, the same cache and noise; but three operations a call look who is done."""
    monkeypatch.setattr(jacobi_identical, "_POSITIONS", 12)  # of three rows
    pipe, seen = tiny_pipeline(AutoregressiveSampler()), []
    drafter = EagleDrafter.for_target(pipe.transformer)
    monkeypatch.setattr(drafter, "forward", lambda *_: pytest.fail("a drafter was called"))
    condition = as_condition(*pipe.encode_prompt([PROMPTS[index % len(PROMPTS)] for index in range(5)]))
    score = Run.score

    def watched(run: Run, cache: Any, tokens: Tensor, slots: Tensor) -> Tensor:
        seen.append((tuple(tokens.shape), cache.cache.num_slots, run.noise.keep))
        return score(run, cache, tokens, slots)

    monkeypatch.setattr(Run, "score", watched)

    def costs(sampler: Any, **parts: Any) -> tuple[Tensor, list[Any], Counted]:
        seen.clear()
        with Counted() as counted:
            asked: Any = dict(law=TokenLaw(guidance_scale=guidance_scale), batch_size=5, **parts)
            tokens = sampler(pipe.transformer, condition, generator=seeded(1, 2, 3, 4, 5), **asked).tokens
        return tokens, [*seen], counted

    costs(AutoregressiveSampler())  # tables are made once
    tokens, calls, plain = costs(AutoregressiveSampler())
    sampler = SpeculativeJacobiSampler(drafts=drafts)
    found, same, default = costs(sampler, **({"drafter": drafter} if sampler.needs_drafter else {}))
    assert torch.equal(found, tokens)
    assert same == calls and len(calls) == 15 and calls[0][0] == (5, 1)
    assert 0 <= default.operations - plain.operations <= 3 * (len(calls) + 1)
    assert 0 <= default.numbers - plain.numbers <= 7 * (len(calls) + 1)


@pytest.mark.parametrize("drafts", ["carried", "repaired", "chosen"])
def test_windows_after_plain_calls_draw_the_same(monkeypatch, drafts):
    """As when rows leave a large batch: plain calls have drafted nothing for the windows that follow."""
    pipe = tiny_pipeline(AutoregressiveSampler())
    pipe.drafter = EagleDrafter.for_target(pipe.transformer).eval()
    asked: Any = dict(prompt=PROMPTS[0], num_images_per_prompt=3, output_type="latent")
    plain = pipe(generator=seeded(1, 2, 3), **asked).images
    widths = itertools.cycle([1, 1, 4, 8])
    monkeypatch.setattr(jacobi_identical, "window_of_rows", lambda *_: next(widths))
    pipe.sampler = SpeculativeJacobiSampler(drafts=drafts)
    assert torch.equal(pipe(generator=seeded(1, 2, 3), **asked).images, plain)


@pytest.mark.parametrize(("guidance_scale", "windows"), [(1.0, {8, 16, 32}), (3.0, {4, 8, 16, 32})])
def test_without_a_window_the_rows_that_are_left_decide(monkeypatch, guidance_scale, windows):
    """Each call has the window of its own rows, and the tokens are those of plain sampling."""
    monkeypatch.setattr(jacobi_identical, "_POSITIONS", 64)
    seen: list[tuple[int, int]] = []
    score = Run.score

    def watched(run: Run, cache: Any, tokens: Tensor, slots: Tensor) -> Tensor:
        seen.append((len(slots) * (2 if run.guided else 1), slots.shape[1]))
        return score(run, cache, tokens, slots)

    monkeypatch.setattr(Run, "score", watched)
    pipe = tiny_pipeline(AutoregressiveSampler())
    asked: Any = dict(output_type="latent", guidance_scale=guidance_scale)
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(5)]
    plain = pipe(prompts, generator=seeded(1, 2, 3, 4, 5), **asked).images
    num_tokens = pipe.transformer.grid.num_tokens
    seen.clear()
    pipe.sampler = SpeculativeJacobiSampler()
    assert torch.equal(pipe(prompts, generator=seeded(1, 2, 3, 4, 5), **asked).images, plain)
    assert all(width == min(window_of_rows(rows), num_tokens) for rows, width in seen)
    assert len({rows for rows, _ in seen}) > 1 and {width for _, width in seen} <= windows
    # Tokens of a seed depend on the window under other acceptances, so there it is 32 in any batch.
    seen.clear()
    pipe.sampler = SpeculativeJacobiSampler(acceptance="exact")
    pipe(prompts, **asked)
    assert {width for _, width in seen} == {min(32, num_tokens)}


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("prices", ["real", "changing"])
def test_columns_are_those_of_plain_sampling(monkeypatch, prices, guidance_scale):
    widths: list[int] = []
    if prices == "changing":
        order = np.random.default_rng(0).choice([1, 2, 4, 8, 16], 500).tolist()
        monkeypatch.setattr(
            WindowPolicy, "choose", lambda self: widths.append(order[len(widths)]) or widths[-1]
        )
    asked: Any = dict(law=TokenLaw(guidance_scale=guidance_scale), batch_size=3)
    condition = torch.tensor([1, 0, 2])
    plain = ColumnAutoregressiveSampler()(COLUMNS, condition, generator=seeded(1, 2, 3), **asked)
    for initial_draft in COLUMN_DRAFTS:
        sampler = ColumnJacobiSampler("auto", initial_draft=initial_draft)
        found = sampler(COLUMNS, condition, generator=seeded(1, 2, 3), **asked)
        assert torch.equal(found.tokens, plain.tokens)
        assert found.trace.commit_call.shape == plain.trace.commit_call.shape
        if prices == "changing":  # every call commits at most its own window
            for row in range(3):
                per_call = torch.bincount(found.trace.commit_call[row])[1:].tolist()
                assert all(count <= width for count, width in zip(per_call, widths, strict=False))
            assert found.trace.target_calls.max() < plain.trace.target_calls.max()
        widths.clear()
    alone = ColumnJacobiSampler("auto")(
        COLUMNS, condition[1:2], generator=seeded(2), **{**asked, "batch_size": 1}
    )
    assert torch.equal(alone.tokens, plain.tokens[1:2])


def test_what_was_timed_is_remembered_by_model_and_batch():
    model = torch.nn.Linear(1, 1)
    first = WindowPolicy.of(model, (1, False, "cpu"))
    shown(first, COSTS["every slot at full price"], 0.0, 50)
    assert first.held == 1
    assert WindowPolicy.of(model, (1, False, "cpu")) is first
    assert WindowPolicy.of(model, (2, False, "cpu")).held == START
    assert WindowPolicy.of(torch.nn.Linear(1, 1), (1, False, "cpu")).held == START


def test_a_window_that_depends_on_time_is_refused_where_tokens_would():
    refuses(ValueError, "acceptance='exact'", SpeculativeJacobiSampler, window="auto", acceptance="exact")
    refuses(ValueError, "or 'auto'", SpeculativeJacobiSampler, window="wide")
    for acceptance, unit in (("exact", "column"), ("grouped", "codebook")):
        with pytest.raises(ValueError, match="acceptance='identical'"):
            ColumnJacobiSampler(window="auto", acceptance=acceptance, unit=unit)
    refuses(ValueError, "window='wide'.*1.*'auto'", ColumnJacobiSampler, window="wide")
