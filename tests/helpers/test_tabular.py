import itertools

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw


def prefix_logits(model: TabularModel, table: int, prefix: tuple[int, ...]) -> torch.Tensor:
    index = 0
    for token in prefix[len(prefix) - min(model.order, len(prefix)) :]:
        index = index * model.vocab_size + token
    return model.logits[table, len(prefix), index]


@pytest.mark.parametrize("order", [None, 0, 1, 2])
def test_scores_every_prefix_from_its_table(order):
    model = TabularModel(TokenGrid(2, 2), 3, order=order, conditions=2)
    sequences = torch.tensor(list(itertools.product(range(3), repeat=4)))  # [81, 4]
    condition = torch.arange(81) % 2
    state = model.prefill(condition, batch_size=81, guided=True, window=4)
    slots = torch.arange(4).expand(81, -1)
    logits = model(state, sequences, slots)  # [162, 4, 3]
    assert logits.shape == (162, 4, 3) and state.logits.shape == (162, 3)
    for row, sequence in enumerate(sequences.tolist()):
        for table, at in ((int(condition[row]), row), (2, row + 81)):
            assert torch.equal(state.logits[at], prefix_logits(model, table, ()))
            for column in range(3):
                expected = prefix_logits(model, table, tuple(sequence[: column + 1]))
                assert torch.equal(logits[at, column], expected)
    assert logits.isfinite().all()  # the last column is past the grid


def test_rows_advance_at_their_own_pace_and_slots_are_written_again():
    model = TabularModel(TokenGrid(1, 5), 3)
    state = model.prefill(None, batch_size=2, guided=False, window=3)
    model(state, torch.tensor([[2, 2, 2], [1, 0, 2]]), torch.tensor([[0, 1, 2], [0, 1, 2]]))
    logits = model(state, torch.tensor([[0, 1, 1], [2, 0, 0]]), torch.tensor([[1, 2, 3], [2, 3, 4]]))
    assert torch.equal(logits[0, 1], prefix_logits(model, 0, (2, 0, 1)))
    assert torch.equal(logits[1, 0], prefix_logits(model, 0, (1, 0, 2)))


@pytest.mark.parametrize("order", [None, 1])
@pytest.mark.parametrize("guided", [False, True])
def test_law_of_sequences_is_the_product_of_the_laws(guided, order):
    model = TabularModel(TokenGrid(1, 3), 3, order=order, conditions=2)
    law = TokenLaw(guidance_scale=2.0 if guided else 1.0, top_k=2)
    found = model.law_of_sequences(law, condition=1, guided=guided)
    assert found.sum().item() == pytest.approx(1, abs=1e-14)
    for index, sequence in enumerate(itertools.product(range(3), repeat=3)):
        expected = 1.0
        for slot, token in enumerate(sequence):
            tables = (1, 2) if guided else (1,)
            logits = torch.stack([prefix_logits(model, table, sequence[:slot]) for table in tables])[:, None]
            expected *= law(logits, guided)[0, 0, token].exp().item()
        assert found[index].item() == pytest.approx(expected, abs=1e-15)


def test_tables_are_seeded():
    first, second, other = (TabularModel(TokenGrid(1, 3), 3, seed=seed).logits for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_dependence_is_the_share_of_the_context():
    independent = TabularModel(TokenGrid(1, 4), 3, dependence=0.0).logits
    assert (independent.std(2) < 1e-12).all()
    mixed = TabularModel(TokenGrid(1, 4), 50, order=1, dependence=0.3, scale=2.0).logits
    assert mixed.var(2).mean().item() == pytest.approx(0.3 * 4, rel=0.05)


def test_dtype():
    model = TabularModel(TokenGrid(1, 2), 3, dtype=torch.float32)
    assert model.prefill(None, batch_size=1, guided=False, window=1).logits.dtype == torch.float32


@pytest.mark.parametrize(
    "condition", [torch.tensor([0, 1, 0]), torch.tensor([0.0, 1.0]), torch.tensor([0, 2])]
)
def test_refuses_a_condition_it_has_no_table_for(condition):
    model = TabularModel(TokenGrid(1, 2), 3, conditions=2)
    refuses(ValueError, "condition", model.prefill, condition, batch_size=2, guided=False, window=1)
