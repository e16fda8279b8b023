"""RandAR's layout: what calls in any order give, beside the forward of its whole sequence, written out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.llamagen import text_condition
from tests.helpers.llamagen_releases import randar_shapes
from tests.helpers.official import random_weights
from tests.helpers.refusals import refuses
from tests.models.next_token import straight
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_checkpoint import load_transformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.along_order import AlongOrder
from visual_spec.samplers.orders.any_order import AnyOrderSampler
from visual_spec.samplers.orders.any_order_speculative import SpeculativeAnyOrderSampler
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

VOCAB, CLASSES, SIDE = 12, 7, 3
LABELS = torch.tensor([3, 6])
ORDERS = torch.tensor([[4, 0, 8, 2, 6, 1, 7, 3, 5], [8, 7, 1, 0, 2, 6, 3, 5, 4]])
LENGTH = SIDE * SIDE


@pytest.fixture
def loaded(tmp_path) -> tuple[dict[str, Tensor], LlamaGenTransformer]:
    weights = random_weights(randar_shapes(2, 16, vocab=VOCAB, classes=CLASSES), torch.float64)
    torch.save({"model": weights}, tmp_path / "randar.pt")
    return weights, load_transformer(tmp_path / "randar.pt", image_size=2 * SIDE, patch_size=2)


def straight_line(
    weights: dict[str, Tensor],
    prefix: Tensor,
    tokens: Tensor,
    order: Tensor,
    words: Tensor | None = None,
    prefix_turn: float = 0.0,
    group: tuple[int, int] | None = None,
) -> Tensor:
    """Logits [L, V], by place, of one picture: prefix, then instruction and token of every place, causal.

    With a group, the sequence ends in its instructions, and the logits are theirs.

    Two attention heads, of 8 channels each; a quarter of the channels turns by row, as many by column.

    Args:
        prefix: [T, dim].
        words: bool [T], the positions of the prefix that others see.
        prefix_turn: what queries and keys of the prefix are multiplied by.
        group: first place that is asked together with others, and the last of them plus one.
    """
    turn = straight.turns(order // SIDE, order % SIDE, 8)  # [L, 4]
    embedding = weights["pos_instruct_embeddings"].view(2, 4, 2)  # heads, pairs
    told = torch.view_as_real(torch.view_as_complex(embedding) * turn[:, None]).flatten(1)  # [L, dim]
    pairs = torch.stack([told, weights["tok_embeddings.weight"][tokens[order]]], 1).flatten(0, 1)
    x, length, turns = torch.cat([prefix, pairs]), len(prefix), turn.repeat_interleave(2, 0)
    if group is not None:
        known = 2 * group[0]
        x = torch.cat([x[: length + known], told[slice(*group)]])
        turns = torch.cat([turns[:known], turn[slice(*group)]])
    turn = torch.cat([torch.full((length, 4), prefix_turn), turns])[:, None]
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    if words is not None:
        mask[:, :length] &= words
        mask |= torch.eye(len(x), dtype=torch.bool)
    for layer in range(2):
        x = straight.layer(weights, layer, x, mask, turn)
    heads = x[length::2] if group is None else x[length + known :]
    return straight.norm(weights, heads, "norm") @ weights["output.weight"].T


def expected(weights: dict[str, Tensor], tokens: Tensor, orders: Tensor = ORDERS) -> Tensor:
    """`straight_line` of a batch, conditional rows, then unconditional ones: [2B, L, V]."""
    labels = [*LABELS.tolist(), CLASSES, CLASSES]
    prefixes = weights["cls_embedding.embedding_table.weight"][labels][:, None]
    rows = zip(prefixes, tokens.repeat(2, 1), orders.repeat(2, 1), strict=True)
    return torch.stack([straight_line(weights, *row) for row in rows])


def begun(model: Any, window: int = LENGTH, first: int = 1) -> tuple[AlongOrder, Any]:
    along = AlongOrder(model, ORDERS, first)
    return along, along.prefill(LABELS, batch_size=2, guided=True, window=window)


def drawn(seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, want: Tensor) -> None:
    assert float((found - want).abs().max()) < 1e-12 * float(want.abs().max())


@pytest.mark.parametrize("width", [1, 2, LENGTH - 1])
def test_calls_along_an_order_compute_what_the_sequence_says(loaded, width):
    """One place a call, two, and all in one pass with a permutation mask; drafts that were wrong are fed again."""
    weights, model = loaded
    tokens = drawn()
    want, by_place = expected(weights, tokens), tokens.gather(1, ORDERS)
    along, state = begun(model)
    found = [state.logits[:, :1]]
    for first in range(0, LENGTH - 1, width):
        places = torch.arange(first, min(first + width, LENGTH - 1)).expand(2, -1)
        wrong = (by_place.gather(1, places) + 1) % VOCAB
        along(state, wrong, places)
        found.append(along(state, by_place.gather(1, places), places))
    close(torch.cat(found, 1), want)


def test_one_pass_along_orders_computes_the_same_with_gradients(loaded):
    weights, model = loaded
    tokens = drawn()
    want = expected(weights, tokens)
    logits = model.teacher_forced_along(tokens, ORDERS, LABELS)
    close(logits.detach(), want[:2])
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    dropped = model.teacher_forced_along(tokens, ORDERS, LABELS, torch.tensor([False, True])).detach()
    close(dropped, torch.stack([want[0], want[3]]))


def test_places_asked_in_parallel_are_asked_as_if_each_came_next(loaded):
    """Every place after the known ones, put right after them in the sequence; and the first ones of the prefill."""
    weights, model = loaded
    tokens, known = drawn(), 3
    along, state = begun(model, window=LENGTH + 1, first=LENGTH)
    fed = tokens.gather(1, ORDERS)[:, :known]
    places = torch.arange(LENGTH).expand(2, -1)
    logits = along.ask(state, fed, places, places.clamp(max=known))
    for place in range(known, LENGTH):
        moved = torch.cat([ORDERS[:, :known], ORDERS[:, place:], ORDERS[:, known:place]], 1)
        close(logits[:, place], expected(weights, tokens, moved)[:, known])
    for place in range(LENGTH):
        close(state.logits[:, place], expected(weights, tokens, ORDERS.roll(-place, 1))[:, 0])


def test_rows_go_at_their_own_pace_and_may_leave(loaded):
    weights, model = loaded
    tokens = drawn(2)
    want, by_place = expected(weights, tokens), tokens.gather(1, ORDERS)
    along, state = begun(model, window=4)
    every = torch.arange(LENGTH + 4)
    for place in range(5):
        one = torch.tensor([[place], [min(place, 2)]])
        along(state, by_place.gather(1, one), one)
    places = torch.stack([every[5:8], every[3:6]])
    logits = along(state, by_place.gather(1, places), places)
    for row in range(4):
        close(logits[row], want[row, places[row % 2] + 1])
    first = state.logits
    state.select(torch.tensor([1]))
    assert torch.equal(state.logits, first[[1, 3]])
    logits = along(state, by_place[1:, 6:7], every[None, 6:7])
    close(logits, want[1::2, 7:8])
    along(state, by_place[1:, :3], every[None, LENGTH : LENGTH + 3])  # scratch room
    logits = along(state, by_place[1:, 7:8], every[None, 7:8])
    close(logits, want[1::2, 8:9])


@pytest.mark.parametrize("acceptance", ["identical", "exact"])
def test_known_tokens_come_first_in_the_sequence(loaded, acceptance):
    """A picture knows the slots 0, 1, 6, and another only 5; each then goes on along ORDERS[0]."""
    weights, model = loaded
    order = ORDERS[0].tolist()
    known = torch.full((2, LENGTH), -1)
    known[0, [0, 1, 6]], known[1, 5] = torch.tensor([7, 2, 9]), 4
    each = [sorted(order, key=lambda slot, row=row: known[row, slot] < 0) for row in range(2)]
    tokens = known.clamp(min=0)
    for place in range(LENGTH):
        conditional, other = expected(weights, tokens, torch.tensor(each))[:, place].chunk(2)
        likeliest = (other + 1.5 * (conditional - other)).argmax(-1)
        for row, slots in enumerate(each):
            if known[row, slots[place]] < 0:
                tokens[row, slots[place]] = likeliest[row]
    law = TokenLaw(guidance_scale=1.5, top_k=1)
    for sampler in (AnyOrderSampler(order), SpeculativeAnyOrderSampler(3, order, acceptance)):
        result = sampler(model, LABELS, law=law, batch_size=2, known_tokens=known)
        assert torch.equal(result.tokens, tokens)


@pytest.mark.every_set
@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("counts", [(4, 4), (2, 5), (0, 3), (8, 1)], ids=str)
def test_the_prefill_feeds_known_tokens_as_a_sequence_that_begins_with_them(
    loaded, monkeypatch, counts, first
):
    """The first open places, asked in parallel, and the calls that follow, under guidance that rises."""
    weights, model = loaded
    tokens, known = drawn(3), torch.full((2, LENGTH), -1)
    for row, count in enumerate(counts):
        slots = [6, 1, 8, 0, 3, 5, 2, 7][:count]
        known[row, slots] = tokens[row, slots]
    orders = torch.tensor(
        [sorted(ORDERS[row].tolist(), key=lambda slot, row=row: known[row, slot] < 0) for row in range(2)]
    )
    along = AlongOrder(model, ORDERS, first, ramp=(1.0, 4.0))
    along.begin_with(known)
    assert torch.equal(along.order, orders)
    assert along.known is not None and along.known.tolist() == list(counts)
    assert along.known_tokens is not None and torch.equal(along.known_tokens, known.gather(1, orders))

    def compare(found: Tensor, wanted: Tensor, row: int, place: int) -> None:
        """Logits [4, V] and those of sequences; of one picture, and guided as the place says."""
        conditional, other = wanted[row], wanted[row + 2]
        rising = other + (1 + 3 * place / LENGTH) / 4 * (conditional - other)
        close(found[[row, row + 2]], torch.stack([rising, other]))

    seen: list[Tensor] = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda *given, **more: (seen.append(more["seen"]), forward(*given, **more))[1]
    )
    state = along.prefill(LABELS, batch_size=2, guided=True, window=LENGTH)
    # In scratch too: nothing that was not fed.
    assert (seen[0].sum(-1) <= torch.tensor(counts)[:, None]).all()
    assert state.logits.shape == (4, first, VOCAB)
    for ahead in range(first):
        moved = torch.stack(
            [
                torch.cat([order[:count], order[count + ahead :], order[count : count + ahead]])
                for order, count in zip(orders, counts, strict=True)
            ]
        )
        want = expected(weights, tokens, moved)
        for row, count in enumerate(counts):
            if count + ahead < LENGTH:
                compare(state.logits[:, ahead], want[:, count], row, count + ahead)
    want, by_place = expected(weights, tokens, orders), tokens.gather(1, orders)
    places = torch.tensor(counts)[:, None] + torch.arange(2)
    logits = along(state, by_place.gather(1, places.clamp(max=LENGTH - 1)), places)
    for row, count in enumerate(counts):
        for ahead in range(2):
            if count + ahead + 1 < LENGTH:
                compare(logits[:, ahead], want[:, count + ahead + 1], row, count + ahead + 1)


def test_instructions_of_one_call_see_the_earlier_ones_of_it(loaded):
    """Five places after three known ones: the sequence ends in five instructions without tokens between them."""
    weights, model = loaded
    tokens, known, asked = drawn(), 3, 5
    along, state = begun(model, window=LENGTH)
    places = torch.arange(known + asked).expand(2, -1)
    fed = tokens.gather(1, ORDERS)[:, :known]
    logits = along.ask(state, fed, places, places.clamp(max=known), together=True)
    labels = [*LABELS.tolist(), CLASSES, CLASSES]
    prefixes = weights["cls_embedding.embedding_table.weight"][labels][:, None]
    for row, (picture, order) in enumerate(zip(tokens.repeat(2, 1), ORDERS.repeat(2, 1), strict=True)):
        want = straight_line(weights, prefixes[row], picture, order, group=(known, known + asked))
        close(logits[row, known:], want)


# Likeliest tokens of the public code (github.com/ziqipang/RandAR, `RandARTransformer.generate` with top_k=1), on these
# weights, labels and orders: by calls, then by guidance (first place, end).
PUBLISHED = {
    (2, 1.0, 4.0): [[10, 10, 10, 0, 8, 2, 11, 11, 11], [7, 7, 0, 0, 0, 0, 0, 2, 2]],
    (2, 4.0, 4.0): [[5, 6, 6, 11, 8, 2, 11, 11, 11], [0, 7, 0, 2, 0, 0, 0, 2, 11]],
    (3, 1.0, 4.0): [[10, 10, 10, 2, 8, 0, 11, 2, 11], [7, 7, 0, 7, 7, 9, 1, 2, 2]],
    (3, 4.0, 4.0): [[5, 8, 6, 6, 8, 11, 11, 2, 11], [0, 7, 0, 2, 2, 4, 7, 2, 11]],
    (4, 1.0, 4.0): [[10, 10, 10, 2, 8, 2, 2, 2, 11], [7, 7, 4, 1, 1, 9, 1, 2, 2]],
    (4, 1.0, 1.0): [[10, 10, 10, 2, 8, 2, 2, 2, 11], [7, 7, 0, 1, 1, 8, 1, 2, 2]],
    (9, 1.0, 4.0): [[10, 10, 10, 2, 8, 11, 2, 2, 11], [7, 7, 4, 1, 1, 8, 1, 2, 2]],
    (9, 4.0, 4.0): [[5, 8, 8, 11, 8, 11, 11, 11, 11], [4, 4, 1, 0, 0, 3, 0, 2, 11]],
}


@pytest.mark.parametrize(("steps", "start", "end"), PUBLISHED)
def test_parallel_decoding_gives_the_tokens_of_the_public_code(loaded, steps, start, end):
    law = TokenLaw(guidance_scale=end, top_k=1)
    for row, order in enumerate(ORDERS.tolist()):
        sampler = AnyOrderSampler(order, steps, guidance_start=start)
        found = sampler(loaded[1], LABELS[row : row + 1], law=law).tokens[0]
        assert found.tolist() == PUBLISHED[steps, start, end][row]
    if steps == LENGTH:  # one token a call: the law that ASSD keeps
        sampler = SpeculativeAnyOrderSampler(3, order, guidance_start=start)
        found = sampler(loaded[1], LABELS[row : row + 1], law=law).tokens[0]
        assert found.tolist() == PUBLISHED[steps, start, end][row]


@pytest.mark.parametrize("zero", [True, False])
def test_captions_are_seen_without_their_padding(zero):
    torch.manual_seed(0)
    config: dict[str, Any] = dict(
        vocab_size=VOCAB, dim=16, num_layers=2, num_heads=2, grid_size=SIDE, order="any"
    )
    text: dict[str, Any] = dict(prefix_length=5, num_classes=None, caption_dim=12, zero_prefix_keys=zero)
    model: Any = LlamaGenTransformer(**config, **text).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(8)
    caption = text_condition(2, [3, 1])
    caption.features = caption.features.double()
    tokens, weights = drawn(), model.state_dict()
    along = AlongOrder(model, ORDERS, first=2)
    state = along.prefill(caption, batch_size=2, guided=False, window=LENGTH)
    places = torch.arange(LENGTH - 1).expand(2, -1)
    found = torch.cat([state.logits[:, :1], along(state, tokens.gather(1, ORDERS)[:, :-1], places)], 1)
    prefixes, words = model.cls_embedding.prefix(caption)
    rows = zip(prefixes.detach(), tokens, ORDERS, words, strict=True)
    close(found, torch.stack([straight_line(weights, *row, prefix_turn=float(not zero)) for row in rows]))


def test_other_calls_and_samplers_are_refused(loaded):
    model: Any = loaded[1]
    refuses(ValueError, "asked", model.prefill, LABELS, batch_size=2, guided=False, window=1)
    _, state = begun(model)
    refuses(ValueError, "seen", model, state.inner, LABELS[:, None], LABELS[:, None])
    request: dict[str, Any] = dict(law=TokenLaw(), batch_size=2)
    refuses(ValueError, "'any'.*AnyOrderSampler", AutoregressiveSampler(), model, LABELS, **request)
    refuses(ValueError, "AnyOrderSampler", OrderedSampler(), model, LABELS, **request)
    with pytest.raises(ValueError, match="teacher_forced"):
        model.teacher_forced(torch.zeros(2, LENGTH, dtype=torch.long), LABELS)
