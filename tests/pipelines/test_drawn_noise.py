"""The noise of `torch.multinomial`, asked for out of order: the tokens of a plain loop, and no draw too many."""

import torch
from torch import Tensor

from visual_spec.pipelines.accelerate.drawn_noise import DrawnNoise
from visual_spec.samplers.core.noise import TOKEN

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
    for starts in ([0, 0, 0], [1, 3, 2], [2, 30, 4], [3, 34, 2], [20, 36, 3], [0, 1, 2]):
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
    after = torch.rand(2)
    torch.manual_seed(6)
    for law in laws()[:6]:
        torch.multinomial(law, 1)
    assert torch.equal(torch.rand(2), after)


def test_rewound_the_generator_stands_where_the_plain_loop_ends():
    for steps in (0, 3, 9):
        torch.manual_seed(7)
        for law in laws()[:steps]:
            torch.multinomial(law, 1)
        want, noise = torch.rand(2), made(7)
        asked(noise, torch.arange(6).expand(ROWS, -1), torch.arange(ROWS))
        noise.rewind(steps)
        assert torch.equal(torch.rand(2), want)
