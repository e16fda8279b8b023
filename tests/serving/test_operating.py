"""What an operator does with a server, and what goes wrong: the real command and painter, and an engine with faults."""

import base64
import concurrent.futures
import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest
import torch

from tests.serving.servers import running

FAKE = Path(__file__).parent / "fake"
RAISES, HANGS, EXITS, REFUSED, SLOW, SHORT, ALONE = range(1000, 1007)  # as fake/vllm has them
BODY = {"prompt": "a large red circle", "guidance_scale": 1}


@contextlib.contextmanager
def serving(tmp_path: Path, *arguments: str, **more: Any) -> Iterator[Any]:
    path = os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")])
    with running(["shapes", *arguments], log=tmp_path / "log", PYTHONPATH=path, **more) as client:
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, "--timeout", "3", "--read-timeout", "1", "--queue", "4") as client:
        client.log = folder / "log"
        yield client


def ask(client: Any, headers: Any = None, **more: Any) -> Any:
    return client.post("/v1/images/generations", json=BODY | more, headers=headers)


def raw(client: Any, sent: bytes, wait: float = 10) -> bytes:
    """What the server answers to these bytes until it closes the connection."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=wait) as connection:
        connection.sendall(sent)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


HEAD = b"POST /v1/images/generations HTTP/1.1\r\nHost: a\r\n"


def test_a_picture_is_drawn_logged_and_counted(client):
    from PIL import Image

    from visual_spec.pipelines.placing import load

    answer = ask(client, {"X-Request-Id": "mine-1"}, seed=5)
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine-1"
    (one,) = answer.json()["data"]
    assert (one["calls"], one["tokens"], one["drafts"]) == (16, 256, 15 * 31 - 16)
    tokens = (5 + torch.arange(256)[None]) % 1024
    expected = numpy.asarray(load("shapes", "cpu", "float32").decode_tokens(tokens)[0])
    assert numpy.array_equal(
        numpy.asarray(Image.open(io.BytesIO(base64.b64decode(one["b64_json"])))), expected
    )
    (line,) = [line for line in client.log.read_text().splitlines() if "request_id=mine-1" in line]
    assert re.search(r"status=200 seconds=\d+\.\d{3} seed=5 calls=16$", line)
    text = client.get("/metrics").text
    for name, least in (("requests_total{status=\"200\"}", 1), ("e2e_request_latency_seconds_count", 1),
                        ("generation_tokens_total", 256), ("calls_total", 16), ("pictures_total", 1),
                        ("spec_decode_num_draft_tokens_total", 449), ("spec_decode_num_accepted_tokens_total", 240),
                        ("queue_pictures", 0), ("ready", 1)):  # fmt: skip
        value = re.search(rf"^visual_spec_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert value and float(value[1]) >= least, name
    assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize("given", ["two words", "a\tb", "x" * 129, ""])
def test_an_id_that_would_spoil_the_log_is_replaced(client, given):
    headers = {"X-Request-Id": given}
    assert re.fullmatch("[0-9a-f]{32}", client.get("/version", headers=headers).headers["x-request-id"])


def test_a_picture_that_failed_says_its_seed_and_closes_its_connection_alone(client):
    failed = ask(client, seed=SHORT)
    assert failed.status_code == 500 and failed.headers["connection"] == "close"
    said = failed.json()["error"]["message"]
    assert f"seed {SHORT}" in said and failed.headers["x-request-id"] in said
    for seed in range(30):  # neighbours, on kept connections
        assert client.get("/health").json()["status"] == "ok", seed
    events = client.post("/v1/images/generations", json=BODY | {"seed": SHORT, "stream": True}).text
    assert "event: error" in events and f"seed {SHORT}" in events
    assert "status=500 seconds=" in client.log.read_text()


def test_what_the_engine_refuses_is_400_and_neighbours_are_drawn(client):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        other = pool.submit(ask, client, seed=7)
        refused = ask(client, seed=REFUSED)
        assert refused.status_code == 400 and "does not draw it" in refused.json()["error"]["message"]
        assert other.result().status_code == 200
    assert client.get("/ready").status_code == 200


def test_a_picture_that_is_refused_ends_the_others_of_its_request(client):
    begun = time.monotonic()
    assert ask(client, seed=REFUSED, n=2).status_code == 400  # the second is the slow one
    assert ask(client, seed=1).status_code == 200 and time.monotonic() - begun < 2.5


def test_a_request_has_a_limit_of_time_and_leaves_no_place_behind(client):
    for stream in (False, True):
        begun = time.monotonic()
        late = ask(client, seed=SLOW, stream=stream)
        assert 2.5 < time.monotonic() - begun < 6 and "not drawn within 3 s" in late.text
        assert late.status_code == (200 if stream else 504)  # a stream has begun
    assert client.get("/health").json()["accepted"] == 0


def test_half_a_request_is_not_waited_for(client):
    begun = time.monotonic()
    answer = raw(client, HEAD + b"Content-Length: 60\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ") and b"1 bytes of the body came in 1 s" in answer
    assert raw(client, HEAD[:30]) == b""
    assert raw(client, b"") == b""
    kept = raw(client, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /hea")
    assert kept.count(b"HTTP/1.1 200") == 1
    assert time.monotonic() - begun < 9


def test_large_requests_are_refused(client):
    assert b" 413 " in raw(client, HEAD + b"Connection: close\r\nContent-Length: 70000\r\n\r\n", 3)[:20]
    assert client.post("/v1/images/generations", content=iter([b" " * 40000] * 2)).status_code == 413
    # The head's limit is 64 KiB; what would be left unread would reset the connection before its answer is seen.
    assert b" 400 " in raw(client, HEAD + b"X: " + b"x" * 65536)[:20]


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(client):
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        connection.sendall(HEAD + b"X-Request-Id: left\r\nContent-Length: 60\r\n\r\n{")
        time.sleep(0.3)
    time.sleep(0.5)
    log = client.log.read_text()
    assert "request_id=left method=POST path=/v1/images/generations status=499" in log
    assert "Exception in ASGI application" not in log


# ------------------------------------------------------------------------------------------------ engines that break


@pytest.mark.parametrize(
    ("seed", "said"),
    [
        pytest.param(RAISES, "device-side assert", marks=pytest.mark.slow),
        (HANGS, "a step of vLLM takes more than 2 s"),
        pytest.param(EXITS, "SystemExit", marks=pytest.mark.slow),
    ],
)
def test_a_broken_engine_answers_everybody_and_ends_the_process(seed, said, tmp_path):
    with serving(tmp_path, "--step-timeout", "2") as client, concurrent.futures.ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, client, seed=one) for one in (seed, 1, 2)]
        assert client.server.wait(25) == 1
        for answer in answers:
            with contextlib.suppress(httpx.ConnectError):  # it came when nobody listened any more
                got = answer.result()
                assert got.status_code in (200, 503)
        first = answers[0].result()
        assert first.status_code == 503 and said in first.json()["error"]["message"]
        assert int(first.headers["retry-after"]) >= 1
    log = (tmp_path / "log").read_text()
    assert said in log and "ends with status 1" in log and "Exception in ASGI" not in log


@pytest.mark.slow
def test_a_step_that_lets_no_other_thread_run_ends_the_process(tmp_path):
    """Nobody can answer then."""
    with serving(tmp_path, "--step-timeout", "2") as client:
        with pytest.raises(httpx.RemoteProtocolError):
            ask(client, seed=ALONE)
        assert client.server.wait(5) == 1
    assert "llm_engine.py" in (tmp_path / "log").read_text()  # where it hung


@pytest.mark.slow
def test_the_port_is_bound_while_the_model_loads(tmp_path):
    with serving(tmp_path, until="/live", FAKE_LOADING="4") as client:
        assert client.get("/health").json()["status"] == "loading"
        for answer in (client.get("/ready"), ask(client), client.get("/v1/models")):
            assert answer.status_code == 503 and "loading" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
        assert "visual_spec_ready 0.0" in client.get("/metrics").text
        port = str(client.base_url.port)
        command = [sys.executable, "-m", "visual_spec", "serve", "shapes", "--port", port]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2 and f"--port {port}: Address already in use" in second.stderr
        while client.get("/ready").status_code == 503:
            time.sleep(0.1)
        assert ask(client).status_code == 200


@pytest.mark.slow
def test_a_model_that_does_not_load_ends_the_server(tmp_path):
    with (
        pytest.raises(AssertionError, match="ended with status 2"),
        serving(tmp_path, FAKE_REFUSAL="1"),
    ):
        pass
    assert "visual-spec: error: this engine does not start" in (tmp_path / "log").read_text()


def test_sigterm_draws_what_was_accepted_and_waits_for_nobody_else(tmp_path):
    with (
        serving(tmp_path, "--shutdown-timeout", "3") as client,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        half = socket.create_connection((client.base_url.host, client.base_url.port))
        half.sendall(HEAD + b"Content-Length: 60000\r\n\r\n{")
        drawn = pool.submit(ask, client, seed=1, n=8)
        while client.get("/health").json()["accepted"] < 8:  # else the slow one may come first
            time.sleep(0.02)
        slow = pool.submit(ask, client, seed=SLOW)
        while client.get("/health").json()["accepted"] < 9:
            time.sleep(0.02)
        begun = time.monotonic()
        client.server.send_signal(signal.SIGTERM)
        assert client.server.wait(20) == -signal.SIGTERM and time.monotonic() - begun < 8
        assert drawn.result().status_code == 200
        cut = slow.result()
        assert cut.status_code == 503 and "the server ends" in cut.json()["error"]["message"]
        half.close()
