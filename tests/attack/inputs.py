"""Malformed inputs of every kind, seeded: files, configurations, prompts, flags, samples of an evaluation."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.attack import sent
from tests.attack.damage import damaged_bytes, damaged_header, damaged_settings
from tests.attack.ground import MAKE, Ground, copied, generate
from tests.attack.outcome import Case
from tests.attack.typed import (
    command_cases,
    flag_cases,
    prompt_cases,
    result_cases,
    sampler_cases,
    special_cases,
)
from visual_spec.pipelines.folders import MANIFEST
from visual_spec.pipelines.loading import load_pipeline

# Settings that may have other values without an error: then another picture is right. Names, not what they hold.
FREE = {
    "norm_eps", "default_guidance_scale", "default_top_k", "default_top_p", "default_temperature",
    "refiner_guidance_scale", "warm_temperature", "num_warm_scales", "id2label", "max_audio_length_in_s",
}  # fmt: skip


def same(ground: Ground, kind: str, folder: Path) -> bool | str:
    """Whether the sample is that of the undamaged pipeline."""
    made = next((folder / "out").glob("000-*"), None)
    return (made is not None and made.read_bytes() == ground.output(kind)) or "another sample was made:"


def any_sample(folder: Path) -> bool | str:
    """Whether something was made."""
    return next((folder / "out").glob("000-*"), None) is not None or "nothing was made:"


# -- settings ----------------------------------------------------------------------------------------------------------


def settings_cases(
    ground: Ground, rng: Random, count: int, *, pattern: str, kind_of_case: str
) -> Iterator[Case]:
    """JSON files of pipelines: a wrong value, or damaged text."""
    files = [
        (kind, path.relative_to(ground.folder / kind))
        for kind in MAKE
        for path in sorted((ground.folder / kind).glob(pattern))
    ]
    for _ in range(count):
        kind, path = rng.choice(files)
        whole = (ground.folder / kind / path).read_bytes()
        free = False
        if rng.random() < 0.7:
            settings, name, setting = damaged_settings(json.loads(whole), rng)
            data, free = json.dumps(settings).encode(), setting in FREE
        elif rng.random() < 0.5:
            data, name = damaged_bytes(whole, rng)
            # A changed letter or digit may leave valid settings, of which another sample is right.
            free = _reads(data)
        else:
            data = rng.choice(
                (b"", b"null", b"[]", b"3", b'"x"', b"{}", b"{" * 5000, b"\xff\xfe", b"NaN", b"[[[]")
            )
            name = repr(data[:20])

        def prepare(folder: Path, kind: str = kind, path: Path = path, data: bytes = data) -> list[str]:
            model = copied(ground, kind, folder)
            (model / path).write_bytes(data)
            return generate(kind, model, folder / "out")

        right: Any = any_sample if free else partial(_same_in, ground, kind)
        yield Case(kind_of_case, f"{kind}/{path}: {name}", prepare, right)


def _same_in(ground: Ground, kind: str, folder: Path) -> bool | str:
    return same(ground, kind, folder)


def _reads(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


# -- weights and checkpoints -------------------------------------------------------------------------------------------


def weight_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Safetensors files of pipelines: damaged bytes, headers that say something else, values that are no numbers."""
    files = [
        (kind, path.relative_to(ground.folder / kind))
        for kind in MAKE
        for path in sorted((ground.folder / kind).glob("*/*.safetensors"))
    ]
    for _ in range(count):
        kind, path = rng.choice(files)
        whole = (ground.folder / kind / path).read_bytes()
        (data, name), right = damaged_header(whole, rng), partial(_same_in, ground, kind)
        if rng.random() < 0.5:
            data, name = damaged_bytes(whole, rng)
            right = any_sample  # other finite values are another model, which nothing can tell

        def prepare(folder: Path, kind: str = kind, path: Path = path, data: bytes = data) -> list[str]:
            model = copied(ground, kind, folder)
            (model / path).write_bytes(data)
            return generate(kind, model, folder / "out")

        yield Case("safetensors", f"{kind}/{path}: {name}", prepare, right)


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def pickle_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Official files: damaged bytes of both formats, pickles that run code, and tensors that are none of a model."""
    weights = torch.load(ground.files[1])["model"]
    key = sorted(weights)[0]
    odd: list[tuple[str, Any]] = [
        ("a number as a key", {"model": {3: torch.ones(2), **weights}}),
        ("sparse", {"model": {**weights, key: torch.ones(2, 2).to_sparse()}}),
        ("on meta", {"model": {**weights, key: torch.empty(2, device="meta")}}),
        (
            "quantised",
            {"model": {**weights, key: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}},
        ),
        ("complex", {"model": {**weights, key: weights[key].to(torch.complex64)}}),
        ("nan", {"model": {**weights, key: weights[key] * torch.nan}}),
        ("a list", [1, 2]),
        ("empty", {}),
        ("nothing", None),
        ("a word", "weights"),
        ("nested", {"model": {"model": {"model": weights}}}),
        ("one tensor", torch.ones(3)),
        ("a tensor less", {"model": {name: value for name, value in weights.items() if name != key}}),
        ("a tensor more", {"model": {**weights, "other": torch.ones(2)}}),
        ("another shape", {"model": {**weights, key: torch.ones(3)}}),
        ("integers", {"model": {**weights, key: weights[key].int()}}),
    ]
    for number in range(count):
        if number < len(odd):
            name, content = odd[number]
            yield Case(
                "checkpoints",
                name,
                partial(_write_and_convert, ground, content),
                partial(_converted, rewritten=True),
            )
            continue
        if rng.random() < 0.1:
            protocol, prefix = rng.randrange(6), rng.randbytes(rng.randrange(3))
            yield Case(
                "checkpoints",
                f"runs code, protocol {protocol}",
                partial(_malicious, ground, protocol, prefix),
                _unrun,
            )
            continue
        source = rng.choice((*ground.files, ground.legacy))
        data, name = damaged_bytes(source.read_bytes(), rng)
        yield Case(
            "checkpoints", f"{source.name}: {name}", partial(_convert_bytes, ground, source, data), _converted
        )


def _convert_command(ground: Ground, file: Path, folder: Path) -> list[str]:
    other = ground.files[1] if file.name.startswith("c2i") else ground.files[0]
    return ["convert", str(file), str(other), "--image-size", "8", "--out", str(folder / "out")]


def _convert_bytes(ground: Ground, source: Path, data: bytes, folder: Path) -> list[str]:
    file = folder / source.name
    file.write_bytes(data)
    return _convert_command(ground, file, folder)


def _write_and_convert(ground: Ground, content: Any, folder: Path) -> list[str]:
    file = folder / "vq_tiny.pt"
    torch.save(content, file)
    return _convert_command(ground, file, folder)


def _malicious(ground: Ground, protocol: int, prefix: bytes, folder: Path) -> list[str]:
    file = folder / "vq_tiny.pt"
    file.write_bytes(prefix + pickle.dumps({"model": _Touch(str(folder / "ran"))}, protocol=protocol))
    return _convert_command(ground, file, folder)


def _unrun(folder: Path) -> bool | str:
    return not (folder / "ran").exists() or "code was run:"


def _converted(folder: Path, rewritten: bool = False) -> bool | str:
    """Whether the conversion loads; a file of other content than a model must not have been converted."""
    if rewritten:
        return "converted what is no model:"
    load_pipeline(folder / "out")
    return True


# -- folders that are replaced or read beside --------------------------------------------------------------------------


def manifest_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Conversions over a folder whose manifest does not say that all of it was converted."""
    manifest = (ground.folder / "converted" / MANIFEST).read_bytes()
    for _ in range(count):
        if rng.random() < 0.5:
            data, name = damaged_bytes(manifest, rng)
        else:
            settings = json.loads(manifest)
            part = rng.choice(("files", "written_by", "all"))
            value = rng.choice((None, [], {}, "x", 3, {"a": 1}, [["model_index.json", 3]]))
            data = json.dumps({**settings, part: value} if part != "all" else value).encode()
            name = f"{part}={value!r}"

        def prepare(folder: Path, data: bytes = data) -> list[str]:
            out = Path(shutil.copytree(ground.folder / "converted", folder / "out"))
            (out / MANIFEST).write_bytes(data)
            (out / "mine.txt").write_text("keep")  # someone's own, which is in no manifest
            return [*_convert_command(ground, ground.files[1], folder), "--overwrite"]

        yield Case(
            "manifests", name, prepare, lambda folder: "a folder with a file of someone's own was replaced:"
        )


def drafter_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Drafters whose configuration or weights are damaged. Any drafter gives the same picture."""
    for _ in range(count):
        file = rng.choice(("config.json", "diffusion_pytorch_model.safetensors"))
        whole = (ground.drafter / file).read_bytes()
        if file == "config.json" and rng.random() < 0.7:
            settings, name, _ = damaged_settings(json.loads(whole), rng)
            data = json.dumps(settings).encode()
        else:
            data, name = damaged_bytes(whole, rng)

        def prepare(folder: Path, file: str = file, data: bytes = data) -> list[str]:
            drafter = Path(shutil.copytree(ground.drafter, folder / "drafter"))
            (drafter / file).write_bytes(data)
            more = ["--sampler", "drafted:acceptance=identical", "--drafter", str(drafter)]
            return generate("pictures", ground.folder / "pictures", folder / "out", *more)

        yield Case("drafters", f"{file}: {name}", prepare, partial(_same_in, ground, "pictures"))


# {kind of inputs: (its cases, how many)}; `scripts/attack.py` multiplies the numbers.
COUNTS: dict[str, tuple[Callable[[Ground, Random, int], Iterator[Case]], int]] = {
    "checkpoints": (pickle_cases, 200),
    "safetensors": (weight_cases, 150),
    "component configurations": (
        partial(settings_cases, pattern="*/config.json", kind_of_case="component configurations"), 200,
    ),
    "sampler configurations": (
        partial(settings_cases, pattern="sampler/sampler_config.json", kind_of_case="sampler configurations"), 60,
    ),
    "model_index.json": (partial(settings_cases, pattern="model_index.json", kind_of_case="model_index.json"), 150),
    "drafters": (drafter_cases, 50),
    "manifests": (manifest_cases, 30),
    "results for report": (result_cases, 60),
    "prompts": (prompt_cases, 70),
    "flags and seeds": (flag_cases, 140),
    "settings of samplers": (sampler_cases, 400),
    "commands": (command_cases, 50),
    "no regular files": (special_cases, 35),
    **sent.COUNTS,
}  # fmt: skip


def cases(ground: Ground, seed: int, share: float = 1.0) -> Iterator[Case]:
    """All inputs of a seed; `share` makes fewer of each kind, at least one."""
    for kind, (make, count) in COUNTS.items():
        yield from make(ground, Random(f"{seed} {kind}"), max(1, round(share * count)))
