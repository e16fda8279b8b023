"""`visual-spec convert`: a folder of official files."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from visual_spec import families
from visual_spec.commands.options import WEIGHTS, add, at_least
from visual_spec.files.documents import json_text

_DESCRIPTION = """Make a folder, which from_pretrained loads, of official files.

    visual-spec convert t2i_XL_stage2_512.pt vq_ds16_t2i.pt --text-encoder google/flan-t5-xl --out llamagen
    visual-spec convert var_d16.pth vae_ch160v4096z32.pth --out var

{}
"""


# fmt: off
_OPTIONS = dict(
    out=dict(type=Path, required=True, metavar="DIR", help="folder for from_pretrained"),
    text_encoder=dict(metavar="DIR",
                      help="folder or Hub id of flan-t5-xl, to be copied too; of MusicGen its T5 (t5-base)"),
    image_size=dict(type=at_least(1), metavar="N", help="pixels (default: what the file or its name says)"),
    dtype=dict(choices=WEIGHTS, help="of the weights written (default: as in the files)"),
)
# fmt: on


def add_convert(commands: argparse._SubParsersAction) -> None:
    official = ", ".join(family.name for family in families.all_families() if family.layout)
    convert = commands.add_parser(
        "convert",
        help="make a folder of official files",
        description=_DESCRIPTION.format(
            textwrap.fill(f"Of one of: {official}; MusicGen of audiocraft.", 100)
        ),
    )
    convert.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a transformer (of Infinity 8B its folder), its tokenizer, or both in any order; of VAR also a smaller "
        "transformer, for CoDe, and of MAR one that drafts; or Self-Forcing's transformer; or the folder of a MusicGen "
        "of audiocraft; a student of LlamaGen also takes the LlamaGen that taught it",
    )
    add(convert, **_OPTIONS)
    add(convert, "overwrite", "json")
    convert.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, and say what each file was."""
    for file in args.files:
        if not file.exists():
            raise FileNotFoundError(f"there is no file {file}")
    import torch
    from diffusers.utils import logging

    from visual_spec.pipelines.convert import convert

    logging.disable_progress_bar()
    facts = convert(
        args.files,
        args.out,
        text_encoder=args.text_encoder,
        image_size=args.image_size,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        overwrite=args.overwrite,
    )
    for file, architecture in facts["files"].items():
        print(f"{file}: {architecture}, every key accounted for")
    counts = ", ".join(f"{name} {count / 1e6:.1f}M" for name, count in facts["parameters"].items())
    print(f"wrote {facts['folder']} ({counts}); load it with {facts['class']}.from_pretrained")
    if args.json:
        print(json_text(facts))
    return 0
