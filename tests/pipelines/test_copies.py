"""A copy or a pickle of an accelerated object is plain, stands alone, and can be accelerated; the first one goes on."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import visual_spec
from tests.helpers.copies import check_copy, unpickled
from tests.helpers.diffusers_video import SMALL
from tests.helpers.diffusers_video import tiny_pipeline as tiny_wan_pipeline
from tests.helpers.musicgen import IDS, MASK
from tests.helpers.nextstep import NextStep, conditions, filled
from tests.helpers.tiny import quiet, seeded, tiny_pipeline
from tests.helpers.tiny_audio import tiny_musicgen
from tests.helpers.transformers_models import GUIDED, INPUTS, SETTINGS
from tests.models.next_token import tiny_transformers as tiny
from tests.models.next_token.tiny_languages import CODES, END, language_model, texts


class Kind(NamedTuple):
    make: Callable[[], Any]
    run: Callable[[Any], Any]
    options: dict[str, Any] = {}


def draw(name: str) -> Callable[[Any], Tensor]:
    guided = dict(guidance_scale=GUIDED[name]) if GUIDED[name] else {}
    return lambda model: model.generate_images(
        **INPUTS[name], **SETTINGS, **guided, generator=seeded(1, 2, 3)
    )


def next_step() -> Any:
    model = NextStep()
    filled(model.image_head)
    return model


def token(model: Any) -> Tensor:
    torch.manual_seed(5)
    return model.image_head.sample(conditions(2), num_sampling_steps=4)


KINDS = {
    "janus": Kind(tiny.janus, draw("janus")),
    "emu3": Kind(tiny.emu3, draw("emu3")),
    "glm": Kind(tiny.glm_image, draw("glm")),
    "musicgen": Kind(
        tiny_musicgen,
        lambda model: model.generate_audio(
            input_ids=IDS, attention_mask=MASK, max_new_tokens=9, do_sample=False
        ),
    ),
    "codes": Kind(
        lambda: language_model("llama"),
        lambda model: model.generate(**texts([7, 4]), max_new_tokens=9),
        dict(codes=CODES, end=END),
    ),
    "nextstep": Kind(next_step, token),
    "wan": Kind(
        tiny_wan_pipeline,
        lambda pipe: pipe.generate_video(
            prompt_embeds=torch.ones(1, 3, 8), generator=seeded(0)[0], output_type="latent", **SMALL
        ),
    ),
    "ours": Kind(
        lambda: quiet(tiny_pipeline()),
        lambda pipe: pipe("a circle", generator=seeded(0), output_type="latent").tokens,
    ),
}


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled])
@pytest.mark.parametrize("name", KINDS)
def test_a_copy_is_plain_and_stands_alone(name, copied):
    kind = KINDS[name]
    check_copy(kind.make(), kind.run, copied, **kind.options)


def test_a_shallow_copy_is_plain():
    model = tiny.janus()
    before = set(vars(model))
    visual_spec.accelerate(model)
    other = copy.copy(model)
    assert set(vars(other)) == before and visual_spec.restore(other) is other
    assert "generate_images" in vars(model)
