"""Frame-by-frame masked decoding: its calls, what it writes of a frame, and what it refuses. Its law is enumerated in
`tests/exactness/test_frame_law.py`."""

from typing import Any

import pytest
import torch

from tests.helpers.frame_tables import TableFrameModel
from tests.helpers.tabular import TabularMaskedModel
from tests.helpers.tiny import seeded
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import of_settings
from visual_spec.samplers.core.base import STOP
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.frames import FrameMaskedSampler, even_places
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice, Schedule

MASK = 5


def model_of(frames: int = 3, height: int = 2, width: int = 4, spread: float = 0.4) -> TableFrameModel:
    return TableFrameModel(TokenGrid(height, width, frames), MASK, conditions=2, spread=spread)


def draw(sampler: FrameMaskedSampler, model: TableFrameModel, samples=(0, 1), **options) -> Any:
    options = {"law": TokenLaw(guidance_scale=1.5), **options}
    condition = torch.tensor([sample % 2 for sample in samples])
    return sampler(model, condition, generator=seeded(*samples), batch_size=len(samples), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "frames"), [(1, 2), (3, 3), (8, 4)])
def test_calls_in_closed_form(steps, frames):
    model = model_of(frames)
    trace = draw(FrameMaskedSampler(steps), model).trace
    assert len(model.calls) == steps * frames and len(model.writes) == frames - 1
    assert trace.target_calls.tolist() == [steps * frames + frames - 1] * 2
    assert trace.frame_calls.tolist() == [steps + 1] * (frames - 1) + [steps]
    first = torch.arange(frames)[:, None] * (steps + 1)
    by_frame = trace.commit_call.unflatten(1, (frames, -1))
    assert (by_frame >= first).all() and (by_frame < first + steps).all()  # no write keeps a token
    assert (by_frame.amax(-1) == first[:, 0] + steps - 1).all()


def test_kept_tokens_stay_and_as_many_stay_hidden_as_the_schedule_says():
    model = model_of(2)
    tokens = draw(FrameMaskedSampler(4, schedule=Schedule(schedule="linear")), model).tokens
    for frame, calls in enumerate([model.calls[:4], model.calls[4:]]):
        assert [(call == MASK).sum(1).tolist() for call in calls] == [[8, 8], [6, 6], [4, 4], [2, 2]]
        for call in calls:
            assert torch.equal(
                call.where(call != MASK, tokens[:, 8 * frame : 8 * frame + 8]),
                tokens[:, 8 * frame : 8 * frame + 8],
            )


@pytest.mark.parametrize(
    ("share", "places"),
    [(0.0, []), (0.01, [0]), (0.25, [0, 4]), (0.3, [0, 4]), (0.5, [0, 2, 4, 6]), (1.0, list(range(8)))],
)
def test_the_same_even_places_of_every_frame_are_hidden(share, places):
    model = model_of()
    tokens = draw(FrameMaskedSampler(2, share), model).tokens
    hidden = torch.zeros(8, dtype=torch.bool)
    hidden[places] = True
    for frame, written in enumerate(model.writes):
        drawn = tokens[:, 8 * frame : 8 * frame + 8]
        assert torch.equal(written[:2], drawn.masked_fill(hidden, MASK))
        assert (written[2:] == MASK).all()  # unconditional rows see no history


def test_even_places_are_different_and_evenly_spaced():
    for count in range(1, 40):
        for number in range(1, count + 1):
            places = even_places(number, count)
            gaps = [b - a for a, b in zip(places, [*places[1:], count], strict=True)]
            assert places[0] == 0 and min(gaps) >= 1 and sum(gaps) == count
            assert all(abs(place - index * count / number) <= 0.5 for index, place in enumerate(places))


def test_a_random_pattern_is_a_samples_own_and_one_for_all_frames():
    model = model_of(3)
    draw(FrameMaskedSampler(2, 0.5, "random", "same"), model, samples=(0, 1, 2))
    first, second = (written == MASK for written in model.writes)
    assert torch.equal(first, second) and (first.sum(1) == 4).all()
    assert torch.equal(first[:3], first[3:])  # unconditional rows see the same
    assert not torch.equal(first[0], first[1])


def test_noise_may_end_with_the_first_frame():
    """As Lumos-1's code, which never sets its noise again: later frames are drawn as without noise."""
    both = dict(steps=3, history_hidden=0.5, falls="product", choice_temperature=4.0)
    whole, first = (
        draw(of_settings(FrameMaskedSampler, **both, later_noise=later), model_of(3))
        for later in (True, False)
    )
    assert torch.equal(whole.tokens[:, :8], first.tokens[:, :8])
    assert not torch.equal(whole.tokens, first.tokens)
    given = first.tokens.clone()
    given[:, 8:] = MASK
    without = of_settings(FrameMaskedSampler, **both | {"choice_temperature": 0.0})
    assert torch.equal(draw(without, model_of(3), known_tokens=given).tokens, first.tokens)
    # The first frame that is drawn has it, whatever is given before.
    again = draw(
        of_settings(FrameMaskedSampler, **both, later_noise=False), model_of(3), known_tokens=given
    ).tokens
    assert torch.equal(
        again[:, 8:16],
        draw(of_settings(FrameMaskedSampler, **both), model_of(3), known_tokens=given).tokens[:, 8:16],
    )
    assert not torch.equal(again[:, 8:16], first.tokens[:, 8:16])


def test_given_frames_cost_the_call_that_writes_them():
    model = model_of(3)
    given = torch.full((2, 24), MASK)
    given[:, :8] = torch.arange(8) % MASK
    result = draw(FrameMaskedSampler(3, 0.5), model, known_tokens=given)
    assert torch.equal(result.tokens[:, :8], given[:, :8])
    assert result.trace.frame_calls.tolist() == [1, 4, 3] and result.trace.target_calls.tolist() == [8, 8]
    assert (result.trace.entry_call[:, :8] == -1).all()
    hidden = torch.tensor([True, False] * 4)
    assert torch.equal(model.writes[0][:2], given[:, :8].masked_fill(hidden, MASK))


def test_frames_after_the_last_unknown_token_cost_nothing():
    model = model_of(3)
    given = torch.zeros(2, 24, dtype=torch.long)
    given[0, 3] = MASK
    result = draw(FrameMaskedSampler(3), model, known_tokens=given)
    assert result.trace.frame_calls.tolist() == [3, 0, 0] and not model.writes
    assert result.trace.target_calls.tolist() == [3, 3]


def test_an_entropy_bound_ends_frames_early():
    sure, unsure = model_of(spread=8.0), model_of(spread=0.1)
    sampler = FrameMaskedSampler(
        8, 0.0, schedule=Schedule(entropy_bound=2.0), choice=Choice(choice_temperature=0.0)
    )
    few, many = draw(sampler, sure).trace, draw(sampler, unsure).trace
    assert len(sure.calls) < len(unsure.calls) <= 24
    assert (few.target_calls < many.target_calls).all()
    assert int(few.frame_calls.sum()) == len(sure.calls) + len(sure.writes)
    everything = draw(FrameMaskedSampler(8, 0.0, schedule=Schedule(entropy_bound=1e9)), model_of())
    assert everything.trace.target_calls.tolist() == [5, 5]


def test_measured_dependence_adds_up_over_frames():
    """Independent slots move nothing, dependent ones do."""
    model = model_of()
    measured = draw(FrameMaskedSampler(2, measure=True), model).trace
    assert measured.divergence is not None and measured.divergence > 0.01
    assert (measured.total_correlation != 0).all()
    model.table[:, :, :, :, :] = model.table[:, :, :1, :1]  # what is seen moves nothing
    assert draw(FrameMaskedSampler(2, measure=True), model).trace.divergence == pytest.approx(0, abs=1e-6)


def test_a_callback_ends_the_decode():
    seen = []

    def stop(call, lengths):
        seen.append(lengths.tolist())
        return STOP if call == 4 else None

    result = draw(FrameMaskedSampler(2, schedule=Schedule(schedule="linear")), model_of(), callback=stop)
    assert seen == [[4, 4], [8, 8], [8, 8], [12, 12], [16, 16]]
    assert result.trace.stopped and (result.trace.commit_call[:, 16:] == -1).all()
    assert ((result.tokens >= 0) & (result.tokens < MASK)).all()


def test_other_models_and_requests_are_refused():
    pictures: Any = TabularMaskedModel(TokenGrid(1, 3), 2)
    frames: Any = model_of()
    with pytest.raises(ValueError, match="TabularMaskedModel"):
        FrameMaskedSampler()(pictures, None, law=TokenLaw())
    with pytest.raises(ValueError, match="use FrameMaskedSampler"):
        MaskedSampler()(frames, None, law=TokenLaw())
    with pytest.raises(ValueError, match="guidance_until"):
        draw(FrameMaskedSampler(), model_of(), law=TokenLaw(guidance_scale=2.0, guidance_until=3))
    with pytest.raises(ValueError, match=r"pass int64 \(2, 24\)"):
        draw(FrameMaskedSampler(), model_of(), known_tokens=torch.zeros(2, 8, dtype=torch.long))


class PlannedTable(TableFrameModel):
    """The same tables, for frames that are drawn as [0], [2], [1]: what a frame sees is what was written before."""

    groups = [[0], [2], [1]]

    @property
    def frame_groups(self) -> list[list[int]]:
        return self.groups


def test_frames_are_drawn_in_the_order_of_their_groups():
    """Of an order of single frames: the clip drawn frame after frame, its frames put in their places."""
    plain, planned = model_of(), PlannedTable(TokenGrid(2, 4, 3), MASK, conditions=2, spread=0.4)
    sampler = FrameMaskedSampler(3, 0.5)
    wanted, result = draw(sampler, plain), draw(sampler, planned)
    frames = [wanted.tokens[:, 8 * frame : 8 * frame + 8] for frame in (0, 2, 1)]
    assert torch.equal(result.tokens, torch.cat(frames, 1))
    calls = [wanted.trace.entry_call[:, 8 * frame : 8 * frame + 8] for frame in (0, 2, 1)]
    assert torch.equal(result.trace.entry_call, torch.cat(calls, 1))
    assert torch.equal(result.trace.commit_call, result.trace.entry_call[..., 0])
    given = torch.full((2, 24), MASK)
    given[:, 16:] = result.tokens[:, 16:]
    again = draw(sampler, planned, known_tokens=given)
    assert torch.equal(again.tokens[:, :8], result.tokens[:, :8])
    assert torch.equal(again.tokens[:, 16:], given[:, 16:]) and again.trace.frame_calls.tolist() == [4, 1, 3]


def test_a_group_of_frames_is_one_masked_decode():
    planned = PlannedTable(TokenGrid(2, 4, 3), MASK, conditions=2, spread=0.4)
    planned.groups = [[0], [1, 2]]
    result = draw(FrameMaskedSampler(4, 0.25, schedule=Schedule(schedule="linear")), planned)
    assert result.trace.target_calls.tolist() == [9, 9] and result.trace.frame_calls.tolist() == [5, 4]
    assert [(call == MASK).sum(1).tolist() for call in planned.calls[4:]] == [
        [16] * 2,
        [12] * 2,
        [8] * 2,
        [4] * 2,
    ]
    assert torch.equal(
        planned.writes[0][:2], result.tokens[:, :8].masked_fill(torch.arange(8) % 4 == 0, MASK)
    )
