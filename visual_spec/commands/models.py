"""`visual-spec models`: what there is, what fits what, and how much memory it needs."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from visual_spec import families
from visual_spec.commands.tables import plain_table
from visual_spec.files.documents import json_text
from visual_spec.records import Family, KnownModel
from visual_spec.samplers.registry import all_samplers, names

_DESCRIPTION = """List the models, what fits what, and how much memory it needs.

    visual-spec models                       all of them
    visual-spec models shapes                the samplers that fit a model
    visual-spec models janus                 how a released one is loaded
    visual-spec models speculative-jacobi    the settings of a sampler
"""


def add_models(commands: argparse._SubParsersAction) -> None:
    """Add the command to a parser's commands."""
    models = commands.add_parser(
        "models", help="list models, samplers, what was verified, and memory", description=_DESCRIPTION
    )
    models.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="of a model: the samplers that fit it, or how it is loaded; of a sampler: its settings",
    )
    models.add_argument("--json", action="store_true", help="print JSON")
    models.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the lists, or what is asked of one model or sampler."""
    from visual_spec.pipelines.embedded import describe, embedded_folder, embedded_models, missing_models
    from visual_spec.samplers.registry import fit

    if args.name is not None:
        print(_sampler_settings(args.name) if args.name in names() else _model_samplers(args.name))
        return 0
    facts = [describe(embedded_folder(name)) for name in embedded_models()]
    if args.json:
        known = [
            {
                **vars(model),
                "memory_bytes": {"float32": model.memory(4), "bfloat16": model.memory(2)},
                "samplers": {sampler.class_name: fit(model.calls, sampler) for sampler in all_samplers()},
            }
            for model in families.models()
        ]
        samplers = [vars(sampler) for sampler in all_samplers()]
        print(
            json_text({"embedded": facts, "models": known, "samplers": samplers, "extras": families.EXTRAS})
        )
        return 0
    print("Embedded: need no download")
    print(missing_models() or _embedded_table(facts))
    print("\nOfficial weights (GB: weights and cache of one sample, guided if it can be; models NAME: files)")
    print(_official_table())
    extras = ", ".join(f"{name} {count / 1e6:.0f}M" for name, count in families.EXTRAS.items())
    print(_filled(f"On top, in parameters: {extras}.", ""))
    print("\nSamplers and models (visual-spec models NAME: of one of them)")
    print(_fit_lists(facts))
    print("\nOf other libraries: visual_spec.accelerate(model)")
    print("\n".join(_filled(f"{name}: {what}", "  ") for name, what in families.ACCELERATED.items()))
    print("\nVerified")
    print("\n".join(_filled(f"{name}: {how}", "  ") for name, how in families.VERIFIED.items()))
    print("Instead of an embedded name: a folder written by save_pretrained, or a Hub id 'owner/name'.")
    return 0


def _embedded_table(facts: list[dict[str, Any]]) -> str:
    lines = [
        [
            fact["name"],
            fact["pipeline"],
            f"{fact['sampling_rate'] / 1000:g} kHz"
            if fact["sampling_rate"]
            else str(fact["image_size"] or "-"),
            f"{sum(fact['parameters'].values()) / 1e6:.1f}M",
            f"{fact['bytes'] / 1e6:.1f}",
        ]
        for fact in facts
    ]
    return plain_table(["model", "pipeline", "pixels or rate", "parameters", "MB"], lines, _width())


def _official_table(chosen: list[KnownModel] | None = None) -> str:
    lines = [
        [
            model.name,
            str(model.pixels or "-"),
            str(model.tokens),
            f"{model.parameters / 1e6:.0f}M",
            f"{model.memory(4) / 1e9:.1f}",
            f"{model.memory(2) / 1e9:.1f}",
            model.verified,
        ]
        for model in (families.models() if chosen is None else chosen)
    ]
    header = ["model", "pixels", "tokens", "parameters", "GB float32", "GB bfloat16", "verified by"]
    return plain_table(header, lines, _width())


def _families_of(asked: str) -> list[tuple[Family, list[KnownModel]]]:
    """The families, or sizes of them, whose names have this text in them (lower case); [] where none has."""
    found = []
    for family in families.all_families():
        sizes = [size for size in families.models() if size.name in {one.name for one in family.sizes}]
        near = [size for size in sizes if asked in size.name.lower()]
        if asked in family.name.lower() or near:
            found.append((family, near or sizes))
    return found


def _official(found: list[tuple[Family, list[KnownModel]]], others: list[str]) -> str:
    """What there is to know of released models: their files, how they are loaded, and the samplers that fit.

    Args:
        others: lines on models that are of no family.
    """
    told = [_filled(f"visual_spec.accelerate(model) of {line}", "") for line in others]
    text = ["\n".join(told)] if told else []
    for family, sizes in found:
        load = family.load or ", ".join(f"{name}.from_official" for name in family.pipelines)
        lines = [f"{family.name}: {load or 'visual_spec.accelerate(model)'}"]
        lines += [f"{size.name}: {size.weights or 'none released'}; {size.load}" for size in sizes]
        fitting = [entry.name for entry in all_samplers() if entry.calls in family.calls]
        lines.append(f"samplers: {', '.join(fitting) or 'none; what is done for it is done by accelerate'}")
        lines.append(f"verified: {families.VERIFIED[family.verified]}")
        text.append("\n".join(_filled(line, "") for line in lines))
        if sizes:
            text.append(_official_table(sizes))
    return "\n\n".join([*text, "How it is loaded, with lines to paste: docs/index.md and docs/MODELS.md."])


def _fit_lists(facts: list[dict[str, Any]]) -> str:
    """Each sampler, what it promises and takes, and the models that answer its calls."""
    from visual_spec.samplers.registry import fit

    models = {fact["name"]: fact["calls"] for fact in facts}
    models |= {one.name: one.calls for one in families.all_families()}
    lines = []
    for entry in all_samplers():
        fits = fit((entry.calls,), entry)
        takes = "" if fits == "yes" else f" {fits}"
        lines.append(_filled(f"{entry.class_name} ({entry.name}): {entry.promise}{takes}", ""))
        listed = ", ".join(name for name, calls in models.items() if entry.calls in calls)
        lines.append(_filled(listed or "no model here", "    "))
    return "\n".join(lines)


def _model_samplers(name: str) -> str:
    """The samplers of a model, and why the others do not fit it: as `accelerate` says."""
    from visual_spec.pipelines.embedded import embedded_models, refuse_no_pipeline
    from visual_spec.samplers.registry import meant

    if name not in embedded_models() and not Path(name).exists():
        asked = name.lower()
        others = [f"{one}: {what}" for one, what in families.ACCELERATED.items() if asked in one.lower()]
        if (found := _families_of(asked)) or others:
            return _official(found, others)
    try:
        refuse_no_pipeline(name)
    except ValueError as error:  # which names the nearest model
        raise ValueError(
            f"{error}{'' if meant(name, embedded_models()) else meant(name, names())}"
        ) from error
    from visual_spec.pipelines.accelerate import refusals
    from visual_spec.pipelines.placing import load

    try:
        said = refusals(load(name, "cpu", "float32"))
    except TypeError as error:
        return str(error)
    fitting = ", ".join(sampler for sampler, reason in said.items() if not reason)
    alike: dict[str, list[str]] = {}
    for sampler, reason in said.items():
        alike.setdefault(re.sub(r"^sampler is \w+, which ", "", reason), []).append(sampler)
    others = [_filled(f"{', '.join(same)}: {reason}", "    ") for reason, same in alike.items() if reason]
    return "\n".join([_filled(f"{name} takes {fitting}.", ""), "It does not take", *others])


def _sampler_settings(name: str) -> str:
    """The settings of a sampler: what each may be, and its default."""
    from visual_spec.models.core.settings import groups_of
    from visual_spec.pipelines.sampler_text import declared_limits
    from visual_spec.samplers.registry import by_name, sampler_class

    kind = sampler_class(by_name(name))
    words: dict[str, str] = {}
    for told in (*map(type, groups_of(kind.__init__).values()), *reversed(kind.__mro__)):
        words |= _words(told.__doc__ or "")
    lines = [
        _filled(f"{key}: {what}.{' ' * (key in words)}{words.get(key, '')}", "")
        for key, what in declared_limits(kind).items()
    ]
    return "\n".join(lines) or f"{name} has no settings."


def _words(docstring: str) -> dict[str, str]:
    """What the section "Args:" or "Attributes:" of a docstring says of each name."""
    section = re.search(r"^( *)(?:Args|Attributes):\n((?:\1 +.*\n|\n)+)", docstring + "\n", re.MULTILINE)
    if section is None:
        return {}
    entries = re.split(rf"^{section[1]}    (?=[\w, ]+:)", section[2], flags=re.MULTILINE)
    told = (entry.partition(":") for entry in entries if entry.strip())
    return {name: " ".join(text.split()) for names, _, text in told for name in names.split(", ")}


def _filled(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _width() or 100, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def _width() -> int | None:
    """Letters in a line of the terminal; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
