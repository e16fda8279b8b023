"""Train the embedded masked model: `python scripts/train_shapes_masked.py --shapes FOLDER --out FOLDER`.

Tokenizer and caption encoder are those of `shapes`, and do not change. Afterwards `--out` holds the weights and
`training.json`, with the loss curve, the held-out loss, and the accuracy of pictures of held-out prompts under several
samplers and guidance scales. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from visual_spec.data.shapes import held_out_prompts
from visual_spec.data.shapes_parser import score
from visual_spec.eval.quality.accuracy import summarise
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked import MaskedSampler
from visual_spec.training.loop import write_json
from visual_spec.training.mar import round_matrices
from visual_spec.training.masked_image import MaskedImageTraining, new_model, train_masked_image
from visual_spec.training.var_tokenizer import to_pixels

SAMPLERS: dict[str, dict[str, Any]] = {
    "confidence": {},
    "confidence, noise 1": {"choice_temperature": 1.0},
    "confidence, noise 4.5": {"choice_temperature": 4.5},
    "halton": {"schedule": "arccos", "score": "halton"},
}


@torch.no_grad()
def judge(parts: tuple, prompts: list[str], sampler: MaskedSampler, guidance: float) -> dict[str, Any]:
    """Accuracy of one picture for each prompt; `parts` are the model, the caption encoder and the tokenizer."""
    (model, encoder, vq_model), hits = parts, []
    for start in range(0, len(prompts), 50):
        some, seed = prompts[start : start + 50], torch.Generator().manual_seed(1000 + start)
        law = TokenLaw(guidance_scale=guidance)
        found = sampler(model, encoder(some), batch_size=len(some), law=law, generator=seed)
        pictures = to_pixels(vq_model.decode_tokens(found.tokens).cpu())
        hits += [score(prompt, picture) for prompt, picture in zip(some, pictures, strict=True)]
    return summarise(hits)


def main() -> None:
    defaults = MaskedImageTraining()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=Path, required=True, help="folder with vq_model/ and text_encoder/")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and training.json")
    for name in ("steps", "batch_size", "scenes", "learning_rate", "seed"):
        value = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--num-heads", type=int, default=6)
    parser.add_argument("--bfloat16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--workers", type=int, default=1, help="processes that paint the scenes")
    parser.add_argument("--eight-bits", action="store_true", help="store matrices in 8 bits, and judge them")
    parser.add_argument("--judged-prompts", type=int, default=200, help="held-out prompts; 0: none")
    parser.add_argument("--judged-steps", type=int, default=16, help="calls of a picture")
    parser.add_argument("--guidance-scale", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0])
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    vq_model: Any = VQModel.from_pretrained(given.shapes / "vq_model", torch_dtype=torch.float32)
    encoder: Any = CaptionEncoder.from_pretrained(given.shapes / "text_encoder", torch_dtype=torch.float32)
    vq_model, encoder = vq_model.eval().to(given.device), encoder.eval().to(given.device)
    size = {name: getattr(given, name) for name in ("dim", "num_layers", "num_heads")}
    model: Any = new_model(vq_model, encoder, **size).to(given.device)
    names = ("steps", "batch_size", "scenes", "learning_rate", "bfloat16", "compile", "seed")
    settings = MaskedImageTraining(**{name: getattr(given, name) for name in names})
    record = train_masked_image(model, encoder, vq_model, settings, given.out, workers=given.workers)
    if given.eight_bits:
        round_matrices(model, given.out)
    prompts, accuracy = held_out_prompts(given.judged_prompts), {}
    for name, parts in SAMPLERS.items() if prompts else ():
        sampler = MaskedSampler(steps=given.judged_steps, **parts)
        for guidance in given.guidance_scale:
            found = judge((model, encoder, vq_model), prompts, sampler, guidance)
            accuracy[f"{name}, {given.judged_steps} steps, guidance {guidance:g}"] = found
            shares = {part: round(found[part]["value"], 3) for part in ("all_correct", "mean_attribute")}
            print(name, guidance, shares, flush=True)
    write_json(given.out / "training.json", record | {"prompt_accuracy": accuracy})
    print(f"{record['parameters'] / 1e6:.2f} M parameters, held-out loss {record['held_out_loss']}")


if __name__ == "__main__":
    main()
