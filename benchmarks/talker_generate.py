"""Seconds of Qwen2.5-Omni's talker by its own `generate` and by `accelerate`, in turn, and those to its first code.

python benchmarks/talker_generate.py --codes 150 --rounds 5 --out FILE

Random weights in the layout of the released talker, at a small size; the released law. Codes must be equal.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniTalkerConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniTalkerForConditionalGeneration

import visual_spec
from visual_spec.eval.machine import environment
from visual_spec.files.documents import write_json

WAYS = {"own generate": "", "accelerated, plain": "autoregressive", "accelerated, default": None}
LAW: dict[str, Any] = dict(
    do_sample=True, top_k=40, top_p=0.8, temperature=0.9, repetition_penalty=1.05, suppress_tokens=[8293],
    eos_token_id=[8292, 8294], pad_token_id=8292,
)  # fmt: skip


class FirstCode:
    """Notes the time at which the first code after the prompt is handed on."""

    def __init__(self) -> None:
        self.puts: list[float] = []

    def put(self, codes: Tensor) -> None:
        self.puts.append(time.process_time())

    def end(self) -> None:
        pass


def random_talker(layers: int, width: int) -> Any:
    config = Qwen2_5OmniTalkerConfig(
        embedding_size=width, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, head_dim=64,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 8, 8]),
    )  # fmt: skip
    return Qwen2_5OmniTalkerForConditionalGeneration(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--codes", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    talker = random_talker(args.layers, args.width)
    ids = torch.tensor([[8296] * 38 + [8292, 8293]])
    reply, embeds = torch.randn(1, 30, args.width) / 10, torch.randn(1, 40, args.width) / 10
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    first: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(args.rounds + 1):  # the first round warms up
        drawn = []
        for way, sampler in WAYS.items():
            if sampler != "":
                visual_spec.accelerate(talker, sampler)
            torch.manual_seed(number)
            heard, start = FirstCode(), time.process_time()
            inputs = dict(input_ids=ids, input_text_ids=ids, thinker_reply_part=reply)
            inputs |= dict(inputs_embeds=embeds.clone(), attention_mask=torch.ones_like(ids), streamer=heard)
            drawn.append(talker.generate(**inputs, **LAW, max_new_tokens=args.codes))
            if number:
                seconds[way].append(time.process_time() - start)
                first[way].append(heard.puts[1] - start)  # the prompt is put first
            visual_spec.restore(talker)
        assert all(torch.equal(one, drawn[0]) for one in drawn)
    for way in WAYS:
        times, begin = seconds[way], statistics.median(first[way])
        print(
            f"{way:22} {statistics.median(times):.2f} s of a processor ({min(times):.2f} to {max(times):.2f}), "
            f"first code after {begin:.3f} s",
            flush=True,
        )
    if args.out:
        machine = environment(torch.device("cpu"), torch.float32)
        write_json(args.out, dict(environment=machine, seconds=seconds, first_code=first), indent=1)


if __name__ == "__main__":
    main()
