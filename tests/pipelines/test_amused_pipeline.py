"""aMUSEd's folders as diffusers writes them: loaded, drawn with, and equal ids for equal noise."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vq_model import VQModel
from diffusers.models.unets.uvit_2d import UVit2DModel
from diffusers.schedulers.scheduling_amused import AmusedScheduler
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from tests.helpers.amused import CODES, MASK, SIDE, STEPS, VQ_SIZES, diffusers_ids, transformer
from tests.helpers.odd_addresses import misplaced, put_at_odd_addresses
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from visual_spec.models.core.settings import of_settings
from visual_spec.models.masked.amused import AmusedTransformer, AmusedVQModel
from visual_spec.pipelines.amused_image import AmusedImagePipeline
from visual_spec.pipelines.loading import load_pipeline, read_facts
from visual_spec.samplers.core.noise import draw_keys
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice
from visual_spec.samplers.masked.presets import PRESETS

PROMPTS = ["a red circle", "a blue square"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random parts of diffusers' own tests, in a folder as its pipeline writes it."""
    home: Path = tmp_path_factory.mktemp("amused")
    torch.manual_seed(0)
    model = transformer()
    plain: Any = UVit2DModel.from_config(model.config)  # pyright: ignore
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(home / "transformer")
    VQModel(**VQ_SIZES, force_upcast=True).save_pretrained(home / "vqvae")
    words = [
        "<|startoftext|>",
        "<|endoftext|>",
        *{word + "</w>" for text in PROMPTS for word in text.split()},
    ]
    letters = sorted({letter for text in PROMPTS for letter in text.replace(" ", "")})
    vocabulary = {token: i for i, token in enumerate([*words, *letters, *(f"{one}</w>" for one in letters)])}
    (home / "vocab.json").write_text(json.dumps(vocabulary))
    (home / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(home / "vocab.json"), str(home / "merges.txt"), model_max_length=7)
    tokenizer.save_pretrained(home / "tokenizer")
    config = CLIPTextConfig(
        bos_token_id=0, eos_token_id=1, hidden_size=8, intermediate_size=8, num_attention_heads=2,
        num_hidden_layers=2, pad_token_id=1, vocab_size=len(vocabulary), projection_dim=8,
        max_position_embeddings=7,
    )  # fmt: skip
    CLIPTextModelWithProjection(config).save_pretrained(home / "text_encoder")
    AmusedScheduler(mask_token_id=MASK).save_pretrained(home / "scheduler")
    index = {
        "_class_name": "AmusedPipeline",
        "_diffusers_version": "0.25.0.dev0",
        "scheduler": ["diffusers", "AmusedScheduler"],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "transformer": ["diffusers", "UVit2DModel"],
        "vqvae": ["diffusers", "VQModel"],
    }
    (home / "model_index.json").write_text(json.dumps(index))
    return home


def load(folder: Path, **options: Any) -> Any:
    return quiet(load_pipeline(folder, **options))


def test_two_loads_of_a_folder_of_diffusers_compute_the_same(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert put_at_odd_addresses(tmp_path) == 3
    loads = [load(tmp_path) for _ in range(2)]
    assert misplaced(*(part for pipe in loads for part in pipe.components.values())) == []
    one, other = (pipe(PROMPTS, generator=seeded(1, 2), output_type="pt") for pipe in loads)
    assert torch.equal(one.images, other.images)


def test_the_folder_of_diffusers_draws_its_ids_for_equal_noise(folder, monkeypatch):
    pipe = load(folder)
    assert type(pipe) is AmusedImagePipeline and isinstance(pipe.transformer, AmusedTransformer)
    assert isinstance(pipe.vq_model, AmusedVQModel) and read_facts(folder).calls == ("masked",)
    assert pipe.sampler.config.steps == 12 and pipe.default_settings()["guidance_scale"] == 10.0
    settings = PRESETS["amused"].settings | {"steps": STEPS, "choice_temperature": 2.0 * STEPS / (STEPS - 1)}
    pipe.sampler = of_settings(MaskedSampler, **settings)
    found = pipe(PROMPTS, generator=seeded(1, 2))
    hidden = torch.full((2, SIDE * SIDE), MASK)
    wanted = diffusers_ids(
        monkeypatch, pipe.transformer, pipe.make_condition(PROMPTS), draw_keys(seeded(1, 2), 2), hidden, 2
    )  # two pixels a token
    assert torch.equal(found.tokens, wanted) and len(wanted.unique()) > 5
    # Its pictures: diffusers' decoder, clipped, of the same ids.
    shape = (2, SIDE, SIDE, 8)
    with torch.no_grad():
        plain: Any = VQModel.decode(
            pipe.vq_model, found.tokens.view(2, SIDE, SIDE), force_not_quantize=True, shape=shape
        )
    pixels = pipe(PROMPTS, generator=seeded(1, 2), output_type="np").images
    assert np.allclose(pixels, plain.sample.clip(0, 1).permute(0, 2, 3, 1).numpy(), atol=1e-6)


def test_prompts_are_those_of_clip(folder):
    pipe = load(folder)
    told = pipe.make_condition(PROMPTS, negative_prompt="a blue", num_images_per_prompt=2)
    assert told.pooled.shape == (4, 8) and told.states.shape == (4, 7, 8)
    ids = pipe.tokenizer(PROMPTS[1], padding="max_length", max_length=7, truncation=True, return_tensors="pt")
    with torch.no_grad():
        own = pipe.text_encoder(ids.input_ids, output_hidden_states=True)
    assert torch.allclose(told.pooled[2:], own.text_embeds.expand(2, -1), atol=1e-6)
    assert torch.allclose(told.states[3], own.hidden_states[-2][0], atol=1e-6)
    drawn = pipe(PROMPTS, negative_prompt="a blue", generator=seeded(1, 2)).tokens
    names = inspect.signature(pipe.make_condition).parameters
    taken = [name for name in names if name.endswith(("embeds", "states"))]
    features = pipe.encode_prompt(PROMPTS, negative_prompt="a blue")
    alone = AmusedImagePipeline(**{**pipe.components, "text_encoder": None, "tokenizer": None})
    again = alone(**dict(zip(taken, features, strict=True)), generator=seeded(1, 2))
    assert torch.equal(again.tokens, drawn)
    refuses(ValueError, "text_encoder", alone, PROMPTS)
    refuses(ValueError, "beside prompt_embeds", pipe, PROMPTS, prompt_embeds=features[0])
    other = pipe.make_condition(PROMPTS[0])
    assert not torch.allclose(told.null_pooled, other.null_pooled)
    pipe.tokenizer.model_max_length = int(1e30)  # as it is saved where nobody said it
    assert pipe.make_condition(PROMPTS[0]).states.equal(other.states)


def test_it_draws_into_pictures_and_is_saved_as_ours(folder, tmp_path):
    pipe = load(folder)
    pipe.sampler = MaskedSampler(steps=3, choice=Choice(choice_temperature=2.0))
    picture = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    mask = np.zeros((16, 16), dtype=np.uint8)
    mask[:, :8] = 255
    found = pipe(PROMPTS, image=picture, mask=mask, generator=seeded(0, 1))
    signed = torch.from_numpy(picture).permute(2, 0, 1)[None] / 127.5 - 1
    known = pipe.vq_model.encode_tokens(signed)[0].view(SIDE, SIDE)
    for row in found.tokens.view(2, SIDE, SIDE):
        assert torch.equal(row[:, 4:], known[:, 4:])
    pipe.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert type(again) is AmusedImagePipeline and again.sampler.config.steps == 3
    assert torch.equal(again(PROMPTS, image=picture, mask=mask, generator=seeded(0, 1)).tokens, found.tokens)


def test_half_precision_decodes_pictures_in_single(folder):
    """As the released tokenizers ask for by `force_upcast`; afterwards they are in half precision again."""
    pipe = load(folder)
    wanted = pipe.vq_model.decode_tokens(torch.arange(64)[None] % CODES)
    half = load(folder, dtype=torch.float16)
    assert half.vq_model.dtype == torch.float16
    found = half.vq_model.decode_tokens(torch.arange(64)[None] % CODES)
    assert half.vq_model.dtype == torch.float16 and found.dtype == torch.float32
    assert (found - wanted).abs().max() < 0.05


def test_what_it_cannot_draw_is_refused(folder):
    pipe = load(folder)
    for settings, kind, message in (
        (dict(prompt=[]), TypeError, r"prompt=\[\].*text"),
        (dict(prompt="a", negative_prompt=["b"]), TypeError, r"negative_prompt=\['b'\]"),
        (dict(prompt="a", height=8), ValueError, "height=8.*16 x 16"),
        (dict(prompt="a", mask=np.zeros((16, 16))), ValueError, "mask.*without image"),
        (dict(prompt="a", generator=seeded(0, 1)), ValueError, "2 generators"),
    ):
        refuses(kind, message, pipe, **settings)


def test_log_probabilities_change_nothing(folder):
    pipe = load(folder)
    plain, found = (
        pipe(PROMPTS, output_type="latent", generator=seeded(1, 2), **more)
        for more in ({}, {"output_logprobs": True})
    )
    assert torch.equal(found.tokens, plain.tokens) and plain.trace.logprobs is None
    assert found.trace.logprobs.shape == found.trace.model_logprobs.shape == found.tokens.shape
    assert found.trace.logprobs.isfinite().all() and (found.trace.model_logprobs < 0).any()
