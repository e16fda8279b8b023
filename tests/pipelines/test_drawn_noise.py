"""The noise of `torch.multinomial`, asked for out of order: the tokens of a plain loop, and no draw too many."""

import math

import pytest
import torch
from torch import Tensor

from visual_spec.pipelines.accelerate.drawn_noise import DrawnNoise
from visual_spec.samplers.core.noise import ACCEPT, TOKEN, CounterNoise

ROWS, SLOTS, IDS = 3, 40, torch.tensor([2, 3, 5, 8, 13])
NUM_IDS = 16


def laws() -> Tensor:
    """Probabilities [L, B, 16] that are zero outside of `IDS`."""
    own = torch.rand(SLOTS, ROWS, len(IDS), generator=torch.Generator().manual_seed(1)) ** 3
    return torch.zeros(SLOTS, ROWS, NUM_IDS).index_copy(2, IDS, own / own.sum(-1, keepdim=True))


def plain(seed: int) -> Tensor:
    """Ids [B, L] of a plain loop."""
    torch.manual_seed(seed)
    return torch.cat([torch.multinomial(law, 1) for law in laws()], 1)


def asked(noise: DrawnNoise, slots: Tensor, rows: Tensor) -> Tensor:
    """Ids [N, W] at slots long [N, W] of these rows; scratch has the law of the last slot."""
    own = laws()[..., IDS][slots.clamp(max=SLOTS - 1), rows[:, None]]
    tokens = noise.categorical(own.log(), slots, TOKEN)
    raced, margin = noise.race(own.log(), slots, TOKEN)
    assert torch.equal(raced, tokens) and (margin > 0).all()
    return IDS[tokens]


def made(seed: int) -> DrawnNoise:
    torch.manual_seed(seed)
    return DrawnNoise(ROWS, SLOTS, NUM_IDS, IDS, None, torch.device("cpu"))


def test_slots_in_any_order_have_the_tokens_of_a_plain_loop():
    want, noise, rows = plain(5), made(5), torch.arange(ROWS)
    # Some are asked for again after they were dropped, before later ones and after the last.
    for starts in ([0, 0, 0], [1, 3, 2], [2, 20, 4], [10, 21, 5], [12, 34, 2], [20, 36, 3], [0, 1, 2]):
        slots = torch.tensor(starts)[:, None] + torch.arange(4)
        assert torch.equal(asked(noise, slots, rows), want.gather(1, slots))
    noise.select(torch.tensor([2, 0]))
    slots = torch.tensor([[7], [35]])
    assert asked(noise, slots, torch.tensor([2, 0])).tolist() == [[int(want[2, 7])], [int(want[0, 35])]]


def test_no_slot_is_drawn_that_nobody_asked_for():
    """A row that has ended asks at scratch, and must not draw the noise of all slots before."""
    noise, rows = made(6), torch.arange(ROWS)
    slots = torch.tensor([[4, 5], [SLOTS, SLOTS + 1], [SLOTS + 7, SLOTS + 8]])
    asked(noise, slots, rows)
    for here in (slots, slots[1:]):  # the noise of scratch is 1: of a flat law it takes the first token
        assert not noise.categorical(torch.zeros(len(here), 2, len(IDS)), here, TOKEN)[-2:].any()
    after = torch.rand(2)
    torch.manual_seed(6)
    for law in laws()[:6]:
        torch.multinomial(law, 1)
    assert torch.equal(torch.rand(2), after)


def test_rewound_the_generator_stands_where_the_plain_loop_ends():
    for steps in (0, 1, 3, 4, 5, 6, 7, 9):
        torch.manual_seed(7)
        for law in laws()[:steps]:
            torch.multinomial(law, 1)
        want, noise = torch.rand(2), made(7)
        asked(noise, torch.arange(6).expand(ROWS, -1), torch.arange(ROWS))
        noise.rewind(steps)
        assert torch.equal(torch.rand(2), want)


@pytest.mark.every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_margin_of_a_race_is_that_of_the_two_best_quotients(dtype):
    """By hand: log (p / q) of the best id less that of the second, q drawn for all ids of all rows at once."""
    noise = DrawnNoise(
        ROWS, SLOTS, NUM_IDS, IDS, torch.Generator().manual_seed(3), torch.device("cpu"), dtype
    )
    slots, own = torch.arange(4).expand(ROWS, -1), laws()[:4, :, IDS].transpose(0, 1).to(dtype)
    tokens, margin = noise.race(own.log(), slots, TOKEN)
    near = 1e-4 if dtype == torch.float32 else 1e-12
    generator = torch.Generator().manual_seed(3)
    for slot in range(4):
        drawn = torch.empty(ROWS, NUM_IDS, dtype=dtype).exponential_(generator=generator)
        for row in range(ROWS):
            shares = own[row, slot].tolist()
            scores = [
                math.log(share / float(drawn[row, one]))
                for share, one in zip(shares, IDS.tolist(), strict=True)
            ]
            second, best = sorted(scores)[-2:]
            assert scores.index(best) == int(tokens[row, slot])
            assert float(margin[row, slot]) == pytest.approx(best - second, rel=near, abs=near)
    tokens, margin = noise.race(torch.zeros(ROWS, 1, 1), slots[:, :1] + SLOTS, TOKEN)
    assert tokens.tolist() == [[0]] * ROWS and margin.isposinf().all()  # one id, at scratch


def test_noise_of_other_purposes_moves_no_generator():
    noise, slots = made(8), torch.arange(3).expand(ROWS, -1)
    log_probs, plain = laws()[:3, :, IDS].transpose(0, 1).log(), CounterNoise(noise.keys, "cpu")
    for stream, round in [(ACCEPT, 0), (TOKEN, 2), (TOKEN, torch.zeros((), dtype=torch.long))]:
        given = log_probs, slots, stream, round
        assert torch.equal(noise.categorical(*given), plain.categorical(*given))
        for found, want in zip(noise.race(*given), plain.race(*given), strict=True):
            assert torch.equal(found, want)
    for each in (noise, plain):
        each.select(torch.tensor([2, 0]))
    assert torch.equal(noise.uniform(slots[:2], ACCEPT), plain.uniform(slots[:2], ACCEPT))
    after = torch.rand(2)
    torch.manual_seed(8)
    assert torch.equal(after, torch.rand(2))
