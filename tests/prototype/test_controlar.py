"""ControlAR: the released layout, its forward written out in one row, and every sampler of LlamaGen on it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

from scripts.train.control import losses_of
from tests.helpers.llamagen import on_meta
from tests.helpers.official import transformer_shapes, write_text_model
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.tiny_controlar import (
    ADAPTER,
    DIM,
    LAYERS,
    PIXELS,
    SIDE,
    TRAINED,
    VOCAB,
    add_preset,
    captions,
    controlar_shapes,
    controlar_weights,
    controls,
    write_controlar,
)
from tests.models.next_token import straight
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.prototype.controlar import (
    ControlARTransformer,
    ControlledCondition,
    load_controlar_checkpoint,
)
from visual_spec.prototype.proactive import ProactiveJacobiSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.orders.zipar import ZipARSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

SLOTS = SIDE * SIDE
TOKENS = torch.randint(VOCAB, (2, SLOTS), generator=torch.Generator().manual_seed(1))
LAW = TokenLaw(guidance_scale=2.0, top_k=6)


@pytest.fixture(autouse=True)
def preset(monkeypatch):
    add_preset(monkeypatch)


def loaded(tmp_path: Any, name: str = "depth_tiny.pt") -> ControlARTransformer:
    return load_controlar_checkpoint(write_controlar(tmp_path, name), image_size=PIXELS)


def condition(strength: float = 1.0, rows: int = 2) -> ControlledCondition:
    return ControlledCondition(**captions(rows), control=controls(rows), strength=strength)


def mlp(weights: dict[str, Tensor], x: Tensor, name: str) -> Tensor:
    inner = F.gelu(x @ weights[f"{name}.fc1.weight"].T, approximate="tanh")
    return inner @ weights[f"{name}.fc2.weight"].T


def patches(weights: dict[str, Tensor], control: Tensor, resample: str) -> Tensor:
    """DINOv2 of transformers, filled by hand: [L, A] of a control picture [3, H, W]."""
    settings = dict(hidden_size=ADAPTER, num_hidden_layers=1, num_attention_heads=1, image_size=14 * SIDE)
    dino = Dinov2Model(Dinov2Config(**settings, patch_size=14)).double().eval()  # pyright: ignore
    present = {
        "attention.query": "q_proj",
        "attention.key": "k_proj",
        "attention.value": "v_proj",
        "output.dense": "o_proj",
    }
    filled = {}
    for key, value in weights.items():
        if key.startswith("adapter.model."):
            key = key.removeprefix("adapter.model.")
            for old, new in present.items():
                key = key.replace(f"attention.{old}", f"attention.{new}")
            filled[key] = value
    dino.load_state_dict(filled)
    more = {} if resample == "nearest" else {"align_corners": True}
    with torch.no_grad():
        size = [14 * (side // 16) for side in control.shape[1:]]
        small = F.interpolate(control[None], size=size, mode=resample, **more)
        return dino(small).last_hidden_state[0, 1:]


def straight_line(
    weights: dict[str, Tensor],
    given: ControlledCondition,
    row: int,
    *,
    guided: bool,
    resample: str = "bicubic",
    tokens: Tensor = TOKENS,
) -> Tensor:
    """Logits [L, V] of all slots of one picture, in one pass over prefix and tokens."""
    slots = tokens.shape[1]
    words = given.mask[row]
    features = given.features[row] * words[:, None]
    features = weights["cls_embedding.uncond_embedding"] if guided else features
    prefix = mlp(weights, features, "cls_embedding.cap_proj")
    seen = mlp(weights, patches(weights, given.control[row], resample), "adapter_mlp")
    seen = weights["condition_mlp.uncond_embedding"][:slots] if guided else seen
    seen = mlp(weights, seen, "condition_mlp.cap_proj")
    start = len(prefix)
    x = torch.cat([prefix, weights["tok_embeddings.weight"][tokens[row, :-1]]])
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    mask[:, :start] &= words
    mask |= torch.eye(len(x), dtype=torch.bool)
    size = x.shape[1] // 2
    place = torch.arange(slots - 1)  # the program turns slot i of any picture by row i of the trained table
    turn = straight.turns(place // TRAINED, place % TRAINED, size)
    turn = torch.cat([torch.zeros(start, size // 2), turn])[:, None]
    for layer in range(LAYERS):  # three layers: each is the first of its third
        control = given.strength * mlp(weights, seen, f"condition_layers.{layer}")
        for slot in range(slots):
            x[start - 1 + slot] = x[start - 1 + slot] + control[slot]
        x = straight.layer(weights, layer, x, mask, turn)
    return straight.norm(weights, x, "norm")[start - 1 :] @ weights["output.weight"].T


def scored(
    model: ControlARTransformer, given: ControlledCondition, widths: list[int], tokens: Tensor = TOKENS
) -> Tensor:
    """Logits [2B, L, V] of `tokens`, fed in windows of these widths."""
    state = model.prefill(given, batch_size=2, guided=True, window=max(widths))
    found, start = [state.logits[:, None]], 0
    for width in widths:
        slots = torch.arange(start, start + width).expand(2, -1)
        found.append(model(state, tokens[:, start : start + width], slots))
        start += width
    return torch.cat(found, 1)


@pytest.mark.parametrize("strength", [1.0, 0.4])
@pytest.mark.parametrize("widths", [[SLOTS - 1], [1, 4, 3, 7]])
def test_windows_compute_what_the_layout_says(tmp_path, widths, strength):
    model, weights, given = loaded(tmp_path), controlar_weights(), condition(strength)
    found = scored(model, given, widths)
    for row in range(4):
        want = straight_line(weights, given, row % 2, guided=row >= 2)
        assert float((found[row] - want).abs().max()) < 1e-10 * float(want.abs().max())


@pytest.mark.parametrize(("height", "width"), [(2, 6), (5, 5), (3, 4), (8, 3)])
def test_pictures_of_other_sizes_keep_the_trained_table(tmp_path, height, width):
    weights, more = controlar_weights(), seeded(4)[0]
    model = loaded(tmp_path).with_grid(height, width)
    assert (model.grid.height, model.grid.width) == (height, width)
    assert model.control_size == (16 * height, 16 * width)
    control = 2 * torch.rand(2, 3, 16 * height, 16 * width, dtype=torch.float64, generator=more) - 1
    given = ControlledCondition(**captions(2), control=control)
    tokens = torch.randint(VOCAB, (2, height * width), generator=more)
    found = scored(model, given, [1, 3, height * width - 5], tokens)
    for row in range(4):
        want = straight_line(weights, given, row % 2, guided=row >= 2, tokens=tokens)
        assert float((found[row] - want).abs().max()) < 1e-10 * float(want.abs().max())
    request: Any = dict(law=LAW, batch_size=2)
    plain = AutoregressiveSampler()(model, given, generator=seeded(1, 2), **request)  # pyright: ignore
    fast = SpeculativeJacobiSampler(5)(model, given, generator=seeded(1, 2), **request)  # pyright: ignore
    assert torch.equal(fast.tokens, plain.tokens)


def test_the_loss_of_training_is_that_of_the_layout(tmp_path):
    """A dropped row loses caption and control together."""
    model, weights, given = loaded(tmp_path), controlar_weights(), condition()
    dropped = torch.tensor([False, True])
    encoder: Any = lambda words: TextCondition(given.features, given.mask)  # noqa: E731
    words = torch.zeros(2, 1, dtype=torch.long)
    for rows in (dropped, None):
        loss = losses_of(model, encoder, words, given.control, TOKENS, rows).mean()
        logits = [
            straight_line(weights, given, row, guided=rows is not None and bool(rows[row]))
            for row in range(2)
        ]
        want = -torch.stack(logits).log_softmax(-1).gather(2, TOKENS[..., None]).mean()
        assert abs((loss.detach() - want).item()) < 1e-10


# What github.com/hustvl/ControlAR at 87e32e9 draws greedily with these weights, without control in its unconditional
# rows, for pictures of 2 x 6 and 8 x 3 tokens; its rotary table is that of 5 x 5.
RELEASED = {
    (2, 6): [[8, 7, 5, 5, 5, 6, 5, 6, 5, 6, 5, 5], [5, 10, 3, 0, 6, 6, 5, 0, 7, 6, 3, 0]],
    (8, 3): [
        [8, 5, 6, 7, 5, 5, 6, 5, 7, 6, 5, 5, 5, 5, 6, 5, 5, 5, 5, 5, 10, 5, 5, 5],
        [7, 5, 8, 5, 8, 7, 6, 3, 0, 6, 7, 6, 5, 7, 6, 5, 0, 6, 5, 0, 5, 8, 9, 6],
    ],
}


# The losses of its training forward there without dropouts: nothing dropped, and the second row.
RELEASED_LOSSES = {(5, 5): (2.9331872, 2.9122427), (2, 6): (3.2303457, 3.4898567)}


@pytest.mark.parametrize(("height", "width"), list(RELEASED_LOSSES))
def test_losses_are_those_of_the_release(tmp_path, height, width):
    model = loaded(tmp_path, "canny_tiny.pt").with_grid(height, width)
    torch.nn.init.zeros_(model.condition_mlp.uncond_embedding)
    more = seeded(10 * height + width)[0]
    control = 2 * torch.rand(2, 3, 16 * height, 16 * width, generator=more, dtype=torch.float64) - 1
    tokens = torch.randint(VOCAB, (2, height * width), generator=more)
    encoder: Any = lambda words: TextCondition(**captions(2))  # noqa: E731
    for rows, want in zip(([False, False], [False, True]), RELEASED_LOSSES[height, width], strict=True):
        loss = losses_of(model, encoder, tokens, control, tokens, torch.tensor(rows)).mean()
        assert loss.item() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(("height", "width"), list(RELEASED))
def test_greedy_tokens_are_those_of_the_release(tmp_path, height, width):
    model = load_controlar_checkpoint(write_controlar(tmp_path, dtype=torch.float32)).with_grid(height, width)
    torch.nn.init.zeros_(model.condition_mlp.uncond_embedding)
    generator = torch.Generator().manual_seed(10 * height + width)
    control = 2 * torch.rand(2, 3, 16 * height, 16 * width, generator=generator) - 1
    given = ControlledCondition(**captions(2, torch.float32), control=control)
    law = TokenLaw(guidance_scale=4.0, top_k=1)
    request: Any = dict(law=law, generator=seeded(1, 2), batch_size=2)
    assert AutoregressiveSampler()(model, given, **request).tokens.tolist() == RELEASED[height, width]


def test_sizes_beyond_the_training_are_refused(tmp_path):
    model = loaded(tmp_path)
    refuses(ValueError, f"5 x 6 tokens.*1 to {TRAINED**2}", model.with_grid, 5, 6)
    with pytest.raises(ValueError, match="rotary_size=4 of 5 x 5"):
        ControlARTransformer(
            {**model.config["transformer_config"], "grid_size": 5, "rotary_size": 4},
            model.config["adapter_config"],
        )
    for size in (16 * (TRAINED + 1), 40, 0):
        with pytest.raises(ValueError, match=f"image_size={size}.* {16 * TRAINED} "):
            load_controlar_checkpoint(write_controlar(tmp_path), image_size=size)


def test_pictures_of_lines_are_made_smaller_without_mixing(tmp_path):
    model, weights, given = loaded(tmp_path, "canny_tiny.pt"), controlar_weights(), condition()
    assert model.config["control_resample"] == "nearest"
    want = straight_line(weights, given, 0, guided=False, resample="nearest")
    assert torch.allclose(scored(model, given, [SLOTS - 1])[0], want, atol=1e-9)


def test_no_strength_is_llamagen_and_the_control_changes_tokens(tmp_path):
    model, request = loaded(tmp_path), dict(law=LAW, batch_size=2)
    plain: Any = AutoregressiveSampler()

    def draw(target: Any, given: Any) -> Tensor:
        return plain(target, given, generator=seeded(1, 2), **request).tokens

    alone = draw(model.transformer, condition())
    assert torch.equal(draw(model, condition(0.0)), alone)
    assert not torch.equal(draw(model, condition()), alone)


@pytest.mark.parametrize(
    "sampler",
    [
        SpeculativeJacobiSampler(5),
        SpeculativeJacobiSampler(8, initial_draft="up"),
        OrderedSampler(order="raster"),
        ZipARSampler(SIDE),  # waits for the whole row above
        ProactiveJacobiSampler(6, 2, 1, "gumbel", "identical", sibling_rule="recursive"),
    ],
    ids=["jacobi", "jacobi, from above", "ordered", "rows", "trees"],
)  # fmt: skip
def test_samplers_draw_the_tokens_of_plain_decoding(tmp_path, sampler):
    model, request = loaded(tmp_path), dict(law=LAW, batch_size=2)
    plain: Any = AutoregressiveSampler()(model, condition(), generator=seeded(1, 2), **request)  # pyright: ignore
    found = sampler(model, condition(), generator=seeded(1, 2), **request)
    assert torch.equal(found.tokens, plain.tokens)


def test_a_saved_model_draws_the_same(tmp_path):
    model = loaded(tmp_path)
    model.save_pretrained(tmp_path / "folder")
    again: Any = ControlARTransformer.from_pretrained(tmp_path / "folder", torch_dtype=torch.float64)
    assert torch.equal(scored(again, condition(), [SLOTS - 1]), scored(model, condition(), [SLOTS - 1]))


@pytest.mark.parametrize(("width", "heads", "trained"), [(384, 6, 48), (768, 12, 32)])
def test_no_key_of_a_release_is_missing_or_left_over(width, heads, trained):
    """LlamaGen-XL with a DINOv2 of the published sizes, on the meta device: multi-resolution files and those of 512."""
    own = controlar_shapes()
    scale = {16: 1280, 64: width, 256: 4 * width}
    shapes = transformer_shapes(36, 1280, caption=(120, 2048))
    for key, shape in own.items():
        if not key.startswith(("adapter", "condition")):
            continue
        sizes = (1, 1370, width) if "position" in key else tuple(scale.get(size, size) for size in shape)
        sizes = (trained * trained, 1280) if "uncond" in key else sizes
        sizes = (16384, 1280) if key == "condition_embeddings.weight" else sizes
        for layer in range(12 if ".layer.0." in key else 1):
            shapes[key.replace(".layer.0.", f".layer.{layer}.")] = sizes
    model = load_controlar_checkpoint(on_meta(shapes), image_size=512)
    assert (model.adapter.config.num_attention_heads, model.adapter.config.image_size) == (heads, 518)
    assert model.grid.num_tokens == 1024 and model.control_size == (512, 512)
    assert model.transformer.config["rotary_size"] == trained
    assert load_controlar_checkpoint(on_meta(shapes)).grid.width == trained


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    refuses(ValueError, "ControlAR.*adapter_mlp", load_controlar_checkpoint, write_text_model(tmp_path))
    shapes = controlar_shapes() | {"condition_embeddings.weight": (VOCAB + 1, DIM)}
    with pytest.raises(ValueError, match="1 unexpected.*condition_embeddings.weight"):
        load_controlar_checkpoint(on_meta(shapes), image_size=PIXELS)
    shapes = controlar_shapes()
    del shapes["condition_layers.1.fc2.weight"]
    with pytest.raises(ValueError, match="1 missing: condition_layers.1.fc2.weight"):
        load_controlar_checkpoint(on_meta(shapes), image_size=PIXELS)
    uneven = controlar_weights() | {
        "condition_mlp.uncond_embedding": torch.randn(10, 16, dtype=torch.float64)
    }
    torch.save(uneven, tmp_path / "uneven.pt")
    with pytest.raises(ValueError, match=r"condition_mlp\.uncond_embedding.*\(10, 16\)"):
        load_controlar_checkpoint(tmp_path / "uneven.pt", image_size=PIXELS)
    model, given = loaded(tmp_path), condition()
    for message, wrong in [
        (r"\(2, 3, 64, 60\)", {"control": given.control[..., 4:]}),
        ("strength=nan given", {"strength": float("nan")}),
        (r"model.*\(2, 6, 8\)", {"features": given.features[:, 1:]}),
    ]:
        parts = dict(features=given.features, mask=given.mask, control=given.control) | wrong
        with pytest.raises(ValueError, match=message):
            model.prefill(ControlledCondition(**parts), batch_size=2, guided=False, window=1)
    with pytest.raises(TypeError, match="TextCondition.*ControlledCondition"):
        bare: Any = captions(2)
        model.prefill(type(given).__mro__[1](**bare), batch_size=2, guided=False, window=1)  # pyright: ignore
    config = dict(model.config["transformer_config"])
    with pytest.raises(ValueError, match="num_layers=4.*3"):
        ControlARTransformer({**config, "num_layers": 4}, model.config["adapter_config"])
    with pytest.raises(ValueError, match="16 pixels.*14"):
        ControlARTransformer(config, {**model.config["adapter_config"], "patch_size": 16})
    with pytest.raises(ValueError, match="control_resample='area'"):
        ControlARTransformer(config, model.config["adapter_config"], "area")
