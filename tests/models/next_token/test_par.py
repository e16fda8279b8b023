"""PAR's official layout: what a file gives, beside its own forward over the reordered sequence, written out."""

import math

import pytest
import torch
from torch import Tensor

from tests.helpers.llamagen import on_meta
from tests.helpers.llamagen_releases import par_shapes
from tests.helpers.nar import scores
from tests.helpers.official import random_weights
from tests.helpers.refusals import refuses
from tests.models.next_token import straight
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_checkpoint import load_transformer, recognise
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.orders.tables import order_of

VOCAB, CLASSES = 12, 7
LABELS = torch.tensor([3, 6])
# Regions, tokens per side.
CASES = [
    pytest.param(4, 4, id="4 regions"),
    pytest.param(4, 6, id="of 3 x 3"),
    pytest.param(16, 8, id="16 regions"),
]


def file_of(tmp_path, count: int, side: int) -> tuple[dict[str, Tensor], LlamaGenTransformer]:
    weights = random_weights(par_shapes(2, 16, count, vocab=VOCAB, classes=CLASSES), torch.float64)
    torch.save({"model": weights}, tmp_path / "par.pt")
    return weights, load_transformer(tmp_path / "par.pt", image_size=2 * side, patch_size=2)


def reordered(count: int, side: int) -> Tensor:
    """The slots in the order of the release: a place of a region, in all regions, then the next place."""
    root = math.isqrt(count)
    slots = torch.arange(side * side).view(root, side // root, root, side // root)
    return slots.permute(1, 3, 0, 2).flatten()


def straight_line(weights: dict[str, Tensor], label: int, tokens: Tensor, count: int) -> Tensor:
    """Logits [L, V] of all slots of one picture of tokens [L], in one pass over the reordered sequence.

    The sequence: class, first tokens, learned tokens, all other tokens. Position p predicts the p-th token. From the
    last first token on, groups of `count` positions see all of themselves. Two attention heads.
    """
    length = len(tokens)
    side, order = math.isqrt(length), reordered(count, math.isqrt(length))
    sequence = weights["tok_embeddings.weight"][tokens[order]]
    learned = weights["spe_tok_embeddings.special_embeddings.weight"]
    start = weights["cls_embedding.embedding_table.weight"][[label]]
    x = torch.cat([start, sequence[:count], learned, sequence[count:]])
    size = x.shape[1] // 2
    group = torch.arange(len(x))
    group[count:] = count + (group[count:] - count) // count
    mask = group[:, None] >= group
    turn = straight.turns(order // side, order % side, size)
    turn = torch.cat(
        [torch.zeros(1, size // 2), turn[:count], torch.zeros(count - 1, size // 2), turn[count:]]
    )[:, None]

    for layer in range(2):
        x = straight.layer(weights, layer, x, mask, turn)
    logits = straight.norm(weights, x, "norm")[:length] @ weights["output.weight"].T
    return logits[order.argsort()]


def expected(weights: dict[str, Tensor], tokens: Tensor, count: int) -> Tensor:
    """`straight_line` of a batch, conditional rows, then unconditional ones: [2B, L, V]."""
    labels = [*LABELS.tolist(), *[CLASSES] * len(tokens)]
    rows = zip(labels, tokens.repeat(2, 1), strict=True)
    return torch.stack([straight_line(weights, label, row, count) for label, row in rows])


@pytest.mark.parametrize(("count", "side"), CASES)
def test_one_pass_and_step_by_step_compute_what_the_layout_says(tmp_path, count, side):
    weights, model = file_of(tmp_path, count, side)
    assert (model.trained_order, model.learned_tokens) == (f"par{count}", count - 1)
    tokens = torch.randint(VOCAB, (2, side * side), generator=torch.Generator().manual_seed(1))
    want, order = expected(weights, tokens, count), order_of(model.trained_order, model.grid)
    learned = (VOCAB + torch.arange(count - 1)).expand(2, -1)
    for steps in (order.steps[1:], (order.joined(),)):
        found = scores(model, LABELS, torch.cat([tokens, learned], 1), steps)[:, : side * side]
        assert float((found - want).abs().max()) < 1e-12 * float(want.abs().max())


@pytest.mark.parametrize(("count", "side"), CASES)
def test_the_sampler_draws_group_by_group(tmp_path, count, side):
    """The likeliest tokens, found by the pass over the whole picture, group by group."""
    weights, model = file_of(tmp_path, count, side)
    result = OrderedSampler()(model, LABELS, law=TokenLaw(guidance_scale=1.5, top_k=1), batch_size=2)
    rank = reordered(count, side).argsort()
    step = torch.where(rank < count, rank, count - 1 + rank // count)
    tokens = torch.zeros(2, side * side, dtype=torch.long)
    for number in range(int(step.max()) + 1):
        conditional, other = expected(weights, tokens, count).chunk(2)
        tokens = (other + 1.5 * (conditional - other)).argmax(-1).where(step == number, tokens)
    assert torch.equal(result.tokens, tokens)
    assert torch.equal(result.trace.commit_call, step.expand(2, -1))
    assert (result.trace.target_calls == count + side * side // count - 1).all() and result.trace.lossless


def test_another_number_of_regions_is_refused():
    with pytest.raises(ValueError, match=r"LlamaGen.*1.*spe_tok_embeddings\.special_embeddings\.weight"):
        recognise(on_meta(par_shapes(12, 768, 9, classes=1000)))


def test_a_picture_whose_regions_do_not_fit_is_refused(tmp_path):
    _, model = file_of(tmp_path, 4, 5)
    refuses(ValueError, "4.*1 x 5 x 5", OrderedSampler(), model, LABELS, law=TokenLaw(), batch_size=2)
