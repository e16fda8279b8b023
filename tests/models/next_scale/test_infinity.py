"""Infinity's transformer against a straight-line computation from the formulas of the paper, and its loader."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers.next_scale import decoded, random_maps
from tests.helpers.refusals import refuses
from tests.helpers.tiny_infinity import LENGTHS, SIDES, captions, some, tiny_infinity
from tests.helpers.var import gelu, normed, silu
from visual_spec.models.core.protocol import Side, shape_of
from visual_spec.models.next_scale.infinity import PRESETS, InfinityTransformer
from visual_spec.models.next_scale.infinity_checkpoint import load_infinity_checkpoint
from visual_spec.models.next_scale.infinity_scales import rope_grid_of, scales_for
from visual_spec.models.next_scale.scale_budget import cache_bytes
from visual_spec.models.next_token.llamagen import TextCondition

WIDE: tuple[Side, ...] = (1, (2, 1), (3, 2), (5, 3))
NEGATIVE = captions(9, (1, 6, 3))
MAPS = random_maps(tiny_infinity())


# -- an independent computation ---------------------------------------------------------------------------------------


def turned(x: Tensor, row: int, column: int) -> Tensor:
    """Pairs of `x [D]` as complex numbers, the first half turned by the row, the second by the column."""
    half = len(x) // 2
    speeds = [10000 ** (-2 * j / half) for j in range(half // 2)]
    angles = torch.tensor([row * s for s in speeds] + [column * s for s in speeds], dtype=x.dtype)
    numbers = torch.complex(x[0::2], x[1::2]) * torch.polar(torch.ones_like(angles), angles)
    return torch.stack([numbers.real, numbers.imag], -1).flatten()


def over_words(w: dict[str, Tensor], p: str, query: Tensor, words: Tensor, heads: int) -> Tensor:
    """One query `[dim]` over words `[t, C]`."""
    dim, size = len(query), len(query) // heads
    both = words @ w[p + "mat_kv.weight"].T
    keys, values = both[:, :dim], both[:, dim:] + w[p + "v_bias"]
    out = torch.zeros(dim, dtype=query.dtype)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        out[part] = (keys[:, part] @ query[part] / math.sqrt(size)).softmax(0) @ values[:, part]
    return w[p + "proj.weight"] @ out + w[p + "proj.bias"]


def straight_line(model: InfinityTransformer, words: Tensor, maps: list[Tensor], grid: Side) -> Tensor:
    """Logits [L * bits, 2] of one picture (words [t, C], maps [bits, h, w]): whole sequence, loops, no cache."""
    w = model.state_dict()
    dim, heads = model.config["dim"], model.config["num_heads"]
    size = dim // heads
    words = words / (words.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w["text_norm.weight"]
    pool = w["text_proj_for_sos.ca.mat_q"].flatten()
    pooled = over_words(w, "text_proj_for_sos.ca.", pool, words, model.config["pool_heads"])
    hidden = gelu(words @ w["text_proj_for_ca.0.weight"].T + w["text_proj_for_ca.0.bias"])
    words = hidden @ w["text_proj_for_ca.2.weight"].T + w["text_proj_for_ca.2.bias"]
    # Tokens in order, the scale of each, and where it lies on the grid of positions.
    rows, levels, places = [pooled + w["pos_start"][0, 0] + w["lvl_embed.weight"][0]], [0], [(0, 0)]
    for level, picture in enumerate(maps, 1):
        height, width = picture.shape[1:]
        for row in range(height):
            for column in range(width):
                embedded = w["word_embed.weight"] @ picture[:, row, column] + w["word_embed.bias"]
                rows.append(embedded + w["lvl_embed.weight"][level])
                levels.append(level)
                # Python rounds halves to even, as the official code does.
                tall, broad = shape_of(grid)
                places.append((round(row * tall / height), round(column * broad / width)))
    x = torch.stack(rows)
    condition = silu(pooled)
    for layer in range(model.config["num_layers"]):
        p = f"blocks.{layer}."
        six = (w["shared_ada_lin.1.weight"] @ condition + w["shared_ada_lin.1.bias"]).view(6, dim)
        gamma1, gamma2, scale1, scale2, shift1, shift2 = six + w[p + "ada_gss"][0, 0]
        h = normed(x, scale1, shift1) @ w[p + "sa.mat_qkv.weight"].T
        q, k, v = h[:, :dim] + w[p + "sa.q_bias"], h[:, dim : 2 * dim], h[:, 2 * dim :] + w[p + "sa.v_bias"]
        mixed = torch.zeros_like(x)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            sharpness = min(math.exp(w[p + "sa.scale_mul_1H11"][0, head, 0, 0]), 100.0)
            queries, keys = (
                torch.stack([turned(y[i, part] / y[i, part].norm(), *places[i]) for i in range(len(x))])
                for y in (q, k)
            )
            for i, level in enumerate(levels):
                seen = [j for j in range(len(levels)) if levels[j] <= level]
                mixed[i, part] = (sharpness * keys[seen] @ queries[i]).softmax(0) @ v[seen][:, part]
        x = x + (mixed @ w[p + "sa.proj.weight"].T + w[p + "sa.proj.bias"]) * gamma1
        zero = torch.zeros(dim, dtype=x.dtype)
        h = normed(x, zero, zero) * w[p + "ca_norm.weight"] + w[p + "ca_norm.bias"]
        h = h @ w[p + "ca.mat_q.weight"].T + w[p + "ca.mat_q.bias"]
        x = x + torch.stack([over_words(w, p + "ca.", query, words, heads) for query in h])
        h = normed(x, scale2, shift2) @ w[p + "ffn.fc1.weight"].T + w[p + "ffn.fc1.bias"]
        x = x + (gelu(h) @ w[p + "ffn.fc2.weight"].T + w[p + "ffn.fc2.bias"]) * gamma2
    scale, shift = (w["head_nm.ada_lin.1.weight"] @ condition + w["head_nm.ada_lin.1.bias"]).view(2, dim)
    logits = normed(x, scale, shift) @ w["head.weight"].T + w["head.bias"]
    return torch.stack([logits[:, 0::2].flatten(), logits[:, 1::2].flatten()], -1)


# -- the network -------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[dict[str, Any], Side]] = {
    "squares": (dict(), 4),
    "positions on a larger grid": (dict(rope_grid=10, num_heads=4, num_layers=1), 10),  # 2.5 and 7.5: halves
    "other shapes": (dict(scales=WIDE, rope_grid=(9, 5)), (9, 5)),
}


@pytest.mark.parametrize(("changes", "grid"), VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_a_straight_line_computation(changes, grid):
    model = tiny_infinity(**changes)
    model.get_parameter("blocks.0.sa.scale_mul_1H11").data[0, 0] = 7.0  # beyond the logarithm of 100: clamped
    maps, condition = random_maps(model), captions()
    got = torch.cat(decoded(model, condition, maps, guided=True), 1)
    against = torch.cat(decoded(model, replace(condition, negative=NEGATIVE), maps, guided=True), 1)
    for row in range(3):
        picture = [map[row] for map in maps]
        want = straight_line(model, condition.features[row, condition.mask[row]], picture, grid)
        # Angles are in float32.
        assert (got[row] - want).abs().max() < 2e-5
        assert (against[row] - want).abs().max() < 2e-5
        null = straight_line(model, model.cfg_uncond.data[: LENGTHS[row]], picture, grid)
        assert (got[3 + row] - null).abs().max() < 2e-5
        want = straight_line(model, NEGATIVE.features[row, NEGATIVE.mask[row]], picture, grid)
        assert (against[3 + row] - want).abs().max() < 2e-5
    assert got.std() > 0.3  # the logits say something


def test_a_caption_is_read_the_same_wherever_its_words_stand_and_whoever_is_beside_it():
    model, maps = tiny_infinity(), MAPS
    whole = torch.cat(decoded(model, captions(), maps, guided=True), 1)
    for row in range(3):
        alone = some(captions(), torch.tensor([row]))
        words = alone.features[0, alone.mask[0]]
        spread = TextCondition(torch.zeros(1, 12, 6).double(), torch.zeros(1, 12, dtype=torch.bool))
        places = torch.arange(len(words)) * 2 + 1
        spread.features[0, places], spread.mask[0, places] = words, True
        one = [map[row : row + 1] for map in maps]
        for condition in (alone, spread):
            got = torch.cat(decoded(model, condition, one, guided=True), 1)
            assert (got - whole[[row, 3 + row]]).abs().max() < 1e-11


def test_bytes_are_those_of_the_arithmetic():
    model, condition = tiny_infinity(dtype=torch.float32), captions()
    row = 2 * 2 * 16 * 4  # keys and values, layers, width, bytes
    for guided, rows in [(False, 3), (True, 6)]:
        state = model.prefill(condition, batch_size=3, guided=guided)
        planned = cache_bytes(model.config, None, 3, guided, torch.float32)
        assert state.cache_bytes == planned.held == rows * row * (1 + 4 + 9)
        assert 2 * state.text_keys.nbytes == rows * row * max(LENGTHS)
        assert model.prefill(condition, batch_size=3, guided=guided, stop=3).cache_bytes == rows * row * 5
    assert model.prefill(condition, batch_size=3, guided=False, stop=1).cache_bytes == 0
    model = model.bfloat16()
    cache: Any = model.prefill(condition, batch_size=3, guided=False).cache
    assert cache.held.keys.dtype == cache.held.values.dtype == torch.bfloat16
    wide = tiny_infinity(scales=WIDE)
    assert wide.offsets == (0, 1, 3, 9, 24)
    assert cache_bytes(wide.config, None, 1, False, torch.float32).held == row * 9


def test_fresh_networks_begin_near_the_uniform_law():
    torch.manual_seed(0)
    model = InfinityTransformer(
        bits=3, dim=32, num_layers=2, num_heads=2, ffn_dim=64, caption_dim=6, caption_length=7, pool_heads=4,
        scales=SIDES,
    )  # fmt: skip
    logits = model.teacher_forced([map.float() for map in MAPS], captions())
    assert 0 < logits.abs().max() < 0.1


def test_positions_follow_the_official_grids():
    assert rope_grid_of(scales_for(256)) == rope_grid_of(scales_for(1024)) == 64
    assert rope_grid_of(scales_for(512, 4 / 3)) == (72, 54)
    assert rope_grid_of(SIDES) == 4
    small, large = (tiny_infinity(scales=scales_for(size), num_levels=15) for size in (256, 512))
    rotations = small._rotations(torch.device("cpu"))
    assert rotations.shape == (521, 4, 2)
    # Of a float64 model to the last bit: half the pairs turn by row. The last place is in row and column 60 of 64.
    angles = 60 * 10000 ** -(torch.arange(2, dtype=torch.float64) / 2)
    assert (rotations[-1, :2] - torch.stack([angles.cos(), angles.sin()], -1)).abs().max() < 1e-13
    assert torch.equal(large._rotations(torch.device("cpu"))[:521], rotations)
    assert not torch.equal(tiny_infinity(scales=scales_for(256), rope_grid=16, num_levels=15)._rotations(
        torch.device("cpu")
    ), rotations)  # fmt: skip


def test_requests_that_do_not_fit_are_refused_with_what_would():
    model, condition = tiny_infinity(), captions()
    refuses(TypeError, "str.*TextCondition", model.prefill, "red circle", batch_size=1, guided=False)
    with pytest.raises(ValueError, match=r"\(3, 6, 6\).*\(3, 6\).*\[2, words, 6\]"):
        model.prefill(condition, batch_size=2, guided=False)
    with pytest.raises(ValueError, match=r"\[4, 0, 5\].*1.*7"):
        empty = TextCondition(condition.features, condition.mask.clone())
        empty.mask[1] = False
        model.prefill(empty, batch_size=3, guided=False)
    with pytest.raises(ValueError, match=r"captions.*\[8\].*1.*7"):
        model.prefill(captions(lengths=(8,)), batch_size=1, guided=False)
    refuses(ValueError, "coarse", tiny_infinity, scales=(1, 3, 2))
    refuses(ValueError, "coarse", tiny_infinity, scales=(1, (3, 2), (4, 1)))
    refuses(ValueError, "most 6.*1", tiny_infinity, scales=(2, 3))
    refuses(ValueError, "at most 6", tiny_infinity, scales=(1, 2, 3, 4, 5, 6, 7))
    refuses(ValueError, "dim=12, num_heads=2, pool_heads=4", tiny_infinity, dim=12)


# -- official checkpoints --------------------------------------------------------------------------------------------


def official_shapes(preset: str, chunks: int = 8) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the released files."""
    size = PRESETS[preset]
    dim, depth, heads, bits = size["dim"], size["num_layers"], size["num_heads"], size["bits"]
    shapes: dict[str, tuple[int, ...]] = {
        "cfg_uncond": (512, 2048),
        "pos_start": (1, 1, dim),
        "text_norm.weight": (2048,),
        "text_proj_for_sos.ca.mat_q": (1, 16, dim // 16),
        "text_proj_for_sos.ca.mat_kv.weight": (2 * dim, 2048),
        "text_proj_for_sos.ca.v_bias": (dim,),
        "text_proj_for_sos.ca.zero_k_bias": (dim,),
        "text_proj_for_sos.ca.proj.weight": (dim, dim),
        "text_proj_for_sos.ca.proj.bias": (dim,),
        "text_proj_for_ca.0.weight": (dim, 2048),
        "text_proj_for_ca.0.bias": (dim,),
        "text_proj_for_ca.2.weight": (dim, dim),
        "text_proj_for_ca.2.bias": (dim,),
        "lvl_embed.weight": (15, dim),
        "word_embed.weight": (dim, bits),
        "word_embed.bias": (dim,),
        "shared_ada_lin.1.weight": (6 * dim, dim),
        "shared_ada_lin.1.bias": (6 * dim,),
        "head_nm.ada_lin.1.weight": (2 * dim, dim),
        "head_nm.ada_lin.1.bias": (2 * dim,),
        "head.weight": (2 * bits, dim),
        "head.bias": (2 * bits,),
    }
    for layer in range(depth):
        each = depth // chunks
        p = f"block_chunks.{layer // each}.module.{layer % each}."
        shapes |= {
            p + "sa.scale_mul_1H11": (1, heads, 1, 1),
            p + "sa.q_bias": (dim,),
            p + "sa.v_bias": (dim,),
            p + "sa.zero_k_bias": (dim,),
            p + "sa.mat_qkv.weight": (3 * dim, dim),
            p + "sa.proj.weight": (dim, dim),
            p + "sa.proj.bias": (dim,),
            p + "ca.mat_q.weight": (dim, dim),
            p + "ca.mat_q.bias": (dim,),
            p + "ca.mat_kv.weight": (2 * dim, dim),
            p + "ca.v_bias": (dim,),
            p + "ca.zero_k_bias": (dim,),
            p + "ca.proj.weight": (dim, dim),
            p + "ca.proj.bias": (dim,),
            p + "ca_norm.weight": (dim,),
            p + "ca_norm.bias": (dim,),
            p + "ffn.fc1.weight": (4 * dim, dim),
            p + "ffn.fc1.bias": (4 * dim,),
            p + "ffn.fc2.weight": (dim, 4 * dim),
            p + "ffn.fc2.bias": (dim,),
            p + "ada_gss": (1, 1, 6, dim),
        }
    return shapes


def official(preset: str, **changes: Any) -> dict[str, Tensor]:
    shapes = official_shapes(preset) | changes
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


@pytest.mark.parametrize(("preset", "billions"), [("2b", 2.20), ("8b", 8.38)])
def test_official_files_load_key_for_key(preset: str, billions: float):
    weights = official(preset)
    model = load_infinity_checkpoint(weights)
    assert {key: model.config[key] for key in PRESETS[preset]} == PRESETS[preset]
    assert model.scales == scales_for(1024)
    assert model.config["caption_dim"] == 2048 and model.config["caption_length"] == 512
    count = sum(parameter.numel() for parameter in model.parameters())
    constants = sum(weight.numel() for key, weight in weights.items() if "zero_k_bias" in key)
    assert count == sum(weight.numel() for weight in weights.values()) - constants
    assert abs(count / 1e9 - billions) < 0.01
    with torch.device("meta"):
        built = InfinityTransformer(**PRESETS[preset])
    assert {k: v.shape for k, v in built.state_dict().items()} == {
        k: v.shape for k, v in model.state_dict().items()
    }
    assert load_infinity_checkpoint(weights, scales=scales_for(512, 0.75)).scales[-1] == (27, 36)


def test_chunks_are_joined_in_order_and_give_the_same_logits(tmp_path):
    model = tiny_infinity(dtype=torch.float32, num_layers=4)
    maps, condition = [map.float() for map in MAPS], captions()
    want = model.teacher_forced(maps, condition)
    weights = {}
    for key, value in model.state_dict().items():
        part, *rest = key.split(".")
        layer = int(rest[0]) if part == "blocks" else 0
        name = f"block_chunks.{layer // 2}.module.{layer % 2}." + ".".join(rest[1:])
        weights[name if part == "blocks" else key] = value.clone()
    weights["block_chunks.1.module.0.ca.zero_k_bias"] = torch.zeros(16)
    weights["lvl_1L"] = torch.zeros(1, 30)
    torch.save(weights, tmp_path / "own.pth")
    # The 8B comes in a folder of shards with an index.
    folder = tmp_path / "shards"
    folder.mkdir()
    names = sorted(weights)
    shards = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(shards.values()):
        save_file({name: weights[name] for name in names if shards[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for source in (tmp_path / "own.pth", str(folder), weights, model.state_dict()):
        again = load_infinity_checkpoint(source, scales=SIDES)
        assert torch.equal(again.teacher_forced(maps, condition), want)
        assert not again.training
    assert load_infinity_checkpoint(weights, scales=SIDES, dtype=torch.bfloat16).dtype == torch.bfloat16
    (folder / "model.safetensors.index.json").unlink()
    refuses(ValueError, "0 index", load_infinity_checkpoint, folder)


def test_a_missing_layer_is_noticed_be_it_the_last_one():
    for chunk, layer in ((7, 3), (2, 1), (0, 3)):
        weights = official("2b")
        for key in [key for key in weights if key.startswith(f"block_chunks.{chunk}.module.{layer}.")]:
            del weights[key]
        refuses(ValueError, rf"block_chunks.*{chunk}: 3", load_infinity_checkpoint, weights)
    weights = {key: value for key, value in official("2b").items() if not key.startswith("block_chunks.3.")}
    refuses(ValueError, "block_chunks", load_infinity_checkpoint, weights)


def test_biases_that_should_be_zero_are_looked_at(tmp_path):
    weights = tiny_infinity(dtype=torch.float32).state_dict()
    zeros = torch.zeros(weights["word_embed.bias"].shape)
    for key in ("blocks.0.sa.zero_k_bias", "text_proj_for_sos.ca.zero_k_bias"):
        load_infinity_checkpoint({**weights, key: zeros}, scales=SIDES)
        with pytest.raises(ValueError, match=f"{key} is a constant"):
            load_infinity_checkpoint({**weights, key: zeros + 1e-3}, scales=SIDES)


def test_an_index_that_names_no_shards_is_refused(tmp_path):
    for text in ("[]", "{", '{"weight_map": 3}', "null", '{"weight_map": {"a": 3}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        refuses(ValueError, r"model\.safetensors\.index\.json", load_infinity_checkpoint, tmp_path)
