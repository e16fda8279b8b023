"""Emu3's documented `generate`, whose layout is a function of the caller: accelerated where it lays out a picture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.models.next_token import tiny_transformers as tiny
from visual_spec.pipelines.accelerate import accelerate, restore
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

HEIGHT, WIDTH, START = 3, 5, 62
PICTURE = HEIGHT * (WIDTH + 1) + 3
EOL, EOF, EOI, EOS, PAD = 9, 10, 11, 2, 1
MODEL = tiny.emu3()
INPUTS = tiny.prompts([6, 4, 7], low=50, high=62, pad=PAD, last=START, first=0)
IMAGES = MODEL.model.vocabulary_mapping.image_tokens


def documented(
    height: int = HEIGHT, width: int = WIDTH, images: Any = IMAGES
) -> Callable[[int, Tensor], Any]:
    """The function of transformers' documentation: it counts from the token that begins a picture."""
    forced = [torch.tensor([token]) for token in (EOF, EOI, EOS)]

    def allowed(_: int, ids: Tensor) -> Any:
        offset = len(ids) - int(torch.nonzero(ids == START, as_tuple=True)[0][0])
        last = (width + 1) * height
        if offset % (width + 1) == 0 and offset <= last:
            return (torch.tensor([EOL]),)
        if offset > last:
            return (forced[offset - last - 1],) if offset <= last + 3 else (torch.tensor([PAD]),)
        return images

    return allowed


def greedy(allowed: Any, **more: Any) -> dict[str, Any]:
    return dict(INPUTS, prefix_allowed_tokens_fn=allowed, do_sample=False) | {"max_new_tokens": 500} | more


@pytest.fixture(autouse=True)
def _accelerated():
    yield
    restore(MODEL)


@pytest.mark.fast_sets(6)
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "more",
    [
        {},
        dict(guidance_scale=3.0),
        dict(num_return_sequences=2, do_sample=True, top_k=1),
        dict(max_new_tokens=HEIGHT * (WIDTH + 1)),  # no closing tokens then
        dict(image_sizes=[[HEIGHT, WIDTH]] * 3),
    ],
    ids=["plain", "guided", "two each", "cut", "with sizes"],
)
@pytest.mark.parametrize(
    "images", [IMAGES, tuple(IMAGES), torch.tensor(IMAGES)], ids=["list", "tuple", "tensor"]
)
def test_greedy_pictures_are_those_of_generate(more, images):
    settings = greedy(documented(images=images), **more)
    # transformers' generate takes no sizes of pictures that it does not see.
    want = MODEL.generate(**{name: value for name, value in settings.items() if name != "image_sizes"})
    accelerate(MODEL, SpeculativeJacobiSampler(6))
    assert torch.equal(MODEL.generate(**settings), want)
    assert MODEL.last_trace.commit_call.shape[1] == HEIGHT * WIDTH
    assert (MODEL.last_trace.target_calls < HEIGHT * WIDTH).any()
    count = more.get("max_new_tokens", PICTURE)
    assert want.shape == (3 * more.get("num_return_sequences", 1), INPUTS["input_ids"].shape[1] + count)


def test_sampled_pictures_and_outputs_that_are_dicts():
    """A prompt given by position, and the result that generate_images gives with the sizes."""
    accelerate(MODEL, SpeculativeJacobiSampler(6))
    sampling: Any = dict(do_sample=True, top_k=9, generator=seeded(1, 2, 3))
    sizes: Any = [[HEIGHT, WIDTH]] * 3
    want = MODEL.generate_images(**INPUTS, **sampling, image_sizes=sizes)
    found = MODEL.generate(
        INPUTS["input_ids"],
        attention_mask=INPUTS["attention_mask"],
        prefix_allowed_tokens_fn=documented(),
        max_length=100,
        return_dict_in_generate=True,
        **sampling | dict(generator=seeded(1, 2, 3)),
    )
    assert torch.equal(found.sequences, want)


def rows_of_two_widths(row: int, ids: Tensor) -> Any:
    return documented(width=WIDTH if row else WIDTH + 1)(row, ids)


def only_some(row: int, ids: Tensor) -> Any:
    return documented(images=IMAGES[:7])(row, ids)


def depending_on_the_picture(row: int, ids: Tensor) -> Any:
    width = WIDTH if ids[-1] == START or (ids == IMAGES[0]).any() else WIDTH - 1
    return documented(width=width)(row, ids)


def no_rows(row: int, ids: Tensor) -> Any:
    place = len(ids) - INPUTS["input_ids"].shape[1]
    return IMAGES if place < 8 else [EOS]


@pytest.mark.parametrize(
    ("allowed", "reason"),
    [
        (rows_of_two_widths, "it allows other layouts for row 1"),
        (only_some, "for row 0 it allows 7 tokens after 7, neither one nor all image tokens"),
        (depending_on_the_picture, "it allows other layouts for row 0"),
        (no_rows, "its 9 steps are not rows that end with 9"),
    ],
)
def test_functions_that_lay_out_no_picture_are_asked_step_by_step(allowed, reason):
    settings = greedy(allowed, max_new_tokens=12)
    want = MODEL.generate(**settings)
    accelerate(MODEL, SpeculativeJacobiSampler(6))
    with pytest.warns(UserWarning, match=f"is not accelerated: {reason}.*leave image_sizes in"):
        assert torch.equal(MODEL.generate(**settings), want)
    assert MODEL.last_trace is None


def test_a_function_that_changes_its_mind_about_the_drawn_picture_is_refused():
    accelerate(MODEL, SpeculativeJacobiSampler(6))
    drawn = MODEL.generate(**greedy(documented()))
    first = drawn[0, : INPUTS["input_ids"].shape[1] + 4].tolist()

    def allowed(row: int, ids: Tensor) -> Any:
        return [EOL] if ids.tolist() == first else documented()(row, ids)

    refuses(ValueError, "step 4.*0", MODEL.generate, **greedy(allowed))


def test_text_is_written_as_before():
    want = MODEL.generate(**INPUTS, max_new_tokens=4, do_sample=False)
    accelerate(MODEL, SpeculativeJacobiSampler(6))
    assert torch.equal(MODEL.generate(**INPUTS, max_new_tokens=4, do_sample=False), want)
    sizes: Any = [[HEIGHT, WIDTH]] * 3
    drawn = MODEL.generate(**INPUTS, image_sizes=sizes, do_sample=False)
    assert torch.equal(drawn, MODEL.generate(**greedy(documented())))
