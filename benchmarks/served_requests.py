"""Requests a second and waiting times of `visual-spec serve`, by the number of clients.

python benchmarks/served_requests.py --out benchmarks/results/shapes-requests.json

Runs in the environment of `make test-vllm`. Each row has a server of its own: with a window and without (window 1),
with pictures drawn together (batch) and one at a time. A client sends its next request when the last one is answered.
"""

import argparse
import os
import threading
import time
from pathlib import Path
from typing import Any

from tests.serving.servers import running
from visual_spec.data.shapes import held_out_prompts
from visual_spec.files.documents import json_text, write_json

REQUESTS = {1: 4, 4: 8, 16: 16}


def load(client: Any, clients: int, prompts: list[str]) -> dict[str, Any]:
    """Send every prompt once from so many clients: requests a second, and waiting times."""
    waiting, seconds, lock = list(enumerate(prompts)), [], threading.Lock()

    def run() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                seed, prompt = waiting.pop(0)
            began = time.perf_counter()
            answer = client.post("/v1/images/generations", json={"prompt": prompt, "seed": seed})
            answer.raise_for_status()
            seconds.append(time.perf_counter() - began)

    threads = [threading.Thread(target=run) for _ in range(clients)]
    began, used = time.perf_counter(), client.processor_seconds()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = time.perf_counter() - began
    seconds.sort()
    used = client.processor_seconds() - used
    return {
        "requests": len(seconds),
        "processor seconds a request": round(used / len(seconds), 2),
        "requests a second": round(len(seconds) / total, 3),
        "p50 seconds": round(seconds[len(seconds) // 2], 2),
        "p95 seconds": round(seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: dict[str, Any] = {"threads": 1, "processors": os.cpu_count()}
    for window, together in ((32, 16), (1, 16), (32, 1), (1, 1)):
        arguments = ["shapes", "--window", str(window), "--pictures", str(together)]
        with running(arguments) as client:
            load(client, 1, held_out_prompts(1))  # warms up
            rows[f"window {window}, {together} at once"] = {
                f"{clients} clients": load(client, clients, held_out_prompts(count))
                for clients, count in REQUESTS.items()
            }
        rows[f"window {window}, {together} at once"]["load average after it"] = os.getloadavg()[0]
        print(json_text(rows, indent=1), flush=True)
        if given.out:
            write_json(given.out, rows, indent=1)


if __name__ == "__main__":
    main()
