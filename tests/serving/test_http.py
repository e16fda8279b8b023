"""`visual-spec serve` as a stranger meets it: a server of `shapes` by vLLM, and requests over HTTP."""

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from tests.serving.servers import NEEDS_VLLM, running

PROMPT = "a small yellow star left of a large blue square on a striped mint background"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NEEDS_VLLM), reason=NEEDS_VLLM)]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    arguments = ["shapes", "--pictures", "2", "--queue", "4", "--max-n", "4", "--api-key", "key"]
    with running(arguments, "key") as client:
        yield client


@pytest.fixture(scope="module")
def pipe() -> Any:
    from visual_spec.pipelines.placing import load

    return load("shapes", "cpu", "float32")


def pixels(answer: dict[str, Any]) -> numpy.ndarray:
    from PIL import Image

    return numpy.asarray(Image.open(io.BytesIO(base64.b64decode(answer["b64_json"]))))


def drawn(pipe: Any, seed: int, **law: Any) -> numpy.ndarray:
    return numpy.asarray(pipe(PROMPT, generator=torch.Generator().manual_seed(seed), **law).images[0])


def ask(client: Any, **asked: Any) -> Any:
    return client.post("/v1/images/generations", json={"prompt": PROMPT} | asked)


def accepted(client: Any) -> int:
    return client.get("/health").json()["accepted"]


def test_pictures_are_those_of_the_pipeline(client, pipe):
    answer = ask(client, n=3, seed=7, size="128x128", response_format="b64_json").json()
    assert [one["seed"] for one in answer["data"]] == [7, 8, 9] and answer["size"] == "128x128"
    for one in answer["data"]:
        assert numpy.array_equal(pixels(one), drawn(pipe, one["seed"]))
        assert one["tokens"] == 256 and 10 < one["calls"] < 256


def test_a_request_brings_its_own_law(client, pipe):
    law = dict(guidance_scale=1.0, temperature=0.7, top_k=50, top_p=0.9)
    (one,) = ask(client, seed=3, **law).json()["data"]
    assert numpy.array_equal(pixels(one), drawn(pipe, 3, **law))


def test_a_stream_shows_the_picture_on_the_way(client, pipe):
    asked = {"prompt": PROMPT, "seed": 5, "stream": True, "partial_images": 2}
    with client.stream("POST", "/v1/images/generations", json=asked) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    kinds = [event["type"].removeprefix("image_generation.") for event in events]
    assert kinds == ["partial_image", "partial_image", "completed"]
    assert [event.get("partial_image_index") for event in events] == [0, 1, None]
    whole, early = drawn(pipe, 5), pixels(events[0])
    assert numpy.array_equal(pixels(events[-1]), whole)
    assert not numpy.array_equal(early, whole) and early.shape == whole.shape
    away = numpy.abs(early.astype(int) - whole).mean((1, 2))
    assert away[:32].mean() < away[-32:].mean() / 2  # its first rows are done
    assert (numpy.abs(early[-48:].astype(int) - 127.5) < 1).all()  # its last rows are open


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"prompt": "!!!"}, "'!!!'"),
        ({"prompt": 3}, "prompt of 3"),
        ({"prompt": "red " * 1000}, "4000 letters"),
        ({"n": 5}, "n=5"),
        ({"n": True}, "n=True"),
        ({"size": "64x64"}, "size='64x64'"),
        ({"response_format": "url"}, "response_format='url'"),
        ({"model": "/etc/passwd"}, "model='/etc/passwd'"),
        ({"image": "file:///etc/passwd"}, "image is unknown"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 0}, "top_p=0"),
        ({"stream": True, "n": 2}, "n=2"),
        ({"partial_images": 1}, "partial_images=1"),
    ],
)
def test_bad_requests_are_400_with_our_message(client, asked, named):
    answer = ask(client, **asked)
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]


def test_bodies_are_read_up_to_the_limit(client):
    for body, status in ((b"{", 400), (b"[1]", 400), (b"[" * 50000, 400), (b" " * 70000, 413)):
        assert client.post("/v1/images/generations", content=body).status_code == status


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer wrong", "Bearer k", "Bearer \u00fc"])
def test_without_the_key_nothing_is_drawn(client, key):
    headers = {"Authorization": key.encode()}
    for call in (lambda: client.get("/v1/models", headers=headers),
                 lambda: client.post("/v1/images/generations", json={"prompt": PROMPT}, headers=headers)):  # fmt: skip
        assert call().status_code == 401
    assert client.get("/v1/models").json()["data"][0]["id"] == "shapes"


def test_a_full_queue_is_429_and_empties(client):
    threads = [threading.Thread(target=ask, args=(client,), kwargs={"n": 2, "seed": 2 * k}) for k in range(2)]
    for thread in threads:
        thread.start()
    while accepted(client) < 4:
        time.sleep(0.02)
    refused = ask(client)
    assert refused.status_code == 429 and "of at most 4" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    for thread in threads:
        thread.join()
    assert accepted(client) == 0


def test_a_cancelled_request_stops_decoding(client, pipe):
    """The places of two cancelled requests are free long before their pictures would be done."""
    import httpx  # pyright: ignore[reportMissingImports]

    for stream in (False, True):
        with pytest.raises(httpx.ReadTimeout):
            client.post(
                "/v1/images/generations",
                json={"prompt": PROMPT, "n": 1 if stream else 4, "stream": stream},
                timeout=0.3,
            )
        start = time.monotonic()
        while accepted(client) and time.monotonic() - start < 20:
            time.sleep(0.02)
        assert accepted(client) == 0
    (one,) = ask(client, seed=11).json()["data"]  # and the engine goes on
    assert numpy.array_equal(pixels(one), drawn(pipe, 11))
