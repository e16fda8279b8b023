"""The options of `visual-spec generate`; `drawing` runs it."""

from __future__ import annotations

import argparse
from pathlib import Path

from visual_spec.commands.options import WEIGHTS, add, at_least
from visual_spec.models.core.settings import LAW_SETTINGS
from visual_spec.samplers.registry import names

_DESCRIPTION = """Draw pictures or clips, or play music, from prompts.

    visual-spec generate "a fox left of a pizza on a mint background"
    visual-spec generate "a castle on a sky background" --compare --sampler speculative-jacobi:window=16 --out castle
    visual-spec generate "a slow sad organ melody in A minor" --music

With --compare every sample is drawn plainly, too; the command says whether both are equal, and writes a page that shows
them. `visual-spec models NAME` says which samplers fit a model, and the settings of a sampler.
"""
# fmt: off
# Short flags of `generate`: medium and model, or the setting of the sampler that they stand for; name of a value; help.
_ALIASES: tuple[tuple[str, str | tuple[str, str], str | None, str], ...] = (
    ("--music", ("audio", "tunes"), None, "short for --model tunes, unless a model is named"),
    ("--video", ("video", "motion"), None, "short for --model motion, unless a model is named"),
    ("--window", "window", "W", "slots that one target call scores; short for --sampler :window=W, as the next ones"),
    ("--coupling", "coupling", "NAME", "gumbel | independent | maximal"),
    ("--acceptance", "acceptance", "NAME", "identical (same tokens as plain) | exact (same law)"),
    ("--initial-draft", "initial_draft", "NAME", "first draft of a slot, before any call scores it"),
)

# The other options, by group.
_OUTPUT = dict(
    model=dict(help="embedded name, folder, or Hub id; it says whether pictures, clips or music are made (default: "
               "things, or shapes where that knows more of the words)"),
    out=dict(type=Path, default=Path("visual-spec-out"), metavar="DIR", help="folder of what is drawn"),
    num_images=dict(type=at_least(1), default=1, metavar="N", help="pictures per prompt"),
    batch_size=dict(type=at_least(1), default=8, metavar="N", help="pictures decoded together"),
    seed=dict(type=at_least(0), default=0, help="of the first picture; the next ones have seed + 1, seed + 2 ..."),
    dtype=dict(choices=WEIGHTS, help="of the weights (default: as they were saved)"),
    compare=dict(action="store_true", help="decode plainly too, check equality, draw a sheet and a page"),
)
_PAINTING = dict(
    image=dict(type=Path, metavar="FILE", help="of the size that the model draws"),
    mask=dict(type=Path, metavar="FILE", help="white where --image is drawn anew"),
    strength=dict(type=float, metavar="S", help="share of these tokens that is drawn anew (default: all)"),
)
_MASKED = dict(metavar="MODEL", help="with --compare: a masked model of the same tokens, which is compared with plain "
               "decoding of --model")
_MUSIC = dict(
    seconds=dict(type=float, metavar="S", help="length (default: as in training)"),
    extend_stride=dict(type=float, metavar="S", help="go beyond that by a window that moves S seconds"),
)
_CONTROL = dict(
    control=dict(type=Path, metavar="FILE", help="picture to draw along: edges, depth, ..."),
    control_strength=dict(type=float, metavar="S", help="how strongly (default: 1, as trained; 0: not at all)"),
)
_VIDEO = dict(
    frames=dict(type=at_least(1), metavar="N", help="frames of a clip (default: all)"),
    policy=dict(metavar="P", help="cache of a model of chunks, such as sliding:window=8 (default: as it was saved)"),
)
_FORMAT = dict(choices=("wav", "flac", "ogg", "mp4", "gif", "png"),
               help="of music (default: wav) or clips (default: mp4; gif and png need no PyAV)")
_SAMPLER = dict(
    sampler=dict(metavar="NAME", action="append", help=f"{' | '.join(names())} (default: the fast one of the model); "
                 "settings may follow, such as tree:depth=4,width=6; `visual-spec models NAME` lists them. Settings "
                 "alone, as :window=16, change the default"),
    drafter=dict(metavar="NAME", help="embedded drafter or folder (default: the model's own)"),
)
# fmt: on


def add_generate(commands: argparse._SubParsersAction) -> None:
    generate = commands.add_parser(
        "generate", help="draw pictures or clips, or play music, from prompts", description=_DESCRIPTION
    )
    generate.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="(for class models: class names or numbers)"
    )
    add(generate, **_OUTPUT)
    add(generate, "device", "threads", "negative_prompt", "overwrite", "json")
    paint = generate.add_argument_group("painting into a picture (masked and any-order models)")
    add(paint, **_PAINTING)
    add(generate, masked=_MASKED)
    add(generate.add_argument_group("music"), **_MUSIC)
    add(generate.add_argument_group("control (ControlAR)"), **_CONTROL)
    add(generate.add_argument_group("video"), **_VIDEO)
    add(generate, format=_FORMAT)
    add(generate.add_argument_group("sampler"), **_SAMPLER)
    add(generate.add_argument_group("law of a token"), *LAW_SETTINGS)
    short = generate.add_argument_group("short flags")
    for flag, means, metavar, what in _ALIASES:
        if metavar is None:
            short.add_argument(flag, dest="usual", action="append_const", const=(flag, *means), help=what)
        else:
            write = f":{means}={{}}".format
            short.add_argument(flag, dest="sampler", action="append", type=write, metavar=metavar, help=what)
    generate.set_defaults(run=run, sampler=[], usual=[])


def run(args: argparse.Namespace) -> int:
    """Run the command; see `drawing.generate`."""
    from visual_spec.commands.drawing import generate

    return generate(args)
