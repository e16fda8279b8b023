"""The parts of each stage of `visual_spec.eval.speed.gpu_hour`: {name: what measures it}.

Every function here takes `dry`: then models and sizes are tiny, and everything runs on the CPU. What a part returns is
JSON; a key "problem" says in words what is wrong, where something is.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import visual_spec
from visual_spec.data.shapes import held_out_prompts as captions_of_pictures
from visual_spec.data.shapes_classes import CLASS_NAMES
from visual_spec.data.tunes import held_out_prompts as captions_of_clips
from visual_spec.eval import draws
from visual_spec.eval.defaults import settings_of_model, with_setting
from visual_spec.eval.machine import choose_device, load
from visual_spec.eval.settings import Setting, parse_setting
from visual_spec.eval.speed import (
    bench,
    continuous_sizes,
    gpu_tiny,
    kernel_bench,
    measure,
    music_sizes,
    speech_sizes,
    video_sizes,
)
from visual_spec.models.core.calls import COLUMNS, CONTINUOUS, MASKED, RASTER, TREE
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise, draw_keys
from visual_spec.samplers.core.verification import draw_near
from visual_spec.samplers.registry import SAMPLERS, sampler_class

Parts = dict[str, Callable[[], Any]]
_ROOT = Path(visual_spec.__file__).parents[1]
SAMPLES = 4  # pictures or clips that are compared
LATENTS = ("shapes_mar", "shapes_causal")
LLAMAGEN, JANUS, VAR = "llamagen-xl-t2i", "janus-pro-7b", "var-d30+var-d16"

# -- 1: the kernels' tests ---------------------------------------------------------------------------------------------


def kernel_tests(dry: bool) -> Parts:
    """The kernels on the device against their definitions; then all tests of kernels, which a CPU can run too."""
    parts: Parts = {
        "tests/kernels/test_on_device.py": partial(run_tests, "tests/kernels/test_on_device.py", not dry)
    }
    return parts if dry else parts | {"tests/kernels": partial(run_tests, "tests/kernels", True)}


def run_tests(path: str, all_must_run: bool) -> dict[str, Any]:
    """Run tests of this checkout; how many passed, failed and were skipped, and what the failures say.

    Args:
        all_must_run: a skipped test is a problem.

    Raises:
        FileNotFoundError: an installed package has no tests.
    """
    import pytest

    if not (_ROOT / path).exists():
        raise FileNotFoundError(f"no {path} in {_ROOT}; run this in a checkout of the repository")

    class Count:
        counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        failures: list[str] = []

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                self.counts[report.outcome] += 1
            if report.outcome == "failed":
                lines = str(report.longrepr).strip().splitlines()
                self.failures.append(f"{report.nodeid}: {lines[-1] if lines else ''}"[:300])

    count = Count()
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", str(_ROOT), "-c", str(_ROOT / "pyproject.toml")]
    status = pytest.main([*arguments, str(_ROOT / path)], plugins=[count])
    found: dict[str, Any] = {**count.counts, "failures": count.failures[:10]}
    if count.counts["failed"] or status not in (0, 5):
        found["problem"] = f"{count.counts['failed']} failed, pytest ended with {int(status)}"
    elif all_must_run and count.counts["skipped"]:
        found["problem"] = f"{count.counts['skipped']} were skipped"
    return found


# -- 2, 3: the same tokens ---------------------------------------------------------------------------------------------


@cache
def _pipe(model: str, dtype: str, dry: bool) -> Any:
    """An embedded model; `dry`: with the same weights, and a smaller picture or a shorter clip."""
    pipe = load(model, "cpu" if dry else "cuda", dtype)
    return gpu_tiny.shorter(pipe) if dry else pipe


def _prompts(model: str, dry: bool) -> list[str]:
    count = 1 if dry else SAMPLES
    if model in LATENTS:
        return list(CLASS_NAMES[:count])
    return (captions_of_clips if model == "tunes" else captions_of_pictures)(count)


def _setting(model: str, text: str) -> Setting:
    return parse_setting(text, settings_of_model(model).law_with(), 0)


def graphs(dry: bool) -> Parts:
    """Every sampler that records its calls, in the settings that `bench` measures and with the identical rule."""
    parts: Parts = {}
    for entry in SAMPLERS:
        if "graph" not in inspect.signature(sampler_class(entry)).parameters:
            continue
        if entry.calls == CONTINUOUS:
            parts |= _latent_graphs(entry.name, dry)
            continue
        if entry.calls == MASKED:
            texts = [
                with_setting(entry.name, text)
                for text in (["steps=2"] if dry else ["steps=16", "steps=16,reuse=2"])
            ]
            parts |= {text: partial(compare_graph, "shapes_masked", text, dry) for text in texts}
            continue
        assert entry.calls in (RASTER, TREE, COLUMNS), f"no embedded model for {entry.name}"
        model = "tunes" if entry.calls == COLUMNS else "shapes"
        for text in entry.settings or ("",):
            setting = with_setting(entry.name, text)
            parts[setting] = partial(compare_graph, model, setting, dry)
    text = "drafted:acceptance=identical"
    return parts | {text: partial(compare_graph, "shapes", text, dry)}


def _latent_graphs(sampler: str, dry: bool) -> Parts:
    """Calls of one token and of several, and chains of one length and of several."""
    short = "head_steps=2" if dry else ""
    texts = {
        "shapes_causal": [short],
        "shapes_mar": ["steps=2,head_steps=2"] if dry else ["", "steps=16,last_head_steps=5"],
    }
    return {
        f"{with_setting(sampler, text)}, {model}": partial(
            compare_graph, model, with_setting(sampler, text), dry
        )
        for model in LATENTS
        for text in texts[model]
    }


def compare_graph(model: str, text: str, dry: bool) -> dict[str, Any]:
    """Decode samples without a graph and with one that is recorded, then other samples with the same recording.

    On a CPU nothing is recorded, and all are drawn without.
    """
    pipe, prompts = _pipe(model, "float32", dry), _prompts(model, dry)
    eager = _setting(model, with_setting(text, "graph=false"))
    recorded = _setting(model, with_setting(text, "graph=auto" if dry else "graph=true"))
    # What has to be compiled is behind the first pair, whose recording has to serve other texts and seeds too.
    firsts = (0,) if dry else (0, 100)
    pairs = [
        tuple(draws.draw(pipe, one, prompts[:: -1 if first else 1], first) for one in (eager, recorded))
        for first in firsts
    ]
    same = sum(_same(one, two) for one, two in pairs)
    found: dict[str, Any] = dict(
        model=model,
        recorded=not dry,
        samples=len(pairs) * len(prompts),
        same=same,
        ms_per_call_eager=_ms_per_call(pairs[-1][0]),
        ms_per_call_graph=_ms_per_call(pairs[-1][1]),
    )
    if same < found["samples"]:
        found["problem"] = f"{found['samples'] - same} of {found['samples']} samples have other tokens"
    return found


def _same(one: Any, two: Any) -> int:
    """Samples with the same tokens; those that are vectors may differ by rounding, as recorded calls have more room."""
    if "canvas" in one:
        pairs = zip(one["canvas"], two["canvas"], strict=True)
        return sum(np.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in pairs)
    tokens = [torch.from_numpy(arrays["tokens"]).flatten(1) for arrays in (one, two)]
    return int((tokens[0] == tokens[1]).all(1).sum())


def _ms_per_call(arrays: Any) -> float:
    return 1000 * float(arrays["seconds"]) / int(arrays["calls"].max())


IDENTICAL = {
    "shapes": (
        "speculative-jacobi:window=16",
        "speculative-jacobi:window=64",
        "speculative-jacobi:window=32,exact_width=true",
        "drafted:acceptance=identical",
        "proactive-jacobi:coupling=gumbel,acceptance=identical",
    ),
    "tunes": (
        "column-jacobi:window=8",
        "column-jacobi:window=8,exact_width=true",
        "drafted-columns:acceptance=identical",
    ),
}


def identity(dry: bool) -> Parts:
    """Settings that promise the tokens of plain decoding, in single and in half precision."""
    return {
        f"{model}, {dtype}, {text}": partial(compare_plain, model, dtype, text, dry)
        for dtype, model in product(("float32", "bfloat16"), IDENTICAL)
        for text in IDENTICAL[model]
    }


@cache
def _plain(model: str, dtype: str, dry: bool, exact: bool) -> tuple[Any, Any]:
    """Plain decoding, `exact` with `exact_width`; and without it the near-ties of pictures, bool [N, L]."""
    text = with_setting(settings_of_model(model).plain, "exact_width=true" if exact else "")
    pipe, setting = _pipe(model, dtype, dry), _setting(model, text)
    arrays = draws.draw(pipe, setting, _prompts(model, dry), 0)
    if exact or model != "shapes":
        return arrays, None
    tokens = torch.from_numpy(arrays["tokens"]).long().flatten(1)
    return arrays, near_ties(pipe, setting, _prompts(model, dry), tokens)


def compare_plain(model: str, dtype: str, text: str, dry: bool) -> dict[str, Any]:
    """How many samples of a setting have the tokens of plain decoding with the same dtype.

    Of pictures also: `near_ties` of `slots`, and how many of the `first_differences`, one a sample that differs, stand
    at near-ties. A difference elsewhere is a problem; so is one of a clip in float32, and any one with `exact_width`,
    which is compared with plain decoding with `exact_width`.
    """
    setting = _setting(model, text)
    if not setting.sampler.identical:
        raise ValueError(f"{text} does not promise the tokens of plain decoding")
    exact = bool(setting.sampler.config.get("exact_width"))
    plain, ties = _plain(model, dtype, dry, exact)
    fast = draws.draw(_pipe(model, dtype, dry), setting, _prompts(model, dry), 0)
    one, two = (torch.from_numpy(arrays["tokens"]).flatten(1) for arrays in (plain, fast))
    differs = one != two  # [N, L]
    changed = differs.any(1)
    found: dict[str, Any] = dict(
        samples=len(one),
        same=int((~changed).sum()),
        calls=float(fast["calls"].mean()),
        plain_calls=float(plain["calls"].mean()),
        near_ties=None,
        slots=one.numel(),
        first_differences=int(changed.sum()),
        at_near_ties=None,
    )
    elsewhere = found["first_differences"] if exact or dtype == "float32" else 0
    if ties is not None:
        first = differs.int().argmax(1)
        at = int(ties[torch.arange(len(one)), first][changed].sum())
        found |= dict(near_ties=int(ties.sum()), at_near_ties=at)
        elsewhere = found["first_differences"] - at
    if elsewhere:
        found["problem"] = f"{elsewhere} of {len(one)} samples differ at a slot that is no near-tie"
    return found


@torch.no_grad()
def near_ties(pipe: Any, setting: Setting, prompts: list[str], tokens: Tensor) -> Tensor:
    """Where the two best scores (law plus noise) of plain decoding lie closer than the dtype rounds: bool [N, L].

    See `draw_near`, which samplers count them by.

    Args:
        tokens: what plain decoding drew, long [N, L].
    """
    model, law, count = pipe.transformer, setting.law, len(prompts)
    keys = draw_keys([torch.Generator().manual_seed(setting.seed + index) for index in range(count)], count)
    noise, tokens = CounterNoise(keys, pipe.device), tokens.to(pipe.device)
    checked = CheckedLaw(law, tokens.shape[1], deferred=True)
    state = model.prefill(pipe.encode_prompt(prompts), batch_size=count, guided=law.guided, window=1)
    logits, found = state.logits[:, None], []  # [R, 1, V]
    for slot in range(tokens.shape[1]):
        here = torch.full((count, 1), slot, device=pipe.device)
        _, near = draw_near(checked, noise, logits, here, law.guided, torch.finfo(model.dtype).eps)
        found.append(near[:, 0])
        if slot + 1 < tokens.shape[1]:
            logits = model(state, tokens[:, slot : slot + 1], here)
    return torch.stack(found, 1).cpu()


# -- 4, 5: bench -------------------------------------------------------------------------------------------------------


def embedded_models(dry: bool) -> Parts:
    """`bench` of `shapes`, `shapes_var`, `tunes` beside `tunes_masked`, and `motion`."""
    if dry:
        options = [
            "--runs",
            "5",
            "--warmup",
            "0",
            "--device",
            "cpu",
            "--batch-sizes",
            "1",
            "--without-no-cache",
        ]
        samplers = {"shapes": "speculative-jacobi:window=4", "tunes": "column-jacobi:window=4"}
        return {
            f"{model}, float32, batch 1": partial(
                _bench_folder, model, ["--samplers", samplers[model], *options]
            )
            for model in samplers
        }
    parts: Parts = {}
    shapes = ["--samplers", "speculative-jacobi", "--windows", "16", "32", "64"]
    scales = ["--samplers", *(f"scale-wise:num_draft_scales={text}" for text in ("7", "all,cache_share=0.1"))]
    tunes = ["--masked", "tunes_masked", "--samplers", "column-jacobi:window=4", "drafted-columns"]
    clips = ["--samplers", "speculative-jacobi:window=128,initial_draft=previous_frame"]
    for model, samplers, dtype, batch in (
        ("shapes", shapes, "float32", 1),
        ("shapes", shapes, "bfloat16", 1),
        ("shapes", shapes, "bfloat16", 8),
        ("shapes_var", scales, "bfloat16", 1),
        ("tunes", tunes, "float32", 1),
        ("shapes", shapes, "bfloat16", 64),
        ("shapes_var", scales, "bfloat16", 64),
        ("tunes", tunes, "float32", 64),
        ("motion", clips, "float32", 1),
    ):
        options = ["--model", model, *samplers, "--dtype", dtype, "--batch-sizes", str(batch)]
        parts[f"{model}, {dtype}, batch {batch}"] = partial(_bench, [*options, "--without-no-cache"])
    return parts


def token_sizes(dry: bool) -> Parts:
    """LlamaGen-XL and Janus-Pro-7B with random weights, beside transformers' `generate` and the official loops."""
    if dry:
        gpu_tiny.add_sizes()
    windows = {1: (16, 32, 64), 8: (8, 16, 32), 64: (4, 8)}
    parts: Parts = {}
    for batch, model in product((1, 8, 64), (LLAMAGEN, JANUS)):
        options = ["--random-weights", "--samplers", "speculative-jacobi", "--slots", "16"]
        if dry:
            if batch == 1:
                options += [
                    "--model",
                    gpu_tiny.SIZES[model],
                    "--windows",
                    "2",
                    "--warmup",
                    "0",
                    "--device",
                    "cpu",
                ]
                parts[f"{model}, batch 1"] = partial(_bench_that_fits, options, 1)
            continue
        options += ["--model", model, "--dtype", "bfloat16", "--windows", *map(str, windows[batch])]
        parts[f"{model}, batch {batch}"] = partial(_bench_that_fits, options, batch)
    return parts


def other_sizes(dry: bool) -> Parts:
    """VAR-d30 with CoDe and ScaleKV, and MusicGen-medium beside transformers' `generate`, with random weights."""
    batches = (1,) if dry else (1, 8, 64)
    parts: Parts = {}
    for batch in batches:
        parts[f"{VAR}, batch {batch}"] = partial(_var, batch, dry)
        parts[f"musicgen-medium, batch {batch}"] = partial(_music, batch, dry)
    return parts


def _var(batch: int, dry: bool) -> dict[str, Any]:
    texts = ["num_draft_scales=0", "num_draft_scales=8", "num_draft_scales=6"]
    texts += ["num_draft_scales=all,cache_share=0.1", "num_draft_scales=8,cache_share=0.1"]
    options = ["--random-weights", "--samplers", *(f"scale-wise:{text}" for text in texts[: 1 if dry else 5])]
    if dry:
        gpu_tiny.add_sizes()
        options += ["--model", gpu_tiny.SIZES[VAR], "--warmup", "0", "--device", "cpu"]
    else:
        options += ["--model", VAR, "--dtype", "bfloat16"]
    return _bench_that_fits(options, batch)


def _music(batch: int, dry: bool) -> dict[str, Any]:
    device = choose_device("cpu" if dry else "cuda")
    dtype = torch.float32 if dry else torch.bfloat16
    law = TokenLaw(guidance_scale=3.0, top_k=250)
    texts = (
        ["columns", "column-jacobi:window=4"]
        if dry
        else ["columns", *(f"column-jacobi:window={w}" for w in (4, 16))]
    )
    settings = [parse_setting(text, law, 0) for text in texts]
    model = music_sizes.musicgen((1, 32, 2, 32) if dry else "medium", dtype=dtype, device=device)
    sizes: dict[str, Any] = (
        dict(runs=2, warmup=0, steps=6, frames=20) if dry else dict(runs=5, warmup=1, steps=24)
    )

    def rows(batch: int) -> dict[str, Any]:
        found = music_sizes.measure_steps(model, settings, batch_size=batch, **sizes)
        return dict(kind="music-random-weights", architecture="musicgen-medium", rows=_short(found))

    return _that_fits(rows, batch)


def latent_sizes(dry: bool) -> Parts:
    """MAR-B, L and H with random weights, by the published schedule and by two shorter ones."""
    if dry:
        return {"mar-b, batch 1": partial(_mar, gpu_tiny.MAR, 1, True)}
    # First the sizes of which one is most likely to be asked.
    return {
        f"mar-{size.lower()}, batch {batch}": partial(_mar, size, batch, False)
        for batch, size in product((1, 64, 8), "LBH")
    }


def _mar(size: str | dict[str, int], batch: int, dry: bool) -> dict[str, Any]:
    model = _mar_model(json.dumps(size), "cpu" if dry else "cuda")
    sizes: dict[str, Any] = dict(runs=1, warmup=0, sampled=2) if dry else dict(runs=3, warmup=1)
    schedules = ((4, 3),) if dry else continuous_sizes.SCHEDULES

    def rows(batch: int) -> dict[str, Any]:
        found = continuous_sizes.measure_calls(model, schedules, batch_size=batch, **sizes)
        return dict(kind="latent-random-weights", architecture=f"MAR {size}", rows=_short(found))

    return _that_fits(rows, batch)


@lru_cache(maxsize=1)
def _mar_model(size: str, device: str) -> Any:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return continuous_sizes.mar(json.loads(size), dtype=dtype, device=choose_device(device))


def speech(dry: bool) -> Parts:
    """VibeVoice-1.5B with random weights: `generate` of transformers, and the same accelerated. A token is a latent."""
    batches = (1,) if dry else (1, 8)
    return {f"vibevoice-1.5b, batch {batch}": partial(_speech, batch, dry) for batch in batches}


def _speech(batch: int, dry: bool) -> dict[str, Any]:
    dtype, device = (torch.float32, "cpu") if dry else (torch.bfloat16, "cuda")
    model = speech_sizes.vibevoice("tiny" if dry else "1.5b", dtype=dtype, device=choose_device(device))
    sizes: dict[str, Any] = (
        dict(runs=1, warmup=0, latents=3, prompt=4) if dry else dict(runs=5, warmup=1, latents=32)
    )

    def rows(batch: int) -> dict[str, Any]:
        found = speech_sizes.measure_latents(model, batch_size=batch, **sizes)
        return dict(kind="speech-random-weights", architecture="vibevoice-1.5b", rows=_short(found))

    return _that_fits(rows, batch)


def video(dry: bool) -> Parts:
    """Wan 2.1 1.3B, causal by chunks as Self-Forcing's, with random weights: a full cache and bounded ones. A token is
    a latent frame, a sample a chunk of three."""
    name = "tiny" if dry else "1.3b"
    return {f"wan-{name}-causal, batch 1": partial(_video, name, dry)}


def _video(name: str, dry: bool) -> dict[str, Any]:
    dtype, device = (torch.float32, "cpu") if dry else (torch.bfloat16, "cuda")
    size = video_sizes.SIZES[name]
    model = video_sizes.wan(size, dtype=dtype, device=choose_device(device))
    frames, chunks = (27, 1) if dry else (45, 5)
    rows = video_sizes.measure_chunks(model, size, batch_size=1, frames=frames, chunks=chunks)
    return dict(kind="video-random-weights", architecture=f"wan-{name}", rows=_short(rows), batch=1)


def _that_fits(measured: Callable[[int], dict[str, Any]], batch: int) -> dict[str, Any]:
    """What is measured with this batch, or the largest half, quarter ... of it that the device has room for."""
    while True:
        try:
            return measured(batch) | {"batch": batch}
        except (measure.DoesNotFit, torch.cuda.OutOfMemoryError):
            if batch == 1:
                raise
        torch.cuda.empty_cache()
        batch //= 2


def _bench_that_fits(options: list[str], batch: int) -> dict[str, Any]:
    """`bench` with this batch, or a smaller one that fits."""
    return _that_fits(lambda batch: _bench([*options, "--batch-sizes", str(batch)]), batch)


def _bench(options: list[str]) -> dict[str, Any]:
    """The document of `visual-spec bench`, shortened."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        bench.main([*options, "--out", str(out)])
        document = json.loads(out.read_text())
    kept = ("kind", "architecture", "left_out", "acceptance")
    return {
        **{name: document[name] for name in kept if name in document},
        "environment": document["environment"],
        "rows": _short(document["rows"]),
    }


def _short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with seconds to a millionth, and without what every row of a sampler repeats."""
    kept = []
    for row in rows:
        row = {name: value for name, value in row.items() if name not in ("law", "plan", "calls_per_round")}
        if "seconds" in row:
            row["seconds"] = [round(value, 6) for value in row["seconds"]]
        kept.append(row)
    return kept


def _bench_folder(model: str, options: list[str]) -> dict[str, Any]:
    """`bench` of the shortened model, saved."""
    with tempfile.TemporaryDirectory() as folder:
        _pipe(model, "float32", True).save_pretrained(folder)
        return _bench(["--model", folder, *options])


# -- 6: kernels --------------------------------------------------------------------------------------------------------


def kernel_bandwidth(dry: bool) -> Parts:
    """Kernels of laws and of layers beside the chains of PyTorch ops, by vocabulary, window and batch; and both ways to
    draw, by slots."""
    if dry:
        layers = partial(_layer_kernels, 2, 1, "cpu", (16, 32, 2, 3, 9))
        return {
            "vocabulary 64, window 2": partial(_kernels, 64, 2, "cpu"),
            "draws of 2 slots": partial(_draws, 64, 2, 1, "cpu"),
            "layer, window 2, batch 1": layers,
        }
    parts: Parts = {
        f"vocabulary {vocab}, window {window}": partial(_kernels, vocab, window, "cuda")
        for vocab, window in product((16384, 65536), (32, 1))
    }
    parts |= {
        f"draws of {window * batch} slots": partial(_draws, 16384, window, batch, "cuda")
        for window, batch in ((1, 1), (32, 1), (32, 64))
    }
    return parts | {
        f"layer, window {window}, batch {batch}": partial(_layer_kernels, window, batch, "cuda")
        for window, batch in ((32, 1), (1, 1), (16, 8), (1, 64))
    }


def _kernels(vocab: int, window: int, device: str) -> dict[str, Any]:
    here = choose_device(device)
    top = measure.copy_bandwidth(here, None if here.type == "cuda" else 4)
    rows = list(kernel_bench.rows(vocab, window, 1, device=here, bandwidth=top))
    return dict(copy_bandwidth=top, rows=rows)


def _draws(vocab: int, window: int, batch: int, device: str) -> dict[str, Any]:
    here = choose_device(device)
    top = measure.copy_bandwidth(here, None if here.type == "cuda" else 4)
    return dict(
        copy_bandwidth=top,
        rows=list(kernel_bench.draw_rows(vocab, window, batch, device=here, bandwidth=top)),
    )


def _layer_kernels(
    window: int, batch: int, device: str, sizes: tuple[int, ...] = kernel_bench.XL
) -> dict[str, Any]:
    here = choose_device(device)
    top = measure.copy_bandwidth(here, None if here.type == "cuda" else 4)
    rows = list(kernel_bench.layer_rows(window, batch, device=here, bandwidth=top, sizes=sizes))
    return dict(copy_bandwidth=top, rows=rows)
