"""The process of a server: it listens, then loads, watches its engine, and ends within a time."""

# pyright: reportMissingImports=false
# uvicorn is installed with the extras that serve only.
from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from visual_spec.serving.asked import Limits
from visual_spec.serving.http import Endpoint, make_app
from visual_spec.serving.painter import Painter

logger = logging.getLogger(__name__)
_TICK = 1.0  # seconds between two looks at the engine
_LAST_WORDS = 10  # seconds for the answers of a broken server to go out


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that has its port. Raises OSError, with what to do, if another has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise OSError(
            f"--host {host} --port {port}: {why}; pass others, or end who listens there."
        ) from error


class Server:
    """A server, until it is ended by a signal, or by a fault of its engine.

    Args:
        load: returns who draws; it is called in a thread of its own, while the server listens already.
        limits, api_key: as for `Endpoint`.
        shutdown: seconds for requests to end after a signal; then they are cut off.
        log_level: of uvicorn.
    """

    def __init__(
        self,
        load: Callable[[], Painter],
        limits: Limits,
        api_key: str | None,
        *,
        shutdown: int = 25,
        log_level: str = "info",
    ) -> None:
        self.load, self.limits = load, limits
        app = make_app(None, limits, api_key, lifespan=self._life)
        self.endpoint: Endpoint = app.state.endpoint
        self.refused: BaseException | None = None  # why the model was not loaded
        config = uvicorn.Config(
            app,
            http=type("TimedProtocol", (_TimedProtocol,), {"seconds": limits.read}),
            ws="none",
            access_log=False,  # `Telling` writes a line a request
            log_level=log_level,
            timeout_graceful_shutdown=shutdown,
        )
        self.server = uvicorn.Server(config)

    def run(self, listening: socket.socket) -> None:
        """Serve. A fault of the engine ends the process with status 1, so that a supervisor starts it again.

        Raises:
            BaseException: what `load` raised.
        """
        self.server.run(sockets=[listening])
        if self.refused is not None:
            raise self.refused
        if self.endpoint.broken:
            sys.stderr.flush()
            os._exit(1)  # a thread that hangs would keep Python from its end

    @contextlib.asynccontextmanager
    async def _life(self, _: object) -> AsyncGenerator[None, None]:
        loop, begun = asyncio.get_running_loop(), time.monotonic()

        def work() -> None:
            try:
                painter = self.load()
            except BaseException as error:
                self.refused, self.server.should_exit = error, True
                return
            self.endpoint.loading = time.monotonic() - begun
            self.endpoint.painter = painter
            logger.info("ready after %.1f s", self.endpoint.loading)
            threading.Event().wait()  # for ever: Linux ends Ray's processes with the thread that started them

        # A daemon, so that a server which is ended while it loads does not wait for it.
        threading.Thread(target=work, name="load", daemon=True).start()
        watching = loop.create_task(self._watch())
        yield
        watching.cancel()
        faulthandler.cancel_dump_traceback_later()
        if self.endpoint.painter is not None and not self.endpoint.fault():
            await asyncio.to_thread(self.endpoint.painter.close)

    async def _watch(self) -> None:
        """Look at the engine until it is broken; then answer everybody, and end the server."""
        while not self.endpoint.fault():
            # Ends the process if this loop itself hangs, such as behind a call that lets no other thread run.
            faulthandler.dump_traceback_later(self.limits.step + _LAST_WORDS, exit=True)
            await asyncio.sleep(_TICK)
        logger.critical("%s; the server ends with status 1, to be started again", self.endpoint.broken)
        faulthandler.dump_traceback()  # where it hangs
        faulthandler.dump_traceback_later(2 * _LAST_WORDS, exit=True)
        self.endpoint.give_up()
        self.server.config.timeout_graceful_shutdown = _LAST_WORDS
        self.server.should_exit = True


class _TimedProtocol(H11Protocol):
    """uvicorn's protocol. It closes a connection on which the head of a request does not come in within `seconds`, and
    one that goes on sending after its answer. A body is timed by `Endpoint`.
    """

    seconds = 30.0
    _armed: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._armed is not None:
            self._armed.cancel()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._armed is None and (self.cycle is None or self.cycle.response_complete):
            self._armed = self.loop.call_later(self.seconds, self._late, self.cycle)

    def _late(self, cycle: object) -> None:
        self._armed = None
        if self.cycle is cycle:
            self.transport.close()
        else:
            self._arm()
