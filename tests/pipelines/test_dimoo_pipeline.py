"""Lumina-DiMOO's official folder: loaded, converted, drawn with, and what it refuses before any computation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vq_model import VQModel

from tests.helpers import dimoo
from tests.helpers.command import generate
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from visual_spec.pipelines.convert import convert
from visual_spec.pipelines.dimoo_image import DimooImagePipeline
from visual_spec.pipelines.loading import load_pipeline, read_facts
from visual_spec.prototype.reuse.dimoo_shortcut import DimooShortcut
from visual_spec.prototype.reuse.masked import ML_CACHE, ReusingMaskedSampler
from visual_spec.prototype.reuse.recap import Reuse
from visual_spec.samplers.masked.presets import PRESETS

SIZE: Any = dict(height=8, width=12)  # two pixels a token
FOX = "a red fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dimoo.write_folder(tmp_path_factory.mktemp("official"))


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    made = quiet(DimooImagePipeline.from_official(folder))
    made.sampler = PRESETS["dimoo"].sampler(steps=8)
    return made


def test_the_official_folder_draws_what_the_model_draws(pipe, folder):
    """The tokens that the release draws (`tests/models/masked/test_dimoo.py`), and diffusers' picture of them."""
    found = pipe(FOX, generator=seeded(1), output_type="np", **SIZE)
    assert found.tokens[0].tolist() == dimoo.TOKENS and found.images.shape == (1, 8, 12, 3)
    own: Any = VQModel.from_pretrained(folder, subfolder="vqvae")
    with torch.no_grad():
        plain = own.decode(found.tokens.view(1, 4, 6), force_not_quantize=True, shape=(1, 4, 6, 8)).sample
    assert np.allclose(found.images, plain.clip(0, 1).permute(0, 2, 3, 1).numpy(), atol=1e-6)
    fresh = load_pipeline(folder)  # by the model_index.json of diffusers' pipeline
    assert type(fresh) is DimooImagePipeline and fresh.sampler.config.steps == 64
    assert fresh.default_settings()["guidance_scale"] == 5.0 and fresh.image_size == (128, 128)
    assert read_facts(folder).calls == ("masked",)


def test_the_language_model_alone_is_cast(pipe, folder):
    """As in the release, which decodes in the type of the file. Calls of its cache draw in 16 bits, too."""
    half = quiet(
        DimooImagePipeline.from_official(folder, dtype=torch.bfloat16, sampler=ML_CACHE.sampler(steps=6))
    )
    kinds = {name: half.components[name].dtype for name in ("transformer", "text_encoder", "vq_model")}
    assert [*kinds.values()] == [torch.bfloat16, torch.bfloat16, torch.float32]
    found = half([FOX, "blue"], generator=seeded(1, 2), output_logprobs=True, output_type="np", **SIZE)
    assert (found.tokens < dimoo.CODES).all() and found.trace.logprobs.isfinite().all()


def test_prompts_are_embedded_in_their_template(pipe, folder):
    told = pipe.make_condition([FOX, "blue"], negative_prompt="fox", num_images_per_prompt=2)
    weights = dimoo.official_weights()["model.transformer.wte.weight"]
    mark = dimoo.MARKS
    said = [dimoo.WORDS[word] for word in "Generate an image according to the text prompt .".split()]
    around = [mark["<system>"], *said, mark["</system>"], mark["<user>"]]
    for part, row, words in ((told, 1, FOX), (told, 2, "blue"), (told.negative, 3, "fox")):
        ids = [*around, *(dimoo.WORDS[word] for word in words.split()), mark["</user>"]]
        assert torch.equal(part.features[row][part.mask[row]], weights[ids])
    assert torch.equal(
        pipe.transformer.null_prompt, weights[[*around, mark["<uncondition>"], mark["</user>"]]]
    )
    embeds, mask = pipe.encode_prompt(FOX)[:2]
    alone = DimooImagePipeline(**{**pipe.components, "text_encoder": None})
    again = quiet(alone)(prompt_embeds=embeds, prompt_attention_mask=mask, generator=seeded(1), **SIZE)
    assert torch.equal(again.tokens, pipe(FOX, generator=seeded(1), **SIZE).tokens)
    plain, other = (
        pipe(FOX, negative_prompt=text, generator=seeded(1), **SIZE).tokens for text in (None, "blue")
    )
    assert not torch.equal(plain, other)


def test_converted_and_saved_folders_draw_the_same(pipe, folder, tmp_path):
    told = convert([folder], tmp_path / "ours")
    assert told["class"] == "DimooImagePipeline" and told["files"] == {str(folder): "Lumina-DiMOO"}
    again = quiet(load_pipeline(tmp_path / "ours"))
    assert type(again) is DimooImagePipeline and again.sampler.config.falls == "never"
    again.sampler = pipe.sampler
    wanted = pipe([FOX, "blue"], generator=seeded(1, 2), **SIZE)
    assert torch.equal(again([FOX, "blue"], generator=seeded(1, 2), **SIZE).tokens, wanted.tokens)
    refuses(ValueError, "image_size|alone", convert, [folder], tmp_path / "other", image_size=512)
    for source in (folder, tmp_path / "ours"):
        here = tmp_path / "pictures" / source.name
        assert generate(str(source), here, FOX, "--sampler", "masked:steps=2") == 0
        assert len([*here.glob("*.png")]) == 1


def test_it_draws_into_pictures_of_any_size(pipe):
    picture = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    mask = np.zeros((8, 12), dtype=np.uint8)
    mask[:4, :6] = 255  # the six tokens in the corner
    signed = torch.from_numpy(picture).permute(2, 0, 1)[None] / 127.5 - 1
    known = pipe.vq_model.encode_tokens(signed)[0].view(4, 6)
    found = pipe(FOX, image=picture, mask=mask, generator=seeded(0), **SIZE)
    drawn = torch.zeros(4, 6, dtype=torch.bool)
    drawn[:2, :3] = True
    assert torch.equal(found.trace.entry_call[0].view(4, 6) >= 0, drawn)
    assert torch.equal(found.tokens.view(4, 6)[~drawn], known[~drawn])
    with pytest.raises(ValueError, match="image of 8 x 12 pixels, but 8 x 8 are drawn"):
        pipe(FOX, image=picture, mask=mask, height=8, width=8)


def test_a_shortcut_is_a_part_of_the_pipeline(pipe, tmp_path):
    network = DimooShortcut(dimoo.DIM, 16, 2, dimoo.HIDDEN, 256, 64).eval()
    sampler = ReusingMaskedSampler(steps=4, reuse=Reuse(reuse=1, reuse_from=0.0, reuse_by="shortcut"))
    made = DimooImagePipeline(**{**pipe.components, "sampler": sampler, "shortcut": network})
    found = quiet(made)(FOX, generator=seeded(1), **SIZE)
    assert found.trace.reused_calls == 2
    made.save_pretrained(tmp_path / "short")
    again = quiet(load_pipeline(tmp_path / "short"))
    assert torch.equal(again(FOX, generator=seeded(1), **SIZE).tokens, found.tokens)


def test_what_it_cannot_draw_is_refused(pipe, folder, tmp_path):
    for settings, message in (
        (dict(prompt="<user>a fox"), r"'<user>a fox' holds <user>.*template.*alone"),
        (dict(prompt="  "), "has no words"),
        (dict(prompt=FOX, negative_prompt="<uncondition>"), "<uncondition>"),
        (dict(prompt=FOX, height=9), "height=9.*128 x 128.*multiples of 2"),
        (dict(prompt=FOX, height=136, width=136 * 2), "68 x 136 tokens.*4608"),
    ):
        refuses(ValueError, message, pipe, **settings)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="no Lumina-DiMOO.*Alpha-VLLM/Lumina-DiMOO"):
        DimooImagePipeline.from_official(tmp_path)
    plain = dimoo.tokenizer()
    reader = type(pipe.text_encoder)(100, dimoo.DIM)
    refuses(ValueError, r"'<system>' as \[126332\].*below 100", reader.with_tokenizer, plain)
