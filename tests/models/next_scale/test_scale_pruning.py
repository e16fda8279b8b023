"""Maps of which a part goes through the layers (FastVAR), against every place computed by itself, without caches."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.next_scale import decoded, random_maps
from tests.helpers.scales import chosen_places, enlarged, straight_logits
from tests.helpers.tiny_infinity import captions, tiny_infinity
from tests.helpers.tiny_scales import tiny_var
from visual_spec.models.core.pruning import Pruning
from visual_spec.models.next_scale.scale_pruning import PrunedMaps, distinct_places

SHARES = (1.0, 1.0, 0.5, 0.3)  # 9 and 16 places: 5 each
KEPT = (1, 4, 5, 5)


def parts(kind: str):
    """A model, its condition and random maps of three pictures."""
    model = tiny_var(num_layers=3) if kind == "var" else tiny_infinity(num_layers=3)
    condition = torch.tensor([3, 0, 4]) if kind == "var" else captions()
    return model, condition, random_maps(model, seed=3)


@pytest.mark.parametrize("depth", [(0.0, 1.0), (0.3, 0.7), (0.6, 1.0)])
@pytest.mark.parametrize("kind", ["var", "infinity"])
def test_pruned_maps_are_what_the_definition_says(kind, depth):
    model, condition, maps = parts(kind)
    layers = [layer for layer in range(3) if depth[0] <= layer / 3 < depth[1]]
    found = decoded(model, condition, maps, pruning=Pruning(SHARES, depth))
    for scale, logits in enumerate(found):
        want = [
            straight_logits(model, maps[:scale], condition, KEPT, layers, null=null) for null in (False, True)
        ]
        assert (logits - torch.cat(want)).abs().max() < 1e-10
    plain = decoded(model, condition, maps)
    assert all(torch.equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True))
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(found[2:], plain[2:], strict=True))


@pytest.mark.parametrize("kind", ["var", "infinity"])
def test_a_prefill_runs_its_scales_whole_and_later_ones_are_restored_from_the_last_of_them(kind):
    model, condition, maps = parts(kind)
    found = decoded(model, condition, maps, pruning=Pruning(SHARES), known=2, guided=False)
    want = [straight_logits(model, maps[:scale], condition, (1, 4, 9, 5), range(3)) for scale in (2, 3)]
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("kind", ["var", "infinity"])
def test_whole_shares_change_no_bit(kind):
    model, condition, maps = parts(kind)
    plain = decoded(model, condition, maps)
    for shares in ((1.0,) * 4, (1.0, 1.0, 0.95, 0.99)):  # all but a part of a place is all
        found = decoded(model, condition, maps, pruning=Pruning(shares))
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("kind", ["var", "infinity"])
def test_rows_without_a_caption_or_class_leave(kind):
    """The conditional rows go on as if the others had never been there, pruned or not."""
    model, condition, maps = parts(kind)
    for pruning in (None, Pruning(SHARES)):
        alone = decoded(model, condition, maps, pruning=pruning, guided=False)
        state = model.prefill(condition, batch_size=3, guided=True, pruning=pruning)
        for scale in (1, 2):
            assert model(state, maps[scale - 1], scale).shape[0] == 6
        before = state.cache.held.nbytes
        state.drop_unconditional()
        assert not state.guided and 2 * state.cache.held.nbytes == before
        last = model(state, maps[2], 3)
        assert last.shape[0] == 3 and (last - alone[3]).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["var", "infinity"])
def test_only_the_kept_places_are_computed(kind):
    model, condition, maps = parts(kind)
    seen: list[list[int]] = [[], [], []]
    blocks: Any = model.blocks
    for layer, block in enumerate(blocks):
        block.ffn.register_forward_hook(
            lambda module, inputs, output, layer=layer: seen[layer].append(inputs[0].shape[1])
        )
    decoded(model, condition, maps, pruning=Pruning(SHARES, (0.3, 0.6)))
    assert seen == [[1, 4, 9, 16], [1, 4, 5, 5], [1, 4, 9, 16]]


def test_places_and_counts():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 12, 5, generator=generator, dtype=torch.float64)
    x[:, 7] = x[:, 3]  # equal scores: the first of them
    for count in range(1, 13):
        assert distinct_places(x, count).tolist() == [chosen_places(row, count) for row in x]
    assert Pruning((1.0, 0.6, 0.5, 0.001)).kept((1, 5, (3, 5), 4, 2)) == (1, 15, 8, 1, 4)
    assert list(Pruning((1.0,), (3 / 32, 28 / 32)).layers(32)) == list(range(3, 28))  # as published
    assert list(Pruning((1.0,), (0.1, 0.9)).layers(10)) == list(range(1, 9))
    assert Pruning((1.0, 1.0, 0.5, 1.0, 0.2, 0.2)).sources((1, 2, 3, 4, 5, 6, 7)) == {2: 1, 4: 3, 5: 3}


@pytest.mark.parametrize(("small", "large"), [(1, 3), (2, 3), (3, 4), (2, 4), (5, 8)])
def test_restored_places_are_means_of_those_they_touch(small, large):
    held = torch.randn(small * small, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = enlarged(held, small, large)
    found = F.interpolate(held.mT.view(1, 3, small, small), size=(large, large), mode="area")
    assert (found.flatten(2)[0].mT - want).abs().max() < 1e-12


def test_maps_that_are_no_squares_are_restored_by_height_and_width():
    maps = PrunedMaps(Pruning((1.0, 1.0, 0.5)), (1, (1, 2), (2, 4)), 1)
    whole = torch.tensor([[[1.0], [5.0]]])
    maps.apply(0, range(1, 2), 0, whole, lambda x, places: 10 * x)
    x = torch.tensor([[[0.0], [9.0], [0.1], [0.2], [-9.0], [0.0], [8.0], [-8.0]]])
    found = maps.apply(0, range(2, 3), 0, x, lambda x, places: x)
    assert found[0, :, 0].tolist() == [10, 9, 50, 50, -9, 10, 8, -8]
