"""A streamer under `accelerate` hears tokens while they are drawn: in order, each as soon as every row has it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import visual_spec
from tests.helpers.musicgen import FRAMES, Heard
from tests.helpers.tiny_audio import tiny_musicgen
from tests.models.next_token import tiny_transformers as tiny
from tests.models.next_token.tiny_languages import CODES, END, language_model, texts
from tests.models.next_token.tiny_transformers import prompts

JANUS = prompts([6, 6], low=6, high=48, pad=0, last=3, first=1) | dict(generation_mode="image")
CHAMELEON = prompts([6, 4], low=68, high=80, pad=1, last=70, first=0)
EMU3 = prompts([6, 6], low=50, high=62, pad=1, last=62, first=0)
MUSIC = dict(input_ids=torch.tensor([[3, 4, 5], [6, 7, 8]]))


GLM = prompts([6, 6], low=30, high=50, pad=50, last=26, first=31) | dict(
    image_grid_thw=torch.tensor([[1, 3, 5], [1, 2, 3]]).repeat(2, 1), images_per_sample=torch.tensor([2] * 2)
)


def rows_of(count: Tensor, width: int) -> Tensor:
    return count + count // width


# name: model, its call, and how many tokens after the prompt a number of slots settles
CASES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "janus": (tiny.janus, JANUS, lambda slots: slots),
    "chameleon": (
        tiny.chameleon,
        CHAMELEON,
        lambda slots: 1 + slots,
    ),  # the picture's opening stands in front
    "emu3": (tiny.emu3, EMU3 | dict(image_sizes=[[2, 3]] * 2), lambda slots: rows_of(slots, 3)),
    "musicgen": (tiny_musicgen, MUSIC | dict(max_new_tokens=FRAMES + 3), lambda slots: slots),
}


class Diary:
    """What the streamer had before each target call's tokens, and how many slots every row had after it."""

    def __init__(self, streamer: Heard) -> None:
        self.streamer = streamer
        self.heard: list[int] = []
        self.slots: list[int] = []

    def __call__(self, call: int, progress: Tensor) -> None:
        self.heard.append(len(self.streamer.parts) - 1)
        self.slots.append(int(progress.min()))


def draw(model: Any, sampler: str, call: dict[str, Any], **more: Any) -> tuple[Any, Heard, Diary]:
    streamer = Heard()
    diary = Diary(streamer)
    visual_spec.accelerate(model, sampler, **more)
    try:
        draws = model.generate if not type(model).__name__.startswith("Chameleon") else model.generate_images
        ids = draws(**call, streamer=streamer, callback=diary)
        return getattr(model, "last_codes", None) if hasattr(model, "last_codes") else ids, streamer, diary
    finally:
        visual_spec.restore(model)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_tokens_come_as_they_are_committed(name, greedy, drafts):
    build, call, settled = CASES[name]
    plain, fast = (
        ("columns", "column-jacobi:window=4")
        if name == "musicgen"
        else ("autoregressive", "speculative-jacobi")
    )
    torch.manual_seed(0)
    ids, streamer, diary = draw(build(), fast if drafts else plain, call | dict(do_sample=not greedy))
    assert streamer.ends == 1
    assert diary.heard[1:] == [int(settled(torch.tensor(slots))) for slots in diary.slots[:-1]]
    assert 0 < diary.heard[1] < diary.heard[-1]  # the first long before the last call
    steps = torch.stack(streamer.parts[1:], 1)
    if name == "musicgen":
        for row, books in enumerate(steps.view(2, 4, -1).tolist()):
            for book, heard in enumerate(books):
                assert heard == [16] * book + ids[row, book].tolist() + [16] * (3 - book)
        return
    assert streamer.parts[0].equal(call["input_ids"])
    start = 0 if name == "janus" else call["input_ids"].shape[1]
    assert steps.equal(ids[:, start:])


def test_grids_of_a_request_come_one_after_the_other():
    ids, streamer, diary = draw(tiny.glm_image(), "speculative-jacobi", GLM)
    assert torch.stack(streamer.parts[1:], 1).equal(ids[:, GLM["input_ids"].shape[1] :])
    first_of_second = diary.slots.index(1, 1)
    assert diary.heard == sorted(diary.heard)
    small = diary.slots[first_of_second - 1]  # slots of the first grid
    assert diary.heard[first_of_second : first_of_second + 2] == [small, small + 1]


def test_a_constrained_emu3_streams_what_it_returns():
    """Its function lays out a picture, and `max_new_tokens` cuts the closing tokens off."""
    model, call = tiny.emu3(), EMU3 | dict(do_sample=False, max_new_tokens=8)
    ends = model.config.vocabulary_map
    fixed = {3: ends["<|extra_200|>"], 7: ends["<|extra_200|>"], 8: ends["<|extra_201|>"]}

    def allowed(row: int, ids: Tensor) -> list[int]:
        place = len(ids) - 6
        return [fixed[place]] if place in fixed else [2] if place > 8 else list(range(20, 44))

    call = call | dict(prefix_allowed_tokens_fn=allowed)
    plain = Heard()
    model.generate(**call, streamer=plain)
    ids, streamer, diary = draw(model, "speculative-jacobi", call)
    assert all(one.equal(other) for one, other in zip(streamer.parts, plain.parts, strict=True))
    assert 0 < diary.heard[1] < diary.heard[-1] <= len(streamer.parts) - 1 == ids.shape[1] - 6


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative-jacobi"])
def test_texts_of_codes_that_end_early(sampler):
    """The tokens are those that `generate` of transformers streams."""
    model, plain = language_model("llama"), Heard()
    call = texts([7, 4, 9]) | dict(max_new_tokens=24)
    allowed = [*range(*CODES), END]
    model.generate(
        **call,
        do_sample=False,
        eos_token_id=END,
        prefix_allowed_tokens_fn=lambda *_: allowed,
        streamer=plain,
    )
    ids, streamer, diary = draw(model, sampler, call | dict(do_sample=False), codes=CODES, end=END)
    assert ids[:, 9:].shape[1] == len(streamer.parts) - 1 and streamer.ends == 1
    assert all(one.equal(other) for one, other in zip(streamer.parts, plain.parts, strict=True))
    assert diary.heard[1:] == [min(slots, ids.shape[1] - 9) for slots in diary.slots[:-1]]
    assert 0 < diary.heard[1] < diary.heard[-1]


@pytest.mark.parametrize("sampler", ["zipar", "speculative-jacobi"])
def test_a_token_waits_for_those_before_it(sampler):
    """ZipAR starts rows before the row above is whole: what is handed on is in the order of the picture."""
    ids, streamer, diary = draw(tiny.janus(), sampler, JANUS | dict(do_sample=False))
    assert torch.stack(streamer.parts[1:], 1).equal(ids)
    assert diary.heard == sorted(diary.heard) and 0 < diary.heard[1] < diary.heard[-1]
