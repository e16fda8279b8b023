"""Pipelines without some components: they load, say what is missing, encode prompts, and draw from features."""

import ast
import inspect
import textwrap
from typing import Any

import pytest
import torch
from diffusers.utils.source_code_parsing_utils import ReturnNameVisitor

from tests.helpers.pipelines import ALL, Kind
from tests.helpers.refusals import refuses

TEXT = ("text_encoder", "tokenizer")
FEATURES: tuple[str, ...] = (
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
    want = made(kind, pipe)
    for name in parts_of(pipe):
        partial = type(pipe).from_pretrained(tmp_path, **{name: None})
        assert getattr(partial, name) is None
        assert parts_of(partial) == [part for part in parts_of(pipe) if part != name]
        if name in set(pipe._optional_components) - {*TEXT, "codec"}:
            continue
        refuses(ValueError, f"without (its {name}|a text encoder;)", made, kind, partial)
        setattr(partial, name, pipe.components[name])  # and it is whole again
        assert torch.equal(made(kind, partial), want)


def test_prompts_are_encoded_without_the_rest_and_drawn_without_the_encoder(kind, tmp_path):
    pipe = kind.make()
    pipe.save_pretrained(tmp_path)
    want = made(kind, pipe)
    text = {name for name in parts_of(pipe) if name in TEXT}
    reader = type(pipe).from_pretrained(
        tmp_path, **{name: None for name in parts_of(pipe) if name not in text}
    )
    drawer = type(pipe).from_pretrained(tmp_path, **dict.fromkeys(text))
    refuses(ValueError, r"pipe\.transformer", made, kind, reader)
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
    if "negative_prompt" in inspect.signature(type(pipe).__call__).parameters:
        plain = Kind(kind.make, kind.asked, kind.each, kind.settings | {"guidance_scale": 2.0})
        want = made(plain, pipe, prompt=kind.asked, negative_prompt="a blue square")
        together = reader.encode_prompt(kind.asked, negative_prompt="a blue square")
        assert torch.equal(made(plain, drawer, **dict(zip(FEATURES, together, strict=True))), want)
