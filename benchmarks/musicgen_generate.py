"""Time of a frame of MusicGen by transformers' own `generate`, and by the plain path of `accelerate`.

python benchmarks/musicgen_generate.py --frames 50 --rounds 5 --out benchmarks/results/musicgen-generate-cpu.json

Random weights, guidance 3, sampled; the two alternate. "small" has the sizes of facebook/musicgen-small.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EncodecConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    T5Config,
)

import visual_spec
from visual_spec.files.documents import write_json

# Layers, width, heads.
SIZES = {"4 layers of 256": (4, 256, 4), "12 layers of 512": (12, 512, 8), "small": (24, 1024, 16)}


def random_musicgen(layers: int, width: int, heads: int) -> Any:
    decoder = MusicgenDecoderConfig(
        num_hidden_layers=layers, hidden_size=width, ffn_dim=4 * width, num_attention_heads=heads
    )
    text = T5Config(vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    codec = EncodecConfig(
        num_filters=4,
        hidden_size=128,
        codebook_size=2048,
        sampling_rate=32000,
        upsampling_ratios=[8, 5, 4, 4],
        target_bandwidths=[2.2],
    )
    config = MusicgenConfig(
        text_encoder=text.to_dict(), audio_encoder=codec.to_dict(), decoder=decoder.to_dict()
    )
    return MusicgenForConditionalGeneration(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    ids = torch.arange(5, 17)[None]
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, guidance_scale=3.0)
    rows = []
    for size, sizes in SIZES.items():
        model = random_musicgen(*sizes)
        ways = {"own generate": model.generate, "accelerated, plain": None}
        processor: dict[str, list[float]] = {way: [] for way in ways}
        wall: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(args.rounds + 1):  # the first round warms up
            for way in ways:
                if way != "own generate":
                    visual_spec.accelerate(model, "columns")
                start = time.process_time(), time.perf_counter()
                model.generate(**inputs, max_new_tokens=args.frames)
                if number:
                    processor[way].append(1e3 * (time.process_time() - start[0]) / args.frames)
                    wall[way].append(1e3 * (time.perf_counter() - start[1]) / args.frames)
                visual_spec.restore(model)
        ratios = [own / ours for own, ours in zip(*processor.values(), strict=True)]
        rows.append(dict(size=size, processor_ms_a_frame=processor, wall_ms_a_frame=wall, ratios=ratios))
        medians = ", ".join(f"{way} {statistics.median(times):.1f} ms" for way, times in processor.items())
        print(
            f"{size}: {medians} of a processor a frame; {statistics.median(ratios):.2f}x ({min(ratios):.2f} to "
            f"{max(ratios):.2f})",
            flush=True,
        )
    if args.out:
        write_json(args.out, dict(rows=rows), indent=1)


if __name__ == "__main__":
    main()
