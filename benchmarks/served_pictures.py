"""Pictures through vLLM, with a window and without, against `ImagePipeline`: tokens, calls, seconds.

python benchmarks/served_pictures.py --prompts 50 --out benchmarks/results/shapes-served-first.json
python benchmarks/served_pictures.py --prompts 50 --second --out benchmarks/results/shapes-served-second.json

Runs in the environment of `make test-vllm`. All pictures are sent at once. Each engine has a process of its own.
`--second`: vLLM's second model runner; on a CPU by Triton's interpreter, whose seconds say nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "HF_HUB_OFFLINE": "1",
}


def served(window: int, count: int, second: bool, together: int) -> dict[str, Any]:
    """Draw by vLLM: tokens, calls, wall and processor seconds."""
    if second:
        from tests.serving import interpreted  # noqa: F401  # makes the second runner run on a CPU
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    from visual_spec.data.shapes import held_out_prompts
    from visual_spec.pipelines.image import ImagePipeline
    from visual_spec.serving.vllm.engine import draw_tokens, engine_arguments
    from visual_spec.serving.vllm.folder import PromptIds, save_for_vllm
    from visual_spec.serving.vllm.start import windows_of

    pipe = ImagePipeline.from_pretrained("shapes")
    ids, law = PromptIds(pipe.transformer, pipe.text_encoder), pipe.make_law()
    length = pipe.transformer.grid.num_tokens
    with tempfile.TemporaryDirectory() as folder:
        save_for_vllm(pipe, folder)
        engine = LLM(
            **engine_arguments(folder, window=window, requests=2 * together, second=second, dtype="float32")
        )
    windows = windows_of(engine.llm_engine.vllm_config)
    assert windows is not None
    prompts = held_out_prompts(count)
    draw_tokens(engine, ids, prompts[:1], [10**6], law, length)  # warms up
    windows.calls, wall, processor = 0, time.perf_counter(), time.process_time()
    tokens = draw_tokens(engine, ids, prompts, range(count), law, length)
    return {
        "seconds": round(time.perf_counter() - wall, 2),
        "processor seconds": round(time.process_time() - processor, 2),
        "calls": windows.calls,
        "tokens": tokens.tolist(),
    }


def reference(window: int, count: int) -> dict[str, Any]:
    """Draw by the pipeline, one picture at a time."""
    import torch

    from visual_spec.data.shapes import held_out_prompts
    from visual_spec.pipelines.image import ImagePipeline
    from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

    pipe = ImagePipeline.from_pretrained("shapes")
    pipe.set_progress_bar_config(disable=True)
    pipe.sampler = SpeculativeJacobiSampler(window)
    tokens, calls, wall, processor = [], [], time.perf_counter(), time.process_time()
    for seed, prompt in enumerate(held_out_prompts(count)):
        drawn = pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="latent")
        tokens += drawn.tokens.tolist()
        calls.append(int(drawn.trace.target_calls))
    return {
        "seconds": round(time.perf_counter() - wall, 2),
        "processor seconds": round(time.process_time() - processor, 2),
        "calls": sum(calls),
        "most calls of a picture": max(calls),
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--together", type=int, help="pictures in the engine at once (default: all)")
    parser.add_argument("--second", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    together = given.together or given.prompts
    if given.part:
        window = int(given.part)
        part = reference(given.window, given.prompts) if not window else served(
            window, given.prompts, given.second, together
        )  # fmt: skip
        assert given.out is not None
        given.out.write_text(json.dumps(part, allow_nan=False))
        return
    parts: dict[str, Any] = {}
    for name, window in (("pipeline", 0), ("window", given.window), ("plain", 1)):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "part.json"
            call = [sys.executable, __file__, *sys.argv[1:], "--part", str(window), "--out", str(out)]
            subprocess.run(call, check=True)
            parts[name] = json.loads(out.read_text())
    tokens = {name: part.pop("tokens") for name, part in parts.items()}
    equal = {name: sum(map(list.__eq__, tokens["pipeline"], own)) for name, own in tokens.items()}
    first = {
        name: [(index, next(slot for slot, (a, b) in enumerate(zip(one, other, strict=True)) if a != b))
               for index, (one, other) in enumerate(zip(tokens["pipeline"], own, strict=True)) if one != other]
        for name, own in tokens.items()
    }  # fmt: skip
    facts = {
        "prompts": given.prompts, "window": given.window, "together": together,
        "runner": "second" if given.second else "first", "threads": int(os.environ["OMP_NUM_THREADS"]),
    }  # fmt: skip
    rows = {
        name: part | {"equal pictures": equal[name], "first differences (picture, slot)": first[name]}
        for name, part in parts.items()
    }
    text = json.dumps(facts | rows, indent=1, allow_nan=False)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
