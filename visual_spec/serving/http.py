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
import math
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route

import visual_spec
from visual_spec.files.documents import json_text
from visual_spec.serving.answers import DRAWS, Metrics, RefusedError, Telling, Told
from visual_spec.serving.asked import Limits, read
from visual_spec.serving.painter import BrokenError, BusyError, Drawn, Order, Painter

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


class Endpoint:
    """The requests of one server.

    Args:
        painter: who draws; None: the model is loading, and `painter` is set afterwards.
        limits: see `Limits`.
        api_key: what `Authorization: Bearer` must hold; None: anybody may draw.

    Raises:
        ValueError: an empty key.
    """

    def __init__(self, painter: Painter | None, limits: Limits, api_key: str | None) -> None:
        if api_key is not None and not api_key.strip():
            raise ValueError(f"api_key={api_key!r} is empty; pass a key, or None to let anybody draw.")
        self.painter, self.limits, self.api_key = painter, limits, api_key
        self.accepted = 0
        self.pace = 1.0  # seconds a picture, of the last ones
        self.loading = 10.0  # seconds that a new process loads; measured where this one did
        self.broken: str | None = None
        self.metrics = Metrics(lambda: self.accepted, lambda: self.painter is not None and not self.fault())
        self._at_work: set[asyncio.Timeout] = set()

    # -- whether it works ----------------------------------------------------------------------------------------------

    def fault(self) -> str | None:
        """Return why nothing is drawn any more; None: all is well, or the model is loading."""
        if self.broken is None and self.painter is not None:
            look = getattr(self.painter, "fault", None)  # a painter that never breaks need not have one
            self.broken = look and look(self.limits.step)
        return self.broken

    def drawing(self) -> Painter:
        """Return who draws. Raises RefusedError, 503, if nobody does."""
        if self.fault():
            raise self.refusal()
        if self.painter is None:
            raise RefusedError(503, "the model is loading; try again later.", retry=math.ceil(self.loading))
        return self.painter

    def refusal(self) -> RefusedError:
        """Return what is answered once the engine is broken."""
        why = f"the engine is broken: {self.broken}. The server ends, to be started again."
        return RefusedError(503, why, retry=math.ceil(self.loading))

    def give_up(self) -> None:
        """End all drawing at once: the requests are answered by what is at fault."""
        for limit in self._at_work:
            limit.reschedule(0)

    def wait(self) -> int:
        """Return after how many seconds half of the pictures that are accepted will be drawn, at the pace of the last
        ones: then there is room for all who were refused meanwhile, and the engine still has work.
        """
        return max(1, math.ceil(self.accepted / 2 * self.pace))

    # -- reading a request ---------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Response:
        """Answer `POST /v1/images/generations`."""
        told: Told = request.state.told
        self.check_key(request)
        self.drawing()  # before the body is waited for
        orders, stream = read(
            await body_of(request, self.limits.body, self.limits.read), self.drawing(), self.limits
        )
        told.seed = orders[0].seed
        if self.accepted + len(orders) > self.limits.queue:
            many = f"{self.accepted} pictures are waiting or drawn, of at most {self.limits.queue}"
            raise RefusedError(429, f"{many}; try again later.", retry=self.wait())
        self.accepted += len(orders)  # given back where the drawing ends, however it ends
        if stream:
            return _Stream(self, orders[0], told)
        return await self.pictures(orders, request, told)

    def check_key(self, request: Request) -> None:
        """Refuse a request without the key; compares in constant time."""
        if self.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if not hmac.compare_digest(key.encode(), self.api_key.encode()):
            raise RefusedError(401, "wrong or no key; pass it as Authorization: Bearer <key>.")

    # -- drawing -----------------------------------------------------------------------------------------------------

    async def pictures(self, orders: list[Order], request: Request, told: Told) -> Response:
        """Draw, and give up if the client goes away."""
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._last(order, told)) for order in orders
        ]
        drawing: asyncio.Future[Any] = asyncio.gather(*tasks)
        leaving: asyncio.Future[Any] = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait([drawing, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not drawing.done():
                raise RefusedError(499, "the client has gone.")
            drawn = drawing.result()
        except Exception as error:
            raise self._failed(error, told) from error
        finally:
            for task in (*tasks, leaving):  # one that failed ends the others
                task.cancel()
            await asyncio.gather(drawing, *tasks, leaving, return_exceptions=True)
            self.accepted -= len(orders)
        data = [
            {"b64_json": base64.b64encode(one.png).decode(), "seed": order.seed, **one.facts}
            for one, order in zip(drawn, orders, strict=True)
        ]
        return JSONResponse(
            {"created": int(time.time()), "data": data, "output_format": "png", "size": self._size()}
        )

    async def events(self, order: Order, told: Told) -> AsyncGenerator[str, None]:
        """Draw one picture as server-sent events."""
        count, drawing = 0, self._drawn(order, told)
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
            answer = self._failed(error, told)
            told.status = answer.status
            refused = json.loads(bytes(answer.response().body))
            yield f"event: error\ndata: {json_text({'type': 'error'} | refused)}\n\n"
        finally:
            await drawing.aclose()

    async def _last(self, order: Order, told: Told) -> Drawn:
        return [one async for one in self._drawn(order, told)][-1]

    async def _drawn(self, order: Order, told: Told) -> AsyncGenerator[Drawn, None]:
        """Yield what the painter yields, within the time of a request."""
        begun, before, drawing = time.monotonic(), self.accepted, self.drawing().draw(order)
        end = asyncio.get_running_loop().time() + told.begun + self.limits.seconds - begun
        try:
            while True:
                async with asyncio.timeout_at(end) as limit:
                    self._at_work.add(limit)
                    try:
                        one = await anext(drawing, None)
                    finally:
                        self._at_work.discard(limit)
                if one is None:
                    return
                if one.whole:
                    # What came before it was drawn meanwhile, too.
                    self.pace += 0.2 * ((time.monotonic() - begun) / before - self.pace)
                    self.metrics.drawn(one.facts)
                    told.calls += [one.facts[name] for name in ("calls",) if name in one.facts]
                yield one
        except TimeoutError as error:
            self.drawing()  # or it says what is broken
            why = f"not drawn within {self.limits.seconds:g} s; ask for fewer pictures, or try again later."
            raise RefusedError(504, why) from error
        finally:
            await drawing.aclose()

    def _failed(self, error: Exception, told: Told) -> RefusedError:
        if isinstance(error, RefusedError):
            return error
        if isinstance(error, BusyError):
            return RefusedError(429, str(error), retry=self.wait())
        if isinstance(error, BrokenError):
            self.broken = self.broken or str(error)
        if self.fault():
            return self.refusal()
        if isinstance(error, ValueError):
            return RefusedError(400, str(error))
        return Telling.failed(error, told)

    def _size(self) -> str:
        height, width = self.drawing().size
        return f"{width}x{height}"


class _Stream(StreamingResponse):
    """A picture as server-sent events. Its place is given back also if the client has gone before the first event."""

    def __init__(self, endpoint: Endpoint, order: Order, told: Told) -> None:
        self.endpoint, self.told, self.events = endpoint, told, endpoint.events(order, told)
        self.held = 1  # places in the queue
        super().__init__(self._sent(), media_type="text/event-stream")

    async def _sent(self) -> AsyncGenerator[str, None]:
        async for event in self.events:
            yield event
        self._release()  # before the client reads the end

    def _release(self) -> None:
        self.endpoint.accepted -= self.held
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that reads nothing would keep its place for ever.
        most = self.endpoint.limits.seconds + self.endpoint.limits.read
        try:
            async with asyncio.timeout(most):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            self.told.status = 499
        finally:
            self._release()
            await self.events.aclose()


def make_app(
    painter: Painter | None, limits: Limits | None = None, api_key: str | None = None, **more: Any
) -> FastAPI:
    """Return the application; its routes stand in docs/SERVING.md. `state.endpoint` of it is the `Endpoint`.

    Args:
        painter, limits, api_key: as for `Endpoint`.
        more: arguments of FastAPI.
    """
    endpoint = Endpoint(painter, limits or Limits(), api_key)

    async def models(request: Request) -> Response:
        endpoint.check_key(request)
        own = {"id": endpoint.drawing().name, "object": "model", "owned_by": "visual-spec"}
        name = request.path_params.get("name")
        if name not in (None, own["id"]):
            raise RefusedError(
                404, f"model {name[:80]!r} is not here; this server has {own['id']!r}.", "model"
            )
        return JSONResponse(own if name else {"object": "list", "data": [own]})

    async def live(request: Request) -> Response:
        if endpoint.fault():
            raise endpoint.refusal()
        status = "loading" if endpoint.painter is None else "ok"
        return JSONResponse({"status": status, "accepted": endpoint.accepted})

    async def ready(request: Request) -> Response:
        endpoint.drawing()
        return await live(request)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": visual_spec.__version__})

    async def metrics(request: Request) -> Response:
        return endpoint.metrics.response()

    async def refused(request: Request, error: RefusedError) -> Response:
        return error.response()

    async def unknown(request: Request, error: HTTPException) -> Response:
        what = (
            f"{request.method} {request.url.path[:80]}: {error.detail}; see docs/SERVING.md for the routes."
        )
        answer = RefusedError(error.status_code, what).response()
        answer.headers.update(error.headers or {})
        return answer

    gets = {
        "/v1/models": models, "/v1/models/{name:path}": models, "/health": live, "/live": live, "/ready": ready,
        "/version": version, "/metrics": metrics,
    }  # fmt: skip
    routes: list[BaseRoute] = [Route(path, one) for path, one in gets.items()]
    app = FastAPI(
        routes=[*routes, Route(DRAWS, endpoint.answer, methods=["POST"])],
        exception_handlers={RefusedError: refused, HTTPException: unknown},
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        **more,
    )
    app.add_middleware(Telling, metrics=endpoint.metrics)
    app.state.endpoint = endpoint
    return app


async def body_of(request: Request, most: int, seconds: float) -> bytes:
    """Read a body of at most `most` bytes, which comes in within `seconds`. Raises RefusedError for another."""
    held, large = bytearray(), RefusedError(413, f"a body of more than {most} bytes; send less.")
    if int(request.headers.get("content-length", 0)) > most:
        raise large
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                held += part
                if len(held) > most:
                    raise large
    except TimeoutError as error:
        why = f"{len(held)} bytes of the body came in {seconds:g} s, and not its end; send it faster."
        raise RefusedError(408, why) from error
    except ClientDisconnect as error:
        raise RefusedError(499, "the client has gone.") from error  # nobody reads it
    return bytes(held)


async def _gone(request: Request) -> None:
    """Wait until the client has gone."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)
