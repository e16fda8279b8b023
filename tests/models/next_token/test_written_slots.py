"""Calls out of raster order: a column is scored from the slots that it sees, whatever the other slots hold."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.cached_decoders import case
from tests.helpers.llamagen import event_logits, make, text_condition
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularModel
from visual_spec.models.core import protocol
from visual_spec.models.core.protocol import TokenGrid

# Slots of three calls (window 4, grid 3 x 3); slot 5 is fed in two calls, and columns past the grid (9 ..) are unused.
CALLS = [[[0, 5, 9, 10], [3, 1, 0, 9]], [[1, 2, 5, 10], [5, 9, 10, 11]], [[7, 4, 3, 9], [4, 2, 6, 7]]]
CONDITION = text_condition(2, [3, 5])


def fed(call: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and slots [2, 4] of a call, and which fed slots each column sees, drawn at random: [2, 4, 9]."""
    generator = torch.Generator().manual_seed(call)
    slots = torch.tensor(CALLS[call])
    tokens = torch.randint(0, vocab_size, slots.shape, generator=generator)
    held = torch.zeros(2, 9, dtype=torch.bool)
    for earlier in CALLS[: call + 1]:
        for row in range(2):
            held[row, [slot for slot in earlier[row] if slot < 9]] = True
    seen = held[:, None] & (torch.rand(2, 4, 9, generator=generator) < 0.6)
    return tokens, slots, seen


def poison(state: Any, call: int) -> None:
    """Overwrite all that no call up to this one has fed."""
    for row in range(2):
        used = {slot for earlier in CALLS[:call] for slot in earlier[row]}
        for slot in set(range(9)) - used:
            if isinstance(state.__dict__.get("tokens"), Tensor):
                state.tokens[row, slot] = int(torch.randint(0, 3, ()))
                continue
            prefix = state.prefix_mask.shape[1]
            for cache in state.cache.buffers():
                cache[:, row::2, :, prefix + slot] = 50 * torch.randn_like(cache[:, row::2, :, prefix + slot])


@pytest.mark.parametrize("guided", [False, True])
def test_llamagen_attends_to_what_is_seen_and_nothing_else(guided):
    model = make(grid_size=3)
    state = model.prefill(CONDITION, batch_size=2, guided=guided, window=4)
    events: list[list[tuple[int, int, set[int]]]] = [[], []]
    latest: list[dict[int, int]] = [{}, {}]  # by slot, the event that fed it last
    checked = 0
    for call in range(len(CALLS)):
        tokens, slots, seen = fed(call, model.vocab_size)
        poison(state, call)
        logits = model(state, tokens, slots, seen=seen)
        assert logits.shape == (4 if guided else 2, 4, model.vocab_size)
        for row in range(2):
            before = len(events[row])
            latest[row].update({int(slot): before + w for w, slot in enumerate(slots[row])})
            for w in range(4):
                slot = int(slots[row, w])
                visible = {latest[row][other] for other in range(9) if seen[row, w, other]}
                events[row].append((int(tokens[row, w]), min(slot, 8), visible - {before + w}))
            for part in range(2 if guided else 1):
                want = event_logits(model, CONDITION, row, bool(part), events[row])[before:]
                for w in range(4):
                    if slots[row, w] < 9:
                        assert (logits[row + 2 * part, w] - want[w]).abs().max() < 1e-12
                        checked += 1
    assert checked == (32 if guided else 16)


# -- slots that a position is told to predict --------------------------------------------------------------------------


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(("order", "told"), [(0, True), (2, True), (8, True), (4, False)])
def test_tabular_predicts_the_slots_it_is_told(order, told, guided):
    """Any slot, from the tokens before it that the position sees; a position that feeds nothing predicts as well.
    Without being told it predicts the slot after its own."""
    model = TabularModel(TokenGrid(3, 3), 3, order=order, conditions=2)
    condition = torch.tensor([1, 0])
    state = model.prefill(condition, batch_size=2, guided=guided, window=4)
    text: list[dict[int, int]] = [{}, {}]
    asked = torch.tensor(
        [[[8, 0, 3, 9], [5, 5, 2, 7]], [[1, 6, 7, 8], [10, 4, 0, 3]], [[0, 2, 12, 6], [8, 7, 1, 5]]]
    )
    for call, predicted in enumerate(asked):
        tokens, slots, seen = fed(call, 3)
        poison(state, call)
        logits = model(state, tokens, slots, seen=seen, predicted=predicted if told else None)
        assert logits.shape == (4 if guided else 2, 4, 3) and logits.isfinite().all()
        for row in range(2):
            text[row].update(zip(slots[row].tolist(), tokens[row].tolist(), strict=True))
            for w, following in enumerate((predicted if told else slots + 1)[row].tolist()):
                if following >= 9:
                    continue
                index = 0
                for other in range(following - order, following):
                    known = other == slots[row, w] or (other >= 0 and bool(seen[row, w, other]))
                    index = 3 * index + (text[row][other] if known else 2 if other >= 0 else 0)
                for part, table in enumerate([int(condition[row]), 2][: 2 if guided else 1]):
                    assert torch.equal(logits[row + 2 * part, w], model.logits[table, following, index])


def raster_models() -> list[Any]:
    return [
        pytest.param(make(grid_size=3), CONDITION, id="llamagen"),
        *(pytest.param(*case(name), id=name) for name in ("janus", "emu3")),
    ]


@pytest.mark.parametrize(("model", "condition"), raster_models())
def test_a_raster_model_predicts_the_slot_after_and_refuses_others(model, condition, monkeypatch):
    batch_size, count = 2 if condition is CONDITION else 4, model.grid.num_tokens
    slots = torch.tensor([4, 2, count + 1]).expand(batch_size, -1)
    tokens = torch.tensor([1, 5, 0]).expand(batch_size, -1)
    seen = torch.zeros(batch_size, 3, count, dtype=torch.bool)
    seen[:, 0, 2] = True

    def ask(predicted: Tensor | None) -> Tensor:
        state = model.prefill(condition, batch_size=batch_size, guided=True, window=3)
        return model(state, tokens, slots, seen=seen, predicted=predicted)

    want = ask(None)
    for allowed in ([5, 3, count], [count + 2, 3, count + 1]):
        assert torch.equal(ask(torch.tensor(allowed).expand(batch_size, -1)), want)
    other = (slots + 1).clone()
    other[1, 0] = 7
    refuses(ValueError, "slot 7.*4", ask, other)
    monkeypatch.setattr(protocol, "on_host", lambda tensor: False)
    assert torch.equal(ask(other), want)  # on a device nothing is read
