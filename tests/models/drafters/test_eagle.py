"""EAGLE against a straight-line computation; cached decoding, trees and unrolled training against each other."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.llamagen import make, text_condition
from tests.helpers.refusals import refuses
from tests.models.next_token import straight
from visual_spec.models.drafters.eagle import EagleDrafter, EagleState, logits_of
from visual_spec.models.next_token.llamagen import LlamaGenTransformer

LENGTH = 16


def drafter_for(target: LlamaGenTransformer) -> EagleDrafter:
    torch.manual_seed(5)
    drafter = EagleDrafter.for_target(target).double().eval()
    # Weights of order one, so that attention is not uniform by accident.
    for parameter in drafter.parameters():
        parameter.data = torch.randn_like(parameter) * (0.25 if parameter.ndim == 2 else 1.0)
    return drafter


def start(
    batch_size: int = 2, guided: bool = False, window: int = LENGTH
) -> tuple[EagleDrafter, EagleState, Any]:
    target = make()
    drafter = drafter_for(target)
    condition = text_condition(batch_size, [3, 5, 4][:batch_size])
    cache = target.prefill(condition, batch_size=batch_size, guided=guided, window=window)
    return drafter, drafter.follow(target, cache, window=window), cache


def texts(batch_size: int = 2) -> Tensor:
    return torch.randint(0, 40, (batch_size, LENGTH), generator=torch.Generator().manual_seed(1))


def target_features(rows: int = 2) -> Tensor:
    """Features of slots 0 to 15, as from some target: [R, 16, 32]."""
    return torch.randn(rows, LENGTH, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def slots_from(first: int, count: int, batch_size: int = 2) -> Tensor:
    return torch.arange(first, first + count).expand(batch_size, -1)


def straight_line(
    drafter: EagleDrafter, target: LlamaGenTransformer, tokens: list[int], features: Tensor
) -> Tensor:
    """The feature [dim] after the last of n tokens, fed with features [n, dim], in one pass."""
    own, theirs = drafter.state_dict(), target.state_dict()
    heads, side = drafter.config["num_heads"], drafter.config["grid_size"]
    embedded = straight.norm(own, theirs["tok_embeddings.weight"][tokens], "embedding_norm")
    x = torch.cat([embedded, features], 1) @ own["fc.weight"].T
    slots = torch.arange(len(tokens))
    turn = straight.turns(slots // side, slots % side, x.shape[1] // heads)[:, None]
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    return straight.norm(theirs, straight.layer(own, "block.", x, seen, turn, heads)[-1], "norm")


def test_logits_equal_a_straight_line_computation_on_the_targets_features_and_on_its_own():
    drafter, state, _ = start()
    tokens, features = texts(), target_features()
    drafter.observe(state, features[:, 1:6], slots_from(0, 5))  # predicted slots 1 to 5
    features[:, 0] = state.features[:, 0]
    known = drafter(state, tokens[:, :6], slots_from(0, 6))  # [2, 6, V]
    drafted = [drafter(state, tokens[:, slot, None], slots_from(slot, 1)) for slot in (6, 7, 8)]
    got = torch.cat([known, *drafted], 1)
    head = state.target.output.weight
    for row in range(2):
        fed = list(features[row, :6])
        for slot in range(9):
            if slot >= 6:  # its own prediction stands in
                fed.append(
                    straight_line(drafter, state.target, tokens[row, :slot].tolist(), torch.stack(fed))
                )
            predicted = straight_line(
                drafter, state.target, tokens[row, : slot + 1].tolist(), torch.stack(fed[: slot + 1])
            )
            assert (got[row, slot] - head @ predicted).abs().max() < 1e-9


def test_begins_with_the_feature_that_predicted_slot_0():
    drafter, state, cache = start(guided=True)
    assert torch.equal(state.features[:, :1], cache.features)
    assert torch.equal(state.logits, cache.logits) and len(state.features) == 4


@pytest.mark.parametrize("guided", [False, True])
def test_ragged_rows_written_again_equal_a_fresh_computation(guided):
    """Refused drafts, and features of drafts, leave no trace once their slots are fed and observed anew."""
    drafter, state, _ = start(guided=guided)
    tokens, features = texts(), target_features(4 if guided else 2)
    lengths = torch.tensor([[7], [4]])
    rows = torch.arange(len(features))[:, None]
    everything = slots_from(0, LENGTH - 1)
    drafter.observe(state, features[:, 1:].flip(1), everything)
    drafter(state, tokens.flip(1), slots_from(0, LENGTH))  # nonsense at every slot, in cache and features
    drafter.observe(state, features[:, 1:], everything)
    drafter(state, tokens[:, :7], slots_from(0, 7))  # leaves its own features at slots 1 to 7
    newest = lengths - 3 + torch.arange(3)  # three columns up to the newest token, and two of scratch
    window = lengths - 3 + torch.arange(5)
    at = newest.repeat(len(features) // 2, 1)
    drafter.observe(state, features[rows, at], newest - 1)
    scratch = torch.zeros(2, 2, dtype=torch.long)
    got = drafter(state, torch.cat([tokens.gather(1, newest), scratch], 1), window)[:, 2]
    following = drafter(state, tokens.gather(1, lengths), lengths)[:, 0]

    for row in range(2):
        _, fresh, _ = start(guided=guided)
        length = int(lengths[row])
        drafter.observe(fresh, features[:, 1:length], slots_from(0, length - 1))
        want = drafter(fresh, tokens[:, :length], slots_from(0, length))[row::2, -1]
        after = drafter(fresh, tokens[:, length, None], slots_from(length, 1))[row::2, 0]
        assert (got[row::2] - want).abs().max() < 1e-12
        assert (following[row::2] - after).abs().max() < 1e-12


@pytest.mark.parametrize("guided", [False, True])
def test_every_node_of_a_growing_forest_is_scored_as_its_chain(guided):
    parents = [-1, -1, 0, 0, 1, 2, 4]  # levels of 2, 3 and 2 nodes; -1 is the cached text
    levels, tokens = [2, 5, 7], texts()
    nodes = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([[6], [3]])

    def ancestry(node: int) -> list[int]:
        return [] if node < 0 else [*ancestry(parents[node]), node]

    features = target_features(4 if guided else 2)

    def caught_up():
        drafter, state, _ = start(guided=guided)
        drafter.observe(state, features[:, 1:], slots_from(0, LENGTH - 1))
        window = lengths - 3 + torch.arange(3)  # up to the newest token
        drafter(state, tokens[:, :6], slots_from(0, 6))
        drafter.observe(state, features[:, 1:], slots_from(0, LENGTH - 1))
        drafter(state, tokens.gather(1, window), window)
        return drafter, state

    drafter, state = caught_up()
    depths = torch.tensor([len(ancestry(node)) - 1 for node in range(7)])
    visible = torch.tensor([[m in ancestry(n) for m in range(7)] for n in range(7)])
    for count in levels:
        logits = drafter(
            state, nodes[:, :count], lengths + depths[:count], visible[:count, :count].expand(2, -1, -1)
        )
        for row in range(2):
            for node in range(count):
                drafter, chain = caught_up()
                for depth, step in enumerate(ancestry(node)):
                    want = drafter(chain, nodes[:, step, None], lengths + depth)
                assert (logits[row::2, node] - want[row::2, 0]).abs().max() < 1e-12


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_unrolled_training_equals_cached_decoding(steps):
    drafter, state, _ = start()
    tokens, features = texts(), target_features()
    features[:, 0] = state.features[:, 0]
    outputs = drafter.unrolled(state.target, tokens, features, steps)
    assert len(outputs) == steps
    for step, predicted in enumerate(outputs):
        for slot in range(step, LENGTH):
            _, fresh, _ = start()
            known = slot - step + 1  # slots whose features are the target's
            drafter.observe(fresh, features[:, 1:known], slots_from(0, known - 1))
            drafter(fresh, tokens[:, :known], slots_from(0, known))
            for later in range(known, slot + 1):
                drafter(fresh, tokens[:, later, None], slots_from(later, 1))
            assert (predicted[:, slot] - fresh.features[:, slot + 1]).abs().max() < 1e-12


def test_unrolled_steps_pass_gradients_back_to_the_first():
    drafter, state, _ = start()
    features = target_features().requires_grad_()
    last = drafter.unrolled(state.target, texts(), features, 3)[2]
    last[:, 9].sum().backward()  # drafted from slots 0 to 7: slot 8 reads a feature made up after slot 7
    assert features.grad is not None
    touched = features.grad.abs().amax((0, 2)) > 0
    assert touched.tolist() == [slot <= 7 for slot in range(LENGTH)]
    assert all(parameter.grad is not None for parameter in drafter.parameters())


def test_owns_neither_embedding_nor_head_of_the_target(tmp_path):
    drafter, state, _ = start()
    shapes = {tuple(parameter.shape) for parameter in drafter.parameters()}
    assert not any(40 in shape for shape in shapes)  # the vocabulary appears nowhere
    drafter.save_pretrained(tmp_path)
    loaded = EagleDrafter.from_pretrained(tmp_path).double().eval()
    assert isinstance(loaded, EagleDrafter) and loaded.grid == drafter.grid and loaded.vocab_size == 40
    again = loaded.follow(state.target, start()[2], window=LENGTH)
    a = drafter(state, texts()[:, :3], slots_from(0, 3))
    b = loaded(again, texts()[:, :3], slots_from(0, 3))
    assert (a - b).abs().max() < 1e-5  # saved in double, loaded in single precision


def test_half_precision_runs_in_half_and_gives_logits_in_single():
    target = make().bfloat16()
    drafter = drafter_for(target).bfloat16()
    cache = target.prefill(text_condition(2, [3, 5]), batch_size=2, guided=False, window=4)
    state = drafter.follow(target, cache, window=4)
    logits = drafter(state, texts()[:, :4], slots_from(0, 4))
    assert state.features.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert logits.isfinite().all()
    assert logits_of(target, cache.features).dtype == torch.float32


@pytest.mark.parametrize("change", [dict(dim=64), dict(grid_size=5), dict(vocab_size=30), dict(num_heads=4)])
def test_refuses_another_target_and_says_what_it_was_made_for(change):
    name, value = next(iter(change.items()))
    drafter = drafter_for(make())
    with pytest.raises(ValueError, match=f"{name}={make().config[name]}.*{name}={value};"):
        drafter.check_target(make(**change))
    refuses(ValueError, "Linear", drafter.check_target, torch.nn.Linear(2, 2))
