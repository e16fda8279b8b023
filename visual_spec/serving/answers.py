"""What a server says of each request: errors in OpenAI's form, an id, a line in the log, numbers for Prometheus."""

# pyright: reportMissingImports=false
# FastAPI and prometheus-client are installed with the extras that serve only.
from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import generate_latest as text_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)
Number = TypeVar("Number")

DRAWS = "/v1/images/generations"
WATCHED = (
    "/health",
    "/live",
    "/ready",
    "/metrics",
)  # asked all the time: logged with --verbose, or if refused
_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)  # as vLLM


class RefusedError(Exception):
    """A request that is answered by an error: status, message, the field at fault, seconds until a new try is worth it.

    Args:
        status: of HTTP.
        message: one sentence or two.
        field: of the request.
        retry: seconds, for the header `Retry-After`.
    """

    def __init__(self, status: int, message: str, field: str | None = None, retry: int | None = None) -> None:
        super().__init__(message)
        self.status, self.field, self.retry = status, field, retry

    def response(self) -> JSONResponse:
        """Return the answer in OpenAI's form."""
        kinds = {401: "auth_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.field, "code": None}
        # Half of a surrogate pair, which a request may hold, has no bytes.
        error = {
            name: value and value.encode(errors="backslashreplace").decode() for name, value in error.items()
        }
        headers = {} if self.retry is None else {"Retry-After": str(self.retry)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 500):  # bytes of a body may follow, or anything may be wrong
            headers["Connection"] = "close"
        return JSONResponse({"error": error}, self.status, headers)


@dataclass
class Told:
    """What the log says of a request.

    Attributes:
        id: from `X-Request-Id`, if it has 1 to 128 letters, digits or ._:- alone; else made.
        begun: time.monotonic().
        status: of the answer; of a stream, which began with 200, what ended it.
        seed: of its first picture.
        calls: of each picture.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    begun: float = field(default_factory=time.monotonic)
    status: int | None = None
    seed: int | None = None
    calls: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Told:
        given = headers.get("x-request-id", "")
        return cls(given) if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else cls()

    def line(self, method: str, path: str) -> str:
        """Return the line of the log."""
        facts: dict[str, object] = {"request_id": self.id, "method": method, "path": path[:200]}
        facts |= {"status": self.status, "seconds": f"{time.monotonic() - self.begun:.3f}"}
        if self.seed is not None:
            facts |= {"seed": self.seed, "calls": ",".join(map(str, self.calls)) or "-"}
        return " ".join(f"{name}={value}" for name, value in facts.items())


class Metrics:
    """Numbers for Prometheus. Where vLLM has the same, they are called as there, with our prefix.

    Args:
        accepted: says how many pictures are accepted and not finished.
        is_ready: says whether pictures are drawn.
    """

    def __init__(self, accepted: Callable[[], int], is_ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()

        def made(kind: Callable[..., Number], name: str, what: str, *labels: str, **more: object) -> Number:
            return kind(f"visual_spec_{name}", what, labels, registry=self.registry, **more)

        self.requests = made(Counter, "requests", "Answered requests for pictures.", "status")
        self.seconds = made(
            Histogram, "e2e_request_latency_seconds", "Seconds of a request for pictures.", buckets=_SECONDS
        )
        self.pictures = made(Counter, "pictures", "Pictures drawn.")
        self.tokens = made(Counter, "generation_tokens", "Tokens of drawn pictures.")
        self.calls = made(Counter, "calls", "Calls of the model that drew them.")
        self.drafts = made(Counter, "spec_decode_num_draft_tokens", "Drafts tested.")
        self.kept = made(Counter, "spec_decode_num_accepted_tokens", "Drafts kept.")
        made(Gauge, "queue_pictures", "Pictures accepted and not finished.").set_function(accepted)
        made(Gauge, "ready", "1: pictures are drawn; 0: loading or broken.").set_function(is_ready)

    def drawn(self, facts: Mapping[str, int]) -> None:
        """Count a picture."""
        self.pictures.inc()
        self.tokens.inc(facts.get("tokens", 0))
        self.calls.inc(facts.get("calls", 0))
        if "drafts" in facts:
            self.drafts.inc(facts["drafts"])
            self.kept.inc(facts["tokens"] - facts["calls"])

    def response(self) -> Response:
        """Return all numbers: ours, and those of the process and of vLLM."""
        text = text_of(self.registry) + text_of(REGISTRY)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


class Telling:
    """Middleware: gives each request its id, and says afterwards what became of it. An error that nobody expected is
    answered by 500, and the connection is closed behind it; what the end of the server cuts off by 503.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        told = Told.of(headers)
        scope.setdefault("state", {})["told"] = told
        is_begun = False

        async def tell(message: Any) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun, told.status = True, told.status or message["status"]
                own = (b"x-request-id", told.id.encode())
                message = message | {"headers": [*message.get("headers", []), own]}
            await send(message)

        try:
            await self.app(scope, receive, tell)
        except (Exception, asyncio.CancelledError) as error:
            answer = self.failed(error, told)
            told.status = answer.status
            if not is_begun:
                await answer.response()(scope, receive, tell)
        finally:
            self.tell(told, scope)

    @staticmethod
    def failed(error: BaseException, told: Told) -> RefusedError:
        """Return what is answered to an error that is no fault of the request."""
        if isinstance(error, asyncio.CancelledError):
            return RefusedError(503, "the server ends; send it again.", retry=1)
        logger.error("request_id=%s seed=%s failed", told.id, told.seed, exc_info=error)
        again = "" if told.seed is None else f" Send it again with seed {told.seed}: the same picture comes."
        return RefusedError(500, f"{error or type(error).__name__} (request {told.id}).{again}")

    def tell(self, told: Told, scope: Scope) -> None:
        """Write the line of the log, and count."""
        path, status = scope["raw_path"].decode("latin-1"), told.status or 499
        told.status = status
        level = logging.DEBUG if path in WATCHED else logging.INFO
        logger.log(level, "%s", told.line(scope["method"], path))
        if path == DRAWS and scope["method"] == "POST":
            self.metrics.requests.labels(str(status)).inc()
            self.metrics.seconds.observe(time.monotonic() - told.begun)
