"""What pictures of VAR cost, counted on the real modules, against the closed formulas of the cost model."""

from typing import Any

import pytest
import torch

from tests.helpers.tiny_scales import TINY_VQ, tiny_scale_pipeline
from visual_spec import ScaleImagePipeline
from visual_spec.eval.draws import caches_of
from visual_spec.eval.speed.scale_cost import count_decode, like_on_meta, pipeline_on_meta
from visual_spec.models.next_scale.scale_budget import ScaleBudget
from visual_spec.models.next_scale.var import PRESETS, SCALES
from visual_spec.samplers.scales.schedule import ScaleSchedule

CODES = 4096


def formula(
    depth: int,
    *,
    layers: int | None = None,
    scales: tuple[int, ...] = SCALES[256],
    first: int = 0,
    stop: int | None = None,
    size: int = 2,
    shared: bool = False,
) -> tuple[float, float, float]:
    """FLOPs, weight bytes and bytes of keys and values for scales `first` to `stop` - 1 of a picture with guidance.

    A block has 12 C^2 weights (attention 4, feed-forward 8), AdaLN 6 C^2 a layer (or once, if it is shared) and 2 C^2
    at the head, which has C V. Attention of n queries over m keys takes 4 C n m. Two rows; AdaLN once a model.
    """
    width, count = 64 * depth, layers or depth
    slots = [side * side for side in scales]
    known = [sum(slots[: k + 1]) for k in range(len(slots))]
    block, head = 12 * width**2 * count, width * CODES
    adaln = 6 * width**2 * (1 if shared else count) + 2 * width**2
    flops = weights = cached = 0.0
    for k in range(first, len(scales) if stop is None else stop):
        fed = known[k] if k == first else slots[k]
        pairs = known[k] * slots[k] + (sum(slots[j] * known[j] for j in range(k)) if k == first else 0)
        once = adaln if k == first else 0
        flops += 2 * (2 * block * fed + 2 * head * slots[k] + 4 * width * count * pairs + 2 * once)
        weights += size * (block + head + once)
        cached += 2 * 2 * width * count * known[k] * size
    return flops, weights, cached


def count(name: str, small: str | None = None, split: int | None = None, **changes: Any):
    configs = [{**PRESETS[part], **changes} for part in (name, small) if part]
    scales = configs[0]["scales"]
    pipe = pipeline_on_meta(configs[0], {"scales": scales}, *configs[1:], dtype=torch.bfloat16)
    cost = count_decode(pipe.stages(len(scales) if split is None else split), guided=True)
    return cost.flops, cost.weight_bytes, cost.cache_bytes


def within(found, expected, share: float = 0.05) -> None:
    assert found == pytest.approx(expected, rel=share)
    assert found[1] + found[2] == pytest.approx(expected[1] + expected[2], rel=share)


@pytest.mark.fast_sets(4)
@pytest.mark.parametrize("pixels", [256, 512])
@pytest.mark.parametrize("depth", [16, 20, 24, 30, 36])
def test_a_picture_of_var(depth, pixels):
    """Two layers of the true width: what a layer costs is the same in all."""
    scales, shared = SCALES[pixels], depth == 36
    found = count(f"d{depth}", num_layers=2, scales=scales)
    within(found, formula(depth, layers=2, scales=scales, shared=shared), 0.01)


@pytest.mark.parametrize("split", [6, 7, 8, 9])
def test_a_picture_by_two_models(split):
    large = formula(30, layers=2, stop=split)
    small = formula(16, layers=2, first=split)
    want = tuple(a + b for a, b in zip(large, small, strict=True))
    within(count("d30", "d16", split, num_layers=2), want, 0.02)


@pytest.mark.slow
def test_whole_models_cost_what_the_notes_say():
    """TFLOP a picture: VAR-d16 0.60, VAR-d30 3.79, CoDe 2.91 / 1.98 / 1.43 / 1.09 at N = 9 / 8 / 7 / 6."""
    for name, want in {"d16": 0.60, "d30": 3.79}.items():
        found = count(name)
        within(found, formula(int(name[1:])))
        assert found[0] / 1e12 == pytest.approx(want, rel=0.05)
    for split, want in {9: 2.91, 8: 1.98, 7: 1.43, 6: 1.09}.items():
        assert count("d30", "d16", split)[0] / 1e12 == pytest.approx(want, rel=0.05)


def test_compressed_caches_are_read_by_what_they_hold():
    scales = SCALES[256]
    pipe = pipeline_on_meta({**PRESETS["d16"], "num_layers": 2}, {}, dtype=torch.bfloat16)
    full = count_decode(pipe.stages(), guided=True)
    budget = ScaleBudget.from_share(scales, 2, 0.1)
    pipe.compress(budget)
    small = count_decode(pipe.stages(), guided=True)
    row = 2 * 2 * 1024 * 2  # bytes of one token in one layer of both rows
    read = sum(held + side * side for side, rows in zip(scales, budget.held(), strict=True) for held in rows)
    assert small.cache_bytes == row * read < 0.7 * full.cache_bytes
    assert small.weight_bytes == full.weight_bytes and small.flops < full.flops


def test_a_batch_shares_its_weights_and_nothing_else():
    cost = count_decode(like_on_meta(tiny_scale_pipeline(pair=False)).stages(), guided=True)
    alone, batch = cost.in_batch(1), cost.in_batch(4)
    assert batch["weight_bytes_per_image"] == alone["weight_bytes_per_image"] / 4 == cost.weight_bytes / 4
    for name in ("flops_per_image", "cache_bytes_per_image", "forwards"):
        assert batch[name] == alone[name]
    assert batch["bytes_per_image"] == cost.weight_bytes / 4 + cost.cache_bytes
    unguided = count_decode(like_on_meta(tiny_scale_pipeline(pair=False)).stages(), guided=False)
    words = 2 * 29 * 2 * 16  # both rows read the same maps, which are embedded once
    assert cost.flops == 2 * unguided.flops - words and cost.cache_bytes == 2 * unguided.cache_bytes
    assert cost.weight_bytes == unguided.weight_bytes


def test_a_refiner_without_guidance_costs_half_the_rows():
    both, half = (
        like_on_meta(tiny_scale_pipeline(refiner_guidance_scale=scale)).stages(2) for scale in (None, 1.0)
    )
    costs = [[count_decode(stages, guided=guided) for guided in (True, False)] for stages in (both, half)]
    (full, none), (mixed, still) = costs
    assert still == none and none.flops < mixed.flops < full.flops and mixed.weight_bytes == full.weight_bytes
    alone = like_on_meta(tiny_scale_pipeline(refiner_guidance_scale=1.0)).stages(4)
    assert count_decode(alone, guided=True).flops > count_decode(alone, guided=False).flops
    # The refiner's share of the difference is gone, the large model's is as it was.
    rows = caches_of(half, 1, True, torch.float32), caches_of(both, 1, True, torch.float32)
    assert rows[0][0] == rows[1][0] and 2 * rows[0][1].peak == rows[1][1].peak


def test_every_weight_of_a_tiny_model_is_read_where_it_is_used():
    pipe = like_on_meta(tiny_scale_pipeline(pair=False))
    model = pipe.transformer
    cost = count_decode(pipe.stages(), guided=True)
    sizes = {name: p.numel() * 4 for name, p in model.named_parameters()}
    once = sum(size for name, size in sizes.items() if "ada_lin" in name or name == "pos_start")
    tables = sizes["class_emb.weight"] + sizes["lvl_embed.weight"]
    positions = sizes["pos_1LC"]
    always = sum(sizes.values()) - once - tables - positions
    first = sum(sizes[f"word_embed.{kind}"] for kind in ("weight", "bias"))  # scale 0 has no words
    places = cost.weight_bytes - (4 * always - first + once)
    # Positions of each scale once, and its row of levels.
    assert places == positions


def test_the_shapes_and_classes_are_those_of_the_pipeline():
    pipe = tiny_scale_pipeline(num_draft_scales=3)
    copy = like_on_meta(pipe)
    flexvar = ScaleImagePipeline.from_pretrained("shapes_flexvar")
    counted = like_on_meta(flexvar)
    pairs = [(getattr(pipe, name), getattr(copy, name)) for name in ("transformer", "refiner", "vq_model")]
    pairs += [(getattr(flexvar, name), getattr(counted, name)) for name in ("transformer", "vq_model")]
    assert count_decode(counted.stages(), guided=True).forwards == len(flexvar.transformer.scales)
    for here, there in pairs:
        assert type(here) is type(there)
        assert all(p.is_meta for p in there.parameters())
        shapes = [{key: value.shape for key, value in one.state_dict().items()} for one in (here, there)]
        assert shapes[0] == shapes[1]
    assert [stage.scales for stage in copy.stages()] == [range(3), range(3, 4)]
    assert pipeline_on_meta({"num_layers": 1}, {}, dtype=torch.float16).refiner is None
    assert set(TINY_VQ) <= set(copy.vq_model.config)


def test_a_schedule_costs_what_it_runs():
    """By the matrix products of every scale: layers of kept places in their rows, the head of all places."""
    pipe = like_on_meta(tiny_scale_pipeline(pair=False))
    full = count_decode(pipe.stages(), guided=True)

    def flops(**schedule: Any) -> int:
        return count_decode(pipe.stages(), guided=True, schedule=ScaleSchedule(**schedule)).flops

    width, layers, words = 16, 2, 12
    block, head = layers * 12 * width * width, width * words  # of one place
    reads = 2 * layers * width  # of one place and one that it sees
    assert flops(stop_after=3, guided_until=4, keep_share=(1.0,) * 4) == full.flops
    # Without the last scale: its embedding, blocks and head, and what its places see.
    last = 16 * (2 * width) + 2 * 16 * (block + head + reads * 30)
    assert full.flops - flops(stop_after=2) == 2 * last
    # Without the unconditional rows of the last scale.
    assert full.flops - flops(guided_until=3) == 2 * 16 * (block + head + reads * 30)
    # With 5 of its 16 places, which see these and the 14 before.
    pruned = 2 * (16 * (block + reads * 30) - 5 * (block + reads * 19))
    assert full.flops - flops(keep_share=(0.3,)) == 2 * pruned
    assert count_decode(pipe.stages(), guided=True, schedule=ScaleSchedule(stop_after=2)).forwards == 3
