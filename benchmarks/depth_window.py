"""Codes a call and seconds of a window inside the frames of a trained CSM, beside its own `generate` and static frames.

python benchmarks/depth_window.py --minutes 15 --out benchmarks/results/csm-depth-window.json

No trained CSM is embedded. This trains a small one (transformers' own class and loss) on the music of `tunes`: 8 codes
a frame, the codec's 4 and 4 more of its residual by k-means. Then each way continues the same held-out clips, in turn.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CsmConfig, CsmForConditionalGeneration, EncodecModel

import visual_spec
from visual_spec.files.documents import write_json
from visual_spec.models.core.kmeans import k_means
from visual_spec.training.tokens import sample_tunes

BOOKS, CODES, END = 8, 512, 512
PROMPT, FRAMES = 20, 60
WAYS = {
    "own generate": "",
    "static frames": None,
    "window": "depth-window",
    "window of 3": "depth-window:window=3",
}
LAWS = {
    "temperature 1": {},
    "temperature 0.9, top-k 50": {"temperature": 0.9, "top_k": 50},
    "greedy": {"do_sample": False},
}


@torch.no_grad()
def tune_codes(clips: int, number_of_books: int = BOOKS) -> Tensor:
    """Codes of clips of music, [clips, frames, books]."""
    codec: Any = EncodecModel.from_pretrained("weights/visual_spec_models/tunes/codec").float().eval()
    latents = [
        codec.encoder(part[:, None].float())
        for start in range(0, clips, 100)
        for part in torch.from_numpy(sample_tunes(min(100, clips - start), 7 + start)[1]).split(20)
    ]
    latent = torch.cat(latents).transpose(1, 2)
    rest, codes = latent.flatten(0, 1), []
    books: list[Tensor] = [layer.codebook.embed for layer in codec.quantizer.layers]
    for number in range(number_of_books):
        if number == len(books):
            shuffled = rest[torch.randperm(len(rest))]
            books.append(k_means(shuffled[:5000], shuffled[:CODES].clone(), 3)[0])
        nearest = torch.cat([torch.cdist(part, books[number]).argmin(1) for part in rest.split(4000)])
        codes.append(nearest)
        rest = rest - books[number][nearest]
    return torch.stack(codes, 1).view(*latent.shape[:2], number_of_books)


def small_csm() -> Any:
    sizes: dict[str, Any] = dict(
        num_attention_heads=4, num_key_value_heads=4, num_codebooks=BOOKS, vocab_size=CODES + 2
    )
    depth = dict(sizes, num_hidden_layers=1, hidden_size=128, intermediate_size=512, backbone_hidden_size=160)
    return CsmForConditionalGeneration(
        CsmConfig(
            text_vocab_size=8,
            hidden_size=160,
            intermediate_size=640,
            num_hidden_layers=2,
            depth_decoder_config=dict(depth, max_position_embeddings=BOOKS + 1),
            pad_token_id=1,
            codebook_pad_token_id=CODES + 1,
            codebook_eos_token_id=END,
            bos_token_id=2,
            audio_token_id=3,
            audio_eos_token_id=4,
            **sizes,
        )
    )


def train(model: Any, loss_of: Callable[[], Tensor], seconds: float, rate: float) -> int:
    """Train for so many seconds of a processor; returns the steps."""
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.02)
    start, step = time.process_time(), 0
    while (spent := time.process_time() - start) < seconds:
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, step / 30) * (1 - 0.95 * spent / seconds)
        loss = loss_of()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 200 == 0:
            print(step, round(spent), round(float(loss.detach()), 3), flush=True)
    return step


def frame_loss(model: Any, codes: Tensor) -> Tensor:
    """The loss of a batch of clips [N, T, K]; the depth decoder learns some of their frames."""
    batch = codes[torch.randint(len(codes), (2,))]
    labels = batch.clone()
    labels[..., 1:][torch.rand(labels.shape[:2]) > 0.4] = -100
    return model(input_ids=batch, labels=labels).loss


def continued(model: Any, prompts: Tensor, law: dict[str, Any], seed: int) -> tuple[Tensor, float]:
    """Codes of clips that go on, and seconds."""
    torch.manual_seed(seed)
    depth = {f"depth_decoder_{name}": value for name, value in ({"do_sample": True} | law).items()}
    start = time.perf_counter()
    codes = model.generate(input_ids=prompts, max_new_tokens=FRAMES, do_sample=True, **depth)
    return codes, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15, help="of a processor for training")
    parser.add_argument("--clips", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    codes, model = tune_codes(args.clips), small_csm()
    steps = train(model.train(), lambda: frame_loss(model, codes[:-20]), 60 * args.minutes, 2e-3)
    model.eval()
    with torch.no_grad():
        held = [
            float(model(input_ids=clip[None], labels=clip[None]).depth_decoder_loss) for clip in codes[-20:]
        ]
    print(
        f"{steps} steps, held-out nats a code of the depth decoder: {sum(held) / len(held):.2f}", flush=True
    )
    rows = []
    for law, settings in LAWS.items():
        for batch in (1, 4):
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            equal = dict.fromkeys(WAYS, 0)
            for number in range(args.rounds + 1):  # the first round warms up
                prompts = codes[-20 + number * batch % 16 :][:batch, :PROMPT]
                drawn = {}
                for way, sampler in WAYS.items():
                    if sampler != "":
                        visual_spec.accelerate(model, sampler)
                    drawn[way], spent = continued(model, prompts, settings, number)
                    if sampler != "":
                        trace = model.last_trace
                        rates[way].append(trace.frames * trace.codes / trace.calls)
                        visual_spec.restore(model)
                    equal[way] += torch.equal(drawn[way], drawn["own generate"])
                    if number:
                        seconds[way].append(1e3 * spent / FRAMES)
            for way in WAYS:
                times = sorted(seconds[way])
                rate = sum(rates[way]) / max(1, len(rates[way]))
                rows.append(
                    dict(
                        law=law,
                        batch=batch,
                        way=way,
                        codes_a_call=round(rate, 2),
                        ms_a_frame=times,
                        equal=equal[way],
                    )
                )
                print(
                    f"{law:28} batch {batch} {way:14} {rate:5.2f} codes a call, {times[len(times) // 2]:6.1f} ms a "
                    f"frame ({times[0]:.1f}-{times[-1]:.1f}), equal {equal[way]} of {args.rounds + 1}",
                    flush=True,
                )
    if args.out:
        document = dict(steps=steps, held_out=sum(held) / len(held), minutes=args.minutes, rows=rows)
        write_json(args.out, document, indent=1)


if __name__ == "__main__":
    main()
