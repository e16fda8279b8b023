"""Pipelines without some components: they load, say what is missing, encode prompts, and draw from features."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch
from diffusers.utils.source_code_parsing_utils import ReturnNameVisitor

from scripts.train.causal_video import new_model
from tests.helpers.distilled_pipelines import (
    class_student_pipeline,
    scale_student_pipeline,
    text_student_pipeline,
)
from tests.tiny_latents import tiny_latent_pipeline
from tests.tiny_pipelines import KINDS, Kind, _quiet
from visual_spec.pipelines.chunk_video import ChunkVideoPipeline


def _chunks() -> Any:
    transformer, encoder = new_model(24, 1, 2)
    return ChunkVideoPipeline(transformer.eval(), encoder.eval())


SMALL = {"num_frames": 2, "steps": 1}
ALL = KINDS | {
    "students": Kind(_quiet(class_student_pipeline), 3, "num_images_per_label"),
    "students of scales": Kind(_quiet(scale_student_pipeline), 3, "num_images_per_label"),
    "students of captions": Kind(_quiet(text_student_pipeline), "a red circle"),
    "latents": Kind(_quiet(tiny_latent_pipeline), 3, "num_images_per_label"),
    "chunks": Kind(_quiet(_chunks), "a small red star moves right", "num_videos_per_prompt", SMALL),
}
TEXT = ("text_encoder", "tokenizer")
FEATURES = (
    "prompt_embeds",
    "prompt_attention_mask",
    "negative_prompt_embeds",
    "negative_prompt_attention_mask",
)


@pytest.fixture(params=ALL)
def kind(request) -> Kind:
    return ALL[request.param]


def parts_of(pipe: Any) -> list[str]:
    return [name for name, part in pipe.components.items() if part is not None]


def made(kind: Kind, pipe: Any, **asked: Any) -> torch.Tensor:
    given = asked or {"labels" if isinstance(kind.asked, int) else "prompt": kind.asked}
    generator = torch.Generator().manual_seed(1)
    result = pipe(
        **given, generator=generator, **{"output_type": "latent", **kind.settings, "return_dict": False}
    )
    return result[0]


def test_every_component_may_be_left_out(kind, tmp_path):
    pipe = kind.make()
    pipe.save_pretrained(tmp_path)
    for name in parts_of(pipe):
        partial = type(pipe).from_pretrained(tmp_path, **{name: None})
        assert getattr(partial, name) is None
        assert parts_of(partial) == [part for part in parts_of(pipe) if part != name]
        if name in set(pipe._optional_components) - {*TEXT, "codec"}:
            continue
        with pytest.raises(ValueError, match=f"without (its {name}|a text encoder;)"):
            made(kind, partial)
        setattr(partial, name, pipe.components[name])  # and it is whole again
        assert torch.equal(made(kind, partial), made(kind, pipe))


def test_prompts_are_encoded_without_the_rest_and_drawn_without_the_encoder(kind, tmp_path):
    pipe = kind.make()
    pipe.save_pretrained(tmp_path)
    want = made(kind, pipe)
    text = {name for name in parts_of(pipe) if name in TEXT}
    reader = type(pipe).from_pretrained(
        tmp_path, **{name: None for name in parts_of(pipe) if name not in text}
    )
    drawer = type(pipe).from_pretrained(tmp_path, **dict.fromkeys(text))
    if isinstance(kind.asked, int):
        assert torch.equal(made(kind, drawer, labels=reader.make_condition(kind.asked)), want)
        return
    named = ReturnNameVisitor()  # so diffusers' own tests know what is returned
    named.visit(ast.parse(textwrap.dedent(inspect.getsource(type(pipe).encode_prompt))))
    assert tuple(named.return_names) == FEATURES
    taken = [name for name in FEATURES if name in inspect.signature(type(pipe).__call__).parameters]
    encoded = dict(zip(FEATURES, reader.encode_prompt(kind.asked), strict=True))
    assert encoded["negative_prompt_embeds"] is None and encoded["negative_prompt_attention_mask"] is None
    assert torch.equal(made(kind, drawer, **{name: encoded[name] for name in taken}), want)
    if kind not in (ALL["students of captions"], ALL["chunks"]):  # their law is in their weights
        plain = Kind(kind.make, kind.asked, kind.each, kind.settings | {"guidance_scale": 2.0})
        want = made(plain, pipe, prompt=kind.asked, negative_prompt="a blue square")
        together = reader.encode_prompt(kind.asked, negative_prompt="a blue square")
        assert torch.equal(made(plain, drawer, **dict(zip(FEATURES, together, strict=True))), want)
