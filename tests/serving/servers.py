"""A server of ours in a process of its own, for tests; and whether it could start."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEEDS_VLLM = "" if importlib.util.find_spec("vllm") else "needs vLLM: run `make test-vllm`"
NEEDS_RAY = "" if importlib.util.find_spec("ray") else "needs Ray Serve: run `make test-vllm`"

CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextlib.contextmanager
def running(
    arguments: list[str],
    key: str | None = None,
    patience: float = 900,
    *,
    log: Path | None = None,
    until: str = "/ready",
    **environment: str,
) -> Iterator[Any]:
    """Run `visual-spec serve` with these arguments, and give an `httpx.Client` that has the key.

    The process is `client.server`; `log` gets what it says; it is awaited until the route `until` answers 200.
    """
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "visual_spec", "serve", *arguments, "--port", str(port)]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    said = None if log is None else log.open("w")
    server = subprocess.Popen(command, env=os.environ | CPU | environment, stderr=said)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=900) as client:
            start = time.monotonic()
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(until).status_code == 200:
                        break
                assert server.poll() is None, f"the server ended with status {server.returncode}"
                assert time.monotonic() - start < patience, "the server did not start"
                time.sleep(0.2)
            client.server = server  # pyright: ignore
            client.processor_seconds = lambda: _processor_seconds(server.pid)  # pyright: ignore
            yield client
    finally:
        server.terminate()
        server.wait(60)
        if said is not None:
            said.close()


def _processor_seconds(process: int) -> float:
    """What a process has used so far, of Linux; unlike wall time it is the same on a busy machine."""
    with open(f"/proc/{process}/stat") as file:
        user, system = file.read().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
