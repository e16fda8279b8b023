"""The next-scale transformer against a straight-line computation from the formulas of the paper, and its loader."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.next_scale import decoded, random_maps
from tests.helpers.refusals import refuses
from tests.helpers.tiny_scales import tiny_var
from tests.helpers.var import block_shapes, normed, silu, straight_layers
from visual_spec.models.next_scale.var import PRESETS, SCALES, VARTransformer, load_var_checkpoint

SIDES = (1, 2, 3, 4)
MAPS = random_maps(tiny_var(), 2)


def straight_line(model: VARTransformer, label: int, maps: list[Tensor]) -> Tensor:
    """Logits [L, V] of one picture (maps [D, n, n]), with loops over heads, tokens and what they see. No cache."""
    w = model.state_dict()
    # Tokens in order, and the scale of each.
    rows, levels = [], []
    for slot in range(model.scales[0] ** 2):
        rows.append(w["class_emb.weight"][label] + w["pos_start"][0, slot])
        levels.append(0)
    for level, picture in enumerate(maps, 1):
        for row in range(model.scales[level]):
            for column in range(model.scales[level]):
                rows.append(w["word_embed.weight"] @ picture[:, row, column] + w["word_embed.bias"])
                levels.append(level)
    x = torch.stack(
        [
            row + w["pos_1LC"][0, slot] + w["lvl_embed.weight"][level]
            for slot, (row, level) in enumerate(zip(rows, levels, strict=True))
        ]
    )
    x = straight_layers(model, x, label, lambda i, j: levels[j] <= levels[i])
    condition = silu(w["class_emb.weight"][label])
    dim = model.config["dim"]
    scale, shift = (w["head_nm.ada_lin.1.weight"] @ condition + w["head_nm.ada_lin.1.bias"]).view(2, dim)
    return normed(x, scale, shift) @ w["head.weight"].T + w["head.bias"]


VARIANTS: list[dict[str, Any]] = [
    dict(),
    dict(shared_adaln=True),
    dict(scales=(2, 3), num_heads=4, num_layers=1),
]


@pytest.mark.parametrize("changes", VARIANTS, ids=["adaln a layer", "shared adaln", "first scale of four"])
def test_logits_equal_a_straight_line_computation(changes):
    model = tiny_var(**changes)
    # Beyond the logarithm of 100: clamped.
    model.get_parameter("blocks.0.attn.scale_mul_1H11").data[0, 0] = 7.0
    maps = random_maps(model, 2)
    labels = torch.tensor([3, 0])
    got = torch.cat(decoded(model, labels, maps, guided=True), 1)
    for row, label in enumerate([3, 0, 5, 5]):
        want = straight_line(model, label, [map[row % 2] for map in maps])
        assert (got[row] - want).abs().max() < 1e-10
    assert got.std() > 0.3  # the logits say something


def test_nothing_is_cached_that_nobody_reads():
    model, labels, maps = tiny_var(dtype=torch.float32), torch.tensor([2, 3]), MAPS
    row = 2 * 2 * 16 * 4  # keys and values, layers, width, bytes

    def cached(guided: bool = False, **changes) -> int:
        return model.prefill(labels, batch_size=2, guided=guided, **changes).cache_bytes

    assert cached() == 2 * row * (1 + 4 + 9)
    assert cached(guided=True) == 4 * row * (1 + 4 + 9)
    assert cached(stop=3) == 2 * row * (1 + 4)
    assert cached(stop=1) == 0
    assert cached(maps=maps[:1]) == 2 * row * (1 + 4 + 9)
    assert cached(maps=maps) == 0  # only the last scale was asked for, and this forward has it
    assert cached(maps=maps[:2], stop=3) == 0
    model = model.bfloat16()
    state = model.prefill(labels, batch_size=2, guided=False)
    cache: Any = state.cache
    assert cache.held.keys.dtype == cache.held.values.dtype == torch.bfloat16
    assert state.cache_bytes == row * (1 + 4 + 9)


def test_a_shorter_cache_gives_the_same_logits():
    model, labels, maps = tiny_var(), torch.tensor([2, 3]), MAPS
    whole = decoded(model, labels, maps, guided=False)
    state = model.prefill(labels, batch_size=2, guided=False, stop=3)
    for k in (1, 2):
        assert (model(state, maps[k - 1], k) - whole[k]).abs().max() < 1e-12
    refuses(ValueError, "3.*stop=3", model, state, maps[2], 3)


@pytest.mark.parametrize(("known", "stop"), [(0, 1), (1, 2), (2, 3), (3, None)])
def test_a_prefill_of_the_last_scale_leaves_nothing_to_go_on_from(known, stop):
    """Nothing was cached, so another scale would attend to nothing, or to memory that was never written."""
    model, labels, maps = tiny_var(), torch.tensor([2, 3]), MAPS
    want = decoded(model, labels, maps, guided=False)[known]
    state = model.prefill(labels, batch_size=2, guided=False, maps=maps[:known], stop=stop)
    assert (state.logits - want).abs().max() < 1e-12
    for scale in (1, 2, 3):
        refuses(ValueError, f"scale {scale} .*0 cached", model, state, maps[scale - 1], scale)


def test_fresh_networks_begin_near_the_identity_and_the_uniform_law():
    torch.manual_seed(0)
    for shared in (False, True):
        model = VARTransformer(
            vocab_size=12, code_dim=2, dim=32, num_layers=2, num_heads=2, num_classes=5, scales=SIDES,
            shared_adaln=shared,
        )  # fmt: skip
        logits = model.teacher_forced([map.float() for map in MAPS], torch.tensor([1, 4]))
        assert logits.abs().max() < 0.1
        condition = model.embed_condition(torch.tensor([1, 4]))
        modulations = model._modulations(condition)
        gains = 0.3 if shared else 0.01  # what is shared has no small gains of its own
        assert modulations[0][:, :2].abs().max() < gains


def test_requests_that_do_not_fit_are_refused_with_what_would():
    model, maps = tiny_var(), MAPS
    labels = torch.tensor([1, 4])
    refuses(TypeError, "str.*LongTensor", model.prefill, "red circle", batch_size=1, guided=False)
    refuses(ValueError, r"\[5\].*1.*0.*4", model.prefill, torch.tensor([5]), batch_size=1, guided=False)
    refuses(ValueError, r"labels \[1, 4\].*3", model.prefill, labels, batch_size=3, guided=False)
    with pytest.raises(ValueError, match=r"\(2, 2, 2, 2\).*1.*\(1, 2, 2, 2\)"):
        model.prefill(labels[:1], batch_size=1, guided=False, maps=maps)
    refuses(ValueError, "coarse", tiny_var, scales=(2, 1))
    refuses(ValueError, "dim=10.*num_heads=4", tiny_var, dim=10, num_heads=4)


# -- official checkpoints --------------------------------------------------------------------------------------------


def official_shapes(depth: int, scales: tuple[int, ...], shared: bool) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the released `var_d*.pth`."""
    dim, length = 64 * depth, sum(side * side for side in scales)
    shapes: dict[str, tuple[int, ...]] = {
        "pos_start": (1, 1, dim),
        "pos_1LC": (1, length, dim),
        "lvl_1L": (1, length),
        "attn_bias_for_masking": (1, 1, length, length),
        "word_embed.weight": (dim, 32),
        "word_embed.bias": (dim,),
        "class_emb.weight": (1001, dim),
        "lvl_embed.weight": (10, dim),
        "head_nm.ada_lin.1.weight": (2 * dim, dim),
        "head_nm.ada_lin.1.bias": (2 * dim,),
        "head.weight": (4096, dim),
        "head.bias": (4096,),
    }
    shapes |= {f"blocks.{layer}.attn.zero_k_bias": (dim,) for layer in range(depth)}
    return shapes | block_shapes(depth, dim, depth, shared)


def official(name: str, **changes: Any) -> dict[str, Tensor]:
    """An official state dict on the meta device, but for the small table that tells the scales."""
    preset = PRESETS[name]
    scales = preset["scales"]
    shapes = official_shapes(preset["num_layers"], scales, preset.get("shared_adaln", False)) | changes
    weights = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    levels = [torch.full((side * side,), level) for level, side in enumerate(scales)]
    return weights | {"lvl_1L": torch.cat(levels)[None]}


@pytest.mark.parametrize(
    ("name", "millions"), [("d16", 310), ("d20", 600), ("d24", 1030), ("d30", 2010), ("d36", 2350)]
)
def test_official_files_load_key_for_key(name: str, millions: int):
    weights = official(name)
    model = load_var_checkpoint(weights)
    assert {key: model.config[key] for key in PRESETS[name]} == PRESETS[name]
    assert model.scales == (SCALES[512] if name == "d36" else SCALES[256])
    assert (model.vocab_size, model.code_dim, model.config["num_classes"]) == (4096, 32, 1000)
    assert abs(sum(p.numel() for p in model.parameters()) / 1e6 - millions) < 0.02 * millions
    # Without the constants too: the official scales are known by their number of slots.
    del weights["lvl_1L"], weights["attn_bias_for_masking"]
    assert load_var_checkpoint(weights).scales == model.scales


def test_sizes_of_any_kind_are_read_off_the_file_and_give_the_same_logits(tmp_path):
    maps, labels = [map.float() for map in MAPS], torch.tensor([1, 4])
    for shared in (False, True):
        model = tiny_var(dtype=torch.float32, shared_adaln=shared)
        weights = model.state_dict()
        weights["blocks.1.attn.zero_k_bias"] = torch.zeros(16)
        torch.save(weights, tmp_path / "own.pth")
        again = load_var_checkpoint(tmp_path / "own.pth", scales=SIDES)
        assert torch.equal(again.teacher_forced(maps, labels), model.teacher_forced(maps, labels))
        assert not again.training
        assert load_var_checkpoint(weights, scales=SIDES, dtype=torch.bfloat16).dtype == torch.bfloat16
        refuses(ValueError, "30.*4.*`scales`", load_var_checkpoint, weights)


def test_constants_are_looked_at():
    weights = tiny_var(dtype=torch.float32).state_dict()
    levels = torch.cat([torch.full((side * side,), level) for level, side in enumerate(SIDES)])
    allowed = levels[:, None] >= levels[None, :]
    mask = torch.where(allowed, 0.0, -torch.inf)[None, None]
    usual = {
        "lvl_1L": levels[None],
        "attn_bias_for_masking": mask,
        "blocks.0.attn.zero_k_bias": torch.zeros(16),
    }
    load_var_checkpoint({**weights, **usual})
    for key, value in {
        "lvl_1L": levels.flip(0)[None],
        "attn_bias_for_masking": mask.mT.contiguous(),
        "blocks.0.attn.zero_k_bias": torch.full((16,), 0.01),
    }.items():
        refuses(ValueError, f"{key} is a constant", load_var_checkpoint, {**weights, **usual, key: value})


def test_other_scales_are_refused():
    refuses(ValueError, r"\(1, 2\).*5.*680.*10", load_var_checkpoint, official("d16"), scales=(1, 2))
