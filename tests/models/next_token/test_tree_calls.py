"""Tree calls: a node is scored as a chain of its ancestors would be, and `keep` makes a path the cached text."""

from typing import Any

import pytest
import torch

from tests.helpers.llamagen import make, text_condition
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid

PARENTS = [-1, 0, 0, 1, 1, 2, 5]  # two branches under the root; node 6 is the deepest


def ancestry(node: int) -> list[int]:
    """The path from the root to a node."""
    return [] if node < 0 else [*ancestry(PARENTS[node]), node]


def models() -> list[Any]:
    tabular = TabularModel(TokenGrid(3, 3), 3, order=3, conditions=2)
    return [
        pytest.param(tabular, torch.tensor([1, 0]), id="tabular"),
        pytest.param(make(grid_size=3), text_condition(2, [3, 5]), id="llamagen"),
    ]


@pytest.mark.parametrize(("model", "condition"), models())
@pytest.mark.parametrize("guided", [False, True])
def test_every_node_is_scored_as_its_chain_and_kept_paths_are_cached(model, condition, guided):
    size = len(PARENTS)
    text = torch.randint(0, 3, (2, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([4, 2])  # ragged: row 0 has four committed tokens, row 1 two
    tree = torch.randint(0, 3, (2, size), generator=torch.Generator().manual_seed(1))
    tree[:, 0] = text.gather(1, lengths[:, None] - 1)[:, 0]
    depth = torch.tensor([len(ancestry(node)) - 1 for node in range(size)])
    slots = lengths[:, None] - 1 + depth
    visible = torch.tensor([[m in ancestry(n) for m in range(size)] for n in range(size)]).expand(2, -1, -1)

    def start():
        state = model.prefill(condition, batch_size=2, guided=guided, window=size)
        model(state, text[:, :4], torch.arange(4).expand(2, -1))  # row 1 gets two stale slots
        return state

    def chain(row: int, node: int) -> torch.Tensor:
        """Logits [R / B, V] after the path to a node, by a plain call over the whole text."""
        state = model.prefill(condition, batch_size=2, guided=guided, window=9)
        tokens = [*text[row, : lengths[row] - 1].tolist(), *tree[row, ancestry(node)].tolist()]
        logits = model(state, torch.tensor([tokens, tokens]), torch.arange(len(tokens)).expand(2, -1))
        return logits[row::2, -1]

    state = start()
    logits = model(state, tree, slots, visible)
    for row in range(2):
        for node in range(size):
            assert (logits[row::2, node] - chain(row, node)).abs().max() < 1e-12

    # Row 0 accepts 0, 2, 5, 6; row 1 accepts 0, 1 and names the root again for the rest.
    nodes = torch.tensor([[0, 2, 5, 6], [0, 1, 0, 0]])
    model.keep(state, nodes, slots.gather(1, nodes))
    newest = torch.tensor([[1], [2]])
    following = torch.tensor([[7], [3]])
    after = model(state, newest, following)
    for row, path in enumerate([[0, 2, 5, 6], [0, 1]]):
        tokens = [*text[row, : lengths[row] - 1].tolist(), *tree[row, path].tolist(), int(newest[row])]
        plain = model.prefill(condition, batch_size=2, guided=guided, window=9)
        want = model(plain, torch.tensor([tokens, tokens]), torch.arange(len(tokens)).expand(2, -1))
        assert (after[row::2, -1] - want[row::2, -1]).abs().max() < 1e-12
