"""The promise of equal tokens below float32: calls of one width, and the count of near-ties without them."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_transformer
from tests.helpers.tiny_audio import tiny_decoder
from tests.helpers.transformers_models import INPUTS, draw
from tests.models.next_token import tiny_transformers
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler
from visual_spec.prototype.proactive import ProactiveJacobiSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.precision import EXACT_WIDTH
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.tree import TreeSampler

LABELS = torch.tensor([1, 4, 0])
LAW = TokenLaw(guidance_scale=8.0, top_k=40)
EXACT: dict[str, Any] = dict(exact_width=True)
IDENTICAL: dict[str, Any] = dict(acceptance="identical")


@functools.cache
def pictures(dtype: torch.dtype = torch.bfloat16) -> Any:
    """6 x 6 tokens of 256. Strong guidance enlarges what is rounded, so near-ties are met."""
    sizes = dict(num_classes=5, caption_dim=None, prefix_length=1, dim=64, vocab_size=256, grid_size=6)
    model: Any = tiny_transformer(**sizes)
    return model.to(dtype)


@functools.cache
def drafter() -> Any:
    torch.manual_seed(3)
    made: Any = EagleDrafter.for_target(pictures())
    return made.to(torch.bfloat16).eval()


@functools.cache
def clips() -> Any:
    return MusicgenColumnModel(tiny_decoder(torch.bfloat16), 40)


def decode(model: Any, sampler: Any, seed: int = 0, *, law: TokenLaw = LAW, **parts: Any) -> Any:
    condition: Any = LABELS
    if model is clips():
        features = torch.randn(3, 4, model.text_width, generator=torch.Generator().manual_seed(5))
        condition = TextCondition(features.bfloat16(), torch.ones(3, 4, dtype=torch.bool))
    generator = [torch.Generator().manual_seed(seed + index) for index in range(3)]
    return sampler(model, condition, law=law, generator=generator, batch_size=3, **parts)


def width_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the tokens of all calls from here on."""
    shapes: list[tuple[int, ...]] = []
    score = Run.score

    def watched(self: Run, cache: Any, tokens: Tensor, slots: Tensor) -> Tensor:
        model = self.model

        def call(state: Any, tokens: Tensor, slots: Tensor) -> Tensor:
            shapes.append(tuple(tokens.shape))
            return model(state, tokens, slots)

        self.model = call
        try:
            return score(self, cache, tokens, slots)
        finally:
            self.model = model

    monkeypatch.setattr(Run, "score", watched)
    return shapes


@pytest.mark.fast_sets(2)
@pytest.mark.parametrize(
    "sampler",
    [
        SpeculativeJacobiSampler(1, **EXACT),
        SpeculativeJacobiSampler(5, **EXACT),
        SpeculativeJacobiSampler(32, initial_draft="last_law", **EXACT),
        SpeculativeJacobiSampler("auto", initial_draft="up", **EXACT),
        DraftedSampler(4, **IDENTICAL, **EXACT),
        DraftedSampler(4, stop_below=0.05, **IDENTICAL, **EXACT),
    ],
    ids=lambda sampler: f"{type(sampler).__name__}-{dict(sampler.config)}"[:70],
)
def test_pictures_in_bfloat16_are_those_of_plain_decoding(sampler, monkeypatch):
    parts = dict(drafter=drafter()) if sampler.needs_drafter else {}
    shapes = width_of_calls(monkeypatch)
    for seed in (0, 10):
        plain = decode(pictures(), AutoregressiveSampler(**EXACT), seed)
        found = decode(pictures(), sampler, seed, **parts)
        assert torch.equal(found.tokens, plain.tokens)
        assert found.trace.promises_tokens and found.trace.near_ties is None
        assert found.trace.output_law == "same tokens as autoregressive sampling with exact_width (bfloat16)"
    assert set(shapes) == {(3, EXACT_WIDTH)}  # samples that are complete stay, too


@pytest.mark.parametrize(
    "sampler",
    [
        ColumnJacobiSampler(3, **EXACT),
        ColumnJacobiSampler(16, unit="codebook", **EXACT),
        DraftedColumnSampler(3, **IDENTICAL, **EXACT),
    ],
    ids=["jacobi", "codebook", "drafted"],
)
def test_clips_in_bfloat16_are_those_of_plain_decoding(sampler):
    parts = dict(drafter=clips()) if sampler.needs_drafter else {}
    plain = decode(clips(), ColumnAutoregressiveSampler(**EXACT))
    found = decode(clips(), sampler, **parts)
    assert torch.equal(found.tokens, plain.tokens)
    assert found.trace.promises_tokens


def test_without_it_some_differ():
    """Else the tests above would show nothing."""
    plain = decode(pictures(), AutoregressiveSampler())
    found = decode(pictures(), SpeculativeJacobiSampler(32))
    assert not torch.equal(found.tokens, plain.tokens)
    assert found.trace.identical and not found.trace.promises_tokens


@pytest.mark.parametrize("name", ["emu3", "janus"])
def test_models_of_transformers_and_row_ends(name):
    model = {"emu3": tiny_transformers.emu3, "janus": tiny_transformers.janus}[name](torch.bfloat16)
    assert INPUTS[name]
    want = draw(model, name, AutoregressiveSampler(**EXACT))
    for window in (2, 9, 32):
        assert torch.equal(draw(model, name, SpeculativeJacobiSampler(window, **EXACT)), want)


def test_a_position_is_scored_alike_at_any_place_of_a_call():
    """The property that the promise rests on, bit by bit."""
    model = pictures()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (3, 36 + EXACT_WIDTH), generator=generator)
    found: dict[int, Tensor] = {}
    for stride in (1, 7, 32):
        state = model.prefill(LABELS, batch_size=3, guided=True, window=EXACT_WIDTH)
        state.fixed = True
        for start in range(0, 36, stride):
            slots = (start + torch.arange(EXACT_WIDTH)).expand(3, -1)
            logits = model(state, tokens.gather(1, slots), slots)
            for place in range(min(stride, 36 - start)):
                expected = found.setdefault(start + place, logits[:, place])
                assert torch.equal(logits[:, place], expected)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SpeculativeJacobiSampler, dict(window=33), "33 positions.*32"),
        (SpeculativeJacobiSampler, dict(acceptance="exact"), "exact_width=True.*acceptance='exact'"),
        (DraftedSampler, dict(), "exact_width=True.*acceptance='exact'"),
        (DraftedSampler, dict(num_drafts=32, **IDENTICAL), "33 positions"),
        (ColumnJacobiSampler, dict(window=64), "64 positions"),
        (DraftedColumnSampler, dict(), "exact_width=True.*acceptance='exact'"),
    ],
)
def test_refuses_what_it_cannot_promise(kind, settings, message):
    refuses(ValueError, message, kind, **settings, **EXACT)


# -- near-ties ---------------------------------------------------------------------------------------------------------


def near_by_definition(model: Any, tokens: Tensor, law: TokenLaw, seed: int = 0) -> Tensor:
    """Near-ties of the slots after the first one, bool [B, L - 1], by one wide call for one sample and the definition.

    In one call of one sample the logits are nearly those that the sampler saw; `seed` and model are chosen so that no
    margin lies at the threshold itself.
    """
    near = []
    for index, label in enumerate(LABELS):
        keys = draw_keys(torch.Generator().manual_seed(seed + index), 1)
        state = model.prefill(label[None], batch_size=1, guided=law.guided, window=36)
        slots = torch.arange(35)[None]
        logits = model(state, tokens[index : index + 1, :-1], slots)  # [2, 35, V]
        scores = law(logits, law.guided, slots + 1)
        if law.temperature:
            scores = scores + CounterNoise(keys, "cpu").gumbel(slots + 1, 256, TOKEN)
        else:
            scores = law.guidance_scale * logits[0] - (law.guidance_scale - 1) * logits[1]
        best = scores.reshape(35, 256).sort(-1, descending=True).values
        spacing = 2.0**-7 / (law.temperature or 1.0)
        largest = law.guidance_scale * logits[0].abs().amax(-1)
        largest = largest + (law.guidance_scale - 1) * logits[1].abs().amax(-1)
        near.append(best[:, 0] - best[:, 1] < 2 * spacing * largest)
    return torch.stack(near)


@pytest.mark.parametrize("law", [LAW, TokenLaw(guidance_scale=8.0, temperature=0.0)], ids=["drawn", "greedy"])
def test_near_ties_are_counted(law):
    """In float32, which is said to be bfloat16, so that the logits can be had a second time."""
    model = pictures(torch.float32)
    samplers: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (AutoregressiveSampler(), {}),
        "jacobi": (SpeculativeJacobiSampler(8), {}),
        "last_law": (SpeculativeJacobiSampler(8, initial_draft="last_law"), {}),
        "drafted": (DraftedSampler(3, **IDENTICAL), {}),
        "tree": (TreeSampler(2, 3, **IDENTICAL), {}),
        "proactive": (ProactiveJacobiSampler(6, coupling="gumbel", **IDENTICAL), {}),
    }
    torch.manual_seed(3)
    parts: dict[str, Any] = dict(drafter=EagleDrafter.for_target(model).eval())
    expected = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("visual_spec.samplers.core.base.low_precision_of", lambda model: "bfloat16")
        for name, (sampler, _) in samplers.items():
            found = decode(model, sampler, law=law, **(parts if sampler.needs_drafter else {}))
            if expected is None:
                expected = near_by_definition(model, found.tokens, law).sum(1)
                assert 0 < expected.min() and expected.max() < 35
            assert torch.equal(found.trace.near_ties, expected), name
            repair = "; none with exact_width=True" if "exact_width" in sampler.config else ""
            limit = "" if name == "plain" else f" up to near-ties (bfloat16{repair})"
            met = f"autoregressive sampling{limit}, {int(expected.sum())} near-ties met"
            assert found.trace.summary().endswith(met)
