"""The endpoint alone, in front of a painter that paints at once: what is taken, what is refused, and in what words."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.helpers.refusals import refuses
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.serving.asked import Limits
from visual_spec.serving.http import make_app
from visual_spec.serving.painter import Drawn, png_of
from visual_spec.serving.server import listen


class Quick:
    name, size = "shapes", (128, 128)

    def law(self, **settings: Any) -> TokenLaw:
        return TokenLaw(**{name: value for name, value in settings.items() if value is not None})

    def check(self, order: Any) -> None:
        pass

    async def draw(self, order: Any) -> AsyncGenerator[Drawn, None]:
        yield Drawn(png_of(Image.new("RGB", (2, 2))), facts={"calls": 1, "tokens": 256})

    def close(self) -> None:
        pass


QUICK = Quick()  # it never breaks, so it has no `fault`


def ask(
    body: Any = None,
    *,
    api_key: str | None = None,
    content: bytes | None = None,
    painter: Any = QUICK,
    route: str = "POST /v1/images/generations",
    **headers: str,
) -> httpx.Response:
    async def answer() -> httpx.Response:
        app = httpx.ASGITransport(app=make_app(painter, api_key=api_key), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=app, base_url="http://test") as client:
            sent: dict[str, Any] = {"json": body} if content is None else {"content": content}
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(*route.split(), headers=named, **sent)

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
    refuses(ValueError, "api_key.*empty", make_app, painter, api_key=key)


# ------------------------------------------------------------------------------------------------------------ routes


class Broken(Quick):
    def fault(self, step: float) -> str | None:
        return "its thread has ended"


class Raising(Quick):
    async def draw(self, order: Any) -> AsyncGenerator[Drawn, None]:
        raise RuntimeError("no memory")
        yield Drawn(b"")


class Forever(Quick):
    async def draw(self, order: Any) -> AsyncGenerator[Drawn, None]:
        await asyncio.sleep(3600)
        yield Drawn(b"")


ROUTES = ("/health", "/live", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/shapes")


@pytest.mark.every_set
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_routes_answer(method, path):
    answer = ask(route=f"{method} {path}")
    assert answer.status_code == 200 and len(answer.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("painter", "statuses"),
    [
        (Quick(), [200, 200, 200, 200]),
        (None, [200, 200, 503, 503]),  # loading: it lives, and is not ready
        (Broken(), [503, 503, 503, 503]),
    ],
)
def test_whether_it_lives_and_whether_it_is_ready(painter, statuses):
    routes = ("GET /health", "GET /live", "GET /ready", "POST /v1/images/generations")
    answers = [ask({"prompt": "a"}, painter=painter, route=route) for route in routes]
    assert [answer.status_code for answer in answers] == statuses
    for answer in answers:
        if answer.status_code == 503:
            said = answer.json()["error"]["message"]
            assert ("loading" if painter is None else "its thread has ended") in said
            assert int(answer.headers["retry-after"]) >= 1
    ready = ask(painter=painter, route="GET /metrics").text
    assert (
        f"visual_spec_ready {float(statuses[2] == 200)}" in ready
        and "visual_spec_queue_pictures 0.0" in ready
    )


@pytest.mark.parametrize(
    ("route", "status"),
    [("GET /v1/models/dall-e-3", 404), ("GET /nothing", 404), ("PUT /v1/images/generations", 405)],
)
def test_what_is_not_here_is_said_in_openais_form(route, status):
    answer = ask(route=route)
    assert (
        answer.status_code == status and route.split()[1].split("/")[-1] in answer.json()["error"]["message"]
    )


def test_a_failure_says_its_seed_and_id_and_closes_the_connection():
    answer = ask({"prompt": "a", "seed": 12}, painter=Raising(), x_request_id="r-7")
    assert answer.status_code == 500 and answer.headers["connection"] == "close"
    assert answer.json()["error"]["message"] == (
        "no memory (request r-7). Send it again with seed 12: the same picture comes."
    )


def test_the_wait_that_is_advised_grows_with_the_queue_and_the_pace():
    async def seconds(accepted: int, pace: float) -> str:
        app = make_app(Forever(), Limits(queue=accepted))
        app.state.endpoint.accepted, app.state.endpoint.pace = accepted, pace
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://test"
        ) as client:
            answer = await client.post("/v1/images/generations", json={"prompt": "a"})
        assert answer.status_code == 429
        return answer.headers["retry-after"]

    waits = [asyncio.run(seconds(*case)) for case in ((1, 0.1), (64, 1.0), (64, 2.5))]
    assert waits == ["1", "32", "80"]


def test_the_pace_is_that_of_the_pictures_that_were_drawn():
    async def learned() -> float:
        app = make_app(Quick())
        endpoint = app.state.endpoint
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://test"
        ) as client:
            for _ in range(40):
                await client.post("/v1/images/generations", json={"prompt": "a"})
        return endpoint.pace

    assert 0 < asyncio.run(learned()) < 0.1  # from 1 s at the start


def test_a_request_is_answered_in_its_time():
    async def answer() -> httpx.Response:
        app = make_app(Forever(), Limits(seconds=0.2))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://test"
        ) as client:
            late = await client.post("/v1/images/generations", json={"prompt": "a"})
            assert app.state.endpoint.accepted == 0
            return late

    late = asyncio.run(answer())
    assert late.status_code == 504 and "not drawn within 0.2 s" in late.json()["error"]["message"]


def test_a_client_that_reads_nothing_of_its_stream_keeps_no_place():
    async def stream() -> int:
        app = make_app(Quick(), Limits(seconds=0.2, read=0.1))
        body = {"type": "http.request", "body": b'{"prompt":"a","stream":true}', "more_body": False}
        messages = [body]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.sleep(3600)

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(3600)

        path = "/v1/images/generations"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
        answering = asyncio.ensure_future(app(scope | {"query_string": b"", "asgi": {}}, receive, send))
        await asyncio.wait([answering], timeout=3)
        assert answering.done()
        return app.state.endpoint.accepted

    assert asyncio.run(stream()) == 0


def test_a_port_that_another_has_is_refused_in_words():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        refuses(OSError, f"--port {port}: Address already in use", listen, "127.0.0.1", port)
    refuses(OSError, "--port 70000", listen, "127.0.0.1", 70000)
