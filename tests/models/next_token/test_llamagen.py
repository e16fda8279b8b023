"""The transformer against a straight-line computation from the formulas of research notes and paper."""

import math

import pytest
import torch

from tests.helpers.llamagen import caption_prefix, make, text_condition
from tests.helpers.refusals import refuses
from tests.models.next_token import straight
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_blocks import rotary_table
from visual_spec.models.text.caption_encoder import CaptionEncoder


def straight_line(
    model: LlamaGenTransformer, prefix: torch.Tensor, mask: torch.Tensor, tokens: list[int]
) -> torch.Tensor:
    """Logits [T + n, V] of one sequence, in one pass."""
    weights, config = model.state_dict(), model.config
    heads, side, start = config["num_heads"], config["grid_size"], len(prefix)
    size, slots = config["dim"] // heads, torch.arange(len(tokens))
    x = torch.cat([prefix, weights["tok_embeddings.weight"][tokens]])
    still = torch.full((start, size // 2), float(not config["zero_prefix_keys"]))
    turn = torch.cat([still, straight.turns(slots // side, slots % side, size)])[:, None]
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    seen[:, :start] &= mask.bool()
    seen |= torch.eye(len(x), dtype=torch.bool)
    for layer in range(config["num_layers"]):
        x = straight.layer(weights, layer, x, seen, turn, heads)
    return straight.norm(weights, x, "norm") @ weights["output.weight"].T


@pytest.mark.parametrize("zero_prefix_keys", [True, False])
def test_text_logits_equal_a_straight_line_computation(zero_prefix_keys):
    model = make(zero_prefix_keys=zero_prefix_keys)
    condition = text_condition(2, [3, 5])
    tokens = torch.randint(0, 40, (2, 16))
    slots = torch.arange(15).repeat(2, 1)
    state = model.prefill(condition, batch_size=2, guided=True, window=15)
    logits = model(state, tokens[:, :15], slots)
    got = torch.cat([state.logits[:, None], logits], 1)  # [2B, 16, V]
    for row in range(2):
        features = condition.features[row] * condition.mask[row][:, None]
        want = straight_line(
            model, caption_prefix(model, features), condition.mask[row], tokens[row, :15].tolist()
        )
        assert (got[row] - want[4:]).abs().max() < 1e-9
        # The official code masks the unconditional prefix where the caption is padded, too.
        prefix = caption_prefix(model, model.state_dict()["cls_embedding.uncond_embedding"])
        want = straight_line(model, prefix, condition.mask[row], tokens[row, :15].tolist())
        assert (got[2 + row] - want[4:]).abs().max() < 1e-9


def test_class_logits_equal_a_straight_line_computation():
    model = make(prefix_length=1, num_classes=7, caption_dim=None)
    labels = torch.tensor([3, 6])
    tokens = torch.randint(0, 40, (2, 9))
    state = model.prefill(labels, batch_size=2, guided=True, window=9)
    got = torch.cat([state.logits[:, None], model(state, tokens, torch.arange(9).repeat(2, 1))], 1)
    table = model.state_dict()["cls_embedding.embedding_table.weight"]
    for row, label in enumerate([3, 6, 7, 7]):
        want = straight_line(model, table[[label]], torch.ones(1), tokens[row % 2].tolist())
        assert (got[row] - want).abs().max() < 1e-9


def test_windows_ragged_rows_and_rewrites_give_the_logits_of_a_single_pass():
    model = make()
    condition = text_condition(2, [5, 1])
    tokens = torch.randint(0, 40, (2, 16))
    state = model.prefill(condition, batch_size=2, guided=False, window=16)
    whole = model(state, tokens, torch.arange(16).repeat(2, 1))
    state = model.prefill(condition, batch_size=2, guided=False, window=4)
    lengths = torch.tensor([0, 0])
    wrong = torch.randint(0, 40, (2, 4))
    while (lengths < 16).any():
        slots = lengths[:, None] + torch.arange(4)  # runs past the grid into the scratch room at the end
        model(state, wrong, slots)  # drafts that are all rejected, then written again
        window = tokens.gather(1, slots.clamp_max(15))
        logits = model(state, window, slots)
        for row in range(2):
            for column in range(4):
                slot = int(slots[row, column])
                if slot < 16:
                    assert (logits[row, column] - whole[row, slot]).abs().max() < 1e-11
        lengths = torch.minimum(lengths + torch.tensor([3, 1]), torch.tensor(16))


def test_training_logits_equal_decoding_logits():
    model = make()
    condition = text_condition(3, [2, 5, 1])
    tokens = torch.randint(0, 40, (3, 16))
    dropped = torch.tensor([False, False, True])
    trained = model.teacher_forced(tokens, condition, dropped)
    state = model.prefill(condition, batch_size=3, guided=True, window=15)
    decoded = model(state, tokens[:, :15], torch.arange(15).repeat(3, 1))
    assert (trained[:, 0] - state.logits[[0, 1, 5]]).abs().max() < 1e-11
    assert (trained[:, 1:] - decoded[[0, 1, 5]]).abs().max() < 1e-11


def test_head_size_100_has_25_frequencies_per_axis():
    table = rotary_table(24, 100)
    assert table.shape == (576, 50, 2)
    angle = torch.atan2(table[24 * 3 + 2, :, 1], table[24 * 3 + 2, :, 0])
    assert math.isclose(angle[0], 3.0, rel_tol=1e-5) and math.isclose(angle[25], 2.0, rel_tol=1e-5)


def test_conditions_that_do_not_fit_are_refused_with_what_would():
    text, classes = make(), make(prefix_length=1, num_classes=7, caption_dim=None)
    with pytest.raises(TypeError, match="takes a TextCondition"):
        text.prefill(torch.tensor([1]), batch_size=1, guided=False, window=1)
    with pytest.raises(TypeError, match="TextCondition.*LongTensor"):
        classes.prefill(text_condition(1, [2]), batch_size=1, guided=False, window=1)
    refuses(ValueError, "0 to 6", classes.prefill, torch.tensor([7]), batch_size=1, guided=False, window=1)
    with pytest.raises(ValueError, match=r"\(2, 5, 12\)"):
        text.prefill(text_condition(1, [2]), batch_size=2, guided=False, window=1)
    with pytest.raises(ValueError, match="left-padded"):
        text.prefill(text_condition(1, [0]), batch_size=1, guided=False, window=1)
    refuses(ValueError, "exactly one", make, num_classes=3)
    refuses(ValueError, "multiple of 4", make, dim=36, num_heads=6)


def test_caption_features_do_not_depend_on_the_other_prompts():
    torch.manual_seed(0)
    encoder = (
        CaptionEncoder(["a", "red", "circle", "blue", "star"], dim=16, num_layers=2, num_heads=2, max_words=6)
        .double()
        .eval()
    )
    together = encoder(["a red circle", "a blue star a red circle"])
    alone = encoder(["a red circle"])
    assert together.mask.sum(1).tolist() == [3, 6] and together.mask[:, -1].all()
    assert (together.features[0] - alone.features[0]).abs().max() < 1e-12
    assert together.features[0, :3].abs().max() == 0


def test_caption_encoder_names_unknown_words_and_refuses_empty_and_long_prompts():
    encoder = CaptionEncoder(["a", "red", "circle"], dim=8, num_layers=1, num_heads=2, max_words=3)
    assert encoder.unknown_words(["A red zebra!", "zebra circle, ünknown"]) == ["zebra", "ünknown"]
    refuses(ValueError, r"'\?!'.*words", encoder, ["?!"])
    with pytest.warns(UserWarning, match="reads at most 3 words; 'circle' at the end of the prompt"):
        cut = encoder(["a red red circle"])
    assert torch.equal(cut.features, encoder(["a red red"]).features)
