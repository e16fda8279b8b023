"""What all adapters share: windows, rollback, trees, any order, batches. Each family has tests of its own."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.cached_decoders import case, rows_of, text
from visual_spec.models.core import cache as core_cache
from visual_spec.models.core.transformers_cache import ImagePrompt, SlotCache
from visual_spec.models.next_token import cached_decoder
from visual_spec.models.next_token.cached_decoder import CachedDecoder
from visual_spec.samplers.core.history import RepetitionPenalty
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.zipar import ZipARSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

CASES = ["janus", "chameleon", "lumina", "emu3", "glm small", "glm large"]
GUIDED = [(name, name in CASES[:4]) for name in CASES]  # guidance covers the conditional rows as well


def in_fixed_shapes_too(cases: list[tuple]) -> list[tuple]:
    """On a GPU nothing may be read back, so shapes are those of the worst case. The same code can run here."""
    return [(*case, False) for case in cases] + [
        (*case, True) for case in cases if case[0] in ("lumina", "emu3")
    ]


@pytest.fixture
def shapes(request, monkeypatch) -> None:
    if request.node.callspec.params["fixed"]:
        for module in (cached_decoder, core_cache):
            monkeypatch.setattr(module, "on_host", lambda tensor: False)


def straight(model: CachedDecoder, condition: ImagePrompt, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [R, L, V] that predict every slot: one forward of the bare decoder over each row's whole sequence,
    without a cache, a mask or padding, and with the whole head."""
    logits = []
    for prompt in [condition.prompt, condition.unconditional]:
        if prompt is None:
            continue
        positions, start = prompt.where
        for row in range(len(prompt.ids)):
            ids = prompt.ids[row, prompt.mask[row]][None]
            own = positions[..., row, :][..., prompt.mask[row]]
            picture = model.embed(tokens[row : row + 1])
            slots = torch.arange(model.grid.num_tokens)
            after = slots
            if model.row_end is not None:
                end = model.table(torch.tensor([[model.row_end]]))
                lines = picture.split(model.grid.width, 1)
                picture = torch.cat([part for line in lines for part in (line, end)], 1)
                after = slots + slots // model.grid.width
            place = torch.arange(picture.shape[1])
            if positions.ndim == 3:
                width = model.grid.width
                grid = torch.stack([torch.zeros_like(place), place // width, place % width])
                position = torch.cat([own, start[row] + grid], -1)[:, None]
            else:
                position = torch.cat([own, len(ids[0]) + place])[None]
            embedded = torch.cat([model.table(ids), picture], 1)
            hidden = model.decoder(inputs_embeds=embedded, position_ids=position).last_hidden_state[0]
            whole = model.head(hidden[ids.shape[1] - 1 + after])
            logits.append(whole[:, model.image_rows])
    return torch.stack(logits)


@pytest.mark.parametrize(("name", "guided", "fixed"), in_fixed_shapes_too([*GUIDED, ("janus", False)]))
@torch.no_grad()
def test_one_wide_call_and_single_calls_equal_a_straight_forward(name, guided, fixed, shapes):
    model, condition = case(name)
    tokens, count = text(model), model.grid.num_tokens
    want = straight(model, condition if guided else ImagePrompt(condition.prompt), tokens)
    slots = torch.arange(count).expand(4, -1)
    state = model.prefill(condition, batch_size=4, guided=guided, window=count)
    assert (state.logits - want[:, 0]).abs().max() < 1e-10
    wide = model(state, tokens, slots)[:, :-1]
    assert (wide - want[:, 1:]).abs().max() < 1e-10
    state = model.prefill(condition, batch_size=4, guided=guided, window=1)
    for slot in range(count - 1):
        single = model(state, tokens[:, slot : slot + 1], slots[:, slot : slot + 1])
        assert (single[:, 0] - want[:, slot + 1]).abs().max() < 1e-10
    assert want.std(1).mean() > 0.1  # the laws differ from slot to slot


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_wide_calls_in_float32(name):
    """In float32 a wide product rounds unlike a narrow one; the other tests' large weights would make that grow."""
    model, condition = case(name, torch.float32)
    for parameter in model.decoder.parameters():
        parameter.mul_(0.1 if parameter.ndim > 1 else 1)
    tokens, count = text(model), model.grid.num_tokens
    slots = torch.arange(count).expand(4, -1)
    wide = model(model.prefill(condition, batch_size=4, guided=False, window=count), tokens, slots)
    state = model.prefill(condition, batch_size=4, guided=False, window=1)
    for slot in range(count):
        single = model(state, tokens[:, slot : slot + 1], slots[:, slot : slot + 1])[:, 0]
        assert ((single - wide[:, slot]).norm(dim=-1) / wide[:, slot].norm(dim=-1)).max() < 1e-6


@pytest.mark.parametrize(("name", "fixed"), in_fixed_shapes_too([(name,) for name in CASES]))
@torch.no_grad()
def test_stale_slots_do_not_leak(name, fixed, shapes):
    """Rows at their own pace, windows that run ahead with wrong tokens and past the grid, and poisoned scratch."""
    model, condition = case(name)
    tokens, count = text(model), model.grid.num_tokens
    want = straight(model, ImagePrompt(condition.prompt), tokens)
    state = model.prefill(condition, batch_size=4, guided=False, window=5)
    prompt = state.prompt_mask.shape[1]
    for layer in state.cache.layers:
        layer.keys[:, :, prompt:] = 1e3  # pyright: ignore
        layer.values[:, :, prompt:] = 1e3  # pyright: ignore
    committed = torch.zeros(4, dtype=torch.long)
    noise = torch.Generator().manual_seed(1)
    while (committed < count).any():
        slots = committed[:, None] + torch.arange(5)
        fed = torch.randint(0, model.vocab_size, (4, 5), generator=noise)  # wrong drafts
        right = torch.randint(1, 5, (4,), generator=noise)  # of which some are right
        for row in range(4):
            for column in range(int(right[row])):
                if slots[row, column] < count:
                    fed[row, column] = tokens[row, slots[row, column]]
        logits = model(state, fed, slots)
        for row in range(4):
            for column in range(int(right[row])):
                slot = int(slots[row, column])
                if slot + 1 < count:
                    assert (logits[row, column] - want[row, slot + 1]).abs().max() < 1e-10
        committed = (committed + right).clamp(max=count)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_eager_attention_is_the_same(name):
    model, condition = case(name)
    tokens, slots = text(model), torch.arange(model.grid.num_tokens).expand(4, -1)
    want = model(model.prefill(condition, batch_size=4, guided=False, window=99), tokens, slots)
    config = model.decoder.config
    try:
        config._attn_implementation = "eager"
        got = model(model.prefill(condition, batch_size=4, guided=False, window=99), tokens, slots)
    finally:
        config._attn_implementation = "sdpa"
    assert (got - want).abs().max() < 1e-4  # its softmax is float32 in any model


@pytest.mark.parametrize(("name", "guided"), [*GUIDED, ("janus", False)])
def test_identical_samplers_return_the_autoregressive_tokens_in_any_batch(name, guided):
    model, condition = case(name)
    law = TokenLaw(guidance_scale=2.0 if guided else 1.0, temperature=0.8, top_k=12)

    def draw(sampler, rows):
        generators = [torch.Generator().manual_seed(10 + row) for row in rows]
        return sampler(
            model, rows_of(condition, rows), law=law, generator=generators, batch_size=len(rows)
        ).tokens

    want = draw(AutoregressiveSampler(), [0, 1, 2, 3])
    for window in (3, 8):
        assert torch.equal(draw(SpeculativeJacobiSampler(window), [0, 1, 2, 3]), want)
    for row in range(4):
        assert torch.equal(draw(SpeculativeJacobiSampler(4), [row])[0], want[row])
    assert torch.equal(draw(AutoregressiveSampler(), [3])[0], want[3])
    for coupling in ("independent", "maximal"):
        sampler = SpeculativeJacobiSampler(4, coupling, "exact")
        assert torch.equal(draw(sampler, [2, 0]), draw(sampler, [0, 1, 2, 3])[[2, 0]])


@pytest.mark.parametrize(("name", "guided"), GUIDED)
def test_a_law_that_reads_the_tokens_before_a_slot_is_that_of_straight_logits(name, guided):
    """Greedy, with a penalty on tokens that are there already: every token is the best of a straight forward."""
    model, condition = case(name)
    scale, penalty = 2.0 if guided else 1.0, 1.8
    law = TokenLaw(scale, temperature=0.0, history=(RepetitionPenalty(penalty),))
    for sampler in (AutoregressiveSampler(), SpeculativeJacobiSampler(4)):
        tokens = sampler(model, condition, law=law, batch_size=4).tokens
        logits = straight(model, condition if guided else ImagePrompt(condition.prompt, None), tokens)
        if guided:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + scale * (conditional - unconditional)
        for row, slot in itertools.product(range(4), range(tokens.shape[1])):
            scores = logits[row, slot]
            for token in set(tokens[row, :slot].tolist()):
                scores[token] *= penalty if scores[token] < 0 else 1 / penalty
            assert scores.argmax() == tokens[row, slot]
        assert not torch.equal(
            sampler(model, condition, law=replace(law, history=()), batch_size=4).tokens, tokens
        )


PARENTS = [-1, 0, 0, 1, 1, 2, 5]  # two branches under the root; node 6 is the deepest


def ancestry(node: int) -> list[int]:
    return [] if node < 0 else [*ancestry(PARENTS[node]), node]


@pytest.mark.parametrize(
    ("name", "guided", "first", "fixed"),
    in_fixed_shapes_too(
        [(name, guided, (4, 2)) for name, guided in GUIDED if name != "glm small"]
        # With row ends it matters where the roots stand: inside a row, before its end, or at it.
        + [(name, False, first) for name in ("lumina", "emu3") for first in [(3, 6), (2, 3)]]
    ),
)
@torch.no_grad()
def test_tree_calls_score_chains_and_keep_caches_them(name, guided, first, fixed, shapes):
    model, condition = case(name)
    condition, size = rows_of(condition, [0, 1]), len(PARENTS)
    tokens = text(model, 2)
    lengths = torch.tensor(first)
    tree = torch.randint(0, model.vocab_size, (2, size), generator=torch.Generator().manual_seed(4))
    tree[:, 0] = tokens.gather(1, lengths[:, None] - 1)[:, 0]
    depth = torch.tensor([len(ancestry(node)) - 1 for node in range(size)])
    slots = lengths[:, None] - 1 + depth
    visible = torch.tensor([[m in ancestry(n) for m in range(size)] for n in range(size)]).expand(2, -1, -1)

    def chain(row: int, path: list[int]) -> torch.Tensor:
        whole = tokens[row : row + 1].clone()
        start = int(lengths[row]) - 1
        for step, node in enumerate(path):
            whole[0, start + step] = tree[row, node]
        want = straight(model, rows_of(condition, [row]), whole)
        return want[: 2 if guided else 1, start + len(path)]

    state = model.prefill(condition, batch_size=2, guided=guided, window=size)
    model(state, tokens[:, :6], torch.arange(6).expand(2, -1))  # rows get stale slots
    logits = model(state, tree, slots, visible)
    for row in range(2):
        for node in range(size):
            assert (logits[row::2, node] - chain(row, ancestry(node))).abs().max() < 1e-10

    nodes = torch.tensor([[0, 2, 5, 6], [0, 1, 0, 0]])
    model.keep(state, nodes, slots.gather(1, nodes))
    after = model(state, torch.tensor([[7], [3]]), slots.gather(1, nodes[:, :1]) + torch.tensor([[4], [2]]))
    for row, path in enumerate([[0, 2, 5, 6], [0, 1]]):
        whole, start = tokens[row : row + 1].clone(), int(lengths[row]) - 1
        for step, node in enumerate(path):
            whole[0, start + step] = tree[row, node]
        whole[0, start + len(path)] = [7, 3][row]
        want = straight(model, rows_of(condition, [row]), whole)
        if start + len(path) + 1 < model.grid.num_tokens:
            assert (after[row::2, 0] - want[: 2 if guided else 1, start + len(path) + 1]).abs().max() < 1e-10


@pytest.mark.parametrize(("name", "guided", "fixed"), in_fixed_shapes_too([*GUIDED, ("janus", False)]))
@torch.no_grad()
def test_calls_in_any_order_that_see_all_before_them_equal_raster_calls(name, guided, fixed, shapes):
    model, condition = case(name)
    tokens, count = text(model), model.grid.num_tokens
    want = straight(model, condition if guided else ImagePrompt(condition.prompt), tokens)
    before = torch.arange(count) < torch.arange(count)[:, None]
    turned = torch.randperm(count, generator=torch.Generator().manual_seed(2))
    state = model.prefill(condition, batch_size=4, guided=guided, window=count)
    # In raster order, shuffled within a call, beside a column that idles.
    for part in torch.arange(count).split(3):
        order = turned[torch.isin(turned, part)]
        slots = torch.cat([order, torch.tensor([count + 1])]).expand(4, -1)
        seen = torch.cat([before[order], torch.zeros(1, count, dtype=torch.bool)]).expand(4, -1, -1)
        fed = torch.cat([tokens[:, order], tokens[:, :1]], 1)
        logits = model(state, fed, slots, seen=seen)
        for column, slot in enumerate(order.tolist()):
            if slot + 1 < count:
                assert (logits[:, column] - want[:, slot + 1]).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["janus", "lumina", "emu3"])
def test_row_parallel_decoding_runs_and_is_raster_with_the_full_lead(name):
    model, condition = case(name)
    law = TokenLaw(temperature=0.0)
    want = AutoregressiveSampler()(model, condition, law=law, batch_size=4).tokens
    full = ZipARSampler(model.grid.width)(model, condition, law=law, batch_size=4)
    assert torch.equal(full.tokens, want)
    fast = ZipARSampler(1)(model, condition, law=law, batch_size=4)
    assert fast.trace.target_calls.max() < full.trace.target_calls.min()


@torch.no_grad()
def test_what_the_head_read_is_kept_for_drafters():
    for name in CASES:
        model, condition = case(name)
        state = model.prefill(condition, batch_size=4, guided=False, window=4)
        assert torch.equal(state.logits, model.score(state.features)[:, 0])
        logits = model(state, text(model)[:, :4], torch.arange(4).expand(4, -1))
        assert state.features.shape[:2] == (4, 4)
        assert torch.equal(logits, model.score(state.features))


@torch.no_grad()
def test_only_the_heads_image_rows_are_read():
    model, condition = case("chameleon")
    weight = model.head.weight.detach().clone()
    want = model.prefill(condition, batch_size=4, guided=False, window=1).logits
    try:
        model.head.weight.data[:20] = torch.nan
        model.head.weight.data[44:] = torch.nan
        got = model.prefill(condition, batch_size=4, guided=False, window=1).logits
    finally:
        model.head.weight.data = weight
    assert torch.equal(got, want)


@torch.no_grad()
def test_a_head_that_is_more_than_a_matrix_is_called():
    model, condition = case("emu3")
    want = model.prefill(condition, batch_size=4, guided=False, window=1).logits

    class Wrapped(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    plain = model.head
    try:
        model.head = Wrapped(32, 64, bias=False).double()
        model.head.weight = plain.weight
        got = model.prefill(condition, batch_size=4, guided=False, window=1).logits
    finally:
        model.head = plain
    assert (got - want - 1).abs().max() < 1e-12


def test_the_cache_is_a_cache_of_transformers():
    cache = SlotCache(2, 7)
    places = torch.tensor([[5, 0], [1, 2]])
    keys = torch.randn(2, 3, 2, 4)
    cache.at(places, 6)
    read, values = cache.update(keys, -keys, 1)
    assert read.shape == (2, 3, 6, 4) and torch.equal(values, -read)
    assert torch.equal(read[0, :, 5], keys[0, :, 0]) and torch.equal(read[1, :, 2], keys[1, :, 1])
    assert read.count_nonzero() == keys.numel()  # the rest is zero, not uninitialised
    assert cache.get_seq_length() == 0 and cache.get_max_length() == 7 and len(cache) == 2
    assert cache.nbytes == 2 * 2 * 3 * 7 * 4 * 4 == sum(buffer.nbytes for buffer in cache.buffers())
    cache.copy(torch.tensor([[5], [2]]), torch.tensor([[6], [0]]))
    cache.select(torch.tensor([1]))
    layer: Any = cache.layers[1]
    assert layer.keys.shape == (1, 3, 7, 4)
    assert torch.equal(layer.keys[0, :, 0], keys[1, :, 1]) and torch.equal(layer.values, -layer.keys)
