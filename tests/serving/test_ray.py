"""`visual-spec serve --engine ray`: pictures of a model that vLLM cannot hold, and a replica that is killed."""

import base64
import io
import os
import signal
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.serving.servers import NEEDS_RAY, running

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NEEDS_RAY), reason=NEEDS_RAY)]
LABELS = ["red circle", "yellow triangle", "purple diamond", "white star"]


def replicas(mark: str) -> list[int]:
    """The processes of replicas that were started with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = mark.encode() in (folder / "environ").read_bytes()
            if ours and b"ServeReplica:visual-spec" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_killed_replica_loses_no_request():
    """100 requests, a replica killed in their middle: all are answered, with the pictures of the pipeline."""
    from PIL import Image

    from visual_spec.pipelines.placing import load

    mark, lock = f"mark-{uuid.uuid4()}", threading.Lock()
    waiting, answers = list(range(100)), {}

    with running(
        ["shapes_var", "--engine", "ray", "--replicas", "2", "--pictures", "4"], SERVED_FOR=mark
    ) as client:

        def draw() -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    seed = waiting.pop(0)
                asked = {"prompt": LABELS[seed % 4], "seed": seed}
                answers[seed] = client.post("/v1/images/generations", json=asked)
                if seed == 40:
                    before = replicas(mark)
                    assert len(before) == 2
                    os.kill(before[0], signal.SIGKILL)
                    killed.append(before[0])

        killed: list[int] = []
        threads = [threading.Thread(target=draw) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bad = client.post("/v1/images/generations", json={"prompt": "no such class"})
        partial = client.post(
            "/v1/images/generations", json={"prompt": LABELS[0], "stream": True, "partial_images": 1}
        )
    assert killed and [answer.status_code for answer in answers.values()] == [200] * 100
    assert bad.status_code == 400 and "no such class" in bad.json()["error"]["message"]
    assert partial.status_code == 400 and "partial_images=1" in partial.json()["error"]["message"]
    pipe: Any = load("shapes_var", "cpu", "float32")
    for seed in range(0, 100, 7):
        (one,) = answers[seed].json()["data"]
        own = pipe([LABELS[seed % 4]], generator=[torch.Generator().manual_seed(seed)]).images[0]
        served = numpy.asarray(Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))))
        assert one["seed"] == seed
        assert numpy.abs(served.astype(int) - numpy.asarray(own)).max() <= 1  # batches may round the pixels


def test_a_replica_that_hangs_is_replaced_and_its_picture_drawn():
    """Stopped by a signal, the only replica neither draws nor says that it is well."""
    mark = f"mark-{uuid.uuid4()}"
    asked = {"prompt": LABELS[0], "seed": 1}
    with running(["shapes_var", "--engine", "ray"], SERVED_FOR=mark) as client:
        before = client.post("/v1/images/generations", json=asked)
        (hangs,) = replicas(mark)
        os.kill(hangs, signal.SIGSTOP)
        after = client.post("/v1/images/generations", json=asked, timeout=240)
        assert replicas(mark) != [hangs]
        assert client.get("/ready").status_code == 200
    assert before.status_code == after.status_code == 200
    assert before.json()["data"] == after.json()["data"]
