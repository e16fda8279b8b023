"""Caches of keys and values: every policy against full attention with an explicit mask, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.refusals import refuses
from visual_spec.models.core import cache as core_cache
from visual_spec.models.core.cache import (
    EvictingCache,
    KeyValues,
    StaticCache,
    common_run,
    largest,
    seen_in_order,
    seen_in_tree,
    seen_up_to,
)

ROWS, HEADS, DIM, VOCAB = 2, 2, 12, 7
LIKE = torch.zeros(0, dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Vectors [..., D] turned by positions [..., A], a third (or all) of the pairs by each axis."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    each = pairs.shape[-1] // positions.shape[-1]
    speeds = 0.4 ** torch.arange(each, dtype=torch.float64)
    angles = (positions[..., None] * speeds).flatten(-2)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def slow_attention(query: Tensor, keys: Tensor, values: Tensor, mask: list[bool]) -> Tensor:
    """One query [D] over all keys that there ever were [N, D], under a mask."""
    scores = (keys @ query / math.sqrt(len(query))).masked_fill(~torch.tensor(mask), -math.inf)
    weights = (scores - scores.max()).exp()
    return weights @ values / weights.sum()


# -- by slot ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotated", ["when stored", "when read"])
@pytest.mark.parametrize("width", [1, 4])
def test_rows_at_their_own_pace_with_rejected_drafts_equal_full_attention(width, rotated):
    """A window of drafts a call, of which some stay; all others are written again."""
    cache = StaticCache.allocate(LIKE, (2, ROWS, HEADS, 40, DIM))
    queries, keys, values = (random(2, VOCAB, HEADS, DIM, seed=seed) for seed in (1, 2, 3))
    generator = torch.Generator().manual_seed(4)
    frontier = torch.zeros(ROWS, dtype=torch.long)
    text: list[dict[int, int]] = [{} for _ in range(ROWS)]  # by position, the token that was fed last
    size = cache.nbytes
    where = [buffer.data_ptr() for buffer in cache.buffers()]
    for _ in range(12):
        slots = frontier[:, None] + torch.arange(width)
        tokens = torch.randint(0, VOCAB, slots.shape, generator=generator)
        for row in range(ROWS):
            text[row].update(zip(slots[row].tolist(), tokens[row].tolist(), strict=True))
        seen = cache.causal(slots)
        for layer in range(2):
            k, v = keys[layer][tokens], values[layer][tokens]  # [R, W, H, D]
            at = slots[..., None, None].expand(-1, -1, HEADS, 1)
            read = cache.update(layer, turned(k, at) if rotated == "when stored" else k, v)
            assert read[0].shape[2] == seen.shape[2]
            if rotated == "when read":
                held = torch.arange(seen.shape[2]).expand(ROWS, -1)
                read = turned(read[0], held[:, None, :, None].expand(-1, HEADS, -1, -1)), read[1]
            q = turned(queries[layer][tokens], at)
            got = F.scaled_dot_product_attention(q.transpose(1, 2), *read, attn_mask=seen[:, None])
            for row in range(ROWS):
                ids = torch.tensor([text[row][place] for place in range(len(text[row]))])
                places = torch.arange(len(ids))[:, None]
                for w, slot in enumerate(slots[row].tolist()):
                    mask = [p <= slot for p in range(len(ids))]
                    for head in range(HEADS):
                        all_keys = turned(keys[layer][ids, head], places)
                        want = slow_attention(q[row, w, head], all_keys, values[layer][ids, head], mask)
                        assert (got[row, head, w] - want).abs().max() < 1e-12
        frontier += torch.randint(0, width + 1, (ROWS,), generator=generator) if width > 1 else 1
    assert frontier.min() > 8
    assert cache.nbytes == size and [buffer.data_ptr() for buffer in cache.buffers()] == where


def test_a_run_is_found_where_all_rows_write_the_same_consecutive_places():
    assert common_run(torch.tensor([[4, 5, 6]] * 2)) == slice(4, 7)
    assert common_run(torch.tensor([[0]])) == slice(0, 1)
    others = [[4, 5, 6], [5, 6, 7]], [[4, 6, 7]] * 2, [[6, 5, 4]], [[3, 3]]
    assert [common_run(torch.tensor(slots)) for slots in others] == [None] * 4
    assert common_run(torch.zeros(2, 0, dtype=torch.long)) is None


@pytest.mark.parametrize("slots", [[[3, 4], [3, 4]], [[3, 4], [4, 5]], [[4, 3], [4, 3]]])
def test_a_run_is_written_as_single_places_are(slots):
    cache = StaticCache.allocate(LIKE, (1, 2, HEADS, 6, DIM))
    keys, values = random(2, 2, HEADS, DIM, seed=1), random(2, 2, HEADS, DIM, seed=2)
    cache.causal(torch.tensor(slots))
    cache.update(0, keys, values)
    for row in range(2):
        for place in range(6):
            for held, new in ((cache.keys, keys), (cache.values, values)):
                fed = slots[row].index(place) if place in slots[row] else None
                expected = torch.zeros(HEADS, DIM, dtype=LIKE.dtype) if fed is None else new[row, fed]
                assert torch.equal(held[0, row, :, place], expected)


def test_static_slots_are_copied_and_rows_selected():
    cache = StaticCache.allocate(LIKE, (3, ROWS, HEADS, 6, DIM))
    before = random(2, 3, ROWS, 6, HEADS, DIM)
    cache.at(torch.arange(6).expand(ROWS, -1), 6)
    for layer in range(3):
        keys, values = cache.update(layer, *before[:, layer])
        assert keys.untyped_storage().data_ptr() == cache.keys.untyped_storage().data_ptr()
        assert torch.equal(keys, before[0, layer].transpose(1, 2))
        assert torch.equal(values, before[1, layer].transpose(1, 2))
    cache.copy(torch.tensor([[4, 5], [3, 3]]), torch.tensor([[0, 1], [0, 5]]))
    want = before.clone()
    want[:, :, 0, 0], want[:, :, 0, 1] = before[:, :, 0, 4], before[:, :, 0, 5]
    want[:, :, 1, 0] = want[:, :, 1, 5] = before[:, :, 1, 3]
    assert torch.equal(torch.stack(cache.buffers()), want.transpose(3, 4))
    assert cache.num_slots == 6 and cache.nbytes == want.nbytes
    cache.select(torch.tensor([1, 0, 1]))
    assert torch.equal(torch.stack(cache.buffers()), want[:, :, [1, 0, 1]].transpose(3, 4))


# -- what is seen ------------------------------------------------------------------------------------------------------


def test_masks(monkeypatch):
    slots = torch.tensor([[0, 1, 4], [2, 3, 3]])
    for fixed, size in [(False, 5), (True, 9)]:
        monkeypatch.setattr(core_cache, "on_host", lambda tensor, fixed=fixed: not fixed)
        seen = seen_up_to(slots, 9)
        assert seen.tolist() == [[[p <= s for p in range(size)] for s in row] for row in slots.tolist()]
    visible = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    tree = seen_in_tree(slots, visible, 5)
    assert torch.equal(tree[..., 5:], visible)
    assert tree[..., :5].tolist() == [[[False] * 5] * 3, [[True, True, False, False, False]] * 3]
    some = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    order = seen_in_order(torch.tensor([[4, 0, 6], [1, 2, 5]]), some, 2)
    for row, own in enumerate([[4, 0, 6], [1, 2, 5]]):
        for w in range(3):
            want = {p for p in range(5) if some[row, w, p]} | {own[w]}
            assert set(order[row, w].nonzero()[:, 0].tolist()) == want


# -- cut to a budget ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_evicted_keys_take_values_and_positions_along(shared):
    """Blocks of a clip, keys stored before the rotary embedding, a sink that is moved closer after every eviction.

    A straight line knows all keys there ever were; each head has a mask over them and a position for each.
    """
    size, sink, recent, budget, blocks = 3, 2, 3, 7, 8
    groups = 1 if shared else HEADS
    cache = EvictingCache(2)
    queries, keys, values = (random(2, ROWS, HEADS, blocks * size, DIM, seed=seed) for seed in (1, 2, 3))
    index = torch.arange(blocks * size)
    clip = torch.stack([index // size, index % size, index % 2], -1)  # frame, row, column
    kept = [[[[] for _ in range(HEADS)] for _ in range(ROWS)] for _ in range(2)]  # [layer][row][head]: tokens
    # [layers, R, H, N, 3], what the straight line turns by
    places = clip.double().repeat(2, ROWS, HEADS, 1, 1)

    def straight(layer: int, block: int) -> Tensor:
        """What the block's queries read, [R, H, size, D]."""
        own = list(range(block * size, (block + 1) * size))
        out = torch.zeros(ROWS, HEADS, size, DIM, dtype=torch.float64)
        for row in range(ROWS):
            for head in range(HEADS):
                at = places[layer, row, head]
                all_keys = turned(keys[layer, row, head], at)
                mask = [token in kept[layer][row][head] + own for token in range(blocks * size)]
                for w, token in enumerate(own):
                    query = turned(queries[layer, row, head, token], at[token])
                    out[row, head, w] = slow_attention(query, all_keys, values[layer, row, head], mask)
        return out

    def read(layer: int, block: int, held: KeyValues) -> tuple[Tensor, Tensor]:
        """The same from a cache, and the turned queries."""
        assert held.positions is not None
        own = slice(block * size, (block + 1) * size)
        q = turned(queries[layer, :, :, own], clip[own].expand(ROWS, HEADS, -1, -1))
        k = turned(held.keys, held.positions.expand(-1, HEADS, -1, -1))
        return F.scaled_dot_product_attention(q, k, held.values), q

    most = 0
    for block in range(blocks):
        own = slice(block * size, (block + 1) * size)
        for layer in range(2):
            positions = clip[own].expand(ROWS, 1, -1, -1)
            new = KeyValues(keys[layer, :, :, own], values[layer, :, :, own], positions)
            noisy = KeyValues(new.keys * 2, -new.values, positions)
            cache.joined(layer, noisy)  # a block that is not final yet leaves nothing behind
            before = read(layer, block, cache.joined(layer, new))[0]
            held = cache.append(layer, new)
            assert held.positions is not None and held is cache.layers[layer]
            got, q = read(layer, block, held)
            assert torch.equal(before, got)
            assert (got - straight(layer, block)).abs().max() < 1e-12
            count = held.keys.shape[2]
            most = max(most, count)
            scores = q.sum(2)[:, :, None] @ turned(held.keys, held.positions.expand(-1, HEADS, -1, -1)).mT
            scores = scores[:, :, 0].sum(1, keepdim=True) if shared else scores[:, :, 0]
            cache.evict(layer, scores, budget, sink=sink, recent=recent)
            moved = 0
            for row in range(ROWS):
                for head in range(HEADS):
                    tokens = kept[layer][row][head] + list(range(block * size, (block + 1) * size))
                    if count > budget:
                        mine = scores[row, head % groups].tolist()
                        between = sorted(range(sink, count - recent), key=lambda p: -mine[p])
                        stay = {
                            *range(sink),
                            *between[: budget - sink - recent],
                            *range(count - recent, count),
                        }
                        tokens = [tokens[p] for p in sorted(stay)]
                        moved = 2
                    kept[layer][row][head] = tokens
                    places[layer, row, head, tokens[:sink], 0] += moved
            held = cache.layers[layer]
            assert held is not None and held.positions is not None
            held.positions[:, :, :sink, 0] += moved
            assert held.keys.shape[2] == held.values.shape[2] == held.positions.shape[2] == min(count, budget)
    assert most == budget + size
    assert all(part.shape[2] == budget for part in cache.buffers())


def test_evicting_caches_count_select_and_drop():
    cache = EvictingCache(3)
    keys, values = random(ROWS, HEADS, 4, DIM), random(ROWS, HEADS, 4, DIM, seed=1)
    positions = torch.arange(4)[:, None].expand(ROWS, 1, -1, -1)
    whole = torch.randn(ROWS, HEADS, 9, DIM)
    cache.append(0, KeyValues(whole[:, :, :2], whole[:, :, 2:4]))
    cache.append(2, KeyValues(keys, values, positions))
    assert cache.nbytes == 2 * ROWS * HEADS * 2 * DIM * 4 + 2 * keys.nbytes + ROWS * 4 * 8
    # Not a view of `whole`.
    assert sum(part.untyped_storage().nbytes() for part in cache.buffers()) == cache.nbytes
    order = torch.tensor([[[3, 1], [0, 2]], [[1, 0], [2, 3]]])
    cache.keep(2, order)
    held = cache.layers[2]
    assert held is not None and held.positions is not None
    for row in range(ROWS):
        for head in range(HEADS):
            at = order[row, head]
            assert torch.equal(held.keys[row, head], keys[row, head, at])
            assert torch.equal(held.values[row, head], values[row, head, at])
            assert torch.equal(held.positions[row, head, :, 0], at)
    cache.append(2, KeyValues(keys, values, positions))  # heads that differ, and new ones that do not
    cache.select(torch.tensor([1]))
    held = cache.layers[2]
    assert held is not None and held.positions is not None
    assert held.positions[0, :, :, 0].tolist() == [[1, 0, 0, 1, 2, 3], [2, 3, 0, 1, 2, 3]]
    assert torch.equal(held.keys[0, :, 2:], keys[1]) and torch.equal(held.values[0, :, 2:], values[1])
    cache.drop(2)
    assert cache.layers[1:] == [None, None] and len(cache.buffers()) == 2


def test_what_an_eviction_keeps():
    cache = EvictingCache(1)
    cache.append(0, KeyValues(torch.arange(6.0)[None, None, :, None], torch.zeros(1, 1, 6, 1)))
    scores = torch.tensor([[[9.0, 1.0, 5.0, 5.0, 2.0, -9.0]]])
    assert largest(scores, 3).tolist() == [[[0, 2, 3]]]
    assert largest(torch.zeros(4), 2).tolist() == [0, 1]
    cache.evict(0, scores, 6)
    cache.evict(0, scores, 4, sink=2, recent=1)
    held = cache.layers[0]
    assert held is not None and held.keys.flatten().tolist() == [0, 1, 2, 5]
    for options in (dict(budget=2, sink=2, recent=1), dict(budget=0), dict(budget=3, sink=-1)):
        refuses(ValueError, f"budget={options['budget']}, sink=.*room", cache.evict, 0, scores, **options)
