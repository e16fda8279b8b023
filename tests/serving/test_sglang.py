"""What SGLang asks for GLM-Image's tokens, answered by a tiny random one: the tokens of plain decoding."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import visual_spec
from tests.models.next_token import tiny_transformers as tiny

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from tests.helpers.refusals import refuses
from visual_spec import cli
from visual_spec.serving.sglang import plugin
from visual_spec.serving.sglang.route import PriorTokens, make_app

GRIDS = [[1, 4, 6], [1, 2, 3]]  # as of the processor: the large one first
TOKENS = 4 * 6 + 2 * 3
PROMPTS = [[31, 40, 33, 44, 26], [31, 35, 26]]


@pytest.fixture(scope="module")
def tokens() -> PriorTokens:
    return PriorTokens(tiny.glm_image(torch.float32), "speculative-jacobi:window=8")


def params(seed: int | None = 7, **changes: Any) -> dict[str, Any]:
    """As `_external_ar_sampling_params` of SGLang 0.5.23 makes them."""
    own = {"temperature": 1.0, "max_new_tokens": TOKENS + 1, "ignore_eos": True, "sampling_seed": seed}
    return {name: value for name, value in (own | changes).items() if value is not None}


def one(ids: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "image_data": [{"image_grid_thw": GRIDS}],
        "sampling_params": params(**changes),
    }


def plain(ids: list[int], seed: int, **law: Any) -> list[int]:
    """By one call a token, of another instance of the same model."""
    model = tiny.glm_image(torch.float32)
    visual_spec.accelerate(model, "autoregressive")
    drawn = model.generate_images(
        torch.tensor([ids]),
        image_grid_thw=torch.tensor(GRIDS),
        do_sample=True,
        generator=torch.Generator().manual_seed(seed),
        **{"temperature": 1.0, "top_k": 0} | law,
    )
    return drawn[0, len(ids) :].tolist()


def test_a_request_of_the_stage_gets_the_tokens_of_plain_decoding(tokens):
    client = TestClient(make_app(tokens))
    assert client.get("/health").status_code == 200
    answer = client.post("/generate", json=one(PROMPTS[0])).json()
    assert answer["output_ids"] == plain(PROMPTS[0], 7) and len(answer["output_ids"]) == TOKENS + 1
    facts = answer["meta_info"]
    assert facts["prompt_tokens"] == 5 and facts["completion_tokens"] == TOKENS + 1
    assert facts["target_calls"] < TOKENS and facts["sampling_seed"] == 7


def test_a_batch_has_the_tokens_of_single_requests(tokens):
    """Prompts of two lengths, two laws, and a seed that the server chooses and tells."""
    laws = [params(7), params(8), params(None), params(9, temperature=0.5, top_k=-1, top_p=0.9)]
    ids = [PROMPTS[0], PROMPTS[1], PROMPTS[1], PROMPTS[0]]
    batch = {"input_ids": ids, "image_data": [[{"image_grid_thw": GRIDS}]] * 4, "sampling_params": laws}
    answers = TestClient(make_app(tokens)).post("/generate", json=batch).json()
    seeds = [answer["meta_info"]["sampling_seed"] for answer in answers]
    assert seeds[:2] == [7, 8] and seeds[3] == 9
    for own, seed, answer in zip(ids[:3], seeds, answers, strict=False):
        assert answer["output_ids"] == plain(own, seed)
    assert answers[3]["output_ids"] == plain(ids[3], 9, temperature=0.5, top_p=0.9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(input_ids=[]), "input_ids"),
        (dict(input_ids=[31, 64]), "input_ids=64"),
        (dict(input_ids=[31, True]), "input_ids=True"),
        (dict(input_ids=[PROMPTS[0]] * 65), "65 pictures"),
        (dict(input_ids=PROMPTS[:2]), "different lengths"),
        (dict(image_data=None), "image_data=None"),
        (dict(image_data=[{"image_grid_thw": GRIDS, "url": "x"}]), "image_data="),
        (dict(image_data=[{"image_grid_thw": [[1, 4]]}]), "unpack"),
        (dict(image_data=[{"image_grid_thw": [[1, 0, 6]]}]), "height=0"),
        (dict(image_data=[{"image_grid_thw": [[1, 400, 600]]}]), "240000 tokens"),
        (dict(image_data=[{"image_grid_thw": []}]), "0 tokens"),
        (dict(sampling_params=params(max_new_tokens=5)), "max_new_tokens=5"),
        (dict(sampling_params=params(sampling_seed=-1)), "sampling_seed=-1"),
        (dict(sampling_params=params(temperature="hot")), "pass numbers"),
        (dict(sampling_params=params(top_p=2.0)), "top_p=2.0"),
        (dict(sampling_params=params(min_p=0.1)), "min_p"),
        (dict(stream=True), "stream"),
        (dict(prompt="x"), "prompt"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(tokens, monkeypatch, changes, named):
    monkeypatch.setattr(tokens, "draw", lambda requests: pytest.fail("drawn"))
    answer = TestClient(make_app(tokens)).post("/generate", json=one(PROMPTS[0]) | changes)
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]


def test_bodies_failures_and_a_full_queue_are_answered(tokens, monkeypatch):
    client = TestClient(make_app(tokens, queue=1))
    for body, status in (("[" * 9000, 400), ("{", 400), ("[]", 400), ("x" * (1 << 20) + "x", 413)):
        assert client.post("/generate", content=body).status_code == status
    entered, leave = Event(), Event()

    def draw(requests: Any) -> Any:
        entered.set()
        leave.wait(20)
        raise RuntimeError("no memory.")

    monkeypatch.setattr(tokens, "draw", draw)
    with ThreadPoolExecutor(1) as threads, client:
        first = threads.submit(client.post, "/generate", json=one(PROMPTS[0]))
        assert entered.wait(20)
        second = client.post("/generate", json=one(PROMPTS[0]))
        leave.set()
        assert (second.status_code, second.headers["retry-after"]) == (503, "1")
        failed = first.result()
    assert failed.status_code == 500 and "no memory. Seeds: [7]" in failed.json()["error"]["message"]


def test_only_glm_image_is_taken(tmp_path, capsys):
    refuses(TypeError, "JanusForConditionalGeneration", PriorTokens, tiny.janus(torch.float32))
    tiny.janus(torch.float32).config.save_pretrained(tmp_path)
    assert cli.main(["serve", str(tmp_path), "--engine", "sglang"]) == 2
    assert "holds a janus" in capsys.readouterr().err
    for more in (["--api-key", "k"], ["--host", "0.0.0.0", "--api-key", "k"], ["--host", "0.0.0.0"]):
        assert cli.main(["serve", str(tmp_path), "--engine", "sglang", *more]) == 2
        assert "key" in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path / "none"), "--engine", "sglang"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_serves_a_folder_until_it_is_told_to_end(tmp_path):
    import httpx

    tiny.glm_image(torch.float32).save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "visual_spec", "serve", str(tmp_path), "--engine", "sglang"]
    server = subprocess.Popen([*command, "--window", "8", "--port", str(port)])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for _ in range(300):
                with contextlib.suppress(httpx.ConnectError):
                    client.get("/health")
                    break
                time.sleep(0.2)
            answer = client.post("/generate", json=one(PROMPTS[0])).json()
        server.terminate()
        assert server.wait(20) in (0, -signal.SIGTERM)
    finally:
        server.kill()
    assert answer["output_ids"] == plain(PROMPTS[0], 7)


def test_the_plug_in_accelerates_the_encoder_that_sglang_loads(monkeypatch):
    """By the hook that it registers, and the call of `generate` that the stage makes."""
    hooks: list[tuple[Any, ...]] = []
    modules = {
        "sglang.multimodal_gen.runtime.platforms.plugins": SimpleNamespace(
            HookRegistry=SimpleNamespace(register=lambda *hook: hooks.append(hook))
        ),
        "sglang.srt.plugins.hook_registry": SimpleNamespace(HookType=SimpleNamespace(AFTER="after")),
    }
    for name, module in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    plugin.register()
    assert hooks == []
    monkeypatch.setenv(plugin.VARIABLE, "speculative-jacobi:window=8")
    plugin.register()
    ((target, hook, kind),) = hooks
    assert target == plugin.LOADER and kind == "after"
    assert hook("http://127.0.0.1:30000", "path") == "http://127.0.0.1:30000"

    model = hook(tiny.glm_image(torch.float32), "path", SimpleNamespace())
    inputs = dict(input_ids=torch.tensor(PROMPTS[:1]), image_grid_thw=torch.tensor(GRIDS))
    torch.manual_seed(3)
    drawn = model.generate(**inputs, max_new_tokens=TOKENS + 1, do_sample=True)
    assert drawn.shape == (1, len(PROMPTS[0]) + TOKENS + 1)
    assert int(model.last_trace.target_calls) < TOKENS
    visual_spec.accelerate(model, "autoregressive")
    torch.manual_seed(3)
    assert torch.equal(model.generate(**inputs, max_new_tokens=TOKENS + 1, do_sample=True), drawn)
