"""A copy or a pickle of an accelerated object is plain, stands alone, and can be accelerated; the first one goes on."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import visual_spec
from tests.helpers.diffusers_video import SMALL
from tests.helpers.diffusers_video import tiny_pipeline as tiny_wan_pipeline
from tests.helpers.musicgen import IDS, MASK
from tests.helpers.nextstep import NextStep, conditions, filled
from tests.helpers.tiny import quiet, seeded, tiny_pipeline
from tests.helpers.tiny_audio import tiny_musicgen
from tests.helpers.tiny_depth import tiny_csm, tiny_minimax_music, tiny_moshi, tiny_talker
from tests.helpers.tiny_speech import tiny_pocket, tiny_vibevoice
from tests.helpers.transformers_models import GUIDED, INPUTS, SETTINGS
from tests.models.next_token import tiny_transformers as tiny
from tests.models.next_token.tiny_languages import CODES, END, language_model, texts
from tests.pipelines import test_depth_decoders as depth
from tests.pipelines import test_minimax_music as minimax
from tests.pipelines import test_transformers_speech as speech
from visual_spec.pipelines.accelerate import ADAPTERS


class Kind(NamedTuple):
    adapter: str
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
    "janus": Kind("images", tiny.janus, draw("janus")),
    "chameleon": Kind("images", tiny.chameleon, draw("chameleon")),
    "emu3": Kind("images", tiny.emu3, draw("emu3")),
    "glm": Kind("images", tiny.glm_image, draw("glm")),
    "musicgen": Kind(
        "music",
        tiny_musicgen,
        lambda model: model.generate_audio(
            input_ids=IDS, attention_mask=MASK, max_new_tokens=9, do_sample=False
        ),
    ),
    "codes": Kind(
        "codes",
        lambda: language_model("llama"),
        lambda model: model.generate(**texts([7, 4]), max_new_tokens=9),
        dict(codes=CODES, end=END),
    ),
    "csm": Kind("depth", tiny_csm, lambda model: depth.drawn(model, "csm", "sampled")),
    "moshi": Kind("depth", tiny_moshi, lambda model: depth.drawn(model, "moshi", "sampled")),
    "talker": Kind("depth", tiny_talker, lambda model: depth.drawn(model, "talker", "sampled")),
    "minimax": Kind("minimax_music", tiny_minimax_music, lambda pipe: minimax.hiddens(pipe, 0)),
    "nextstep": Kind("nextstep", next_step, token),
    "vibevoice": Kind("speech", tiny_vibevoice, lambda model: speech.speak(model).latents),
    "pocket": Kind("speech", tiny_pocket, lambda model: speech.frames(model, 2).audio_latents),
    "wan": Kind(
        "video",
        tiny_wan_pipeline,
        lambda pipe: pipe.generate_video(
            prompt_embeds=torch.ones(1, 3, 8), generator=seeded(0)[0], output_type="latent", **SMALL
        ),
    ),
    "ours": Kind(
        "",
        lambda: quiet(tiny_pipeline()),
        lambda pipe: pipe("a circle", generator=seeded(0), output_type="latent").tokens,
    ),
}


def test_every_adapter_is_here():
    assert {name for name, _ in ADAPTERS} == {kind.adapter for kind in KINDS.values()} - {""}


def modules_of(thing: Any) -> list[nn.Module]:
    parts = [thing, *getattr(thing, "components", {}).values()]
    return [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]


def names_of(thing: Any) -> list[set[str]]:
    """What each object holds of its own."""
    return [set(vars(thing)), *(set(vars(module)) for module in modules_of(thing))]


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result
    return [tensor for value in values for tensor in tensors(value)]


def unpickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled])
@pytest.mark.parametrize("name", KINDS)
def test_a_copy_is_plain_and_stands_alone(name, copied):
    kind = KINDS[name]
    thing = kind.make()
    with torch.no_grad():
        kind.run(visual_spec.accelerate(thing, **kind.options))
        before = names_of(visual_spec.restore(thing))  # with what the library keeps after a call
        try:
            copied(thing)
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"no plain one can be copied so: {error}")
        wanted = tensors(kind.run(visual_spec.accelerate(thing, **kind.options)))
        other = copied(thing)
        assert name == "ours" or names_of(other) == before  # the sampler of ours is one of its components
        assert all(map(torch.equal, tensors(kind.run(thing)), wanted))
        assert names_of(visual_spec.restore(thing)) == before
        for module in modules_of(thing):
            for parameter in module.parameters():
                parameter.zero_()
        assert all(map(torch.equal, tensors(kind.run(visual_spec.accelerate(other, **kind.options))), wanted))
    assert names_of(visual_spec.restore(visual_spec.restore(other))) == before


def test_a_shallow_copy_is_plain():
    model = tiny.janus()
    before = set(vars(model))
    visual_spec.accelerate(model)
    other = copy.copy(model)
    assert set(vars(other)) == before and visual_spec.restore(other) is other
    assert "generate_images" in vars(model)
