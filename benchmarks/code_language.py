"""Codes a call and seconds of a causal language model of codes: music as one stream, four codes a frame in turn.

python benchmarks/code_language.py --minutes 10 --out benchmarks/results/llama-codes-cpu.json

Trains a small Llama of transformers on the codes of `tunes`, then continues held-out clips by its own `generate` and
by `visual_spec.accelerate` in turn.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from depth_window import train, tune_codes
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import visual_spec
from visual_spec.files.documents import write_json

BOOKS, CODES = 4, 512
PROMPT, NEW = 80, 240
WAYS = {
    "own generate": "",
    "plain": "autoregressive",
    "window 8": "speculative-jacobi:window=8",
    "window 32": "speculative-jacobi:window=32",
}
LAWS = {"temperature 1": {}, "temperature 0.8, top-k 50": {"temperature": 0.8, "top_k": 50}}


def small_llama() -> Any:
    config = LlamaConfig(
        vocab_size=BOOKS * CODES,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def stream_loss(model: Any, stream: Tensor) -> Tensor:
    """The loss of a batch of clips [N, T * K]."""
    ids = stream[torch.randint(len(stream), (4,))]
    return model(input_ids=ids, labels=ids).loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="of a processor for training")
    parser.add_argument("--clips", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    stream = (tune_codes(args.clips, BOOKS) + CODES * torch.arange(BOOKS)).flatten(1)
    model = small_llama()
    steps = train(model.train(), lambda: stream_loss(model, stream[:-20]), 60 * args.minutes, 1e-3)
    model.eval()
    with torch.no_grad():
        held = statistics.mean(
            float(model(input_ids=ids[None], labels=ids[None]).loss) for ids in stream[-20:]
        )
    print(f"{steps} steps, held-out nats a code: {held:.2f}", flush=True)
    rows = []
    for law, settings in LAWS.items():
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        equal = dict.fromkeys(WAYS, 0)
        for number in range(args.rounds + 1):  # the first round warms up
            prompt = stream[-20 + number % 20][None, :PROMPT]
            request: dict[str, Any] = dict(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                max_new_tokens=NEW,
                top_k=0,
            )
            plain = None
            for way, sampler in WAYS.items():
                if sampler:
                    visual_spec.accelerate(model, sampler, codes=(0, BOOKS * CODES))
                    request["generator"] = torch.Generator().manual_seed(number)
                start = time.process_time()
                drawn = model.generate(**(request | settings))
                spent = time.process_time() - start
                if sampler:
                    plain = drawn if plain is None else plain
                    equal[way] += torch.equal(drawn, plain)
                    rates[way].append(float(model.last_trace.tokens_per_call.mean()))
                    visual_spec.restore(model)
                if number:
                    seconds[way].append(1e3 * spent / NEW)
        for way, times in seconds.items():
            rate = statistics.mean(rates[way] or [1.0])
            rows.append(
                dict(law=law, way=way, codes_a_call=rate, processor_ms_a_code=times, equal=equal[way])
            )
            print(
                f"{law:26} {way:12} {rate:5.2f} codes a call, {statistics.median(times):5.2f} ms of a processor a code "
                f"({min(times):.2f} to {max(times):.2f}), {equal[way]} of {args.rounds + 1} equal to plain",
                flush=True,
            )
    if args.out:
        document = dict(steps=steps, held_out=held, minutes=args.minutes, rows=rows)
        write_json(args.out, document, indent=1)


if __name__ == "__main__":
    main()
