"""The exact law of frame-by-frame decoding: the real sampler on every outcome of its draws, against a second writing of
the recursion over frames in plain Python, whose steps within a frame are those of `plain_masking`."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import permutations
from math import factorial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.exactness.plain_masking import Plain, Tokens
from tests.helpers.frame_tables import TableFrameModel
from tests.helpers.masked_laws import ForcedNoise, distance, law_of_sampler
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import of_settings
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked import frames
from visual_spec.samplers.masked.frames import FrameMaskedSampler
from visual_spec.samplers.masked.policies import Choice

NO_NOISE = dict(choice_temperature=0.0)


@dataclass
class PlainFrame(Plain):
    """One frame, after what was written of those before it, for the conditional rows and for the others."""

    table: list = field(default_factory=list)
    past: tuple[Tokens, Tokens] = ((), ())

    def logits(self, tokens: Tokens, stage: int, slot: int, scale: float) -> list[float]:
        found = []
        for table, past in zip((self.table[0], self.table[-1]), self.past, strict=True):
            seen, here = past + tokens, len(past) + slot
            found.append(
                [sum(table[here][j][t][v] for j, t in enumerate(seen)) for v in range(self.model.vocab_size)]
            )
        with_text, without = found
        return (
            with_text
            if scale <= 1
            else [u + scale * (c - u) for c, u in zip(with_text, without, strict=True)]
        )


def clip_law(
    model: TableFrameModel,
    steps: int,
    patterns: list[set[int]],
    *,
    blind: bool = True,
    given: Tokens | None = None,
    **settings: Any,
) -> dict[Tokens, float]:
    """The law of clips whose frames later ones see without the places of a pattern, all as probable."""
    mask, count, law = model.vocab_size, model.frame_tokens, defaultdict(float)
    table = model.table.tolist()
    for pattern in patterns:
        clips: dict[Tokens, float] = {(): 1.0}
        for frame, group in enumerate(model.frame_groups):
            grid = TokenGrid(model.grid.height, model.grid.width, len(group))
            one: Any = SimpleNamespace(vocab_size=mask, grid=grid)
            known = None if given is None else given[frame * count : (frame + 1) * count]
            longer = defaultdict(float)
            for clip, weight in clips.items():
                past = tuple(mask if i % count in pattern else t for i, t in enumerate(clip))
                others = (mask,) * len(past) if blind else past
                unknown = known is None or mask in known
                plain = PlainFrame(
                    one, [steps if unknown else 0], given=known, table=table, past=(past, others), **settings
                )
                for tokens, chance in plain.law().items():
                    longer[clip + tokens] += weight * chance
            clips = longer
        for clip, weight in clips.items():
            law[clip] += weight / len(patterns)
    return dict(law)


def model_of(*shape: int, vocab_size: int = 2) -> TableFrameModel:
    frame_count, height, width = shape
    return TableFrameModel(TokenGrid(height, width, frame_count), vocab_size)


def drawn(monkeypatch, model, sampler, law=None, choices=1, **options):
    """The law of the sampler; `choices`: outcomes of all its draws but those of tokens."""
    calls = sampler.config.steps * len(options.pop("frames", range(model.grid.frames)))
    rows = (model.vocab_size**model.frame_tokens) ** calls * choices
    noise = ForcedNoise(rows, options.pop("chance", None))
    return law_of_sampler(monkeypatch, sampler, model, law or TokenLaw(), noise, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "places"), [(0.0, set()), (0.5, {0, 2}), (0.7, {0, 1, 3}), (1.0, {0, 1, 2, 3})]
)
def test_two_frames_of_two_by_two(monkeypatch, share, places):
    model = model_of(2, 2, 2)
    found = drawn(monkeypatch, model, of_settings(FrameMaskedSampler, 2, share, **NO_NOISE))
    assert distance(found, clip_law(model, 2, [places])) < 1e-10


@pytest.mark.fast_sets(2)
@pytest.mark.parametrize("score", ["probability", "entropy", "raster"])
@pytest.mark.parametrize("schedule", ["linear", "arccos"])
def test_three_tokens_and_other_parts(monkeypatch, score, schedule):
    model = model_of(2, 1, 3, vocab_size=2)
    sampler = of_settings(
        FrameMaskedSampler, 3, 0.4, score=score, schedule=schedule, temperature="root", **NO_NOISE
    )
    order = [[0, 1, 2]] if score == "raster" else None
    wanted = clip_law(model, 3, [{0}], score=score, schedule=schedule, orders=order, temperature_curve="root")
    assert distance(drawn(monkeypatch, model, sampler), wanted) < 1e-10


def test_frames_that_are_drawn_together(monkeypatch):
    """The first frame, then two by one schedule over their four tokens; half of each is hidden when written."""
    model = model_of(3, 1, 2)
    monkeypatch.setattr(TableFrameModel, "frame_groups", [[0], [1, 2]])
    noise = ForcedNoise(2 ** (2 * 2 + 2 * 4), None)
    sampler = of_settings(FrameMaskedSampler, 2, 0.5, **NO_NOISE)
    found = law_of_sampler(monkeypatch, sampler, model, TokenLaw(), noise)  # type: ignore[arg-type]
    together = clip_law(model, 2, [{0}])
    assert distance(found, together) < 1e-10
    monkeypatch.undo()
    assert distance(together, clip_law(model, 2, [{0}])) > 0.01  # so frame after frame is another law


@pytest.mark.parametrize("unconditional", ["hidden", "same"])
def test_guidance_with_both_histories(monkeypatch, unconditional):
    model = model_of(3, 1, 2)
    sampler = of_settings(
        FrameMaskedSampler,
        2,
        0.5,
        unconditional_history=unconditional,
        guidance="rising",
        least_guidance=1.2,
        **NO_NOISE,
    )
    found = drawn(monkeypatch, model, sampler, TokenLaw(guidance_scale=2.5))
    blind = dict(blind=unconditional == "hidden")
    wanted = clip_law(model, 2, [{0}], guidance="rising", least_guidance=1.2, scale=2.5, **blind)
    assert distance(found, wanted) < 1e-10
    other = clip_law(
        model, 2, [{0}], guidance="rising", least_guidance=1.2, scale=2.5, blind=unconditional == "same"
    )
    assert distance(found, other) > 0.01  # so the two histories differ


def test_noise_on_the_scores_and_a_random_pattern(monkeypatch):
    """Three frames of two tokens: the same pattern in all of them, fresh noise in each."""
    model = model_of(3, 1, 2)
    sampler = FrameMaskedSampler(2, 0.5, "random", choice=Choice(choice_temperature=0.8))
    left = {0: 0.5}  # the noise of the first of two steps

    def chance(picked, round):
        return picked / (0.8 * left[round]) if round in left else picked

    choices = 2**3 * factorial(2)  # a ranking in the first step of every frame, and one pattern
    found = drawn(monkeypatch, model, sampler, choices=choices, chance=chance)
    assert distance(found, clip_law(model, 2, [{0}, {1}], noise=0.8)) < 1e-10
    assert distance(found, clip_law(model, 2, [{0}], noise=0.8)) > 0.01


def test_an_order_of_its_own_in_every_frame(monkeypatch):
    model = model_of(2, 1, 3)
    sampler = of_settings(FrameMaskedSampler, 2, 0.4, score="random", **NO_NOISE)
    orders = [list(order) for order in permutations(range(3))]
    found = drawn(monkeypatch, model, sampler, choices=len(orders) ** 2)
    assert distance(found, clip_law(model, 2, [{0}], score="random", orders=orders)) < 1e-10


def test_given_tokens(monkeypatch):
    """The first frame is known, and the second in part."""
    model = model_of(3, 1, 2)
    given = (1, 0, 2, 1, 2, 2)
    found = drawn(
        monkeypatch,
        model,
        of_settings(FrameMaskedSampler, 2, 0.5, **NO_NOISE),
        known_tokens=given,
        frames=range(2),
    )
    assert distance(found, clip_law(model, 2, [{0}], given=given)) < 1e-10


# -- planted bugs, each of which the enumeration notices ---------------------------------------------------------------


class SeenHistory(FrameMaskedSampler):
    """Writes frames whole, though a share is declared hidden."""

    def _write(self, run, state):
        state.history = torch.zeros_like(state.history)
        super()._write(run, state)


class RedrawnHistory(FrameMaskedSampler):
    """Hides other places in every frame."""

    def _write(self, run, state):
        state.history = state.history.roll(state.frame, 1)
        super()._write(run, state)


class ForgottenFrame(FrameMaskedSampler):
    """Keeps the first frame alone in the history."""

    def _write(self, run, state):
        super()._write(run, state)
        if state.frame == 2:
            state.cache.written[:, model_of(3, 1, 2).frame_tokens :] = run.model.mask_id


@pytest.mark.parametrize("broken", [SeenHistory, RedrawnHistory, ForgottenFrame])
def test_planted_bugs_are_noticed(monkeypatch, broken):
    model = model_of(3, 1, 2)
    wanted = clip_law(model, 2, [{0}])
    settings = dict(steps=2, history_hidden=0.5, **NO_NOISE)
    assert distance(drawn(monkeypatch, model, of_settings(FrameMaskedSampler, **settings)), wanted) < 1e-10
    assert distance(drawn(monkeypatch, model, broken(**settings)), wanted) > 0.005  # type: ignore[arg-type]


def test_shared_counters_are_noticed(monkeypatch):
    """Frames that draw from the same noise would not be independent: the forced noise refuses a second use."""
    inner = frames.FrameMaskedSampler._begin_frame

    def begin(self, run, state):
        inner(self, run, state)
        state.drawing.first = 0

    monkeypatch.setattr(frames.FrameMaskedSampler, "_begin_frame", begin)
    with pytest.raises(AssertionError, match="used twice"):
        drawn(monkeypatch, model_of(2, 1, 2), of_settings(FrameMaskedSampler, 2, 0.5, **NO_NOISE))
