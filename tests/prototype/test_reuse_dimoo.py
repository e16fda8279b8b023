"""Lumina-DiMOO's own cache, and MIGM-Shortcut's network for it, beside their public code in recorded tokens.

They were recorded as those of `tests/models/masked/test_dimoo.py`; the shortcut's by Kaiwen-Zhu/MIGM-Shortcut.
"""

from typing import Any

import pytest
import torch

from tests.helpers import dimoo
from tests.helpers.dimoo import CODES
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_masked_transformer
from tests.helpers.written_weights import written
from visual_spec.models.masked.dimoo_checkpoint import load_dimoo
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.prototype.reuse.dimoo_shortcut import DimooShortcut, load_dimoo_shortcut
from visual_spec.prototype.reuse.masked import ML_CACHE, ReusingMaskedSampler
from visual_spec.prototype.reuse.recap import Reuse, full_calls
from visual_spec.samplers.core.law import TokenLaw

LAW = ML_CACHE.law
# By cache_ratio, refresh_interval and warmup_ratio, of 10 calls.
CACHED = {
    (0.7, 3, 0.3): [6, 9, 21, 22, 9, 12, 10, 6, 23, 6, 12, 6, 9, 23, 14, 8, 6, 6, 19, 22, 7, 6, 12, 22],
    (0.9, 5, 0.1): [6, 9, 14, 22, 7, 12, 10, 15, 23, 9, 12, 6, 8, 19, 14, 6, 6, 6, 22, 22, 7, 6, 14, 10],
    (0.5, 2, 0.0): [6, 9, 10, 22, 7, 6, 10, 6, 23, 7, 12, 6, 9, 23, 14, 8, 6, 6, 19, 22, 7, 14, 12, 22],
}
# By the budget of full calls among 8.
SHORT = {
    4: [6, 14, 14, 19, 7, 12, 19, 21, 21, 21, 21, 15, 16, 14, 14, 15, 19, 6, 10, 21, 7, 14, 6, 19],
    2: [14, 14, 21, 19, 14, 14, 19, 14, 21, 21, 7, 7, 14, 21, 14, 8, 14, 7, 10, 21, 7, 14, 10, 19],
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    model, reader = load_dimoo(dimoo.write_folder(tmp_path_factory.mktemp("dimoo")))
    return model.with_grid(4, 6), reader


@pytest.fixture(scope="module")
def shortcut():
    weights = {key: written(key, shape) for key, shape in dimoo.shortcut_shapes().items()}
    return load_dimoo_shortcut(weights, num_heads=dimoo.HEADS).eval()


def cached(ratio: float, interval: int, warmup: float) -> Any:
    return ML_CACHE.sampler(
        steps=10, reuse=interval - 1, reuse_from=int(10 * warmup) / 10, reuse_share=1 - ratio
    )


@pytest.mark.parametrize("settings", CACHED)
def test_the_cache_draws_the_tokens_of_the_release(loaded, settings):
    model, reader = loaded
    found = cached(*settings)(model, reader(["a red fox"]), law=LAW, generator=seeded(1))
    assert found.tokens[0].tolist() == CACHED[settings]
    ratio, interval, warmup = settings
    first = int(10 * warmup)
    wanted = [step <= first or (step - first) % interval == 0 for step in range(10)]
    assert found.trace.reused_calls == wanted.count(False)
    assert found.trace.whole_calls == pytest.approx(10 - ratio * wanted.count(False))


def test_full_calls_are_those_of_the_release():
    """Of 64, with refresh_interval 5 and warmup_ratio 0.3: `step <= 19 or (step - 19) % 5 == 0`."""
    wanted = [step <= 19 or (step - 19) % 5 == 0 for step in range(64)]
    settings = ML_CACHE.settings
    assert full_calls(64, settings["reuse"], settings["reuse_from"]) == wanted


def test_a_cached_sample_does_not_depend_on_the_batch(loaded):
    """Prompts of different lengths: each row computes its own number of places."""
    model, reader = loaded
    sampler = cached(0.7, 3, 0.3)
    both = sampler(model, reader(["blue", "a red fox"]), law=LAW, generator=seeded(3, 1), batch_size=2).tokens
    assert both[1].tolist() == CACHED[0.7, 3, 0.3]
    assert torch.equal(both[:1], sampler(model, reader(["blue"]), law=LAW, generator=seeded(3)).tokens)


def test_calls_of_all_places_are_full_calls():
    model, told = (
        dimoo.tiny_dimoo().double(),
        TextCondition(torch.randn(2, 5, 8).double(), torch.ones(2, 5).bool()),
    )
    state = model.prepare(told, batch_size=2, guided=True)
    before, after = torch.randint(CODES, (2, 2, 16, 1), generator=torch.Generator().manual_seed(0))
    model(state, before, keep=0)
    held = model(state, after, least=0.2)
    wanted = model(state, after)
    assert (held - wanted).abs().max() > 1e-2  # it is an approximation
    assert (model(state, after, least=1.0) - wanted).abs().max() < 1e-9


def test_places_of_least_logit_are_those_up_to_the_quantile():
    """In rows of 31 and of 29 places, as `torch.quantile` counts them for each row alone."""
    model = dimoo.tiny_dimoo()
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    state = model.prepare(TextCondition(torch.randn(2, 7, 8), mask), batch_size=2, guided=False)
    model(state, torch.full((2, 16, 1), CODES), keep=0)
    for share in (0.1, 0.2, 0.25, 1 - 0.9, 0.5, 0.99):
        state.logits = torch.randn(2, 31, CODES, generator=torch.Generator().manual_seed(1))
        chosen = model._least_sure(state, share)
        for row, length in enumerate((31, 29)):
            sure = state.logits[row, :length].amax(-1)
            wanted = (sure <= sure.quantile(share)).nonzero()[:, 0].tolist()
            own = chosen[row].tolist()
            assert sorted(own[: len(wanted)]) == wanted and len(set(own)) == len(own)
            assert all(place >= length for place in own[len(wanted) :])


@pytest.mark.parametrize("budget", SHORT)
def test_the_shortcut_draws_the_tokens_of_its_release(loaded, shortcut, budget):
    model, reader = loaded
    sampler = ML_CACHE.sampler(steps=8, reuse=8 // budget - 1, reuse_from=0.0, reuse_by="shortcut")
    told = reader(["blue", "a red fox"])  # a batch, of which the second is the recorded one
    found: Any = sampler(model, told, law=LAW, generator=seeded(3, 1), batch_size=2, shortcut=shortcut)
    assert found.tokens[1].tolist() == SHORT[budget]
    assert found.trace.reused_calls == 8 - budget


def test_a_row_that_sees_nothing_new_stays_finite(loaded, shortcut, monkeypatch):
    """With more calls than hidden tokens some keep none: unconditional rows see nothing, and some kernels give nan."""

    def attention(query, key, value, attn_mask=None):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        return (scores if attn_mask is None else scores.masked_fill(~attn_mask, -torch.inf)).softmax(
            -1
        ) @ value

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    model, reader = loaded
    known = torch.full((1, 24), 3)
    known[0, 5] = known[0, 9] = model.mask_id
    sampler = ML_CACHE.sampler(steps=6, reuse=2, reuse_from=0.0, reuse_by="shortcut")
    found = sampler(
        model, reader(["a fox"]), law=LAW, generator=seeded(1), known_tokens=known, shortcut=shortcut
    )
    assert (found.tokens < CODES).all()


def test_the_released_sizes_are_the_defaults():
    with torch.device("meta"):
        made = DimooShortcut()
        own = {key: tuple(value.shape) for key, value in made.state_dict().items()}
    again = load_dimoo_shortcut(
        {key: torch.zeros(shape) for key, shape in dimoo.shortcut_shapes().items()}, num_heads=4
    )
    assert own["time_embedder.mlp.0.weight"] == (724, 256) and own["proj_in.weight"] == (2048, 4096)
    assert own["blocks.0.cross_attn.ff_proj.weight"] == (12288, 2048)
    assert {*own} == {*again.state_dict()}


def test_what_does_not_fit_is_refused(loaded, shortcut):
    model, reader = loaded
    told = reader(["a fox"])
    other, state = tiny_masked_transformer(), model.prepare(told, batch_size=1, guided=False)
    by_logits = Reuse(reuse=1, reuse_by="logits")
    for made, message in (
        (lambda: ReusingMaskedSampler(reuse=by_logits)(other, None, law=TokenLaw()), "ImageTransformer.*no logits"),
        (lambda: ReusingMaskedSampler(graph=True, reuse=by_logits), "graph=True.*'logits'"),
        (lambda: shortcut.check_fits(other), r"base \(32, 500000.0\).*MaskedImageTransformer"),
        (lambda: shortcut.check_fits(dimoo.tiny_dimoo()), r"the model is \(8, 500000.0\)"),
        (lambda: load_dimoo_shortcut({"proj_in.weight": torch.zeros(2, 2)}), "no shortcut of Lumina-DiMOO.*MIGM"),
        (lambda: model(state, torch.zeros(1, 24, 1).long(), least=0.1), "keep=n"),
    ):  # fmt: skip
        refuses(ValueError, message, made)
