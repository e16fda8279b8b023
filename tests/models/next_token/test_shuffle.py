"""Token-Shuffle: what calls give, beside the whole computation written out, and what the model refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.llamagen import make
from tests.helpers.refusals import refuses
from tests.models.next_token import straight
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.blocks import BlockJacobiSampler, Blocks
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

VOCAB, CLASSES, LABELS = 12, 7, torch.tensor([3, 6])
GUIDED = TokenLaw(guidance_scale=1.7, temperature=0.8)


def tiny(order: str = "blocks2", side: int = 6, **changes: Any) -> Any:
    settings = dict(dim=32, vocab_size=VOCAB, num_classes=CLASSES, caption_dim=None, prefix_length=1)
    return make(grid_size=side, order=order, zero_prefix_keys=False, **(settings | changes))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def straight_line(weights: dict[str, Tensor], label: int, tokens: Tensor, s: int) -> Tensor:
    """Logits [side, side, V] of one picture [side, side], in one pass: class, then every block but the last.

    Written token by token: the block at (i, j) holds the tokens at (s i + a, s j + b), and is fed at (s i, s j).
    """
    side, dim = len(tokens), weights["tok_embeddings.weight"].shape[1]
    places = [(i, j) for i in range(0, side, s) for j in range(0, side, s)]
    rows = [weights["cls_embedding.embedding_table.weight"][label]]
    for i, j in places[:-1]:
        narrow = [
            weights["compress.weight"] @ weights["tok_embeddings.weight"][tokens[i + a, j + b]]
            for a in range(s)
            for b in range(s)
        ]
        rows.append(mlps(weights, "shuffle", torch.cat(narrow)))
    x = torch.stack(rows)
    lines, columns = torch.tensor([(0, 0), *places[:-1]]).T  # words do not turn
    turn = straight.turns(lines, columns, dim // 2)[:, None]
    mask = torch.ones(len(x), len(x)).tril().bool()
    for index in range(2):
        x = straight.layer(weights, index, x, mask, turn)
    logits = torch.zeros(side, side, VOCAB, dtype=torch.float64)
    for (i, j), row in zip(places, straight.norm(weights, x, "norm"), strict=True):
        parts = mlps(weights, "unshuffle", row).chunk(s * s)
        for r, part in enumerate(parts):
            logits[i + r // s, j + r % s] = weights["output.weight"] @ (weights["expand.weight"] @ part)
    return logits


def mlps(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    for index in range(2):
        x = x + weights[f"{name}.{index}.fc2.weight"] @ gelu(weights[f"{name}.{index}.fc1.weight"] @ x)
    return x


def expected(model: Any, tokens: Tensor) -> Tensor:
    """`straight_line` of a batch [B, L], conditional rows, then unconditional ones: [2B, L, V]."""
    side, weights = model.grid.width, model.state_dict()
    rows = zip([*LABELS.tolist(), CLASSES, CLASSES], tokens.repeat(2, 1), strict=True)
    drawn = [straight_line(weights, label, row.view(side, side), model.block_side) for label, row in rows]
    return torch.stack(drawn).flatten(1, 2)


def scores(model: Any, tokens: Tensor, window: int) -> Tensor:
    """Logits [2B, L, V] of a batch of pictures, fed `window` blocks a call."""
    served = Blocks(model)
    state = served.prefill(LABELS, batch_size=2, guided=True, window=window)
    parts, count = [state.logits[:, None]], len(served.slots)
    for start in range(0, count - 1, window):
        steps = torch.arange(start, min(start + window, count - 1)).expand(2, -1)
        columns = tokens[:, served.slots[steps[0]]]  # [B, W, K]
        served(state, (columns + 1) % VOCAB, steps)  # a draft that is rejected, and written again
        parts.append(served(state, columns, steps))
    logits = torch.cat(parts, 1).flatten(1, 2)
    return logits[:, served.slots.flatten().argsort()]


@pytest.mark.parametrize(("order", "side"), [("blocks2", 6), ("blocks4", 8)])
def test_calls_of_every_width_and_one_pass_compute_what_is_written_out(order, side):
    model = tiny(order, side)
    tokens = torch.randint(VOCAB, (2, side * side), generator=torch.Generator().manual_seed(1))
    want = expected(model, tokens)
    for window in (1, 2, 5, 64):
        assert float((scores(model, tokens, window) - want).abs().max()) < 1e-12 * float(want.abs().max())
    passed = model.teacher_forced(tokens, LABELS)[:, model.block_slots().flatten().argsort()]
    assert float((passed - want[:2]).detach().abs().max()) < 1e-12 * float(want.abs().max())


@pytest.mark.parametrize("law", [TokenLaw(), GUIDED])
@pytest.mark.parametrize("window", [1, 2, 3, 64])
def test_jacobi_draws_the_tokens_of_one_block_a_call(law, window):
    request: dict[str, Any] = dict(law=law, batch_size=2)
    model = tiny()
    plain = OrderedSampler()(model, LABELS, generator=torch.Generator().manual_seed(5), **request)
    lengths: list[Tensor] = []
    fast = BlockJacobiSampler(window)(
        model,
        LABELS,
        generator=torch.Generator().manual_seed(5),
        callback=lambda call, length: lengths.append(length),
        **request,
    )
    assert torch.equal(fast.tokens, plain.tokens) and fast.trace.identical
    assert (plain.trace.target_calls == 9).all() and (fast.trace.target_calls <= 9).all()
    assert (lengths[0] == 4).all() and (lengths[-1] == 36).all()
    of_blocks = fast.trace.commit_call[:, model.block_slots()]  # a block is committed at once, in order
    assert (of_blocks == of_blocks[..., :1]).all() and (of_blocks[:, 1:, 0] >= of_blocks[:, :-1, 0]).all()
    if window == 1:
        assert torch.equal(fast.trace.commit_call, plain.trace.commit_call)
    assert fast.trace.tokens_per_call.mean() >= 4


def test_what_does_not_fit_is_refused():
    refuses(ValueError, "2 x 2.*grid_size=5.*dim=32.*grid_size", tiny, side=5)
    refuses(ValueError, "4 x 4.*grid_size=8.*dim=24", tiny, "blocks4", 8, dim=24)
    model = tiny()
    with pytest.raises(ValueError, match="'blocks2'.*OrderedSampler"):
        SpeculativeJacobiSampler(4)(model, LABELS, law=TokenLaw(), batch_size=2)
    with pytest.raises(ValueError, match="'raster'"):
        BlockJacobiSampler()(tiny("raster"), LABELS, law=TokenLaw(), batch_size=2)
    with pytest.raises(ValueError, match="guidance_until=8"):
        BlockJacobiSampler()(model, LABELS, law=TokenLaw(2.0, guidance_until=8), batch_size=2)
    state, some = model.prefill(LABELS, batch_size=2, guided=False, window=8), torch.zeros(2, 3).long()
    seen, answers = torch.zeros(2, 3, 36, dtype=torch.bool), torch.zeros(1, 1).long()
    refuses(ValueError, "3 tokens.*4", model, state, some, some, seen=seen, answers=answers)
