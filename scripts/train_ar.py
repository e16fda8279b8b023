"""Train the embedded LlamaGen and caption encoder: `python scripts/train_ar.py --tokenizer FOLDER --out FOLDER`.

Afterwards `--out` holds `transformer/`, `text_encoder/` and `training.json`; `scripts/assemble_shapes.py` joins the
parts to a pipeline.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.training.ar import (
    AutoregressiveTraining,
    initialise,
    shapes_vocabulary,
    train_autoregressive,
)


def main() -> None:
    defaults = AutoregressiveTraining()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="folder that scripts/train_tokenizer.py wrote"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--scenes", type=int, default=defaults.scenes)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument(
        "--hidden-pictures",
        type=float,
        default=defaults.hidden_pictures,
        help="share of pictures with hidden input tokens; 0 to go on from weights that hear the caption",
    )
    parser.add_argument(
        "--grid-size", type=int, default=16, help="tokens per side; 8 for the low-resolution drafter"
    )
    parser.add_argument(
        "--text-encoder", type=Path, help="a trained text encoder to keep as it is; default: train one"
    )
    parser.add_argument(
        "--start-from", type=Path, help="folder with transformer/ and text_encoder/ to start from"
    )
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--bfloat16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    vq_model = VQModel.from_pretrained(arguments.tokenizer).eval().to(arguments.device)
    if arguments.text_encoder is None:
        encoder = CaptionEncoder(shapes_vocabulary(), dim=128, num_layers=0, num_heads=4, max_words=20)
    else:
        encoder = CaptionEncoder.from_pretrained(arguments.text_encoder)
    model = LlamaGenTransformer(
        vocab_size=vq_model.config["codebook_size"],
        dim=arguments.dim,
        num_layers=arguments.num_layers,
        num_heads=arguments.num_heads,
        grid_size=arguments.grid_size,
        prefix_length=encoder.max_words,
        num_classes=None,
        caption_dim=encoder.config["dim"],
        zero_prefix_keys=False,
    )
    initialise(model)
    if arguments.start_from is not None:
        encoder.load_state_dict(
            CaptionEncoder.from_pretrained(arguments.start_from / "text_encoder").state_dict()
        )
        model.load_state_dict(
            LlamaGenTransformer.from_pretrained(arguments.start_from / "transformer").state_dict()
        )
    settings = AutoregressiveTraining(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        scenes=arguments.scenes,
        learning_rate=arguments.learning_rate,
        hidden_pictures=arguments.hidden_pictures,
        train_text_encoder=arguments.text_encoder is None,
        bfloat16=arguments.bfloat16,
        compile=not arguments.no_compile,
        seed=arguments.seed,
    )
    model.to(arguments.device)
    encoder.to(arguments.device)
    record = train_autoregressive(model, encoder, vq_model, settings, arguments.out)
    print(
        f"{record['parameters'] / 1e6:.2f} M parameters, held-out loss {record['held_out_loss']}, {record['seconds']} s"
    )


if __name__ == "__main__":
    main()
