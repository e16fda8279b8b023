"""The shortcut of a masked model: what it learns from, that it learns, and that decoding uses it as it says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.train.shortcut import ShortcutTraining, new_shortcut, record, relative_error, train_shortcut
from tests.helpers.tiny import seeded, tiny_masked_pipeline, tiny_masked_transformer
from tests.helpers.training import check_training
from visual_spec.models.masked.shortcut import FeatureShortcut
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.recap import full_calls

SAMPLER = MaskedSampler(steps=4, choice_temperature=1.0)
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

    def forward(self, features: Any, tokens: Any, newest: Any, share: Any) -> Any:
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
    sampler = MaskedSampler(steps=6, reuse=2, reuse_from=0.0, reuse_by="shortcut")
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
    pipe.sampler = MaskedSampler(steps=6, reuse=1, reuse_from=0.0, reuse_by="shortcut", measure=True)
    drawn = pipe(PROMPTS[0], generator=seeded(1))
    assert drawn.trace.whole_calls == 3 and drawn.trace.divergence > 0
    pipe.save_pretrained(tmp_path / "pipe")
    loaded = load_pipeline(tmp_path / "pipe")
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(loaded(PROMPTS[0], generator=seeded(1)).tokens, drawn.tokens)


def test_a_shortcut_of_another_model_is_refused():
    pipe: Any = tiny_masked_pipeline(MaskedSampler(steps=2, reuse=1, reuse_by="shortcut"))
    with pytest.raises(ValueError, match="FeatureShortcut"):
        pipe(PROMPTS[0])
    pipe.shortcut = FeatureShortcut(16, 12, 9, 8, 2)
    with pytest.raises(ValueError, match="12.*9.*MaskedImageTransformer"):
        pipe(PROMPTS[0])
    with pytest.raises(ValueError, match="dim=8.*num_heads=3"):
        FeatureShortcut(16, 12, 9, 8, 3)
