"""The endpoint alone, in front of a painter that paints at once: what is taken, what is refused, and in what words."""

import asyncio
from typing import Any

import httpx
import pytest
from PIL import Image

from visual_spec.samplers.core.law import TokenLaw
from visual_spec.serving.http import make_app
from visual_spec.serving.painter import Drawn, png_of


class Quick:
    name, size = "shapes", (128, 128)

    def law(self, **settings: Any) -> TokenLaw:
        return TokenLaw(**{name: value for name, value in settings.items() if value is not None})

    def check(self, order: Any) -> None:
        pass

    async def draw(self, order: Any) -> Any:
        yield Drawn(png_of(Image.new("RGB", (2, 2))), facts={"calls": 1, "tokens": 256})

    def fault(self, step: float) -> str | None:
        return None

    def close(self) -> None:
        pass


def ask(
    body: Any = None, *, api_key: str | None = None, content: bytes | None = None, **headers: str
) -> httpx.Response:
    async def answer() -> httpx.Response:
        painter: Any = Quick()
        app = httpx.ASGITransport(app=make_app(painter, api_key=api_key), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=app, base_url="http://test") as client:
            sent: dict[str, Any] = {"json": body} if content is None else {"content": content}
            return await client.post("/v1/images/generations", headers=headers, **sent)

    return asyncio.run(answer())


@pytest.mark.every_set
@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 1), ("size", "auto"), ("response_format", "b64_json"), ("output_format", "png"), ("user", "u1"),
        ("quality", "auto"), ("background", "auto"), ("moderation", "auto"), ("output_compression", 100), ("n", None),
        ("stream", False), ("partial_images", 0),
    ],
)  # fmt: skip
def test_defaults_of_openai_are_taken(field, value):
    answer = ask({"prompt": "a red circle", field: value})
    assert answer.status_code == 200 and answer.json()["data"][0]["b64_json"]


@pytest.mark.every_set
@pytest.mark.parametrize(
    "field, value", [("quality", "hd"), ("background", "transparent"), ("output_compression", 50)]
)
def test_what_would_change_the_picture_is_refused_by_name(field, value):
    answer = ask({"prompt": "a red circle", field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert repr(str(value)) in answer.json()["error"]["message"]


HUGE = 10**400
NUMBERS = ("seed", "n", "partial_images", "temperature", "top_k", "top_p", "guidance_scale")


@pytest.mark.every_set
@pytest.mark.parametrize(
    "name, value", [(name, sign * HUGE) for name in NUMBERS for sign in (1, -1)] + [("top_k", 2**64)]
)
def test_numbers_beyond_all_limits_are_400(name, value):
    answer = ask({"prompt": "a", name: value})
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


def test_half_of_a_surrogate_pair_is_400():
    for body in (rb'{"prompt":"a","\\ud800":1}', rb'{"prompt":"a","model":"\\ud800"}'):
        answer = ask(content=body)
        assert answer.status_code == 400 and "ud800" in answer.json()["error"]["message"]


@pytest.mark.every_set
@pytest.mark.parametrize("name", [*NUMBERS, "prompt", "model", "stream", "quality", "other"])
def test_what_is_nested_deeply_is_400(name):
    """Also at the depths that the parser still takes, where a message shows the value."""
    for depth in (10, *range(900, 1000, 4), 10_000):
        value = "[" * depth + "]" * depth
        assert ask(content=f'{{"{name}":{value}}}'.encode()).status_code == 400


@pytest.mark.every_set
@pytest.mark.parametrize(
    ("content", "named"),
    [
        *[(f'{{"prompt":"a","{name}":{word}}}', f"{word} is no number")
          for name in NUMBERS for word in ("NaN", "Infinity", "-Infinity")],
        *[(f'{{"prompt":"a","{name}":{word}}}', name)
          for name in NUMBERS for word in ("true", "1e999", '"1"', "[1]", "{}")],
        ('{"prompt":"a","seed":1,"seed":2}', "seed is there twice"),
        ('{"prompt":"a","user":{"a":1,"a":2}}', "a is there twice"),
        ('{"prompt":"a","seed":' + "1" * 5000 + "}", "no JSON"),
        ('{"prompt":"a","seed":1.5}', "seed=1.5"),
        ("", "no JSON"), ("\xff", "no JSON"), ("null", "NoneType"),
    ],
)  # fmt: skip
def test_what_is_no_number_or_said_twice_is_400(content, named):
    answer = ask(content=content.encode("latin-1"))
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_has_no_case_and_is_needed(scheme):
    assert ask({"prompt": "a"}, api_key="key", authorization=f"{scheme} key").status_code == 200
    for wrong in ("key", "Basic key", f"{scheme} other", ""):
        refused = ask({"prompt": "a"}, api_key="key", authorization=wrong)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_no_key(key):
    painter: Any = Quick()
    with pytest.raises(ValueError, match="api_key.*empty"):
        make_app(painter, api_key=key)
