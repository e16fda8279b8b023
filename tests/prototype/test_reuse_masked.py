"""Reuse between the calls of a masked decoder: which calls are full, what local calls compute, and the whole loop."""

import json
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.mage import tiny_mage
from tests.helpers.masked_reuse import MODELS, Watched, made, maskgit
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularMaskedModel
from tests.helpers.tiny import seeded
from tests.models.continuous.straight import linear, norm
from visual_spec.models.core import cache
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import of_settings
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.sampler_text import read_sampler, write_sampler
from visual_spec.prototype.reuse import recap
from visual_spec.prototype.reuse.continuous import ReusingContinuousSampler
from visual_spec.prototype.reuse.masked import (
    RECAP,
    ReusingMaskedSampler,
    ReusingMaskedTrace,
    ReusingUnmasking,
)
from visual_spec.prototype.reuse.recap import (
    Reuse,
    full_calls,
    group_width,
    last_of_group,
    places_of,
    scattered,
)
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import (
    CLOCKS,
    SCHEDULES,
    hidden_counts,
    hidden_shares,
)
from visual_spec.samplers.core.noise import CHOICE, RESIDUAL, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.masked import masked
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice, LawByStep, Schedule
from visual_spec.samplers.masked.unmasking import MaskedTrace


def test_full_calls_are_those_of_the_released_settings():
    """ReCAP's scripts: 32 calls with 12 full ones first are 22 full and 10 local ones; 16 with none are 8 and 8."""
    assert sum(full_calls(32, 1, 12 / 32)) == 22 and len(full_calls(32, 1, 12 / 32)) == 32
    assert full_calls(16, 1, 0.0) == [True, False] * 8
    assert full_calls(7, 2, 0.25) == [True, True, True, False, False, True, False]
    assert all(full_calls(9, 0, 0.0)) and full_calls(3, 5, 0.0) == [True, False, False]
    full = full_calls(7, 2, 0.25)
    assert [last_of_group(full, step) for step in (0, 1, 2, 5)] == [0, 1, 4, 6]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("clock", CLOCKS)
def test_no_group_is_wider_than_the_schedule_says(schedule, clock):
    for units in (1, 5, 16, 64):
        for steps in (1, 2, 7, 16, 40):
            for reuse in (1, 3):
                shares, full = hidden_shares(schedule, clock, steps), full_calls(steps, reuse, 0.3)
                for held in {1, max(1, units // 3), units}:
                    number = torch.tensor([held])
                    counts = [*hidden_counts(shares, clock, number), torch.zeros_like(number)]
                    for step in (step for step in range(steps) if full[step]):
                        last = last_of_group(full, step)
                        group = int(counts[step] - counts[last + 1])
                        width = group_width(shares, units, 1, step, last)
                        assert group <= width and width % 8 == 0


def test_a_group_of_spans_has_room_for_all_their_tokens():
    """Six tenths of ten units, and three more: one a step, and two for rounding."""
    shares = [1.0, 0.7, 0.4]
    assert group_width(shares, 10, 3, 0, 1) == 32  # 9 units, 27 tokens, rounded up to 32
    assert group_width(shares, 10, 1, 0, 1) == 16  # 9 tokens


def test_places_are_those_of_the_group_and_then_past_the_grid():
    group = torch.tensor([[False, True, False, True, True], [False] * 5, [True] * 5])
    assert places_of(group, 6).tolist() == [[1, 3, 4, 8, 9, 10], [5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 10]]
    whole, values = torch.zeros(3, 5, 2), torch.arange(36.0).view(3, 6, 2) + 1
    found: Any = scattered(values, places_of(group, 6), whole)
    assert found[0, :, 0].tolist() == [0, 1, 0, 3, 5] and not found[1].any()
    assert found[2, :, 1].tolist() == [26, 28, 30, 32, 34]


# -- models ------------------------------------------------------------------------------------------------------------


def some_tokens(model: Any, seed: int = 0) -> Tensor:
    shape = (2, model.grid.num_tokens, model.grid.codebooks)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, shape, generator=draw)
    return tokens.masked_fill(torch.rand(shape, generator=draw) < 0.6, model.mask_id)


# Slots of two samples, the second with places past the grid. Slots 0 and 1 share a merged place.
PLACES = torch.tensor([[0, 1, 5, 10, 11, 12], [3, 8, 9, 19, 20, 21]])


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_local_calls_of_unchanged_tokens_are_the_full_call(kind, guided):
    if guided and kind == "mage":
        pytest.skip("MAGE draws without a condition")
    model, condition, error = made(kind)
    for stage in range(min(model.grid.codebooks, 2)):
        tokens, state = some_tokens(model), model.prepare(condition, batch_size=2, guided=guided)
        plain = model(state, tokens, stage)
        kept = model(state, tokens, stage, keep=6)
        assert torch.equal(plain, kept) or (plain - kept).abs().max() < error
        assert (model.scores(state, state.features, stage) - kept).abs().max() < error
        for _ in range(2):  # what is held does not wear off
            local = model(state, tokens, stage, places=PLACES)
            for row in range(len(plain)):
                count = 6 if row % 2 == 0 else 3
                wanted = plain[row, PLACES[row % 2, :count]]
                assert (local[row, :count] - wanted).abs().max() < error


@pytest.mark.parametrize("kind", ["captions", "classes, no register", "magnet"])
def test_local_calls_attend_to_fresh_keys_of_the_group_and_old_ones_of_others(kind):
    """With one layer, keys and values depend on each slot's own token only: the group then sees its new tokens, and
    for the others the tokens of the full call, whatever they have become."""
    model, condition, error = made(kind)
    if kind == "magnet":
        del model.decoder.layers[1:]
    else:
        model.transformer["layers"] = model.transformer["layers"][:1]
        model.register_to_config(num_layers=1)
    tokens, later = some_tokens(model), some_tokens(model, seed=1)
    state = model.prepare(condition, batch_size=2, guided=True)
    model(state, tokens, 0, keep=6)
    places = PLACES.clamp(max=15)
    local = model(state, later, 0, places=PLACES)
    mixed = tokens.scatter(1, places[..., None].expand(-1, -1, tokens.shape[2]), 0)
    for row in range(2):
        count = (6, 3)[row]
        mixed[row] = tokens[row]
        mixed[row, PLACES[row, :count]] = later[row, PLACES[row, :count]]
    wanted = model(state, mixed, 0)
    assert (wanted - model(state, later, 0)).abs().max() > 100 * error  # the others matter
    for row in range(4):
        count = (6, 3)[row % 2]
        at = PLACES[row % 2, :count]
        assert (local[row, :count] - wanted[row, at]).abs().max() < error


@torch.no_grad()
def test_several_layers_hold_what_concatenation_would_give():
    """Straight-line: layer by layer, the group's rows attend to old keys of the others joined with their own."""
    model, condition, _ = maskgit(1, 1, True)
    tokens, later = some_tokens(model)[:1], some_tokens(model, seed=1)[:1]
    label, places = condition[:1], PLACES[:1]
    state = model.prepare(label, batch_size=1, guided=False)
    model(state, tokens, 0, keep=6)
    local = model(state, later, 0, places=places)[0]
    layers, heads = model.blocks, model.config["num_heads"]
    old: list[tuple[Tensor, Tensor]] = []

    def embedded(ids: Tensor) -> Tensor:
        return torch.cat([model.tok_emb(ids[0, :, 0]) + model.pos_emb.weight, model.reg_tokens.weight])

    def run(x: Tensor, rows: Tensor | None) -> Tensor:
        for index, layer in enumerate(layers):
            shift, scale, gate, shift2, scale2, gate2 = state.modulations[index, 0]
            q, k, v = layer.attn.project((layer.ln1(x) * (1 + scale) + shift)[None])
            if rows is None:
                old.append((k, v))
            else:
                others = [slot for slot in range(17) if slot not in rows.tolist()]
                k, v = (torch.cat([old[index][i][:, :, others], new], 2) for i, new in ((0, k), (1, v)))
            seen = (q @ k.mT / math.sqrt(x.shape[1] / heads)).softmax(-1) @ v
            x = x + gate * (seen.transpose(1, 2).flatten(2)[0] @ layer.attn.wo.weight.T)
            x = x + gate2 * layer.ff(layer.ln2(x) * (1 + scale2) + shift2)
        return x

    run(embedded(tokens), None)
    rows = torch.cat([places[0], torch.tensor([16])])
    x = run(embedded(later)[rows], rows)[:-1]
    assert (model.scores(state, x[None])[0] - local).abs().max() < 1e-9


@torch.no_grad()
def test_local_calls_of_mage_are_its_two_parts_with_old_keys_of_the_others():
    """Straight-line, from weights by name: the class place and the group, in the encoder and then in the decoder."""
    model = tiny_mage()
    w = {key: value.detach() for key, value in model.state_dict().items()}
    tokens, later = some_tokens(model)[:1], some_tokens(model, seed=1)[:1]
    state = model.prepare(None, batch_size=1, guided=False)
    model(state, tokens, keep=6)
    local = model(state, later, places=PLACES[:1])[0]
    old: dict[str, tuple[Tensor, Tensor]] = {}

    def layer(name: str, x: Tensor, heads: int, rows: list[int]) -> Tensor:
        q, k, v = linear(w, f"{name}.attn.qkv", norm(x, w, f"{name}.norm1")).chunk(3, -1)
        if len(rows) == 17:
            old[name] = k, v
        others = [place for place in range(17) if place not in rows]
        k, v = (torch.cat([held[others], new]) for held, new in zip(old[name], (k, v), strict=True))
        parts = [
            (a @ b.T / math.sqrt(a.shape[1])).softmax(-1) @ c
            for a, b, c in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True)
        ]
        x = x + linear(w, f"{name}.attn.proj", torch.cat(parts, -1))
        hidden = linear(w, f"{name}.mlp.fc1", norm(x, w, f"{name}.norm2"))
        return x + linear(w, f"{name}.mlp.fc2", 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2))))

    def run(ids: Tensor, rows: list[int]) -> Tensor:
        table = w["token_emb.word_embeddings.weight"]
        x = norm(table[ids] + w["token_emb.position_embeddings.weight"][rows], w, "token_emb.LayerNorm")
        for index in range(2):
            x = layer(f"blocks.{index}", x, 3, rows)
        x = linear(w, "decoder_embed", norm(x, w, "norm"))
        x = torch.where((ids == len(table) - 1)[:, None], x[0], x)
        x = layer("decoder_blocks.0", x + w["decoder_pos_embed_learned"][0, rows], 2, rows)
        return model.scores(state, norm(x, w, "decoder_norm")[None, 1:])[0]

    def with_class(ids: Tensor) -> Tensor:
        return torch.cat([torch.tensor([13]), ids[0, :, 0]])

    run(with_class(tokens), list(range(17)))
    rows = [0, *(place + 1 for place in PLACES[0].tolist())]
    wanted = run(with_class(later)[rows], rows)
    assert (wanted - local).abs().max() < 1e-9
    assert (model(state, later)[0, PLACES[0]] - local).abs().max() > 1e-3  # it is an approximation


def test_what_mage_holds_is_selected_with_its_samples():
    model = tiny_mage()
    state, tokens = model.prepare(None, batch_size=2, guided=False), some_tokens(model)
    model(state, tokens, keep=6)
    both = model(state, tokens, places=PLACES)
    assert state.features is not None
    features = state.features.clone()
    state.select(torch.tensor([1]))
    assert torch.equal(model(state, tokens[1:], places=PLACES[1:])[0, :3], both[1, :3])
    assert state.features is not None and torch.equal(state.features, features[1:])


def test_local_calls_need_a_call_that_kept():
    for kind in ("captions", "magnet", "mage"):
        model, condition, _ = made(kind)
        state = model.prepare(condition, batch_size=2, guided=False)
        refuses(ValueError, "keep=n", model, state, some_tokens(model), 0, places=PLACES)


# -- the loop ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse_from", [0.0, 0.5])
@pytest.mark.parametrize("score", ["halton", "raster", "random"])
def test_in_a_fixed_order_exact_local_calls_change_nothing(score, reuse_from):
    """What is kept when does not depend on the draws then, so reuse may only change how it is computed."""
    table = TabularMaskedModel(TokenGrid(1, 7, codebooks=1), 3, conditions=2)
    law, settings = TokenLaw(guidance_scale=1.7, top_p=0.9), dict(steps=5, score=score)
    plain: Any = of_settings(MaskedSampler, **settings)(
        table, None, law=law, generator=seeded(*range(40)), batch_size=40
    )
    model = Watched(table)
    for reuse in (1, 2, 4):
        sampler = of_settings(ReusingMaskedSampler, **settings, reuse=reuse, reuse_from=reuse_from)
        found = sampler(model, None, law=law, generator=seeded(*range(40)), batch_size=40)
        assert torch.equal(found.tokens, plain.tokens)
        trace = found.trace
        assert isinstance(trace, ReusingMaskedTrace) and isinstance(plain.trace, MaskedTrace)
        assert torch.equal(trace.entry_call, plain.trace.entry_call)
        full = full_calls(5, reuse, reuse_from)
        assert trace.reused_calls == 5 - sum(full) > 0
        widths = [places.shape[1] / 7 for _, places in model.asked[-5:] if places is not None]
        assert trace.whole_calls == pytest.approx(sum(full) + sum(min(width, 1) for width in widths))


@pytest.mark.parametrize("given", [False, True])
def test_a_group_is_kept_in_the_order_of_its_full_call(given):
    """A plain loop over single samples: scores of the full call rank the group, and later draws do not change it."""
    table, steps, reuse = TabularMaskedModel(TokenGrid(1, 8), 2, seed=3), 6, 2
    model, count = Watched(table), 50
    known = torch.full((count, 8), 2)
    if given:
        known[::2, 3], known[::3, 5] = 1, 0
    sampler = ReusingMaskedSampler(
        steps, reuse=Reuse(reuse=reuse, reuse_from=0.3), schedule=Schedule(schedule="linear")
    )
    found: Any = sampler(
        model, None, law=TokenLaw(), generator=seeded(*range(count)), batch_size=count, known_tokens=known
    )
    assert isinstance(found.trace, MaskedTrace)
    calls = found.trace.entry_call[..., 0]  # [B, L]
    full = full_calls(steps, reuse, 0.3)
    assert full == [True, True, True, False, False, True]
    assert [keep is not None for keep, _ in model.asked] == [False, False, True, False, False, False]
    state = table.prepare(None, batch_size=count, guided=False)
    # What stood there before the full call 2, and its laws.
    before = torch.where((calls < 2) & ((calls >= 0) | (known < 2)), found.tokens, 2)
    laws = table(state, before[..., None], 0).log_softmax(-1)
    noise = CounterNoise(draw_keys(seeded(*range(count)), count), "cpu")
    slots = torch.arange(8).expand(count, -1)
    drawn = noise.categorical(laws, slots, TOKEN, 2)
    sure = laws.gather(-1, drawn[..., None])[..., 0]
    for row in range(count):
        hidden = [slot for slot in range(8) if before[row, slot] == 2]
        order = sorted(hidden, key=lambda slot: (-float(sure[row, slot]), -slot))
        kept = [slot for call in (2, 3, 4) for slot in hidden if calls[row, slot] == call]
        by_call = [sorted(slot for slot in hidden if calls[row, slot] == call) for call in (2, 3, 4)]
        assert sorted(kept) == sorted(order[: len(kept)])
        start = 0
        for group in by_call:
            assert group == sorted(order[start : start + len(group)])
            start += len(group)
        for call, places in ((3, model.asked[3][1]), (4, model.asked[4][1])):
            assert places is not None
            inside = [place for place in places[row].tolist() if place < 8]
            assert inside == sorted(kept), call


@pytest.mark.parametrize("kind", MODELS)
def test_no_reuse_is_the_base_sampler_and_reuse_is_measured(kind):
    model, condition, _ = made(kind)
    settings: dict[str, Any] = dict(steps=6, choice_temperature=1.0)
    law = TokenLaw(guidance_scale=1.0 if kind == "mage" else 2.0)
    call: dict[str, Any] = dict(law=law, batch_size=2)
    plain: Any = of_settings(MaskedSampler, **settings)(model, condition, generator=seeded(0, 1), **call)
    none: Any = of_settings(ReusingMaskedSampler, **settings, reuse=0, reuse_from=0.0)(
        model, condition, generator=seeded(0, 1), **call
    )
    assert torch.equal(plain.tokens, none.tokens) and none.trace.reused_calls == 0
    books = model.grid.codebooks
    assert none.trace.whole_calls == 6 * books
    found: Any = of_settings(ReusingMaskedSampler, **settings, reuse=1, reuse_from=0.0, measure=True)(
        model, condition, generator=seeded(0, 1), **call
    )
    assert found.trace.reused_calls == 3 * books and found.trace.target_calls.tolist() == [6 * books] * 2
    assert 3 * books < found.trace.whole_calls <= 6 * books and found.trace.divergence > 0
    assert found.tokens.max() < model.vocab_size and not torch.equal(found.tokens, plain.tokens)
    unmeasured: Any = of_settings(ReusingMaskedSampler, **settings, reuse=1, reuse_from=0.0)(
        model, condition, generator=seeded(0, 1), **call
    )
    assert torch.equal(found.tokens, unmeasured.tokens)  # the extra calls leave what is held alone
    alone: Any = of_settings(ReusingMaskedSampler, **settings, reuse=1, reuse_from=0.0)(
        model,
        TextCondition(condition.features[1:], condition.mask[1:])
        if isinstance(condition, TextCondition)
        else condition[1:]
        if condition is not None
        else None,
        law=law,
        generator=seeded(1),
    )
    assert torch.equal(alone.tokens[0], found.tokens[1])


def test_reuse_under_an_entropy_bound_is_refused():
    with pytest.raises(ValueError, match=r"reuse=1.*entropy_bound=0\.1"):
        ReusingMaskedSampler(
            reuse=Reuse(reuse=1), choice=Choice(score="entropy"), schedule=Schedule(entropy_bound=0.1)
        )
    for settings, words in [
        (dict(commit_gaps=[3, 2, 1]), "reuse=1 with commit_gaps=[3, 2, 1]: which tokens"),
        (dict(credit=0.5), "reuse=1 with credit=0.5, which is of all slots"),
    ]:
        refuses(ValueError, re.escape(words), of_settings, ReusingMaskedSampler, reuse=1, **settings)


def test_models_that_keep_nothing_are_refused():
    table = TabularMaskedModel(TokenGrid(1, 4), 3)
    with pytest.raises(ValueError, match="TabularMaskedModel.*0"):
        ReusingMaskedSampler(reuse=Reuse(reuse=1))(table, None, law=TokenLaw())
    model = MaskedImageTransformer(8, 8, 1, 2, 4, num_classes=3)
    with pytest.raises(ValueError, match="FeatureShortcut"):
        ReusingMaskedSampler(reuse=Reuse(reuse=1, reuse_by="shortcut"))(
            model, torch.tensor([1]), law=TokenLaw()
        )


@pytest.mark.parametrize("reuse", [0, 1, 2])
def test_calls_without_unconditional_rows_draw_what_calls_with_them_draw(reuse, monkeypatch):
    """Also where local calls go on from a call that still had them: four of eight calls are guided."""
    (model, condition, _), law = maskgit(1, 0, True), TokenLaw(guidance_scale=3.0)
    settings: dict[str, Any] = dict(reuse=reuse, reuse_from=0.3, guided_steps=4, choice_temperature=1.0)

    def decode(**changed: Any) -> Tensor:
        generator = [torch.Generator().manual_seed(seed) for seed in range(2)]
        sampler = of_settings(ReusingMaskedSampler, 8, **settings | changed)
        return sampler(model, condition, law=law, batch_size=2, generator=generator).tokens

    lean, prepare, asked = decode(), type(model).prepare, []

    def with_all_rows(self: Any, condition: Any, *, batch_size: int, guided: bool) -> Any:
        asked.append(guided)
        return prepare(self, condition, batch_size=batch_size, guided=True)

    monkeypatch.setattr(type(model), "prepare", with_all_rows)
    assert torch.equal(decode(), lean) and asked == [True, False]
    assert not torch.equal(decode(guided_steps=None), lean)


# -- graphs ------------------------------------------------------------------------------------------------------------


def decoded(kind: str, **settings: Any) -> Any:
    model, condition, _ = made(kind)
    law = TokenLaw(guidance_scale=1.0 if kind == "mage" else 2.0)
    sampler = of_settings(ReusingMaskedSampler, **{"steps": 6, "choice_temperature": 1.0, **settings})
    return sampler(model, condition, law=law, generator=seeded(0, 1), batch_size=2)


@pytest.fixture
def on_gpu(monkeypatch) -> None:
    """As if the models were where graphs are recorded."""
    monkeypatch.setattr(masked, "wants_graph", lambda graph, model: graph is not False)
    monkeypatch.setattr(cache, "common_run", lambda slots: None)  # which looks at values on a CPU only


@pytest.mark.parametrize("kind", ["merged", "mage"])
def test_calls_that_keep_and_local_ones_are_recorded_too(kind, on_gpu, recordings):  # noqa: F811
    settings: dict[str, Any] = dict(steps=12, reuse=2, reuse_from=0.0, schedule="linear", measure=True)
    plain, found = decoded(kind, **settings), decoded(kind, **settings, graph=True)
    assert torch.equal(found.tokens, plain.tokens)
    assert found.trace.divergence == pytest.approx(plain.trace.divergence)
    assert len(recordings) == 3  # full ones that keep, local ones of one width, and those of the measure


def test_what_a_model_moves_is_not_recorded(on_gpu, recordings):  # noqa: F811
    settings: dict[str, Any] = dict(steps=6, reuse=1, reuse_from=0.0, schedule="linear")
    plain, found = decoded("magnet", **settings), decoded("magnet", **settings, graph=True)
    assert torch.equal(found.tokens, plain.tokens) and not recordings


@pytest.mark.parametrize("kind", ["captions", "mage", "magnet"])
def test_rounded_group_widths_change_nothing(kind, monkeypatch):
    """Places past the grid fill a group up; what they compute goes nowhere."""
    found = []
    for bucket in (1, 5, 16):
        monkeypatch.setattr(recap, "_BUCKET", bucket)
        found.append(decoded(kind, steps=6, reuse=2, reuse_from=0.0).tokens)
    assert all(torch.equal(tokens, found[0]) for tokens in found)


def test_a_shortcut_and_a_graph_are_refused():
    with pytest.raises(ValueError, match="reuse_by='shortcut'"):
        ReusingMaskedSampler(graph=True, reuse=Reuse(reuse=1, reuse_by="shortcut"))


# -- as released -------------------------------------------------------------------------------------------------------


def test_recap_decodes_as_its_script():
    """One row at a time: a draw at temperature 1 and falling noise rank the slots, and another draw fills them."""
    length, steps, count = 12, 6, 30
    table = TabularMaskedModel(TokenGrid(1, length), 2, seed=3)
    settings = RECAP.settings | dict(steps=steps, choice_temperature=1.5)
    found: Any = of_settings(ReusingMaskedSampler, **settings)(
        Watched(table), None, law=TokenLaw(), generator=seeded(*range(count)), batch_size=count
    )
    noise = CounterNoise(draw_keys(seeded(*range(count)), count), "cpu")
    every = torch.arange(length).expand(count, -1)
    hidden = [int(one) for one in hidden_counts(
        hidden_shares("power_2.5", "recap", steps), "recap", torch.tensor([length])
    )]  # fmt: skip
    kept = [a - b for a, b in zip(hidden, [*hidden[1:], 0], strict=True)]
    groups = [[0], [1], [2], [3, 4], [5]]  # three full calls, then a full and a local one, and the last
    tokens = torch.full((count, length), 2)
    state = table.prepare(None, batch_size=count, guided=False)
    for number, group in enumerate(groups):
        first = group[0]
        laws = table(state, tokens[..., None], 0).log_softmax(-1)
        second = noise.categorical(laws, every, RESIDUAL, first)
        sure = laws.gather(-1, second[..., None])[..., 0]
        gumbel = noise.gumbel(every, 1, CHOICE, first, sure.dtype)[..., 0]
        sure = sure + 1.5 * (1 - (number + 1) / len(groups)) * gumbel
        order = sure.masked_fill(tokens != 2, -torch.inf).argsort(1, descending=True)
        place = 0
        for step in group:
            temperature = 0.65 + (1 - (step / (steps - 1)) ** 0.5) * 0.35
            laws = (table(state, tokens[..., None], 0) / temperature).log_softmax(-1)
            drawn = noise.categorical(laws, every, TOKEN, step)
            at = order[:, place : place + kept[step]]
            tokens = tokens.scatter(1, at, drawn.gather(1, at))
            place += kept[step]
    assert torch.equal(found.tokens, tokens) and len(tokens.unique(dim=0)) > 5
    own = of_settings(ReusingMaskedSampler, **settings | dict(second_draw=False))
    assert not torch.equal(
        own(Watched(table), None, law=TokenLaw(), generator=seeded(*range(count)), batch_size=count).tokens,
        tokens,
    )


def test_noise_may_fall_with_full_calls():
    """Of five calls three are full: the first two and the fourth."""
    unmasking = ReusingUnmasking(
        Schedule(), Choice(), LawByStep(falls="full"), reuse=Reuse(reuse=1, reuse_from=0.2)
    )
    left = unmasking.left(5)
    assert [left[step] for step in (0, 1, 3)] == pytest.approx([2 / 3, 1 / 3, 0])


# -- names of before ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("former", "settings", "now"),
    [
        (MaskedSampler, dict(reuse=2, reuse_from=0.25), ReusingMaskedSampler),
        (MaskedSampler, dict(reuse_by="shortcut"), ReusingMaskedSampler),
        (ContinuousSampler, dict(reuse=1, local_levels=0.4), ReusingContinuousSampler),
    ],
)
def test_settings_of_before_make_the_sampler_that_has_them_now(former, settings, now):
    with pytest.warns(DeprecationWarning, match=f"{former.__name__}.*reuse.*{now.__name__}"):
        found = former(steps=4, **settings)
    assert type(found) is now and settings.items() <= dict(found.config).items()
    text = write_sampler({MaskedSampler: "masked", ContinuousSampler: "continuous"}[former], settings)
    with pytest.warns(DeprecationWarning, match=now.__name__):
        again = read_sampler(text + ",steps=4")
    assert type(again) is now and again.config == found.config


@pytest.mark.parametrize("kind", [MaskedSampler, ContinuousSampler])
@pytest.mark.parametrize("reuse", [0, 2])
def test_folders_of_before_load_without_a_word(kind, reuse, tmp_path, recwarn, capfd):
    """As 0.1 saved them: settings of reuse in the configuration of every sampler."""
    kind(steps=5).save_pretrained(tmp_path)
    file = tmp_path / "sampler_config.json"
    settings = {"reuse": reuse, "reuse_from": 0.25, "reuse_by": "recap", "local_levels": 0.5}
    names = {MaskedSampler: ("reuse_by",), ContinuousSampler: ("local_levels",)}[kind]
    settings = {name: settings[name] for name in ("reuse", "reuse_from", *names)}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    found = kind.from_pretrained(tmp_path)
    now = {MaskedSampler: ReusingMaskedSampler, ContinuousSampler: ReusingContinuousSampler}[kind]
    assert type(found) is (now if reuse else kind) and found.config.steps == 5
    assert not reuse or settings.items() <= dict(found.config).items()
    assert reuse or not settings.keys() & found.config.keys()
    assert not recwarn.list and "not expected" not in "".join(capfd.readouterr())
    assert type(kind.from_config(found.config, reuse=1)) is now
    assert type(kind.from_config(found.config, reuse=0)) is kind
