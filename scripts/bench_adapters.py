"""What an adapter adds to a bare forward of transformers with its StaticCache: milliseconds a step, side by side.

    taskset -c 1 python scripts/bench_adapters.py [--layers 12] [--hidden 640] [--steps 60]

Both sides run one random decoder and the image rows of its head on one thread, and take turns step by step. Processor
time is counted, so that other work on the machine does not count. The bare side is a step of transformers' own loop,
without choosing a token.
"""

import argparse
import logging
import time
from typing import Any

import torch
import transformers as hf
from transformers import StaticCache

from visual_spec.models.core.transformers_cache import CACHE, ImagePrompt, Prompt
from visual_spec.models.next_token.cached_decoder import CachedDecoder
from visual_spec.models.next_token.chameleon import ChameleonImageModel
from visual_spec.models.next_token.emu3 import Emu3ImageModel
from visual_spec.models.next_token.glm_image import GlmImageStage
from visual_spec.models.next_token.janus import JanusImageModel

CODES, SIDE = 1024, 16
VQ = dict(base_channels=32, latent_channels=32, channel_multiplier=[1, 1], num_res_blocks=1)
SPECIAL = {"<image>": 8, "<racm3:break>": 9, "<eoss>": 10, "<reserved08799>": 11, "<reserved08808>": 12}
SPECIAL |= {"<|extra_200|>": 9, "<|extra_201|>": 10, "<|image end|>": 11}


def image_model(family: str, hidden: int, layers: int) -> CachedDecoder:
    """The adapter of a family around a random decoder of this size, 16 x 16 tokens out of 1024."""
    torch.manual_seed(0)
    heads = hidden // 64
    text: dict[str, Any] = dict(
        hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers
    )
    text |= dict(vocab_size=2048, num_attention_heads=heads, num_key_value_heads=heads)
    text |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if family == "Janus":
        vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=64, patch_size=4)
        config = hf.JanusConfig(
            text_config=dict(model_type="llama", **text),
            vision_config=dict(projection_dim=hidden, num_image_tokens=SIDE * SIDE, **vision),
            vq_config=dict(
                num_embeddings=CODES,
                projection_dim=hidden,
                image_token_embed_dim=hidden,
                num_patches=SIDE,
                **VQ,
            ),
        )
        return JanusImageModel(hf.JanusForConditionalGeneration(config).eval())
    if family == "Lumina-mGPT":
        words = ["".join(chr(ord("A") + int(digit)) for digit in str(code)) for code in range(CODES)]
        names = SPECIAL | {f"IMGIMG{word}Z": 20 + code for code, word in enumerate(words)}
        config = hf.ChameleonConfig(vocabulary_map=names, vq_config=dict(num_embeddings=CODES, **VQ), **text)
        return ChameleonImageModel(hf.ChameleonForConditionalGeneration(config).eval(), (SIDE, SIDE))
    if family == "Emu3":
        names = SPECIAL | {f"<|visual token {code:06d}|>": 20 + code for code in range(CODES)}
        config = hf.Emu3Config(
            text_config=text, vq_config=dict(codebook_size=CODES, hidden_size=32, **VQ), vocabulary_map=names
        )
        return Emu3ImageModel(hf.Emu3ForConditionalGeneration(config).eval(), SIDE, SIDE)
    rotary = dict(rope_type="default", rope_theta=1e4, mrope_section=[12, 10, 10], partial_rotary_factor=1.0)
    config = hf.GlmImageConfig(
        text_config=dict(vision_vocab_size=CODES + 8, rope_parameters=rotary, **text),
        vision_config=dict(depth=1, hidden_size=32, num_heads=4, patch_size=8, intermediate_size=64),
        vq_config=dict(embed_dim=16, num_embeddings=CODES, latent_channels=32),
    )
    return GlmImageStage(hf.GlmImageForConditionalGeneration(config).eval(), SIDE, SIDE)


@torch.no_grad()
def compare(model: CachedDecoder, *, batch: int, width: int, steps: int) -> tuple[float, float]:
    """Median milliseconds (processor time) of a step of `width` tokens: of the bare forward, and of the adapter."""
    length, times = 32, torch.zeros(2, steps)
    prompt = Prompt(torch.randint(12, 20, (batch, length)), torch.ones(batch, length))
    state = model.prefill(ImagePrompt(prompt), batch_size=batch, guided=False, window=width)
    static: Any = StaticCache(config=model.decoder.config, max_cache_len=length + model.length + width)
    held = {CACHE: static}
    model.decoder(inputs_embeds=model.table(prompt.ids), use_cache=True, **held)
    for step in range(steps):
        first = step * (SIDE * SIDE - width) // steps  # over the whole picture: its later steps read more
        tokens, slots = torch.randint(0, CODES, (batch, width)), first + torch.arange(width).expand(batch, -1)
        for layer in static.layers:
            layer.cumulative_length.fill_(length + first)
        start = time.thread_time()
        hidden = model.decoder(inputs_embeds=model.embed(tokens), use_cache=True, **held)
        model.score(hidden.last_hidden_state)
        middle = time.thread_time()
        model(state, tokens, slots)
        times[:, step] = torch.tensor([middle - start, time.thread_time() - middle])
    bare, ours = 1e3 * times[:, steps // 10 :].median(1).values  # the first steps warm up
    return float(bare), float(ours)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in [("layers", 12), ("hidden", 640), ("steps", 60)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(f"{'family':12s} {'batch':>5s} {'window':>6s} {'bare ms':>8s} {'adapter ms':>10s} {'overhead':>8s}")
    for family in ("Janus", "Lumina-mGPT", "Emu3", "GLM-Image"):
        model = image_model(family, args.hidden, args.layers)
        for batch, width in [(1, 1), (1, 16), (4, 1), (4, 16)]:
            bare, ours = compare(model, batch=batch, width=width, steps=args.steps)
            print(
                f"{family:12s} {batch:5d} {width:6d} {bare:8.1f} {ours:10.1f} {ours / bare - 1:+8.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
