"""visual-spec serve: pictures over HTTP, as OpenAI's /v1/images/generations.

    visual-spec serve things                              by vLLM, with a window of 32
    visual-spec serve shapes_var --engine ray             what vLLM cannot hold, by Ray Serve
    visual-spec serve GLM-DIR --engine sglang             tokens of a GLM-Image of transformers, for SGLang

Listens on 127.0.0.1 unless told otherwise, and before the model is loaded: GET /ready answers 503 until then.
GET /health answers 503, and the process ends with status 1, once the engine is broken; let a supervisor start it again.
GET /metrics is for Prometheus. docs/SERVING.md lists all routes, limits and what to set them to.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from visual_spec.commands.options import Parser, add, is_quiet, logger
from visual_spec.samplers.registry import RASTER

# What vLLM reads when it is imported: one process, so that pairs enter together, and nothing that calls home.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

# fmt: off
_OPTIONS = dict(
    engine=dict(choices=("vllm", "ray", "sglang"), default="vllm", help="what draws"),
    host=dict(default="127.0.0.1", help="address to listen on (default: this machine only)"),
    port=dict(type=int, default=8000, help="to listen on"),
    api_key=dict(help="what clients must send as a bearer token (default: VISUAL_SPEC_API_KEY, else none)"),
    window=dict(type=int, default=32, metavar="W", help="vllm: slots of a call; 1: no window"),
    pictures=dict(type=int, default=8, metavar="N", help="pictures drawn at once (ray: in a batch)"),
    replicas=dict(default="1", help="ray: a number, or auto"),
    sampler=dict(metavar="TEXT", help="ray, sglang: a sampler (default: the fast one of the model)"),
    dtype=dict(default="float32", help="vllm, sglang: of the computation"),
    queue=dict(type=int, default=64, metavar="N", help="pictures accepted and not finished; else 429"),
    max_n=dict(type=int, default=8, metavar="N", help="pictures of a request"),
    max_prompt=dict(type=int, default=2000, metavar="N", help="letters of a prompt"),
    max_body=dict(type=int, default=65536, metavar="N", help="bytes of a request; else 413"),
)
# fmt: on
_SECONDS = (
    ("timeout", 600, "of a request, until its answer is sent; else 504"),
    ("read_timeout", 30, "for a request to come in; else 408, or the connection is closed"),
    ("step_timeout", 300, "of a step of vLLM, else the process ends with status 1; or of a batch of Ray"),
    ("shutdown_timeout", 25, "for requests to end after SIGTERM; then they are cut off"),
)


_LOCAL = ("127.0.0.1", "::1", "localhost")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="visual-spec serve", description=__doc__)
    parser.add_argument("model", help="embedded name, folder, or Hub id of a pipeline of pictures")
    add(parser, **_OPTIONS)
    for name, default, what in _SECONDS:
        add(parser, **{name: dict(type=int, default=default, metavar="SECONDS", help=what)})
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    seconds = (name for name, *_ in _SECONDS)
    for name in ("pictures", "queue", "max_n", "max_prompt", "max_body", "window", *seconds):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}; pass at least 1.")
    # An empty one is none: a variable that was never set, or a secret without a value.
    key = (args.api_key or os.environ.get("VISUAL_SPEC_API_KEY") or "").strip() or None
    if key is None and args.host not in _LOCAL:
        raise ValueError(
            f"--host {args.host} without a key (an empty one is none); pass --api-key, or anybody there may draw."
        )
    if args.engine == "sglang":
        return _serve_tokens(args)
    _check_model(args)
    serving = _required("visual_spec.serving.server")
    seconds = args.timeout, args.read_timeout, args.step_timeout
    limits = serving.Limits(args.max_body, args.max_prompt, args.max_n, args.queue, *seconds)
    level = "error" if is_quiet() else "info"
    server = serving.Server(
        lambda: _painter(args), limits, key, shutdown=args.shutdown_timeout, log_level=level
    )
    with serving.listen(args.host, args.port) as listening:
        logger.info(
            "listening on http://%s:%d; loading %s", args.host, listening.getsockname()[1], args.model
        )
        server.run(listening)
    return 0


def _serve_tokens(args: argparse.Namespace) -> int:
    """Answer what SGLang asks for a GLM-Image. It sends no key, so only programs of this machine are heard."""
    if args.api_key or args.host not in _LOCAL:
        raise ValueError(
            f"--engine sglang with {'--api-key' if args.api_key else f'--host {args.host}'}: SGLang sends no key, so "
            f"nobody would be asked for one. Listen on {_LOCAL[0]}, behind a proxy if SGLang runs elsewhere."
        )
    uvicorn, route = _required("uvicorn"), _required("visual_spec.serving.sglang.route")
    import torch
    from transformers import AutoConfig, GlmImageForConditionalGeneration

    if not Path(args.model, "config.json").exists() and "/" not in args.model:
        raise ValueError(f"{args.model} is no folder of a transformers model, and no Hub id 'owner/name'.")
    if (kind := AutoConfig.from_pretrained(args.model).model_type) != "glm_image":
        raise ValueError(f"{args.model} holds a {kind}; SGLang asks for tokens of a GLM-Image.")
    with _required("visual_spec.serving.server").listen(args.host, args.port) as listening:
        model: Any = GlmImageForConditionalGeneration.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype)
        )
        if torch.cuda.is_available():
            model.to("cuda")
        sampler = args.sampler or f"speculative-jacobi:window={args.window}"
        app = route.make_app(route.PriorTokens(model.eval(), sampler), args.queue)
        config = uvicorn.Config(app, log_level="error" if is_quiet() else "info")
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _check_model(args: argparse.Namespace) -> None:
    """Refuse a model or a sampler that the engine does not draw with, before anything is loaded."""
    from visual_spec.pipelines.loading import read_facts, read_index
    from visual_spec.pipelines.sampler_text import make_sampler
    from visual_spec.samplers.registry import check_sampler

    facts = read_facts(args.model)
    if facts.medium != "image":
        raise ValueError(f"{args.model} makes {facts.medium}; serve draws pictures.")
    network = read_index(args.model).get("transformer") or (None, None)
    if args.engine == "vllm" and (RASTER not in facts.calls or network[1] != "LlamaGenTransformer"):
        raise ValueError(
            f"{args.model} is no LlamaGen in raster order, which is what vLLM serves; pass --engine ray."
        )
    if args.engine == "ray" and args.sampler is not None:
        try:
            check_sampler(make_sampler(args.sampler), facts.calls)
        except TypeError as error:
            raise ValueError(f"{args.model}: {error}") from error


def _painter(args: argparse.Namespace) -> Any:
    if args.engine == "ray":
        from visual_spec.serving.ray_painter import RayPainter

        replicas = args.replicas if args.replicas == "auto" else int(args.replicas)
        return RayPainter(
            args.model, sampler=args.sampler, replicas=replicas, batch=args.pictures, step=args.step_timeout
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    painter = _required("visual_spec.serving.vllm.painter")
    from visual_spec.pipelines.placing import load

    pipe = load(args.model, "cpu", "float32")
    return painter.VllmPainter(pipe, args.model, window=args.window, pictures=args.pictures, dtype=args.dtype)


def _required(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("visual_spec"):
            raise
        raise ImportError(
            f"visual-spec serve needs {error.name.partition('.')[0]}; see docs/SERVING.md for what to install"
        ) from error
