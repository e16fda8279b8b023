"""ScaleKV: budgets by the paper's rule, eviction against plain loops, memory to the byte."""

import copy
import json
import math
import weakref
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.next_scale import decoded, random_maps
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.tiny_scales import FormulaTokenizer, tiny_var
from visual_spec.models.core import cache
from visual_spec.models.core.cache import largest
from visual_spec.models.next_scale.scale_budget import ScaleBudget, cache_bytes
from visual_spec.models.next_scale.scale_cache import (
    CompressedVAR,
    attention_scores,
    calibrate,
    find_drafters,
    layer_importance,
    observers,
    pool_of,
)
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import Stage, code_stages
from visual_spec.samplers.scales.trace import ScaleTrace

SIDES = (1, 2, 3, 4, 5, 6)
STARTS = (0, 1, 5, 14, 30, 55, 91)
TOKENIZER = FormulaTokenizer(SIDES, 12)
LAW = TokenLaw(guidance_scale=3.0, top_k=9)
LABELS = torch.tensor([3, 0, 4])
# Both layers are squeezed; at the end layer 1 has room for more than the 45 tokens that are left to it by then.
TIGHT = ScaleBudget(SIDES, ((0, 0), (1, 1), (4, 5), (9, 14), (17, 20), (22, 50)))


def var(seed: int = 0, **changes: Any) -> VARTransformer:
    return tiny_var(seed, **{"scales": SIDES, **changes})


def draw(model: Any, rows: Tensor, **options: Any):
    generator = seeded(*(100 + row for row in rows.tolist()))
    sampler = ScaleWiseSampler(**options)
    return sampler(
        model, LABELS[rows], tokenizer=TOKENIZER, law=LAW, generator=generator, batch_size=len(rows)
    )


MAPS = random_maps(var())


# -- plain loops -----------------------------------------------------------------------------------------------------


def slow_choice(queries: Tensor, keys: Tensor, newest: list[int], keep: int, reach: int = 0) -> list[int]:
    """One head: which of `keys [S, D]` the observers `[O, D]` keep; scores are averaged over `reach` to either side."""
    scores = [0.0] * len(keys)
    for query in queries:
        weights = [math.exp(float(query @ key)) for key in keys]
        for place, weight in enumerate(weights):
            scores[place] += weight / sum(weights)
    pooled = []
    for place in range(len(keys)):
        near = scores[max(0, place - reach) : place + reach + 1]
        pooled.append(sum(near) / len(near))
    others = sorted((place for place in range(len(keys)) if place not in newest), key=lambda p: -pooled[p])
    return sorted(newest + others[: keep - len(newest)])


def slow_window(side: int) -> list[int]:
    """Centres of the cells of a 4 x 4 grid, in raster order."""
    if side <= 4:
        return list(range(side * side))
    line = [math.floor((cell + 0.5) * side / 4) for cell in range(4)]
    return [side * row + column for row in line for column in line]


@torch.no_grad()
def slow_logits(model: VARTransformer, maps: list[Tensor], budget: ScaleBudget, masses=None) -> Tensor:
    """Logits [B, L, V] without any cache: a list of what each head still sees, over all tokens of the picture.

    `masses[scale][layer]`, if given, collects pairs of attention masses of each query: on its own map, and the sorted
    weights on what came before.
    """
    classes = model.embed_condition(LABELS)
    hidden = model._embed(classes, maps)
    modulations, head_modulation = model._modulations(classes), model.head_nm.modulation(classes)
    for layer, block in enumerate(model.blocks):

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
            out = torch.zeros_like(q)
            for row in range(q.shape[0]):
                for head in range(q.shape[1]):
                    queries, keys, values = q[row, head], k[row, head], v[row, head]
                    kept: list[int] = []
                    for scale, side in enumerate(SIDES):
                        count = len(kept)
                        own = list(range(STARTS[scale], STARTS[scale + 1]))
                        seen = kept + own
                        for token in own:
                            weights = (keys[seen] @ queries[token]).softmax(0)
                            out[row, head, token] = weights @ values[seen]
                            if masses is not None:
                                masses[scale][layer].append(
                                    (weights[count:].sum(), weights[:count].sort()[0])
                                )
                        if scale + 1 < len(SIDES):
                            room = budget.tokens[scale + 1][layer]
                            kept = seen
                            if room < len(seen):
                                window = slow_window(side)
                                watching = queries[[own[place] for place in window]]
                                newest = [count + place for place in window]
                                kept = [seen[p] for p in slow_choice(watching, keys[seen], newest, room)]
            return out

        hidden = block(hidden, modulations[layer], attend)
    return model._logits(hidden, head_modulation)


# -- eviction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [1, 2, 3, 4, 5, 6, 7, 10, 16, 64])
def test_the_observation_window_is_the_centres_of_a_grid(side):
    assert observers(side).tolist() == slow_window(side)


def test_the_most_attended_tokens_are_those_of_a_plain_computation():
    generator = torch.Generator().manual_seed(2)
    for count, keep in [(30, 5), (30, 17), (30, 29), (7, 4), (4, 3)]:
        newest = [count - 1, count - 3]
        queries = 3 * torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64)
        keys = torch.randn(2, 3, count, 4, generator=generator, dtype=torch.float64)
        for reach in (0, 1, 2):
            scores = attention_scores(queries, keys, torch.tensor(newest), 2 * reach + 1)
            found = largest(scores, keep)
            assert found.shape == (2, 3, keep)
            for row in range(2):
                for head in range(3):
                    want = slow_choice(queries[row, head], keys[row, head], newest, keep, reach)
                    assert found[row, head].tolist() == want
    # Where nothing tells tokens apart, the earlier ones stay.
    alike = attention_scores(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 20, 4), torch.tensor([19]))
    assert largest(alike, 4).flatten().tolist() == [0, 1, 2, 19]


def test_small_maps_are_not_pooled():
    assert pool_of((1, 2, 16)) == pool_of((1, 16, 31)) == pool_of(((4, 8), (16, 64))) == 1
    assert pool_of((1, 32)) == pool_of((1, 64)) == pool_of(((4, 8), (32, 64))) == 5


@pytest.mark.parametrize("known", [0, 3, 5])
def test_compressed_logits_are_those_of_a_plain_computation(known):
    """Also when the first scales come by a prefill: it evicts as decoding scale by scale does."""
    model, maps = var(), MAPS
    got = torch.cat(decoded(CompressedVAR(model, TIGHT), LABELS, maps, known=known), 1)[:3]
    want = slow_logits(model, maps, TIGHT)[:, STARTS[known] :]
    assert (got - want).abs().max() < 1e-10
    full = model.teacher_forced(maps, LABELS)[:, STARTS[known] :]
    assert (got - full).abs().max() > 0.1  # and it is not what the model says with a full cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("known", [0, 2, 5])
def test_a_full_budget_changes_no_bit(known, dtype):
    model, maps = var(dtype=dtype), MAPS
    whole = CompressedVAR(model, ScaleBudget.full(SIDES, 2))
    want, got = (decoded(one, LABELS, maps, known=known) for one in (model, whole))
    assert all(map(torch.equal, want, got))


def test_a_scale_is_fed_once():
    model, maps = CompressedVAR(var(), TIGHT), MAPS
    state = model.prefill(LABELS, batch_size=3, guided=False)
    model(state, maps[0], 1)
    refuses(ValueError, "scale 1.*2.*2", model, state, maps[0], 1)
    for scale in range(2, 6):
        model(state, maps[scale - 1], scale)
    refuses(ValueError, "scale 5.*6", model, state, maps[4], 5)
    assert state.cache.nbytes == 0  # nobody reads after the last scale


# -- with the sampler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 3, 5])
def test_collaboration_of_equal_compressed_models_is_plain_compressed_decoding(split):
    model, rows = var(), torch.arange(3)
    plain = draw(CompressedVAR(model, TIGHT), rows)
    stages = code_stages(CompressedVAR(model, TIGHT), CompressedVAR(copy.deepcopy(model), TIGHT), split)
    assert torch.equal(draw(stages, rows).tokens, plain.tokens)
    assert not torch.equal(draw(model, rows).tokens, plain.tokens)
    whole = ScaleBudget.full(SIDES, 2)
    full = code_stages(CompressedVAR(model, whole), var(7, num_layers=1), split)
    assert torch.equal(draw(full, rows).tokens, draw(code_stages(model, full[1].model, split), rows).tokens)


def test_the_trace_tells_the_bytes_of_compressed_caches():
    large, small = var(dtype=torch.float32), var(3, dtype=torch.float32, num_layers=1)
    one = ScaleBudget(SIDES, tuple((min(first, 20),) for first in STARTS[:-1]))
    stages = code_stages(CompressedVAR(large, TIGHT), CompressedVAR(small, one), 4)
    trace = draw(stages, torch.arange(3)).trace
    assert isinstance(trace, ScaleTrace)
    token = 2 * 16 * 4 * 6  # keys and values, width, bytes, guided rows; of one layer
    assert trace.cache_bytes == (token * (9 + 14), token * 20)
    sizes = [
        cache_bytes(large.config, TIGHT, 3, True, torch.float32, stop=4).held,
        cache_bytes(small.config, one, 3, True, torch.float32, known=4).held,
    ]
    assert trace.cache_bytes == tuple(sizes)


def test_the_trace_does_not_call_a_compressed_model_lossless():
    model, rows = var(), torch.arange(3)
    full = CompressedVAR(model, ScaleBudget.full(SIDES, 2))
    for who, lossless in [(model, True), (full, True), (CompressedVAR(model, TIGHT), False)]:
        trace = draw(who, rows).trace
        assert trace.lossless == trace.identical == lossless
    for who, low, high in [(full, 0, 1e-12), (CompressedVAR(model, TIGHT), 0.01, 1)]:
        stages = [Stage(model, range(1)), Stage(who, range(1, 6))]
        measured = draw(stages, rows, measure=True)
        assert torch.equal(measured.tokens, draw(who, rows).tokens)
        assert measured.trace.divergence is not None and low <= measured.trace.divergence < high


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch) -> SimpleNamespace:
    """Counts the bytes alive in tensors that the cache makes by joining and gathering, and their peak."""
    found = SimpleNamespace(alive=[], peak=0, joined=0)

    def note(tensor: Tensor) -> Tensor:
        found.alive.append(weakref.ref(tensor))
        found.peak = max(found.peak, now())
        return tensor

    def now() -> int:
        return sum(t.untyped_storage().nbytes() for ref in found.alive if (t := ref()) is not None)

    def joining(tensors: list[Tensor], dim: int) -> Tensor:
        result = torch.cat(tensors, dim)
        found.joined = max(found.joined, 2 * result.untyped_storage().nbytes())
        return note(result)

    class Torch:
        cat = staticmethod(joining)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    gather = torch.Tensor.gather
    monkeypatch.setattr(cache, "torch", Torch())
    monkeypatch.setattr(torch.Tensor, "gather", lambda *args: note(gather(*args)))
    found.now = now
    return found


CASES = {
    "tight": (TIGHT, 0, None),
    "by the rule": (ScaleBudget.from_share(SIDES, 2, 0.5, drafters={5: [1]}), 0, None),
    "full": (ScaleBudget.full(SIDES, 2), 0, None),
    "prefilled": (TIGHT, 3, None),
    "first stage": (TIGHT, 0, 4),
    "only the last scale": (TIGHT, 5, None),
}


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_tensors(copies, case, guided):
    budget, known, stop = CASES[case]
    model, maps = var(dtype=torch.float32), [map.float() for map in MAPS]
    want = cache_bytes(model.config, budget, 3, guided, torch.float32, known=known, stop=stop)
    compressed = CompressedVAR(model, budget)
    state = compressed.prefill(LABELS, batch_size=3, guided=guided, maps=maps[:known], stop=stop)
    assert state.cache_bytes == want.held
    for scale in range(known + 1, stop or len(SIDES)):
        assert copies.now() == state.cache.nbytes == want.by_scale[scale]
        compressed(state, maps[scale - 1], scale)
    assert copies.now() == state.cache.nbytes == 0
    assert (copies.peak, copies.joined) == (want.peak, want.joined)
    assert sum(map(bool, want.by_scale)) == (stop or 6) - known - 1


@pytest.mark.parametrize("known", [0, 3, 5])
def test_bytes_of_the_plain_cache(known):
    model, maps = var(dtype=torch.bfloat16), MAPS
    size = cache_bytes(model.config, None, 3, True, torch.bfloat16, known=known)
    state = model.prefill(LABELS, batch_size=3, guided=True, maps=maps[:known])
    keys: Any = state.cache
    # Two of: keys and values, rows, layers, width, bytes, tokens.
    assert state.cache_bytes == size.held == size.full == 2 * 6 * 2 * 16 * 2 * (55 if known < 5 else 0)
    assert (
        keys.held.keys.untyped_storage().nbytes() + keys.held.values.untyped_storage().nbytes() == size.held
    )
    assert size.peak == size.held + (2 * 6 * 16 * 2 * 91 if known < 5 else 0)


# -- budgets ---------------------------------------------------------------------------------------------------------


def test_the_rule_by_hand():
    """Half of 55 tokens in 4 layers is 110, 27.5 a layer; it binds at scales 4 (30 tokens) and 5 (55)."""
    budget = ScaleBudget.from_share(SIDES, 4, 0.5, drafters={2: [3], 4: [1], 5: [0, 1]}, decay=0.2)
    assert budget.tokens == (
        (0, 0, 0, 0),
        (1, 1, 1, 1),
        (5, 5, 5, 5),
        (14, 14, 14, 14),
        (27, 30, 27, 26),  # 22 a refiner would leave 44 for the drafter, who has use for 30
        (39, 39, 16, 16),  # 60 % of 27.5
    )
    assert budget.drafters == ((), (), (), (), (1,), (0, 1))
    assert budget.held()[5] == (39, 39, 16, 16) and budget.held()[4] == (27, 30, 27, 26)
    assert budget.share == 110 / 220


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.37, 0.9, 1.0])
def test_every_scale_spends_the_same_total(share):
    scales, layers = (1, 2, 4, 6, 8, 12, 16, 20, 24), 7
    starts = [0]
    for side in scales:
        starts.append(starts[-1] + side * side)
    drafters = {6: [2], 7: [0, 2, 6], 8: list(range(7))}
    budget = ScaleBudget.from_share(scales, layers, share, drafters=drafters, decay=0.15)
    total = int(share * layers * starts[-2])
    refiners = []
    for scale, row in enumerate(budget.tokens):
        assert sum(row) == min(total, layers * starts[scale])
        assert max(row) <= starts[scale]
        if chosen := [row[layer] for layer in budget.drafters[scale]]:
            rest = [tokens for layer, tokens in enumerate(row) if layer not in drafters[scale]]
            assert min(chosen) >= max(rest, default=0)
            refiners.append(max(rest, default=0))
    assert all(a > b for a, b in pairwise(refiners))
    assert sum(map(sum, budget.held())) <= total * len(scales)
    if share == 1:
        assert budget.tokens == ScaleBudget.full(scales, layers).tokens


def test_budgets_survive_json():
    budget = ScaleBudget.from_share(SIDES, 3, 0.6, drafters={5: [2]})
    assert ScaleBudget.from_dict(json.loads(json.dumps(budget.to_dict()))) == budget
    assert hash(budget) == hash(ScaleBudget.from_dict(budget.to_dict()))


def test_budgets_that_cannot_be_are_refused():
    rows = [list(row) for row in TIGHT.tokens]
    rows[4][1] = 15
    refuses(ValueError, "15 tokens.*1.*4.*16", ScaleBudget, SIDES, tuple(tuple(row) for row in rows))
    with pytest.raises(ValueError, match="3 tokens.*0.*2.*4"):
        ScaleBudget(SIDES, (*TIGHT.tokens[:2], (3, 5), *TIGHT.tokens[3:]))
    refuses(ValueError, r"5 rows.*\[2\].*6", ScaleBudget, SIDES, TIGHT.tokens[:5])
    refuses(ValueError, r"6 rows.*\[1, 2\]", ScaleBudget, SIDES, (*TIGHT.tokens[:5], (16,)))
    refuses(ValueError, "1 scales.*6", ScaleBudget, SIDES, TIGHT.tokens, ((0,),))
    refuses(ValueError, "without tokens", ScaleBudget.from_dict, {"scales": [1]})
    for share in (0, -0.1, 1.1, float("nan")):
        refuses(ValueError, "part.*0.*1", ScaleBudget.from_share, SIDES, 2, share)
    refuses(ValueError, r"11\.0.*16.*0\.291", ScaleBudget.from_share, SIDES, 2, 0.2)
    ScaleBudget.from_share(SIDES, 2, 0.291)
    refuses(ValueError, "decay=-1", ScaleBudget.from_share, SIDES, 2, 0.5, decay=-1)
    for drafters in ({6: [0]}, {5: [2]}, {5: [-1]}):
        refuses(ValueError, "2 layers.*6", ScaleBudget.from_share, SIDES, 2, 0.5, drafters=drafters)


def test_a_budget_for_another_model_is_refused():
    refuses(ValueError, "2 layers.*3", CompressedVAR, var(num_layers=3), TIGHT)
    with pytest.raises(ValueError, match=r"scales \(1, 2\).*2"):
        cache_bytes(var(scales=(1, 2)).config, TIGHT, 1, False, torch.float32)
    with pytest.raises(ValueError, match="stop=9 given"):
        CompressedVAR(var(), TIGHT).prefill(LABELS, batch_size=3, guided=False, stop=9)


# -- calibration -----------------------------------------------------------------------------------------------------


def test_importance_is_that_of_a_plain_computation():
    model, top = var(), 6
    seen: list[Tensor] = []
    rows = torch.arange(3)
    law = TokenLaw()  # unguided: all rows are those of the labels
    sampler = ScaleWiseSampler()
    got = layer_importance(
        model, TOKENIZER, LABELS, sampler=sampler, law=law, top=top, batch_size=3, generator=seeded(1, 2, 3)
    )
    result = sampler(
        model, LABELS, tokenizer=TOKENIZER, law=law, batch_size=3, generator=seeded(1, 2, 3),
        callback=lambda k, canvas: seen.append(canvas),
    )  # fmt: skip
    assert len(rows) == len(result.tokens)
    maps = [TOKENIZER.next_map(canvas, k) for k, canvas in enumerate(seen[:-1], 1)]
    masses: list = [[[], []] for _ in SIDES]
    slow_logits(model, maps, ScaleBudget.full(SIDES, 2), masses)
    for scale in range(1, 6):
        for layer in range(2):
            now = sum(float(own) for own, _ in masses[scale][layer])
            before = sum(float(history[-top:].sum()) for _, history in masses[scale][layer])
            assert len(masses[scale][layer]) == 3 * 2 * SIDES[scale] ** 2
            want = now * before / len(masses[scale][layer]) ** 2
            assert abs(float(got[scale, layer]) - want) < 1e-10
    assert got[0].tolist() == [0, 0]


def test_drafters_have_the_least_importance_for_their_scale():
    importance = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0], [1.0, 2.0, 2.0, 2.1], [0.1, 0.9, 0.2, 0.8]]
    ).double()
    # In deviations: scale 2 has -1.72 for layer 0, scale 3 has -1.13 and -0.85 for layers 0 and 2.
    assert find_drafters(importance, [1, 2, 3], 3) == {2: [0], 3: [0, 2]}
    assert find_drafters(importance, [2, 3], 1) == {2: [0]}
    assert find_drafters(importance, [1, 3], 2) == {3: [0, 2]}
    assert find_drafters(importance, [2, 3], 0) == {}


def test_calibration_makes_a_budget_that_decodes():
    model = var(num_layers=3)
    settings: dict[str, Any] = dict(
        sampler=ScaleWiseSampler(), law=LAW, batch_size=3, generator=seeded(1, 2, 3)
    )
    budget = calibrate(model, TOKENIZER, LABELS, share=0.5, num_drafters=2, **settings)
    assert sum(len(layers) for layers in budget.drafters) == 2
    assert [sum(row) for row in budget.tokens] == [0, 3, 15, 42, 82, 82]
    settings["generator"] = seeded(1, 2, 3)
    importance = layer_importance(model, TOKENIZER, LABELS, top=27, **settings)
    found = find_drafters(importance, [4, 5], 2)
    assert {k: list(layers) for k, layers in enumerate(budget.drafters) if layers} == found
    assert draw(CompressedVAR(model, budget), torch.arange(3)).tokens.shape == (3, 91)
    assert calibrate(model, TOKENIZER, LABELS, share=1.0, **settings) == ScaleBudget.from_share(SIDES, 3, 1.0)
    one = calibrate(model, TOKENIZER, LABELS, share=0.5, **settings)
    assert sum(len(layers) for layers in one.drafters) == 1  # of six pairs
    with pytest.raises(ValueError, match="num_drafters=-1"):
        calibrate(model, TOKENIZER, LABELS, share=0.5, num_drafters=-1, **settings)
