"""Drafts from a whole picture: the plain tokens whatever the drafter is, what the picture is, where it is read."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders import ordered
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.jacobi_identical import UNKNOWN, _repaired_at_once, repaired

GRID, VOCAB = TokenGrid(5, 6), 11
TARGET, NEAR = (TabularModel(GRID, VOCAB, order=2, conditions=5, dependence=0.3) for _ in range(2))
NEAR.logits = TARGET.logits + 0.7 * TabularModel(GRID, VOCAB, order=2, conditions=5, seed=1).logits
LAWS = {
    "plain": TokenLaw(),
    "guided": TokenLaw(guidance_scale=3.0, temperature=0.9, top_k=7, top_p=0.95),
    "greedy": TokenLaw(temperature=0.0),
}
EVERY_LAW = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())


def network(order: str, seed: int) -> LlamaGenTransformer:
    sizes: dict[str, Any] = dict(dim=16, num_layers=2, num_heads=2, num_classes=5, grid_size=5)
    torch.manual_seed(seed)
    model = LlamaGenTransformer(vocab_size=VOCAB, order=order, **sizes).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


RASTER, FLASH = network("raster", 0), network("flashar", 1)
PAIRS = [
    pytest.param(TARGET, NEAR, id="raster drafter"),
    pytest.param(RASTER, FLASH, id="near-to-far drafter"),
]


def decode(
    sampler: Any, model: Any, rows: Any = (0, 4, 1, 2, 3), law: TokenLaw = LAWS["plain"], **parts: Any
) -> Any:
    seeds = [torch.Generator().manual_seed(100 + row) for row in rows]
    return sampler(model, torch.tensor(rows), law=law, generator=seeds, batch_size=len(rows), **parts)


@pytest.mark.parametrize("window", [1, 2, 8, 64])
@EVERY_LAW
@pytest.mark.parametrize(("model", "drafter"), PAIRS)
def test_the_tokens_are_those_of_plain_decoding(model, drafter, law, window):
    for rows in ([3], [0, 4, 1, 2, 3]):
        found = decode(SpeculativeJacobiSampler(window, drafts="pictured"), model, rows, law, drafter=drafter)
        assert found.trace.identical
        assert torch.equal(found.tokens, decode(AutoregressiveSampler(), model, rows, law).tokens)


@EVERY_LAW
def test_the_picture_is_drawn_with_the_noise_of_the_slots(law):
    """The target as its own drafter draws the very tokens that are tested, so every draft is kept."""
    for window in (4, 30):
        found = decode(SpeculativeJacobiSampler(window, drafts="pictured"), TARGET, law=law, drafter=TARGET)
        assert (found.trace.target_calls == 1 + -(-29 // window)).all()


@EVERY_LAW
def test_the_picture_is_what_the_drafter_draws_after_the_first_token(monkeypatch, law):
    """Its own samples from the same generators, with slot 0 as the target drew it."""
    pictures: list[Tensor] = []

    def kept(run: Any, first: Tensor) -> Tensor:
        pictures.append(real(run, first))
        return pictures[-1]

    real = ordered.whole_picture
    monkeypatch.setattr(ordered, "whole_picture", kept)
    found = decode(SpeculativeJacobiSampler(8, drafts="pictured"), RASTER, law=law, drafter=FLASH)
    (picture,) = pictures
    own = decode(OrderedSampler(), FLASH, law=law).tokens
    assert torch.equal(picture[:, 0], found.tokens[:, 0])
    same = own[:, 0] == picture[:, 0]
    assert torch.equal(picture[same], own[same])
    assert same.any() or law.temperature == 0


def test_a_picture_close_to_the_target_saves_calls():
    calls = {
        drafts: decode(SpeculativeJacobiSampler(8, drafts=drafts), TARGET, **parts).trace.target_calls.sum()
        for drafts, parts in {"repaired": {}, "pictured": {"drafter": NEAR}}.items()
    }
    assert calls["pictured"] < 0.9 * calls["repaired"], calls


def test_where_the_neighbours_agree_the_picture_is_read_and_elsewhere_the_copy():
    """By hand: a slot, its left and upper neighbour in text and picture, and what a copy would be."""
    grid = TokenGrid(3, 3)
    text = torch.tensor([[1, 2, 3, 1, 2, 0, 0, 0, 0]])
    picture = torch.tensor([[1, 2, 3, 7, 2, 6, 1, 8, 9]])
    carried, committed = 9, torch.tensor([5])

    def at(slot: int, before: int, last: int = UNKNOWN) -> tuple[int, bool]:
        """What a slot is fed after a token, and in the last call after another one; and whether that is new."""
        slots, fed = torch.tensor([[slot - 1, slot]]), torch.tensor([[before, carried]])
        inputs = torch.full_like(text, last)
        found, replaced, _ = repaired(text, inputs, committed, fed, slots, 1, grid, picture)
        assert torch.equal(inputs[:, slot - 1 : slot + 1], found)
        return int(found[0, 1]), bool(replaced)

    assert at(5, 2) == (6, True)  # left 2, above 3, as in the picture
    assert at(5, 2, last=2) == (carried, False)  # not stale
    assert at(5, 1) == (carried, False)  # left differs, and no slot before has left 1 and above 3
    # Left differs from the picture's 7: slot 4 has it in the text, itself committed.
    assert at(4, 1) == (2, True)
    assert at(6, 6) == (carried, False)  # left as in the picture, above 1 in the text and 7 there
    assert at(7, 1) == (8, True)


@pytest.mark.parametrize("grid", [TokenGrid(6, 7), TokenGrid(3, 4, 3)], ids=["picture", "clip"])
@pytest.mark.parametrize("pictured", [False, True])
def test_a_device_repairs_as_the_host_does(grid, pictured):
    """Few different tokens, so that many neighbours agree; a row that is complete, and one that has one token."""
    generator, rows, width, size = torch.Generator().manual_seed(0), 40, 9, grid.num_tokens
    text, picture = torch.randint(3, (2, rows, size + width), generator=generator)
    inputs = torch.randint(-1, 3, text.shape, generator=generator)
    committed = torch.randint(1, size + 1, (rows,), generator=generator)
    committed[:2] = torch.tensor([1, size])
    slots = committed[:, None] - 1 + torch.arange(width)
    fed, back = text.gather(1, slots), grid.width if grid.frames == 1 else grid.height * grid.width
    shown, ages = picture if pictured else None, torch.randint(2, slots.shape, generator=generator) == 0
    none = torch.zeros(rows, dtype=torch.long)
    for count, steady in product((1, 5, 20), (None, ages)):
        here, there = inputs.clone(), inputs.clone()
        young = None if steady is None else ~steady
        found, replaced, _ = repaired(text, here, committed, fed, slots, count, grid, shown, steady, none)
        other, marked, _ = _repaired_at_once(
            text, there, committed, fed, slots, count, back, shown, steady, young
        )
        assert torch.equal(found, other) and torch.equal(replaced, marked) and torch.equal(here, there)
        assert replaced.any() and not replaced.all() and torch.equal(fed, text.gather(1, slots))


def test_refuses_what_cannot_draft_a_picture():
    with pytest.raises(ValueError, match="drafts='pictured'.*acceptance='exact'.*'identical'"):
        SpeculativeJacobiSampler(acceptance="exact", drafts="pictured")
    sampler = SpeculativeJacobiSampler(4, drafts="pictured")
    refuses(ValueError, "drafter=", decode, sampler, TARGET)
    refuses(ValueError, "1 x 5 x 5.*1 x 5 x 6", decode, sampler, TARGET, drafter=FLASH)

    class Reader(TabularModel):
        def follow(self) -> None: ...

    refuses(ValueError, "Reader", decode, sampler, TARGET, drafter=Reader(GRID, VOCAB, order=1))


def test_bad_logits_of_the_drafter_are_said_to_be_its_own():
    broken = network("flashar", 2)
    torch.nn.init.constant_(broken.medusa_output.weight, torch.nan)
    with pytest.raises(FloatingPointError, match="in the drafter: .*slot"):
        decode(SpeculativeJacobiSampler(4, drafts="pictured"), RASTER, drafter=broken)
