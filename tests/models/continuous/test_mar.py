"""MAR and its head against a straight-line computation, row by row."""

from typing import Any

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.models.continuous import straight
from tests.models.continuous.tiny import tiny_mar
from visual_spec.models.continuous.mar import PRESETS, MARTransformer
from visual_spec.models.core.continuous import guided


@pytest.fixture
def batch():
    """Rows that know 0, 1, 9 and 15 of their 16 tokens."""
    generator = torch.Generator().manual_seed(1)
    known = torch.zeros(4, 16, dtype=torch.bool)
    for row, count in enumerate((0, 1, 9, 15)):
        known[row, torch.randperm(16, generator=generator)[:count]] = True
    return torch.tensor([3, 0, 4, 3]), torch.randn(4, 16, 3, generator=generator), known


def test_conditions_are_those_of_each_row_alone(batch):
    labels, tokens, known = batch
    model = tiny_mar()
    weights = model.state_dict()
    z = model(model.prepare(labels, batch_size=4, guided=False), tokens, known)
    for row in range(4):
        expected = straight.mar(weights, 2, int(labels[row]), tokens[row], known[row])
        torch.testing.assert_close(z[row], expected, rtol=1e-4, atol=1e-4)
    # More room than any row needs changes nothing.
    state = model.prepare(labels, batch_size=4, guided=False)
    torch.testing.assert_close(model(state, tokens, known, room=16), z, rtol=1e-4, atol=1e-4)


def test_guided_rows_are_those_of_the_null_class(batch):
    labels, tokens, known = batch
    model = tiny_mar()
    state = model.prepare(labels, batch_size=4, guided=True)
    z = model(state, tokens, known)
    assert z.shape == (8, 16, 16)
    for row in range(4):
        expected = straight.mar(model.state_dict(), 2, None, tokens[row], known[row])
        torch.testing.assert_close(z[4 + row], expected, rtol=1e-4, atol=1e-4)
    nothing = model.prepare(None, batch_size=4, guided=False)
    torch.testing.assert_close(model(nothing, tokens, known), z[4:])
    state.select(torch.tensor([2, 2, 0]))
    chosen = torch.tensor([2, 2, 0])
    again = model(state, tokens[chosen], known[chosen])
    torch.testing.assert_close(again, z[torch.tensor([2, 2, 0, 6, 6, 4])], rtol=1e-4, atol=1e-4)


def test_hidden_tokens_are_not_read_and_known_ones_are(batch):
    labels, tokens, known = batch
    model = tiny_mar()
    state = model.prepare(labels, batch_size=4, guided=False)
    z = model(state, tokens, known)
    noise = torch.full_like(tokens, float("nan"))
    assert torch.equal(model(state, torch.where(known[..., None], tokens, 5.0), known), z)
    assert not model(state, torch.where(known[..., None], tokens, noise), known).isnan().any()
    changed = tokens.clone()
    changed[2, known[2].nonzero()[0]] += 1.0
    found = model(state, changed, known)
    assert torch.equal(found[[0, 1, 3]], z[[0, 1, 3]]) and not torch.allclose(found[2], z[2])


def test_head_is_the_straight_line_one_and_its_modulations_can_be_hoisted():
    torch.manual_seed(0)
    model = tiny_mar()
    head, weights = model.head, model.state_dict()
    x, z, times = torch.randn(5, 3), torch.randn(5, 16), torch.tensor([0.0, 10.0, 500.0, 999.0])
    modulations = head.modulations(z, times)
    assert modulations.shape == (4, 5, 12 * (3 * 2 + 2))
    for index, time in enumerate(times):
        output = head.denoise(x, modulations[index])
        torch.testing.assert_close(head(x, time.expand(5), z), output, rtol=1e-4, atol=1e-5)
        for row in range(5):
            expected = straight.head(weights, "diffloss.net", x[row], float(time), z[row])
            torch.testing.assert_close(output[row], expected, rtol=1e-3, atol=1e-4)


def test_guidance_mixes_predictions_and_keeps_the_conditional_variance():
    output = torch.randn(4, 6)
    mixed = guided(output, 3.0, 3)
    torch.testing.assert_close(mixed[:, :3], output[2:, :3] + 3.0 * (output[:2, :3] - output[2:, :3]))
    assert torch.equal(mixed[:, 3:], output[:2, 3:])
    torch.testing.assert_close(guided(output, 1.0, 3), output[:2])


def test_published_start_of_the_head_predicts_nothing():
    head = tiny_mar().head
    head.initialise()
    assert not head(torch.randn(2, 3), torch.tensor(5.0), torch.randn(2, 16)).any()


@pytest.mark.parametrize(
    ("labels", "error"),
    [([1, 2], ValueError), ([0, 1, 5], ValueError), ([-1, 0, 0], ValueError), ([0.0, 1.0, 2.0], TypeError)],
)
def test_labels_that_do_not_fit_are_refused(labels, error):
    refuses(error, "labels", tiny_mar().prepare, torch.tensor(labels), batch_size=3, guided=False)


def test_sizes_that_make_no_model_are_refused():
    refuses(ValueError, "num_heads=3", tiny_mar, num_heads=3)
    refuses(ValueError, "head_kind='gan'", tiny_mar, head_kind="gan")


def test_a_flow_head_returns_a_velocity_and_steers_another_chain():
    model = tiny_mar(head_kind="flow")
    schedule = model.schedule(7)
    output = model.head(torch.randn(2, 3), schedule.times[3], torch.randn(2, 16))
    mean, sigma = schedule.kernel(torch.zeros(2, 3), 3, output)
    torch.testing.assert_close(mean, -output / 7)
    assert output.shape == (2, 3) and not sigma.any()


@pytest.mark.parametrize(("preset", "millions", "of_head"), [("B", 208, 36), ("L", 478, 72), ("H", 942, 151)])
def test_official_sizes(preset, millions, of_head):
    size: Any = PRESETS[preset]
    with torch.device("meta"):
        model = MARTransformer(**size)
    weights = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    # The paper and the README count differently; these are the checkpoints' (the positions and the classes included).
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=1)
    assert sum(p.numel() for p in model.head.parameters()) / 1e6 == pytest.approx(of_head, abs=1)
    dim, width, layers, depth = (size[name] for name in ("dim", "head_width", "num_layers", "head_depth"))
    # 12 of each block; 8 for each residual block; 2 layers of time, 1 of the condition, 1 of the input, 2 at the end.
    assert len(weights) == 16 + 2 * layers * 12 + 12 + 8 * depth
    expected = {
        "class_emb.weight": (1000, dim),
        "fake_latent": (1, dim),
        "mask_token": (1, 1, dim),
        "z_proj.weight": (dim, 16),
        "z_proj_ln.bias": (dim,),
        "encoder_pos_embed_learned": (1, 320, dim),
        "decoder_pos_embed_learned": (1, 320, dim),
        "diffusion_pos_embed_learned": (1, 256, dim),
        f"encoder_blocks.{layers - 1}.attn.qkv.weight": (3 * dim, dim),
        f"decoder_blocks.{layers - 1}.mlp.fc1.weight": (4 * dim, dim),
        "encoder_norm.weight": (dim,),
        "decoder_embed.weight": (dim, dim),
        "decoder_norm.bias": (dim,),
        "diffloss.net.time_embed.mlp.0.weight": (width, 256),
        "diffloss.net.time_embed.mlp.2.weight": (width, width),
        "diffloss.net.cond_embed.weight": (width, dim),
        "diffloss.net.input_proj.weight": (width, 16),
        f"diffloss.net.res_blocks.{depth - 1}.in_ln.weight": (width,),
        f"diffloss.net.res_blocks.{depth - 1}.mlp.2.weight": (width, width),
        f"diffloss.net.res_blocks.{depth - 1}.adaLN_modulation.1.weight": (3 * width, width),
        "diffloss.net.final_layer.adaLN_modulation.1.weight": (2 * width, width),
        "diffloss.net.final_layer.linear.weight": (32, width),
    }
    assert {key: weights.get(key) for key in expected} == expected
