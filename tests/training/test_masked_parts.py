"""What is trained beside a masked model, its causal layer and its shortcut: what they learn from, that they learn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.train import causal_layer as training
from scripts.train.causal_layer import (
    Beginnings,
    CausalLayerTraining,
    chain_logits,
    groups_of,
    held_out,
    loss_of,
    new_layer,
    some_orders,
    train_causal_layer,
)
from scripts.train.shortcut import ShortcutTraining, new_shortcut, record, relative_error, train_shortcut
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularMaskedModel
from tests.helpers.tiny import seeded, tiny_masked_pipeline, tiny_masked_transformer
from tests.helpers.training import check_training
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.prototype.reuse.masked import ReusingMaskedSampler
from visual_spec.prototype.reuse.recap import Reuse, full_calls
from visual_spec.prototype.reuse.shortcut import FeatureShortcut
from visual_spec.prototype.self_speculative.causal_layer import CausalLayer
from visual_spec.prototype.self_speculative.sampler import SelfSpeculativeMaskedSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice

SETTINGS = CausalLayerTraining(steps=60, batch_size=8, begun=4, scenes=16, places=16, learning_rate=1e-2)


def stirred(side: int = 4, **sizes: Any) -> CausalLayer:
    """A layer in which everything counts."""
    torch.manual_seed(0)
    layer = CausalLayer(6, 12, side, **{"dim": 8, "num_heads": 2, **sizes}).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return layer


def some_group() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    slots = torch.stack([torch.randperm(16, generator=draw)[:6] for _ in range(2)])
    features = torch.randn(2, 6, 6, generator=draw, dtype=torch.float64)
    return features, torch.randint(12, (2, 6), generator=draw), slots


def test_a_place_sees_the_tokens_before_it_and_no_others():
    layer, (features, tokens, slots) = stirred(), some_group()
    found = layer(features, tokens, slots)
    for place in range(6):
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1) % 12
        moved = (layer(features, other, slots) - found).abs().amax((0, 2))
        assert (moved[: place + 1] == 0).all() and (moved[place + 1 :] > 1e-6).all()
        shorter = layer(features[:, : place + 1], tokens[:, : place + 1], slots[:, : place + 1])
        assert torch.allclose(shorter, found[:, : place + 1], atol=1e-12)


def test_the_layer_is_what_its_description_says():
    """Attention, written out a place and a head at a time."""
    layer, (features, tokens, slots) = stirred(), some_group()
    found, (first, second, last) = layer(features, tokens, slots), layer.norms
    for row in range(2):
        x = layer.proj_in(features[row])
        keys, values = layer.key_value(second(x + layer.token_emb(tokens[row]))).chunk(2, -1)
        for place in range(6):
            mixed = []
            for head in range(2):
                part = slice(4 * head, 4 * head + 4)
                query = layer.query(first(x[place]))[part]
                score, value = [query @ layer.nothing[0, head, 0] / 2], [layer.nothing[1, head, 0]]
                for earlier in range(place):
                    (y, x_), (v, u) = (divmod(int(slots[row, at]), 4) for at in (place, earlier))
                    near = layer.distance[head, y - v + 3, x_ - u + 3]
                    score.append(query @ keys[earlier, part] / 2 + near)
                    value.append(values[earlier, part])
                mixed.append(torch.stack(score).softmax(0) @ torch.stack(value))
            inner = x[place] + layer.out(torch.cat(mixed))
            inner = inner + layer.mlp(last(inner))
            expected = features[row, place] + layer.proj_out(inner)
            assert torch.allclose(found[row, place], expected, atol=1e-12)


def test_a_fresh_layer_gives_the_law_of_the_model():
    features, tokens, slots = some_group()
    assert torch.equal(CausalLayer(6, 12, 4, 8, 2).double()(features, tokens, slots), features)


def test_groups_are_those_of_the_pictures():
    pipe: Any = tiny_masked_pipeline()
    model, told = pipe.transformer, pipe.make_condition(["a red circle", "a blue square"])
    draw = torch.Generator().manual_seed(3)
    tokens, order = torch.randint(12, (2, 16), generator=draw), some_orders(2, 4, draw)
    assert sorted(order[0].tolist()) == sorted(order[1].tolist()) == [*range(16)]
    groups = groups_of(model, told, tokens, order, torch.tensor([12, 5]), 6)
    assert groups.there.sum(1).tolist() == [4, 6]
    for row, known in enumerate((12, 5)):
        seen = torch.full((2, 16, 1), model.mask_id)
        seen[row, order[row, :known], 0] = tokens[row, order[row, :known]]
        state = model.prepare(told, batch_size=2, guided=False)
        model(state, seen, 0, keep=0)
        slots = order[row, known : known + 6]
        assert torch.equal(groups.slots[row, : len(slots)], slots)
        assert torch.equal(groups.tokens[row, : len(slots)], tokens[row, slots])
        assert torch.allclose(groups.features[row, : len(slots)], state.features[row, slots], atol=1e-5)


def paired(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Pictures in which every second token repeats the one before it, which is anything."""
    draw = torch.Generator().manual_seed(4)
    words = torch.randint(1, 4, (64, 6), generator=draw)
    return words, torch.randint(12, (64, 8), generator=draw).repeat_interleave(2, 1)


@pytest.mark.slow
def test_it_learns_what_the_model_cannot_say_and_a_saved_pipeline_holds_it(tmp_path: Path, monkeypatch):
    """Two hidden tokens that are equal: to the model they are independent."""
    monkeypatch.setattr(training, "tokenize_dataset", paired)
    pipe: Any = tiny_masked_pipeline()
    pipe.transformer.requires_grad_(False)
    pipe.text_encoder.requires_grad_(False)
    parts = pipe.transformer, pipe.text_encoder, pipe.vq_model

    def train(out, every):
        torch.manual_seed(1)
        layer = new_layer(pipe.transformer, dim=16, num_heads=2)
        return train_causal_layer(layer, *parts, SETTINGS, out, every=every), layer

    found = check_training(tmp_path, train, 41, every=20, saved={"": CausalLayer})
    for figures in found["held_out"].values():
        assert figures["chain_nats"] < figures["independent_nats"] - 0.3 and 0 < figures["overlap"] < 1
    again: Any = CausalLayer.from_pretrained(tmp_path / "whole")
    assert held_out(again.eval(), *parts, places=16) == found["held_out"]
    pipe.causal_layer = again
    pipe.sampler = SelfSpeculativeMaskedSampler(3)
    drawn = pipe("a red circle", generator=seeded(1))
    assert drawn.trace.target_calls.tolist() == [3] and 3 < drawn.trace.layer_calls.item() <= 16
    pipe.save_pretrained(tmp_path / "pipe")
    loaded = load_pipeline(tmp_path / "pipe")
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(loaded("a red circle", generator=seeded(1)).tokens, drawn.tokens)


def test_the_loss_is_that_of_the_hidden_tokens():
    pipe: Any = tiny_masked_pipeline()
    model, told = pipe.transformer, pipe.make_condition(["a red circle"])
    draw = torch.Generator().manual_seed(3)
    tokens, order = torch.randint(12, (1, 16), generator=draw), torch.randperm(16, generator=draw)[None]
    groups = groups_of(model, told, tokens, order, torch.tensor([13]), 6)
    logits = chain_logits(new_layer(model, dim=16, num_heads=2), model, groups)
    nats = [-logits[0, at].log_softmax(0)[tokens[0, order[0, 13 + at]]] for at in range(3)]
    assert loss_of(logits, groups).item() == pytest.approx(sum(nats).item() / 3, abs=1e-5)  # pyright: ignore


def test_what_does_not_fit_is_refused():
    pipe: Any = tiny_masked_pipeline(SelfSpeculativeMaskedSampler(2))
    refuses(ValueError, "causal_layer.*CausalLayer", pipe, "a red circle")
    pipe.causal_layer = CausalLayer(16, 12, 5, 8, 2)
    refuses(ValueError, "12.*5 x 5.*MaskedImageTransformer", pipe, "a red circle")
    refuses(ValueError, "dim=8.*num_heads=3", CausalLayer, 16, 12, 4, 8, 3)
    table = TabularMaskedModel(TokenGrid(2, 2), 3)
    refuses(ValueError, "TabularMaskedModel", SelfSpeculativeMaskedSampler(), table, None, law=TokenLaw())
    model = tiny_masked_transformer()
    new_layer(model, num_heads=2).check_fits(model)


def test_beginnings_are_groups_of_blank_pictures():
    pipe: Any = tiny_masked_pipeline()
    model, encoder = pipe.transformer, pipe.text_encoder
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(1, 4, (5, 6), generator=draw)
    tokens, order = torch.randint(12, (3, 16), generator=draw), some_orders(3, 4, draw)
    chosen = torch.tensor([4, 0, 5])  # the last picture has no caption
    beginnings = Beginnings.of(model, encoder, words)
    groups, layer = beginnings.groups(chosen, tokens, order, 6), new_layer(model, dim=16, num_heads=2)
    found = chain_logits(layer, model, groups)
    for row, caption in enumerate([encoder(words[4:]), encoder(words[:1]), None]):
        nothing = torch.zeros(1, dtype=torch.long)
        wanted = groups_of(model, caption, tokens[row, None], order[row, None], nothing, 6)
        assert torch.equal(groups.tokens[row], wanted.tokens[0])
        assert torch.equal(groups.slots[row], wanted.slots[0])
        # Held in bfloat16.
        assert torch.allclose(found[row], chain_logits(layer, model, wanted)[0], atol=2e-2)
        assert groups.there.all()


SAMPLER = MaskedSampler(steps=4, choice=Choice(choice_temperature=1.0))
PROMPTS = ["a red circle", "a blue square", "a"]


def test_transitions_are_those_of_the_decode():
    pipe: Any = tiny_masked_pipeline()
    model, told = pipe.transformer, pipe.make_condition(PROMPTS)
    found = record(model, told, 3, SAMPLER, 2.0, seed=5)
    generator = torch.Generator().manual_seed(5)
    plain: Any = SAMPLER(model, told, law=TokenLaw(guidance_scale=2.0), generator=generator, batch_size=3)
    calls = plain.trace.entry_call[..., 0].repeat(2, 1)  # [6, L], both rows of each picture
    state = model.prepare(told, batch_size=3, guided=True)
    for step in range(3):
        rows = slice(6 * step, 6 * step + 6)
        known = plain.tokens.repeat(2, 1).masked_fill(calls > step, model.mask_id)
        assert torch.equal(found.tokens[rows], known)
        assert torch.equal(found.newest[rows], calls == step)
        assert torch.allclose(found.share[rows], (calls > step).float().mean(1))
        model(state, known[:3, :, None], 0, keep=0)
        assert torch.allclose(found.after[rows], state.features, atol=1e-5)
        if step:
            assert torch.equal(found.before[rows], found.after[6 * step - 6 : 6 * step])


def test_a_fresh_shortcut_changes_nothing_and_reads_only_the_newest_tokens():
    model = tiny_masked_transformer()
    torch.manual_seed(0)
    shortcut = new_shortcut(model, dim=8, num_heads=2).eval()
    features, tokens = torch.randn(2, 16, 16), torch.randint(12, (2, 16))
    newest, share = torch.zeros(2, 16, dtype=torch.bool), torch.tensor([0.5, 0.2])
    newest[0, 3:6] = True
    assert torch.equal(shortcut(features, tokens, newest, share), features)
    with torch.no_grad():
        for layer in (shortcut.proj_out, shortcut.share[2]):
            torch.nn.init.normal_(layer.weight, std=0.3)  # pyright: ignore[reportArgumentType]
        made = shortcut(features, tokens, newest, share)
        assert torch.isfinite(made).all()  # also of the row in which nothing is new
        other = torch.where(newest, tokens, (tokens + 5) % 12).masked_fill(~newest, model.mask_id)
        assert torch.equal(shortcut(features, other, newest, share), made)
        assert not torch.allclose(shortcut(features, (tokens + 1) % 12, newest, share)[0], made[0])
        assert not torch.allclose(shortcut(features, tokens, newest, share + 0.1), made)


class Oracle(torch.nn.Module):
    """A shortcut that is never wrong: it asks the model."""

    def __init__(self, model: Any, told: Any, count: int) -> None:
        super().__init__()
        self.model, self.state = model, model.prepare(told, batch_size=count, guided=True)
        self.known, self.calls = torch.full((count, 16), model.mask_id), 0

    def check_fits(self, model: Any) -> None:
        assert model is self.model

    def follow(self, model: Any, state: Any, tokens: Any, newest: Any, share: Any) -> Any:
        shown, count = tokens[: len(self.known)], len(self.known)
        assert torch.equal(tokens[count:], shown) and torch.equal(newest[count:], newest[:count])
        assert torch.equal(share, (tokens == self.model.mask_id).float().mean(1))
        self.calls += 1
        self.model(self.state, shown[..., None], 0, keep=0)
        return self.state.features


def test_with_a_perfect_shortcut_the_tokens_are_those_of_the_model():
    pipe: Any = tiny_masked_pipeline()
    model, told = pipe.transformer, pipe.make_condition(PROMPTS)
    call: dict[str, Any] = dict(law=TokenLaw(guidance_scale=2.0), batch_size=3)
    plain: Any = MaskedSampler(steps=6)(model, told, generator=seeded(0, 1, 2), **call)
    oracle = Oracle(model, told, 3)
    sampler = ReusingMaskedSampler(steps=6, reuse=Reuse(reuse=2, reuse_from=0.0, reuse_by="shortcut"))
    found: Any = sampler(model, told, generator=seeded(0, 1, 2), shortcut=oracle, **call)
    assert torch.equal(found.tokens, plain.tokens)
    full = sum(full_calls(6, 2, 0.0))
    assert oracle.calls == 6 - full == found.trace.reused_calls and found.trace.whole_calls == full


def test_it_learns_and_a_saved_pipeline_holds_it(tmp_path: Path):
    pipe: Any = tiny_masked_pipeline()
    pipe.transformer.requires_grad_(False)
    settings = ShortcutTraining(steps=60, batch_size=16, pictures=9, calls=4, learning_rate=5e-3)
    readers = pipe.transformer, pipe.make_condition, 3 * PROMPTS, PROMPTS, SAMPLER

    def train(out, every):
        torch.manual_seed(1)
        shortcut = new_shortcut(pipe.transformer, dim=16, num_heads=2)
        return train_shortcut(shortcut, *readers, settings, out, every=every), shortcut

    found = check_training(tmp_path, train, 41, every=20, saved={"": FeatureShortcut})
    assert found["held_out_relative_error"] < 0.9 and found["parameters"] < 20_000
    again: Any = FeatureShortcut.from_pretrained(tmp_path / "whole")
    told = record(pipe.transformer, pipe.make_condition(PROMPTS), 3, SAMPLER, 2.0, 777)
    with torch.no_grad():
        assert relative_error(again.eval(), told).item() == pytest.approx(
            found["held_out_relative_error"], abs=1e-3
        )
    pipe.shortcut = again
    pipe.sampler = ReusingMaskedSampler(
        steps=6, measure=True, reuse=Reuse(reuse=1, reuse_from=0.0, reuse_by="shortcut")
    )
    drawn = pipe(PROMPTS[0], generator=seeded(1))
    assert drawn.trace.whole_calls == 3 and drawn.trace.divergence > 0
    pipe.save_pretrained(tmp_path / "pipe")
    loaded = load_pipeline(tmp_path / "pipe")
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(loaded(PROMPTS[0], generator=seeded(1)).tokens, drawn.tokens)


def test_a_shortcut_of_another_model_is_refused():
    pipe: Any = tiny_masked_pipeline(ReusingMaskedSampler(steps=2, reuse=Reuse(reuse=1, reuse_by="shortcut")))
    refuses(ValueError, "FeatureShortcut", pipe, PROMPTS[0])
    pipe.shortcut = FeatureShortcut(16, 12, 9, 8, 2)
    refuses(ValueError, "12.*9.*MaskedImageTransformer", pipe, PROMPTS[0])
    refuses(ValueError, "dim=8.*num_heads=3", FeatureShortcut, 16, 12, 9, 8, 3)
