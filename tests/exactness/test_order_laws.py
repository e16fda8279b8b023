"""The law of samples drawn in an order, by enumeration: the product of the laws of its steps, written out by hand."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN, Enumerator
from tests.exactness.enumeration import distance as distance_of
from tests.exactness.regions import total_variation
from tests.helpers.column_laws import with_tries
from tests.helpers.nar import gated, straight_line
from tests.helpers.order_laws import DEFINITIONS, GUIDED, blocks_of_two, made, product_law
from tests.helpers.tabular import TabularModel, TabularOrderModel, TabularState
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders import ordered
from visual_spec.samplers.orders import tables as orders
from visual_spec.samplers.orders.blocks import BlockJacobiSampler
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.orders.zipar import ZipARSampler

CASES = [
    pytest.param("nar", TokenGrid(2, 2), 3, PLAIN, id="nar-2x2"),
    pytest.param("nar", TokenGrid(2, 3), 3, PLAIN, id="nar-2x3"),
    pytest.param("nar", TokenGrid(2, 2), 3, GUIDED, id="nar-2x2-guided"),
    pytest.param("nar", TokenGrid(2, 2, frames=2), 2, PLAIN, id="nar-2x2x2"),
    pytest.param("flashar", TokenGrid(2, 3), 2, PLAIN, id="flashar-2x3"),
    pytest.param("par4", TokenGrid(2, 2), 3, PLAIN, id="par4-2x2"),
    pytest.param("par4", TokenGrid(2, 4), 2, PLAIN, id="par4-2x4"),
    pytest.param("par4", TokenGrid(4, 2), 2, GUIDED, id="par4-4x2-guided"),
    pytest.param("blocks2", TokenGrid(2, 4), 2, PLAIN, id="blocks2-2x4"),
    pytest.param("blocks2", TokenGrid(4, 2), 2, GUIDED, id="blocks2-4x2-guided"),
    pytest.param("blocks2", TokenGrid(2, 2, frames=2), 2, PLAIN, id="blocks2-2x2x2"),
]


def distance(name: str, grid: TokenGrid, vocab_size: int, law: TokenLaw) -> float:
    model = made(name, grid, vocab_size)
    found = Enumerator(OrderedSampler(), model, law)
    want = product_law(model, law, DEFINITIONS[name], law.guided)
    assert float(want.sum()) == pytest.approx(1, abs=1e-10)
    result = found.run()
    assert result.calls == len(orders.order_of(name, grid).steps)
    return distance_of(result, want)


@pytest.mark.parametrize(("name", "grid", "vocab_size", "law"), CASES)
def test_samples_follow_the_product_of_the_step_laws(name, grid, vocab_size, law):
    assert distance(name, grid, vocab_size, law) < 1e-10


class GatedModel(torch.nn.Module):
    """A small FlashAR network with a random gate, as a model whose state holds tokens: each call reads all anew."""

    def __init__(self, side: int, vocab_size: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        sizes: dict[str, Any] = dict(dim=8, num_layers=2, num_heads=2, num_classes=1, order="flashar")
        self.inner = LlamaGenTransformer(vocab_size=vocab_size, grid_size=side, **sizes).double()
        for parameter in self.inner.parameters():
            torch.nn.init.normal_(parameter)
        self.grid, self.vocab_size, self.trained_order = self.inner.grid, vocab_size, "flashar"

    def prefill(self, condition: None, *, batch_size: int, guided: bool, window: int) -> TabularState:
        labels = torch.zeros(batch_size, dtype=torch.long)
        logits = self.inner.prefill(labels, batch_size=batch_size, guided=False, window=1).logits
        tokens = torch.zeros(batch_size, self.grid.num_tokens + window, dtype=torch.long)
        return TabularState(logits, guided=guided, window=window, tokens=tokens, tables=labels)

    @torch.no_grad()
    def forward(
        self,
        state: TabularState,
        tokens: Tensor,
        slots: Tensor,
        *,
        seen: Tensor,
        predicted: Tensor,
        answers: Tensor,
    ) -> Tensor:
        state.tokens.scatter_(1, slots, tokens)
        whole = orders.order_of("flashar", self.grid).joined()
        at = [whole.slots.tolist().index(slot) for slot in slots[0].tolist()]
        assert torch.equal(seen[0], whole.seen[at])
        places = answers.where(answers < 0, torch.tensor(at)[answers.clamp(min=0)] + 1)
        heads = self.inner.teacher_forced_heads(
            state.tokens[:, whole.slots],
            torch.zeros(len(tokens), dtype=torch.long),
            slots=whole.slots,
            seen=whole.seen[:, whole.slots],
            answers=places,
        )
        return self.inner.merge(heads, places)


def gated_law(model: GatedModel) -> Tensor:
    """The probability of every picture: straight lines of its own forward, all slots multiplied."""
    weights = dict(model.inner.state_dict())
    prefix, length = weights["cls_embedding.embedding_table.weight"][[0]], model.grid.num_tokens
    found = []
    for tokens in itertools.product(range(model.vocab_size), repeat=length):
        picture = torch.tensor(tokens)
        logits = straight_line(weights, prefix, torch.ones(1).bool(), picture, gated)  # [L, V]
        found.append(logits.log_softmax(-1)[torch.arange(length), picture].sum().exp())
    return torch.stack(found)


def test_samples_of_a_gated_model_follow_its_law():
    model = GatedModel(2, 3)
    want = gated_law(model)
    assert float(want.sum()) == pytest.approx(1, abs=1e-10)
    found = Enumerator(OrderedSampler(), model).run()
    assert total_variation(found.law, want) < 1e-10 and found.calls == 3
    for parameter in model.inner.hv_gate_mlp.parameters():
        torch.nn.init.zeros_(parameter)  # NAR's mean
    assert total_variation(Enumerator(OrderedSampler(), model).run().law, want) > 1e-2


def test_the_diagonal_of_a_raster_model_has_the_law_of_zipar():
    model = TabularModel(TokenGrid(2, 3), 2, scale=1.5)
    found = Enumerator(OrderedSampler("diagonal", allow_approximate=True), model).run()
    zipar = Enumerator(ZipARSampler(1), model).run()
    assert total_variation(found.law, zipar.law) < 1e-10 and found.calls == zipar.calls == 4
    assert total_variation(found.law, model.law_of_sequences(PLAIN)) > 1e-2


# -- planted bugs ----------------------------------------------------------------------------------------------------


def swapped(order: orders.TokenOrder) -> orders.TokenOrder:
    """Each head answers where the other should."""
    for step in order.steps[1:]:
        object.__setattr__(step, "answers", step.answers.flip(1).where(step.answers.min() >= 0, step.answers))
    return order


def causal(order: orders.TokenOrder) -> orders.TokenOrder:
    """Within a step, a position does not see those after it."""
    for step in order.steps[1:]:
        after = step.slots > step.slots[:, None]  # [W, W]
        object.__setattr__(step, "seen", step.seen.scatter(1, step.slots.expand_as(after), ~after))
    return order


def unmoved(order: orders.TokenOrder) -> orders.TokenOrder:
    """Learned tokens are asked in another order."""
    for step in order.steps[1:]:
        object.__setattr__(step, "answers", step.answers.flip(0))
    return order


@pytest.mark.parametrize(
    ("bug", "name", "grid"),
    [
        (swapped, "nar", TokenGrid(3, 2)),
        (causal, "nar", TokenGrid(2, 3)),
        (unmoved, "par4", TokenGrid(2, 4)),
        (unmoved, "blocks2", TokenGrid(2, 4)),
    ],
)
def test_catches(bug, name, grid, monkeypatch):
    build = orders.ORDERS[name]
    monkeypatch.setitem(orders.ORDERS, name, lambda grid: bug(build(grid)))
    monkeypatch.setattr(ordered, "order_of", orders.order_of.__wrapped__)
    monkeypatch.setattr(ordered, "steps_on", lambda name, grid, device: orders.ORDERS[name](grid).steps)
    assert distance(name, grid, 2, PLAIN) > 1e-3


BLOCK_GRID = TokenGrid(2, 4)
BLOCKS = TabularOrderModel(BLOCK_GRID, 2, "blocks2", first=(0, 1, 4, 5))
ROWS = [
    ("gumbel", "identical", "column"),
    ("gumbel", "exact", "codebook"),
    ("independent", "exact", "codebook"),
    ("maximal", "exact", "column"),
]


def block_distance(law: TokenLaw, sampler: BlockJacobiSampler) -> float:
    found = Enumerator(with_tries(sampler, 1), BLOCKS, law).run()
    want = product_law(BLOCKS, law, blocks_of_two, law.guided)
    assert float(found.law.sum()) == pytest.approx(1, abs=1e-10)
    by_block = want.view([2] * 8).permute(0, 1, 4, 5, 2, 3, 6, 7).flatten()
    return float(total_variation(found.law, by_block))


@pytest.mark.parametrize(("coupling", "acceptance", "unit"), ROWS)
@pytest.mark.parametrize("law", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_every_setting_follows_the_law_of_one_block_a_call(coupling, acceptance, unit, law):
    assert block_distance(law, BlockJacobiSampler(2, coupling, acceptance, unit)) < 1e-10
