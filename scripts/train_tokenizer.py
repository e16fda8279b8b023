"""Train the embedded VQ tokenizer on procedural shapes: `python scripts/train_tokenizer.py --out FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.training.tokenizer import TokenizerTraining, train_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--steps", type=int, default=TokenizerTraining.steps)
    parser.add_argument("--batch-size", type=int, default=TokenizerTraining.batch_size)
    parser.add_argument("--codebook-size", type=int, default=1024)
    parser.add_argument("--base-channels", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = VQModel(
        base_channels=arguments.base_channels,
        channel_multipliers=(1, 2, 4, 8),
        blocks_per_level=1,
        latent_channels=64,
        codebook_size=arguments.codebook_size,
        codebook_dim=8,
        norm_groups=None,
        image_size=128,
    )
    settings = TokenizerTraining(steps=arguments.steps, batch_size=arguments.batch_size, seed=arguments.seed)
    record = train_tokenizer(model, settings, arguments.out)
    print(f"PSNR {record['psnr_db']} dB, {record['codes_used']} codes in use, {record['seconds']} s")


if __name__ == "__main__":
    main()
