"""An engine that commits 16 tokens of each picture a step, token i of a picture being its seed + i."""

import ctypes
import os
import time
from types import SimpleNamespace
from typing import Any

RAISES, HANGS, EXITS, REFUSED, SLOW, SHORT, ALONE = range(1000, 1007)  # seeds of pictures that go wrong
LENGTH, STEP, IDS = 256, 16, 1024


class Refusal(Exception):
    """As vLLM's own, no ValueError."""


class LLMEngine:
    def __init__(self) -> None:
        self.requests: dict[str, tuple[int, int]] = {}

    @classmethod
    def from_engine_args(cls, _: Any) -> "LLMEngine":
        time.sleep(float(os.environ.get("FAKE_LOADING", "0")))
        if "FAKE_REFUSAL" in os.environ:
            raise ValueError("this engine does not start")
        return cls()

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        if params.extra_args["seed"] == REFUSED:
            raise Refusal("this engine does not draw it")
        self.requests[name] = (params.extra_args["seed"], 0)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def step(self) -> list[Any]:
        outputs = []
        for name, (seed, have) in list(self.requests.items()):
            if seed == RAISES:
                raise RuntimeError("CUDA error: device-side assert triggered")
            if seed == EXITS:
                raise SystemExit(3)
            if seed == ALONE:
                ctypes.PyDLL(None).sleep(3600)  # no other thread runs meanwhile
            if seed in (HANGS, SLOW):
                time.sleep(3600 if seed == HANGS else 0.4)
            have += STEP
            finished = have >= LENGTH or (seed == SHORT and have >= LENGTH // 2)
            self.requests[name] = (seed, have)
            if finished:
                del self.requests[name]
            tokens = [(seed + place) % IDS for place in range(have)]
            outputs.append(
                SimpleNamespace(
                    request_id=name, finished=finished, outputs=[SimpleNamespace(token_ids=tokens)]
                )
            )
        return outputs
