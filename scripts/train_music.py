"""Train an embedded music model: `python scripts/train_music.py --kind masked --codec FOLDER --out FOLDER`.

Afterwards `--out` holds `transformer/`, `text_encoder/` and `training.json`. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import EncodecModel, MusicgenForCausalLM

from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.training.music import (
    KINDS,
    MusicTraining,
    initialise,
    music_config,
    train_music,
    tunes_vocabulary,
)


def main() -> None:
    defaults = MusicTraining()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default=defaults.kind)
    parser.add_argument("--codec", type=Path, required=True, help="folder that scripts/train_codec.py wrote")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--clips", type=int, default=defaults.clips)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument(
        "--hidden-clips",
        type=float,
        default=defaults.hidden_clips,
        help="share of clips with hidden input steps (autoregressive); 0 to go on from weights that hear the caption",
    )
    parser.add_argument(
        "--text-encoder", type=Path, help="a trained text encoder to keep as it is; default: train one"
    )
    parser.add_argument(
        "--start-from", type=Path, help="folder with transformer/ and text_encoder/ to start from"
    )
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--bfloat16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    codec = EncodecModel.from_pretrained(arguments.codec, dtype=torch.float32).eval().to(arguments.device)
    if arguments.start_from is not None:
        model = MusicgenForCausalLM.from_pretrained(arguments.start_from / "transformer", dtype=torch.float32)
    else:
        size = (arguments.dim, arguments.num_layers, arguments.num_heads)
        model = MusicgenForCausalLM(
            music_config(codec.config.codebook_size, codec.config.num_quantizers, *size)
        )
        initialise(model)
    kept = arguments.text_encoder or (arguments.start_from and arguments.start_from / "text_encoder")
    if kept:
        encoder = CaptionEncoder.from_pretrained(kept)
    else:
        width = model.config.hidden_size
        encoder = CaptionEncoder(tunes_vocabulary(), dim=width, num_layers=1, num_heads=4, max_words=20)
    names = (
        "kind",
        "steps",
        "batch_size",
        "clips",
        "learning_rate",
        "hidden_clips",
        "bfloat16",
        "compile",
        "seed",
    )
    settings = MusicTraining(
        **{name: getattr(arguments, name) for name in names},
        train_text_encoder=arguments.text_encoder is None,
    )
    record = train_music(
        model.to(arguments.device), encoder.to(arguments.device), codec, settings, arguments.out
    )
    print(
        f"{record['parameters'] / 1e6:.2f} M parameters, held-out loss {record['held_out_loss']}, {record['seconds']} s"
    )


if __name__ == "__main__":
    main()
