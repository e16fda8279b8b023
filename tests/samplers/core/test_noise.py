"""The noise: right laws, and values that depend on key, slot, token id, stream and round alone."""

import math

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from visual_spec.samplers.core import noise as noise_module
from visual_spec.samplers.core.noise import (
    ACCEPT,
    CHAIN,
    DRAFT,
    RESIDUAL,
    TOKEN,
    CounterNoise,
    draw_keys,
    rounds_of,
)

STREAMS = (TOKEN, DRAFT, ACCEPT, RESIDUAL)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_noise(batch_size: int = 1, seed: int = 0) -> CounterNoise:
    return CounterNoise(draw_keys(seeded(seed), batch_size), "cpu")


def kolmogorov_distance(sample: Tensor) -> float:
    """Largest gap between the sample's distribution function and that of Uniform(0, 1)."""
    ordered = sample.flatten().double().sort().values
    steps = torch.arange(ordered.numel() + 1, dtype=torch.float64) / ordered.numel()
    return float(torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max())


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    counts = torch.bincount(tokens.flatten(), minlength=probabilities.numel()).double()
    expected = probabilities * tokens.numel()
    return float(((counts - expected) ** 2 / expected).sum())


# --- laws ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_law(dtype):
    slots = torch.arange(25_000).expand(4, -1)
    sample = make_noise(4).uniform(slots, ACCEPT, dtype=dtype)
    assert sample.shape == (4, 25_000) and sample.dtype == dtype
    assert 0 < sample.min() and sample.max() < 1
    assert kolmogorov_distance(sample) < 1.95 / math.sqrt(sample.numel())  # exceeded once in 1000 seeds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_law(dtype):
    sample = make_noise().gumbel(torch.arange(100)[None], 1000, TOKEN, dtype=dtype)
    assert sample.shape == (1, 100, 1000) and sample.dtype == dtype
    assert sample.isfinite().all()
    assert kolmogorov_distance((-(-sample.double()).exp()).exp()) < 1.95 / math.sqrt(sample.numel())


def test_gumbel_tail_is_not_quantised():
    # In float32, -log(-log(u)) of 24-bit uniforms puts the largest of a million values on a grid of steps near 0.06.
    sample = make_noise().gumbel(torch.arange(1000)[None], 1000, TOKEN).flatten()
    top = sample.sort().values[-100:]
    assert top.unique().numel() == 100
    # The largest of n values is log(n) + Gumbel: between log(n) - 3 and log(n) + 12 but for one seed in 10^5.
    assert math.log(1e6) - 3 < top[-1] < math.log(1e6) + 12


def test_precisions_agree():
    slots = torch.arange(50)[None]
    single = make_noise().gumbel(slots, 999, TOKEN)
    double = make_noise().gumbel(slots, 999, TOKEN, dtype=torch.float64)
    # Very small values (u near 1) lose digits in float32; tokens with such noise never win.
    usable = double > -1.5
    assert (single - double)[usable].abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categorical_law(dtype):
    probabilities = torch.tensor([0.4, 0.0, 0.25, 0.2, 0.1, 0.04, 0.01], dtype=torch.float64)
    slots = torch.arange(10_000).expand(4, -1)
    log_probs = probabilities.log().to(dtype).expand(4, 10_000, -1)
    tokens = make_noise(4).categorical(log_probs, slots, TOKEN)
    assert tokens.shape == (4, 10_000) and tokens.dtype == torch.int64
    assert not (tokens == 1).any()
    support = torch.tensor([0, 2, 3, 4, 5, 6])
    # P = 1e-4, 5 degrees.
    assert chi_square(torch.searchsorted(support, tokens), probabilities[support]) < 25.7


def test_categorical_is_the_argmax_of_law_plus_gumbel():
    noise, slots = make_noise(2), torch.arange(30).reshape(2, 15)
    log_probs = torch.randn(2, 15, 130, generator=seeded(1)).log_softmax(-1)
    expected = (log_probs + noise.gumbel(slots, 130, DRAFT, 4)).argmax(-1)
    assert torch.equal(noise.categorical(log_probs, slots, DRAFT, 4), expected)


def test_categorical_leaves_the_law_alone_and_keeps_to_a_point_law():
    log_probs = torch.full((1, 200, 9), -torch.inf)
    log_probs[..., 6] = 0
    before = log_probs.clone()
    assert (make_noise().categorical(log_probs, torch.arange(200)[None], RESIDUAL) == 6).all()
    assert torch.equal(log_probs, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_law(dtype):
    """A million numbers: distribution function, moments, tails, and independence of the two numbers of a pair."""
    sample = make_noise(4).normal(torch.arange(15_625).expand(4, -1), 16, CHAIN, 3, dtype)
    assert sample.shape == (4, 15_625, 16) and sample.dtype == dtype
    sample = sample.double()
    count = sample.numel()
    assert kolmogorov_distance(torch.special.ndtr(sample)) < 1.95 / math.sqrt(count)
    # Mean and standard deviation of z, z^2, z^3 and z^4: 0, 1, 0, 3 and 1, sqrt(2), sqrt(15), sqrt(96).
    for power, (mean, spread) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs((sample**power).mean() - mean) < 4.5 * math.sqrt(spread / count)
    for limit in (3, 4, 4.75):
        expected = 2 * count * torch.special.ndtr(torch.tensor(-limit, dtype=torch.float64))
        assert abs((sample.abs() > limit).sum() - expected) < 4.5 * expected.sqrt()
    elements = sample.flatten(0, 1).T  # [16, N]
    for kind in (elements, elements.square(), elements.abs()):
        correlation = torch.corrcoef(kind) - torch.eye(16)
        assert correlation.abs().max() < 5 / math.sqrt(elements.shape[1])


def test_bernoulli_law():
    noise, slots = make_noise(), torch.arange(40_000)[None]
    for probability in (0.03, 0.5, 0.9):
        hits = noise.bernoulli(torch.full(slots.shape, probability), slots, ACCEPT)
        assert hits.dtype == torch.bool
        spread = math.sqrt(probability * (1 - probability) / slots.numel())
        assert abs(hits.double().mean() - probability) < 4 * spread
    assert not noise.bernoulli(torch.zeros(slots.shape), slots, ACCEPT).any()
    assert noise.bernoulli(torch.ones(slots.shape), slots, ACCEPT).all()


# --- independence of the draws ---


def test_streams_rounds_slots_and_samples_are_uncorrelated():
    noise, slots = make_noise(2), torch.arange(20_000).expand(2, -1)
    columns = [noise.uniform(slots, stream, round)[0] for stream in STREAMS for round in (0, 1)]
    columns += [noise.uniform(slots, TOKEN)[1], noise.uniform(slots + 1, TOKEN)[0]]
    # A scalar draw and token 0 of the same stream and round are different numbers, too.
    columns += [(-(-noise.gumbel(slots, 5, TOKEN)[0, :, v]).exp()).exp() for v in range(5)]
    correlation = torch.corrcoef(torch.stack(columns).double())
    # Slot i + 1 of the shifted column is the same draw as slot i + 1 of the first: only the pairing is shifted.
    assert (correlation - torch.eye(len(columns))).abs().max() < 4.5 / math.sqrt(20_000)


# --- independence of batch, window and order ---


def test_values_do_not_depend_on_batch_window_or_order():
    noise, slots = make_noise(3), torch.arange(17).expand(3, -1)
    uniform = noise.uniform(slots, ACCEPT, 2)
    gumbel = noise.gumbel(slots, 13, TOKEN, 2)
    for row in range(3):
        alone = CounterNoise(noise.keys[row : row + 1], "cpu")
        for slot in range(17):
            place = torch.tensor([[slot]])
            assert alone.uniform(place, ACCEPT, 2) == uniform[row, slot]
            assert torch.equal(alone.gumbel(place, 13, TOKEN, 2)[0, 0], gumbel[row, slot])
    shuffled = torch.stack([torch.randperm(17, generator=seeded(seed)) for seed in range(3)])
    index = shuffled[..., None].expand(-1, -1, 13)
    assert torch.equal(noise.gumbel(shuffled, 13, TOKEN, 2), gumbel.gather(1, index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_noise_does_not_depend_on_batch_window_order_or_dimension(dtype):
    noise, slots = make_noise(3), torch.arange(17).expand(3, -1)
    levels = torch.arange(51).view(3, 17) % 5
    together = noise.normal(slots, 33, CHAIN, levels, dtype)
    for row in range(3):
        alone = CounterNoise(noise.keys[row : row + 1], "cpu")
        for slot in range(17):
            dim = 1 + (7 * row + slot) % 33
            found = alone.normal(torch.tensor([[slot]]), dim, CHAIN, int(levels[row, slot]), dtype)
            assert torch.equal(found[0, 0], together[row, slot, :dim])
    shuffled = torch.stack([torch.randperm(17, generator=seeded(seed)) for seed in range(3)])
    found = noise.normal(shuffled, 33, CHAIN, levels.gather(1, shuffled), dtype)
    assert torch.equal(found, together.gather(1, shuffled[..., None].expand(-1, -1, 33)))


def test_normal_noise_of_another_slot_level_stream_or_sample_is_uncorrelated():
    noise, slots = make_noise(2), torch.arange(20_000).expand(2, -1)
    columns = [noise.normal(slots, 3, stream, level)[0] for stream in (CHAIN, DRAFT) for level in (0, 1, 99)]
    columns += [noise.normal(slots, 3, CHAIN)[1], noise.normal(slots + 1, 3, CHAIN)[0]]
    correlation = torch.corrcoef(torch.cat(columns, 1).T.double())
    assert (correlation - torch.eye(len(correlation))).abs().max() < 4.5 / math.sqrt(20_000)


def test_normal_noise_in_float32_is_that_in_float64_rounded():
    noise, slots = make_noise(), torch.arange(5000)[None]
    double = noise.normal(slots, 7, CHAIN, dtype=torch.float64)
    assert torch.equal(noise.normal(slots, 7, CHAIN), double.float())
    assert (double != double.float()).double().mean() > 0.99


def test_values_do_not_depend_on_the_vocabulary_size():
    noise, slots = make_noise(2), torch.arange(6).reshape(2, 3)
    wide = noise.gumbel(slots, 1001, TOKEN)
    for vocab_size in (1, 2, 3, 4, 5, 255, 1000):
        assert torch.equal(noise.gumbel(slots, vocab_size, TOKEN), wide[..., :vocab_size])


def test_rounds_may_be_tensors():
    noise, slots = make_noise(2), torch.arange(6).reshape(2, 3)
    expected = torch.stack([noise.uniform(slots, DRAFT, 5)[0], noise.uniform(slots, DRAFT, 8)[1]])
    assert torch.equal(noise.uniform(slots, DRAFT, torch.tensor([5, 8])), expected)
    assert torch.equal(noise.uniform(slots, DRAFT, torch.tensor([[5] * 3, [8] * 3])), expected)
    assert torch.equal(noise.uniform(slots, DRAFT, torch.tensor(5)), noise.uniform(slots, DRAFT, 5))


def test_no_two_attempts_or_levels_of_a_chain_share_a_round():
    levels, attempts = torch.arange(1001), torch.arange(5)
    rounds = rounds_of(levels, attempts[:, None])
    assert isinstance(rounds, Tensor) and rounds.dtype == torch.int64 and rounds.unique().numel() == 5 * 1001
    assert 0 <= int(rounds.min()) and int(rounds.max()) < 2**32
    assert torch.equal(rounds[0], levels)  # a first attempt draws what a chain without attempts does
    assert torch.equal(torch.as_tensor(rounds_of(7, attempts)), rounds[:, 7])
    assert rounds_of(7, None) == 7 and rounds_of(levels, None) is levels


def test_an_empty_window_draws_nothing():
    noise, slots = make_noise(2), torch.zeros(2, 0, dtype=torch.int64)
    assert noise.bernoulli(torch.zeros(2, 0), slots, ACCEPT).shape == (2, 0)
    assert noise.categorical(torch.zeros(2, 0, 5), slots, TOKEN).shape == (2, 0)
    assert noise.normal(slots, 5, CHAIN).shape == (2, 0, 5)


# --- keys ---


def test_one_generator_gives_sample_b_its_bth_draw():
    keys = draw_keys(seeded(0), 5)
    assert keys.shape == (5,) and keys.dtype == torch.int64
    assert keys.unique().numel() == 5
    assert torch.equal(draw_keys(seeded(0), 2), keys[:2])
    generator = seeded(0)
    assert torch.equal(torch.cat([draw_keys(generator, 2), draw_keys(generator, 3)]), keys)


def test_a_list_gives_each_sample_its_own_generator():
    expected = torch.cat([draw_keys(seeded(seed), 1) for seed in (7, 8, 9)])
    assert torch.equal(draw_keys([seeded(7), seeded(8), seeded(9)], 3), expected)
    assert torch.equal(draw_keys((seeded(9),), 1), expected[2:])


def test_keys_use_all_64_bits():
    keys = draw_keys(seeded(0), 500)
    for bit in range(64):
        assert 180 < int(((keys >> bit) & 1).sum()) < 320


def test_every_bit_of_a_seed_counts():
    """PyTorch's own generator ignores the high half. Seeds without one give PyTorch's own numbers."""
    for seed in (0, 5, 2**32 - 1):
        own = torch.cat([torch.randint(-(2**63), 2**63 - 1, (1,), generator=g) for g in 3 * [seeded(seed)]])
        assert torch.equal(draw_keys(seeded(seed), 3), own)
    seeds = [low + (high << 32) for low in (0, 5) for high in (0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1)]
    seeds += [1 << bit for bit in range(64)]
    keys = torch.cat([draw_keys(seeded(seed), 4) for seed in dict.fromkeys(seeds)])
    assert keys.unique().numel() == keys.numel()
    high = torch.cat([draw_keys(seeded(high << 32), 1) for high in range(500)])
    for bit in range(64):
        assert 180 < int(((high >> bit) & 1).sum()) < 320
    restored = torch.Generator()
    restored.set_state(seeded(2**40 + 1).get_state())
    assert torch.equal(draw_keys(restored, 2), draw_keys(seeded(2**40 + 1), 2))


def test_a_generator_without_a_seed_has_the_default_one():
    assert torch.equal(draw_keys(torch.Generator(), 2), draw_keys(seeded(67280421310721), 2))
    torch.manual_seed(2**32 + 3)
    first = draw_keys(None, 2)
    assert torch.equal(first, draw_keys(seeded(2**32 + 3), 2))
    torch.manual_seed(3)
    assert not torch.equal(draw_keys(None, 2), first)


def test_a_million_keys_seed_different_generators():
    """Only keys with one low half can give generators of one state: they must differ too."""
    keys = torch.randint(-(2**63), 2**63 - 1, (10**6,), generator=seeded(0)) & (2**63 - 1)
    low, order = (keys & (2**32 - 1)).sort()
    same = (low[1:] == low[:-1]).nonzero()[:, 0]
    assert len(same) > 50  # 116 are expected
    for at in same.tolist():
        one, other = (draw_keys(seeded(int(keys[order[place]])), 1) for place in (at, at + 1))
        assert one != other


def test_the_default_generator_is_used_only_when_none_is_given():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    draw_keys(seeded(0), 4)
    make_noise().uniform(torch.arange(4)[None], TOKEN)
    assert torch.equal(torch.get_rng_state(), state)
    first = draw_keys(None, 2)
    torch.manual_seed(3)
    assert torch.equal(draw_keys(None, 2), first)


@pytest.mark.parametrize(
    ("generator", "batch_size", "error", "message"),
    [
        ([seeded(0)] * 3, 2, ValueError, "3 generators.*2"),
        ([], 1, ValueError, "0 generators.*1"),
        ([seeded(0), 1], 2, TypeError, r"\[1\].*torch\.Generator"),
        ([None, seeded(0)], 2, TypeError, r"\[0\].*NoneType"),
        (1234, 1, TypeError, "generator is.*int.*manual_seed"),
    ],
)
def test_draw_keys_refuses(generator, batch_size, error, message):
    refuses(error, message, draw_keys, generator, batch_size)


@pytest.mark.parametrize("keys", [torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2)])
def test_noise_refuses_other_keys(keys):
    refuses(ValueError, r"int64 \[B\].*draw_keys", CounterNoise, keys, "cpu")


# -- kept noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_noise_draws_the_same_tokens(monkeypatch, dtype):
    """Windows that run ahead, go back and differ from row to row, and rows that leave."""
    counted = []
    draw = noise_module.philox_log_exponential

    def counting(keys, slots, *rest):
        counted.append(slots.numel())
        return draw(keys, slots, *rest)

    noise, keys = make_noise(3), draw_keys(seeded(0), 3)
    kept = CounterNoise(keys, "cpu", keep=9)
    monkeypatch.setattr(noise_module, "philox_log_exponential", counting)
    slots = laws = torch.empty(0)
    for first in ([0, 0, 0], [2, 0, 5], [7, 1, 5], [3, 40, 9], [0, 70, 33], [2**31, 5, 4]):
        slots = torch.tensor(first)[:, None] + torch.tensor([0, 3, 1, 2])
        laws = torch.randn(3, 4, 50, generator=seeded(first[1]), dtype=dtype).log_softmax(-1)
        before = laws.clone()
        for stream, round in ((TOKEN, 0), (TOKEN, 0), (TOKEN, 2), (DRAFT, 0), (TOKEN, torch.tensor(0))):
            expected = noise.categorical(laws, slots, stream, round)
            assert torch.equal(kept.categorical(laws, slots, stream, round), expected)
        assert torch.equal(laws, before)
    counted.clear()
    rows = torch.tensor([2, 0])
    noise.select(rows)
    kept.select(rows)
    assert torch.equal(
        kept.categorical(laws[rows], slots[rows], TOKEN), noise.categorical(laws[rows], slots[rows], TOKEN)
    )
    assert counted == [2 * 4]  # by the noise that keeps nothing


def test_slots_too_far_apart_to_keep_are_drawn_for_each_call():
    noise, kept = make_noise(2), CounterNoise(draw_keys(seeded(0), 2), "cpu", keep=8)
    for slots in ([0, 1, 2], [0, 7, 8], list(range(9)), [0, 7, 2**40], [5, 4, 6]):
        asked = torch.tensor([slots, slots])
        laws = torch.randn(2, len(slots), 30, generator=seeded(len(slots))).log_softmax(-1)
        assert torch.equal(kept.categorical(laws, asked, TOKEN), noise.categorical(laws, asked, TOKEN))
        assert kept._kept is not None and kept._kept[1].shape == (2, 8, 30)
