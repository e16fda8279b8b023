"""Time models of official size that `visual-spec bench` does not time, and profile a call. Weights are random.

python -m benchmarks.sizes music --size medium --batch 8       MusicGen: milliseconds a step
python -m benchmarks.sizes speech --size 1.5b                  VibeVoice: milliseconds a latent
python -m benchmarks.sizes video --size 1.3b                   causal Wan: milliseconds a chunk, by cache
python -m benchmarks.sizes profile --size janus-pro-7b --sampler speculative-jacobi:window=32,graph=true
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.sizes import models
from benchmarks.sizes import music as music_sizes
from benchmarks.sizes import speech as speech_sizes
from benchmarks.sizes import video as video_sizes
from benchmarks.sizes.call_profile import profile_calls
from benchmarks.sizes.next_token import Middle
from visual_spec.eval.machine import environment
from visual_spec.eval.settings import parse_setting
from visual_spec.files.documents import json_text, write_json
from visual_spec.pipelines.placing import choose_device
from visual_spec.samplers.core.law import TokenLaw

Rows = list[dict[str, Any]]


def music(size: str, args: argparse.Namespace, where: dict[str, Any]) -> Rows:
    """Steps in the middle of a clip, of `generate` of transformers and of our samplers."""
    law = TokenLaw(guidance_scale=3.0, top_k=250)
    texts = ("columns", "column-jacobi:window=4", "column-jacobi:window=16")
    settings = [parse_setting(text, law, 0) for text in texts]
    model = music_sizes.musicgen(size, **where)
    rounds = dict(runs=args.runs, warmup=1, steps=24)
    return music_sizes.measure_steps(model, settings, batch_size=args.batch, **rounds, report=print)


def speech(size: str, args: argparse.Namespace, where: dict[str, Any]) -> Rows:
    """Latents of `generate` of transformers, and of the same `generate` accelerated."""
    model = speech_sizes.vibevoice(size, **where)
    rounds = dict(runs=args.runs, warmup=1, latents=32)
    return speech_sizes.measure_latents(model, batch_size=args.batch, **rounds, report=print)


def video(size: str, args: argparse.Namespace, where: dict[str, Any]) -> Rows:
    """The last five chunks of a clip of 45 latent frames, by the policy of the cache."""
    sizes, model = video_sizes.SIZES[size], video_sizes.wan(size, **where)
    rounds: dict[str, Any] = dict(frames=45, chunks=5)
    return video_sizes.measure_chunks(model, sizes, batch_size=args.batch, **rounds, report=print)


@torch.no_grad()
def profile(size: str, args: argparse.Namespace, where: dict[str, Any]) -> Rows:
    """Kernels, gaps and the longest kernels of a call of a next-token model, by PyTorch's profiler."""
    official = models.official_model(size)
    models.fill(official, **where)
    law = TokenLaw(guidance_scale=official.guidance_scale, top_k=official.top_k)
    setting, middle = parse_setting(args.sampler, law, 0), Middle(official.model, 16)
    condition = official.condition(args.batch)

    def decode(callback: Callable[[int, Tensor], Any]) -> None:
        options: dict[str, Any] = dict(law=law, batch_size=args.batch, callback=callback)
        setting.sampler(middle, condition, generator=torch.Generator().manual_seed(0), **options)

    decode(lambda index, lengths: None)  # compiles and records
    return [dict(name=args.sampler, batch_size=args.batch) | profile_calls(decode, where["device"])]


KINDS = {"music": (music, "medium"), "speech": (speech, "1.5b"), "video": (video, "1.3b")}
KINDS |= {"profile": (profile, "llamagen-xl-t2i")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--size", help="of the model (default: the one of the lines above)")
    parser.add_argument("--sampler", default="autoregressive", metavar="S", help="of `profile`")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5, help="timed rounds of music and speech")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a JSON document here")
    args = parser.parse_args()
    measure, size = KINDS[args.kind]
    where: dict[str, Any] = dict(device=choose_device(args.device), dtype=getattr(torch, args.dtype))
    rows = measure(args.size or size, args, where)
    document = dict(kind=args.kind, size=args.size or size, environment=environment(**where), rows=rows)
    for row in rows:
        print(json_text({name: value for name, value in row.items() if name not in ("seconds", "top")}))
    if args.out is not None:
        write_json(args.out, document, indent=1)


if __name__ == "__main__":
    main()
