"""`POST /v1/images/generations` as OpenAI specifies it, in front of a `Painter`.

A request names no file and no address that would be opened: pictures go back as base64, and a model is the one that was
loaded. What is too large or malformed is refused before any compute.
"""

# pyright: reportMissingImports=false
# FastAPI is installed with the extras that serve only.
from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from visual_spec.files.documents import json_text
from visual_spec.models.core.settings import LAW_DEFAULTS, Within, whole
from visual_spec.serving.painter import BusyError, Drawn, Order, Painter

logger = logging.getLogger(__name__)

_FIELDS = (
    "prompt", "model", "n", "size", "seed", "response_format", "stream", "partial_images", "output_format", "user",
    *LAW_DEFAULTS,
)  # fmt: skip
# Fields of OpenAI's that change nothing here, with their defaults there, which are the only values that are taken.
_NEUTRAL = {
    "quality": ("auto", "standard"),
    "background": ("auto",),
    "moderation": ("auto",),
    "output_compression": (100,),
}
_MOST_PARTIAL = 3  # as OpenAI


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and all together.

    Attributes:
        body: bytes of a request.
        prompt: letters of a prompt.
        n: pictures of a request.
        queue: pictures that are accepted and not finished.
    """

    body: int = 65536
    prompt: int = 2000
    n: int = 8
    queue: int = 64


class RefusedError(Exception):
    """A request that is answered by an error: status, message, and the field at fault."""

    def __init__(
        self, status: int, message: str, field: str | None = None, kind: str = "invalid_request_error"
    ):
        super().__init__(message)
        self.status, self.field, self.kind = status, field, kind

    def response(self) -> JSONResponse:
        """Return the answer in OpenAI's form."""
        error = {"message": str(self), "type": self.kind, "param": self.field, "code": None}
        # Half of a surrogate pair, which a request may hold, has no bytes.
        error = {
            name: value and value.encode(errors="backslashreplace").decode() for name, value in error.items()
        }
        headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status)
        return JSONResponse({"error": error}, self.status, headers)


class Endpoint:
    """The requests of one server.

    Args:
        painter: who draws.
        limits: see `Limits`.
        api_key: what `Authorization: Bearer` must hold; None: anybody may draw.

    Raises:
        ValueError: an empty key.
    """

    def __init__(self, painter: Painter, limits: Limits, api_key: str | None) -> None:
        if api_key is not None and not api_key.strip():
            raise ValueError(f"api_key={api_key!r} is empty; pass a key, or None to let anybody draw.")
        self.painter, self.limits, self.api_key = painter, limits, api_key
        self.accepted = 0

    async def answer(self, request: Request) -> Response:
        """Answer `POST /v1/images/generations`."""
        try:
            self.check_key(request)
            orders, stream = self.read(await self.body(request))
            if self.accepted + len(orders) > self.limits.queue:
                raise RefusedError(
                    429,
                    f"{self.accepted} pictures are waiting or drawn, of at most {self.limits.queue}; try again later.",
                    kind="rate_limit_error",
                )
        except RefusedError as error:
            return error.response()
        self.accepted += len(orders)  # given back where the drawing ends, however it ends
        if stream:
            return _Stream(self, orders[0])
        return await self.pictures(orders, request)

    def check_key(self, request: Request) -> None:
        """Refuse a request without the key; compares in constant time."""
        if self.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if not hmac.compare_digest(key.encode(), self.api_key.encode()):
            raise RefusedError(
                401, "wrong or no key; pass it as Authorization: Bearer <key>.", kind="auth_error"
            )

    async def body(self, request: Request) -> dict[str, Any]:
        """Read a body up to the limit, and no further."""
        held = bytearray()
        async for part in request.stream():
            held += part
            if len(held) > self.limits.body:
                raise RefusedError(413, f"a body of more than {self.limits.body} bytes; send less.")
        try:
            asked = json.loads(held, object_pairs_hook=_once, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            why = f": {error}" if type(error) is ValueError else ""  # not the parser's own words
            raise RefusedError(400, f"the body is no JSON{why}; send an object with a prompt.") from error
        if not isinstance(asked, dict):
            raise RefusedError(400, f"the body is a {type(asked).__name__}; send an object with a prompt.")
        return asked

    def read(self, asked: dict[str, Any]) -> tuple[list[Order], bool]:
        """Return the orders of a request, and whether to stream.

        Raises:
            RefusedError: names the field, its value and what is allowed.
        """
        body = {name: value for name, value in asked.items() if value is not None}
        for name, values in _NEUTRAL.items():
            self._one_of(body, name, values)
        if unknown := sorted(set(body) - {*_FIELDS, *_NEUTRAL}):
            raise RefusedError(400, f"{unknown[0]} is unknown; pass {', '.join(_FIELDS)}.", unknown[0])
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or len(prompt) > self.limits.prompt:
            what = f"{len(prompt)} letters" if isinstance(prompt, str) else repr(prompt)[:80]
            raise RefusedError(
                400, f"prompt of {what}; pass a text of at most {self.limits.prompt} letters.", "prompt"
            )
        height, width = self.painter.size
        self._one_of(body, "size", ("auto", f"{width}x{height}"))
        self._one_of(body, "model", (self.painter.name,))
        self._one_of(body, "response_format", ("b64_json",))
        self._one_of(body, "output_format", ("png",))
        self._one_of(body, "stream", (False, True))
        n, stream = self._whole(body, "n", 1, 1, self.limits.n), body.get("stream", False)
        partial = self._whole(body, "partial_images", 0, 0, _MOST_PARTIAL)
        if (stream and n > 1) or (partial and not stream):
            raise RefusedError(
                400, f"n={n}, partial_images={partial}, stream={stream}; a stream holds one picture.", "n"
            )
        first = self._whole(body, "seed", random.SystemRandom().randrange(2**32), 0, 2**64 - n)
        for name in LAW_DEFAULTS:
            if isinstance(body.get(name), bool) or not isinstance(body.get(name, 0), int | float):
                raise RefusedError(400, f"{name}={body[name]!r}; pass a number.", name)
        try:
            law = self.painter.law(**{name: body.get(name) for name in LAW_DEFAULTS})
            orders = [Order(prompt, first + index, law, partial) for index in range(n)]
            self.painter.check(orders[0])
        except (ValueError, TypeError) as error:
            raise RefusedError(400, str(error)) from error
        return orders, stream

    @staticmethod
    def _one_of(body: dict[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
        value = body.get(name, allowed[0])
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise RefusedError(
                400, f"{name}={str(value)[:80]!r}; pass {' or '.join(map(repr, allowed))}.", name
            )

    @staticmethod
    def _whole(body: dict[str, Any], name: str, usual: int, least: int, most: int) -> int:
        value = body.get(name, usual)
        try:
            return whole(name, value, Within(least, most))
        except ValueError as error:
            raise RefusedError(400, str(error), name) from error

    # -- drawing -----------------------------------------------------------------------------------------------------

    async def pictures(self, orders: list[Order], request: Request) -> Response:
        """Draw, and give up if the client goes away."""
        drawing = asyncio.gather(*map(self._last, orders))
        leaving = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait([drawing, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not drawing.done():
                return Response(status_code=499)  # nobody reads it
            drawn = drawing.result()
        except Exception as error:
            return self._failed(error).response()
        finally:
            for task in (drawing, leaving):
                task.cancel()
            await asyncio.gather(drawing, leaving, return_exceptions=True)
            self.accepted -= len(orders)
        data = [
            {"b64_json": base64.b64encode(one.png).decode(), "seed": order.seed, **one.facts}
            for one, order in zip(drawn, orders, strict=True)
        ]
        return JSONResponse(
            {"created": int(time.time()), "data": data, "output_format": "png", "size": self._size()}
        )

    async def events(self, order: Order) -> AsyncGenerator[str, None]:
        """Draw one picture as server-sent events."""
        count, drawing = 0, self.painter.draw(order)
        try:
            async for one in drawing:
                kind = "image_generation." + ("completed" if one.whole else "partial_image")
                event = {"type": kind, "b64_json": base64.b64encode(one.png).decode(), "seed": order.seed}
                event |= {
                    "created_at": int(time.time()),
                    "output_format": "png",
                    "size": self._size(),
                } | one.facts
                if not one.whole:
                    event["partial_image_index"] = count
                    count += 1
                yield f"event: {kind}\ndata: {json_text(event)}\n\n"
        except Exception as error:
            refused = json.loads(bytes(self._failed(error).response().body))
            yield f"event: error\ndata: {json_text({'type': 'error'} | refused)}\n\n"
        finally:
            await drawing.aclose()

    async def _last(self, order: Order) -> Drawn:
        drawing = self.painter.draw(order)
        try:
            return [one async for one in drawing][-1]
        finally:
            await drawing.aclose()

    def _failed(self, error: Exception) -> RefusedError:
        if isinstance(error, BusyError):
            return RefusedError(429, str(error), kind="rate_limit_error")
        if isinstance(error, ValueError):
            return RefusedError(400, str(error))
        logger.error("a picture failed", exc_info=error)
        return RefusedError(
            500, f"{error} Send it again with its seed: the same picture comes.", kind="server_error"
        )

    def _size(self) -> str:
        height, width = self.painter.size
        return f"{width}x{height}"


class _Stream(StreamingResponse):
    """A picture as server-sent events. Its place is given back also if the client has gone before the first event."""

    def __init__(self, endpoint: Endpoint, order: Order) -> None:
        self.endpoint, self.events = endpoint, endpoint.events(order)
        super().__init__(self.events, media_type="text/event-stream")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.endpoint.accepted -= 1
            await self.events.aclose()


def make_app(painter: Painter, limits: Limits | None = None, api_key: str | None = None) -> FastAPI:
    """Return the application: the endpoint, `GET /v1/models` and `GET /health`."""
    endpoint = Endpoint(painter, limits or Limits(), api_key)
    app = FastAPI(title="visual-spec", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.endpoint = endpoint

    @app.post("/v1/images/generations")
    async def generations(request: Request) -> Response:
        return await endpoint.answer(request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        try:
            endpoint.check_key(request)
        except RefusedError as error:
            return error.response()
        own = {"id": painter.name, "object": "model", "owned_by": "visual-spec"}
        return JSONResponse({"object": "list", "data": [own]})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "accepted": endpoint.accepted}

    return app


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; a name that is there twice has no value."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]} is there twice")
        found[name] = value
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


async def _gone(request: Request) -> None:
    """Wait until the client has gone."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)
