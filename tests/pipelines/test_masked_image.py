"""Pipelines of masked image models: whole pictures, pictures drawn into, and official files."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.official import TINY_VQ
from tests.helpers.refusals import refuses
from tests.helpers.tiny import (
    quiet,
    seeded,
    tiny_masked_pipeline,
    tiny_masked_transformer,
    tiny_pipeline,
    tiny_transformer,
    tiny_vq_model,
)
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.pipelines.masked_class_image import MaskedClassImagePipeline
from visual_spec.pipelines.masked_image import MaskedImagePipeline
from visual_spec.samplers.core.noise import CHOICE, CounterNoise, draw_keys
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice
from visual_spec.samplers.masked.speculative import SpeculativeMaskedSampler
from visual_spec.samplers.orders.any_order import AnyOrderSampler
from visual_spec.samplers.orders.any_order_speculative import SpeculativeAnyOrderSampler

PROMPT = "a red circle"


def picture(seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def tokens_of(pipe: Any, image: Image.Image) -> torch.Tensor:
    signed = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        return pipe.vq_model.encode_tokens(signed)[0]


def mask_of(*boxes: tuple[int, int, int, int]) -> Image.Image:
    white = np.zeros((8, 8), dtype=np.uint8)
    for top, left, bottom, right in boxes:
        white[top:bottom, left:right] = 255
    return Image.fromarray(white)


def test_a_picture_is_what_its_sampler_decodes():
    pipe = tiny_masked_pipeline()
    found = pipe(PROMPT, generator=seeded(3), num_images_per_prompt=1, guidance_scale=2.0)
    direct = pipe.sampler(
        pipe.transformer,
        pipe.make_condition(PROMPT),
        law=pipe.make_law(guidance_scale=2.0),
        generator=seeded(3),
        batch_size=1,
    )
    assert torch.equal(found.tokens, direct.tokens) and found.trace.target_calls.tolist() == [3]
    assert pipe.facts.plain_sampler == "speculative-masked:num_drafts=0"


def test_inpainting_keeps_what_the_mask_does_not_touch_bit_for_bit():
    pipe, image = tiny_masked_pipeline(), picture()
    # A token is 2 x 2 pixels. Of one of them the mask touches a single pixel.
    mask = mask_of((0, 0, 4, 4), (7, 7, 8, 8))
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[:2, :2], hidden[3, 3] = True, True
    known = tokens_of(pipe, image)
    found = pipe(PROMPT, image=image, mask=mask, generator=seeded(0, 1, 2), num_images_per_prompt=3)
    for row in found.tokens:
        assert torch.equal(row[~hidden.flatten()], known[~hidden.flatten()])
    assert (found.tokens[:, hidden.flatten()] != known[hidden.flatten()]).any()
    assert (found.trace.entry_call[:, hidden.flatten()] >= 0).all()
    assert (found.trace.entry_call[:, ~hidden.flatten()] == -1).all()


@pytest.mark.parametrize("form", ["array", "ones", "floats", "tensor", "lists"])
def test_pictures_and_masks_come_in_any_form(form):
    pipe, image, mask = tiny_masked_pipeline(), picture(), mask_of((0, 0, 8, 4))
    wanted = pipe([PROMPT, "a blue square"], image=image, mask=mask, generator=seeded(0, 1)).tokens
    pixels, white = np.array(image), np.array(mask)
    given: tuple[Any, Any] = {
        "array": (pixels, white > 0),
        "ones": (pixels, (white > 0).astype(np.uint8)),
        "floats": (pixels / 255, white / 255),
        "tensor": (torch.from_numpy(pixels).permute(2, 0, 1), torch.from_numpy(white)),
        "lists": ([image, image], [mask, white]),
    }[form]
    found = pipe([PROMPT, "a blue square"], image=given[0], mask=given[1], generator=seeded(0, 1))
    assert torch.equal(found.tokens, wanted)


def test_a_variation_draws_a_share_of_the_tokens_anew():
    pipe, image = tiny_masked_pipeline(), picture()
    for strength, count in ((0.01, 1), (0.5, 8), (1.0, 16)):
        found = pipe(PROMPT, image=image, strength=strength, generator=seeded(0, 1), num_images_per_prompt=2)
        assert (found.trace.entry_call >= 0).sum((1, 2)).tolist() == [count] * 2
    part = pipe(PROMPT, image=image, mask=mask_of((0, 0, 8, 4)), strength=0.5, generator=seeded(0))
    drawn = (part.trace.entry_call[0, :, 0] >= 0).view(4, 4)
    assert drawn.sum() == 4 and not drawn[:, 2:].any()
    rows = [
        pipe(PROMPT, image=image, strength=0.5, generator=seeded(seed)).trace.entry_call[0, :, 0] >= 0
        for seed in (0, 1, 0)
    ]
    assert torch.equal(rows[0], rows[2]) and not torch.equal(rows[0], rows[1])


@pytest.mark.every_set
@pytest.mark.parametrize("strength", [None, 0.3])
@pytest.mark.parametrize("pictures", [1, 2])
@pytest.mark.parametrize("masks", [0, 1, 2])
def test_the_pictures_of_a_prompt_follow_each_other(masks, pictures, strength):
    """Two prompts, two pictures each: which tokens are open, one sample after the other, by hand."""
    if not masks and strength is None:
        return
    pipe = tiny_masked_pipeline()
    images = [picture(seed) for seed in range(pictures)]
    half = np.where(np.array(mask_of((0, 0, 4, 6), (7, 7, 8, 8))) > 0, 1.0, 0.5)  # which is not white
    white = [half, mask_of((4, 2, 8, 8))][:masks]
    inside = [{0, 1, 2, 4, 5, 6, 15}, {9, 10, 11, 13, 14, 15}][:masks] or [set(range(16))]
    found: Any = pipe.known_tokens(images, white or None, strength, seeded(5, 6, 7, 8), count=2, each=2)
    assert found.shape == (4, 16)
    chance = CounterNoise(draw_keys(seeded(5, 6, 7, 8), 4), "cpu").uniform(
        torch.arange(16).expand(4, -1), CHOICE
    )
    for row in range(4):
        first = row // 2
        order = sorted(inside[first % len(inside)], key=lambda slot, row=row: float(chance[row, slot]))
        opened = order[: len(order) if strength is None else math.ceil(strength * len(order))]
        want = tokens_of(pipe, images[first % pictures])
        want[opened] = pipe.transformer.mask_id
        assert torch.equal(found[row], want)


@pytest.mark.parametrize("sampler", [AnyOrderSampler("halton"), SpeculativeAnyOrderSampler(3, "random")])
def test_any_order_models_draw_into_a_picture(sampler):
    pipe, image = tiny_pipeline(sampler), picture()
    pipe.transformer = tiny_transformer(order="any")
    known = tokens_of(pipe, image)
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[1:3, :2] = True
    found: Any = pipe(
        PROMPT, image=image, mask=mask_of((2, 0, 6, 4)), generator=seeded(0, 1), num_images_per_prompt=2
    )
    assert all(torch.equal(row[~hidden.flatten()], known[~hidden.flatten()]) for row in found.tokens)
    tokens = known.masked_fill(hidden.flatten(), -1).expand(2, -1)
    direct = sampler(
        pipe.transformer,
        pipe.make_condition([PROMPT] * 2),
        law=pipe.make_law(),
        generator=seeded(0, 1),
        batch_size=2,
        known_tokens=tokens,
    )
    assert torch.equal(found.tokens, direct.tokens) and found.trace.known.tolist() == [12, 12]


def test_pictures_that_cannot_be_drawn_into_are_refused_before_any_compute(monkeypatch):
    pipe, image, mask = tiny_masked_pipeline(), picture(), mask_of((0, 0, 4, 4))
    monkeypatch.setattr(pipe.vq_model, "encode_tokens", None)
    small = image.resize((4, 4))
    refused: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        (dict(mask=mask), ValueError, "mask.*without image"),
        (dict(strength=0.5), ValueError, "strength.*without image"),
        (dict(image=image), ValueError, "image.*without mask"),
        (dict(image=image, strength=0.0), ValueError, r"strength=0\.0"),
        (dict(image=image, strength="1"), ValueError, "strength='1'"),
        (dict(image=image, mask=mask, callback_on_step_end=3), TypeError, "callback_on_step_end=3"),
        (dict(image=small, mask=mask), ValueError, "4 x 4.*8 x 8"),
        (dict(image=image, mask=mask.resize((4, 4))), ValueError, "mask.*4 x 4"),
        (dict(image=[image] * 3, mask=mask), ValueError, "3 pictures.*1"),
        (dict(image="circle.png", mask=mask), TypeError, "image.*PIL"),
        (dict(image=np.zeros((8, 8)), mask=mask), ValueError, r"image.*\(8, 8\)"),
        (dict(image=2.0 * np.array(image), mask=mask), ValueError, "image.*uint8"),
        (dict(image=image, mask=np.array(mask).astype(float)), ValueError, "mask has values.*0.*255"),
        (dict(image=image, mask=mask_of()), ValueError, "white nowhere"),
    )
    for settings, kind, message in refused:
        refuses(kind, message, pipe, PROMPT, **settings)
    monkeypatch.undo()
    pipe.sampler = SpeculativeMaskedSampler(2)
    refuses(ValueError, "SpeculativeMaskedSampler", pipe, PROMPT, image=image, mask=mask)


def test_official_files_of_classes(tmp_path, monkeypatch):
    from visual_spec.models.next_token import llamagen_vq

    monkeypatch.setitem(llamagen_vq.PRESETS, "tiny", TINY_VQ)
    transformer = tiny_masked_transformer(
        vocab_size=16384, num_classes=5, caption_dim=None, prefix_length=0, registers=2
    )
    torch.manual_seed(0)
    vq_model = VQModel(**TINY_VQ, image_size=8)
    weights = dict(transformer.state_dict())
    weights["head.weight"] = weights["tok_emb.weight"].clone()
    torch.save({"model_state_dict": weights, "iter": 1}, tmp_path / "ImageNet_256_tiny.pth")
    torch.save({"model": vq_model.state_dict()}, tmp_path / "vq.pt")
    files = tmp_path / "ImageNet_256_tiny.pth", tmp_path / "vq.pt"
    pipe = quiet(MaskedClassImagePipeline.from_official(*files, num_heads=2))
    assert pipe.image_size == (8, 8) and pipe.default_settings()["guidance_scale"] == 1.7
    assert (pipe.sampler.config.score, pipe.sampler.config.steps) == ("halton", 32)
    pipe.sampler = MaskedSampler(steps=3, choice=Choice(score="halton"))
    made = quiet(MaskedClassImagePipeline(transformer, vq_model.eval(), pipe.sampler))
    settings: dict[str, Any] = dict(generator=seeded(0, 1), guidance_scale=1.7, output_type="pt")
    found = pipe([1, 4], **settings)
    assert torch.equal(found.images, made([1, 4], **{**settings, "generator": seeded(0, 1)}).images)
    inside = pipe(2, image=picture(), mask=mask_of((0, 0, 8, 4)), generator=seeded(0))
    assert torch.equal(inside.tokens.view(4, 4)[:, 2:], tokens_of(pipe, picture()).view(4, 4)[:, 2:])
    with pytest.raises(ValueError, match="image_size=384.*8"):
        MaskedClassImagePipeline.from_official(*files, num_heads=2, image_size=384)
    with pytest.raises(ValueError, match="MaskedImagePipeline"):
        MaskedClassImagePipeline(tiny_masked_transformer(), tiny_vq_model(), MaskedSampler())
    refuses(ValueError, r"MaskedClassImagePipeline\.from_official", MaskedImagePipeline.from_official, *files)


@pytest.mark.parametrize(
    ("side", "dim", "scale"), [(16, 384, 2.5), (16, 768, 1.7), (24, 512, 2.0), (24, 1024, 1.5)]
)
def test_official_files_are_guided_as_their_size_was_published(side, dim, scale, monkeypatch):
    """The table of the release: w by model, and this scale is 1 + w."""
    from types import SimpleNamespace

    from visual_spec.models.masked import maskgit_checkpoint
    from visual_spec.models.next_token import llamagen_checkpoint
    from visual_spec.pipelines import masked_class_image

    made = []
    grid: Any = SimpleNamespace(width=side)
    model = SimpleNamespace(grid=grid, config={"dim": dim})
    tokenizer = SimpleNamespace(patch_size=16, register_to_config=lambda **settings: None)
    monkeypatch.setattr(maskgit_checkpoint, "load_maskgit_checkpoint", lambda *args, **kwargs: model)
    monkeypatch.setattr(llamagen_checkpoint, "load_tokenizer", lambda *args, **kwargs: tokenizer)

    class Noted(masked_class_image.MaskedClassImagePipeline):
        def __init__(self, *parts: Any, default_guidance_scale: float) -> None:
            made.append(default_guidance_scale)

    Noted.from_official("transformer.pth", "vq.pt")
    assert made == [scale]
