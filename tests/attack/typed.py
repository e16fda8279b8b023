"""Malformed inputs that are typed or named: prompts, flags, results for `report`, and what is no regular file."""

import inspect
import itertools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from tests.attack.damage import damaged_bytes
from tests.attack.ground import Ground, copied, generate
from tests.attack.outcome import Case
from visual_spec.models.core.settings import settings_of
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.samplers.registry import all_samplers, by_name, sampler_class

# -- what is typed -----------------------------------------------------------------------------------------------------

PIECES = (
    "", " ", "\t", "\n", "\x00", "\x1b[31m", "\ud800", "é", "红", "🟥", "a", "red", "circle", "on", "-", "--", "-x",
    "../", "/etc/passwd", "%s", "{0}", "$(id)", "`id`", "'", '"', "\\", "a" * 300, "blue " * 40, "\u202e", "NaN", "0",
    "-1", "1e9", "999999999999",
)  # fmt: skip


def prompt_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Prompts: no words, unknown ones, too many, controls, other scripts, names of files."""
    for _ in range(count):
        kind = rng.choice(("pictures", "scales", "music"))
        prompt = rng.choice(("", " ")).join(rng.choice(PIECES) for _ in range(rng.randrange(5)))

        def prepare(folder: Path, kind: str = kind, prompt: str = prompt) -> list[str]:
            command = generate(kind, ground.folder / kind, folder / "out")
            return [command[0], *command[2:], "--", prompt]

        yield Case("prompts", f"{kind}: {prompt!r}"[:80], prepare, _only_inside)


def _only_inside(folder: Path) -> bool | str:
    """Whether one sample was made, in the folder that was named."""
    found = [path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file()]
    return (len(found) == 1 and found[0][0] == "out" and len(found[0]) == 2) or f"wrote {found}:"


BAD_FLAGS: dict[str, tuple[str, ...]] = {
    "--seed": ("-1", str(2**64), str(10**30), "1.5", "x", "", "nan", "0x10"),
    "--num-images": ("0", "-1", "1.5", "x", "", "nan"),
    "--batch-size": ("0", "-3", "2.5", "x"),
    "--threads": ("0", "-1", "x"),
    "--dtype": ("float8", "int8", "", "FLOAT32", "bfloat"),
    "--device": ("meta", "cuda:99", "x", "", "cpu:x"),
    "--model": ("", " ", "/nonexistent", "no-such-model", "..", "a/b/c/d", "~/nothing"),
    "--window": ("0", "-1", "x", "1.5", ""),
    "--coupling": ("x", "", "GUMBEL", "none"),
    "--acceptance": ("x", "", "exactly", "grouped(3"),
    "--initial-draft": ("x", "", "down"),
    "--guidance-scale": ("nan", "inf", "-1", "1e39", "x", ""),
    "--guidance-until": ("-1", "x", "1.5"),
    "--temperature": ("nan", "inf", "-0.5", "1e-9", "1e39", "x", ""),
    "--top-k": ("-1", "1.5", "x", ""),
    "--top-p": ("0", "-1", "1.1", "nan", "x", ""),
    "--format": ("wav", "mp3", ""),
    "--seconds": ("1", "nan", "-1", "x"),
    "--extend-stride": ("1", "-1", "x"),
    "--drafter": ("", "/nonexistent", "no-such-drafter"),
    "--sampler": (
        "", "x", ":", "tree:", "speculative-jacobi:window", "speculative-jacobi:window=", "speculative-jacobi:window=0",
        "speculative-jacobi:window=1.5", "speculative-jacobi:window=x", "speculative-jacobi:colour=red", "masked",
        "speculative-jacobi:window=4,window=5", "scale-wise", "columns", "tree", "zipar:window=-1", "drafted",
        "speculative-jacobi:coupling=maximal", "speculative-jacobi:exact_width=true,window=64", "drafted:num_drafts=0",
        "speculative-jacobi:exact_width=3", "speculative-jacobi:graph=true", "speculative-jacobi:relaxation={",
        "multiscale",
        "speculative-jacobi:acceptance=grouped,relaxation=3", "autoregressive:window=3",
    ),
    "--music": ("",),
    "--unknown": ("3",),
}  # fmt: skip


def flag_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Flags with values that are refused, each alone, then in pairs."""
    single = [(flag, value) for flag, values in BAD_FLAGS.items() for value in values]
    pairs = [tuple(rng.sample(single, 2)) for _ in range(count)]
    for chosen in itertools.islice([*((one,) for one in single), *pairs], count):

        def prepare(folder: Path, chosen: Any = chosen) -> list[str]:
            command = generate("pictures", ground.folder / "pictures", folder / "out")
            for flag, value in chosen:
                command += [flag, value] if flag != "--music" else [flag]
            return command

        name = " ".join(f"{flag} {value!r}" for flag, value in chosen)
        yield Case("flags and seeds", name, prepare, lambda folder: "accepted:")


def sampler_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Settings of samplers out of their declarations, typed or passed; what is accepted can be saved and loaded."""
    pairs = [
        (entry.name, setting)
        for entry in all_samplers()
        for setting in settings_of(inspect.unwrap(sampler_class(entry).__init__)).values()
    ]
    wrong: tuple[Any, ...] = (
        math.nan, -math.inf, 10**30, -1, 0.5, 1 + 2j, "", "x", "\x00", b"x", [], [[1]], [1, "x"], {"x": 1}, {1}, object,
        np.int64(3), np.float32(0.5), np.bool_(True), np.array([1, 2]), np.array(math.nan), torch.tensor(3), True, None,
    )  # fmt: skip
    for number in range(count):
        name, setting = pairs[number % len(pairs)]
        value = rng.choice(wrong)

        def prepare(folder: Path, name: str = name, key: str = setting.name, value: Any = value) -> Any:
            return lambda: make_sampler(name, **{key: value}).save_pretrained(folder / "saved")

        def loads(folder: Path, name: str = name) -> bool:
            return bool(sampler_class(by_name(name)).from_pretrained(folder / "saved"))

        yield Case("settings of samplers", f"{name}:{setting.name}={value!r} {number}", prepare, loads)


def command_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Every command with numbers of threads that no machine has use of."""
    for number in range(count):
        command = rng.choice(("generate", "bench", "eval", "sample", "score"))
        threads = rng.choice(("0", "-1", "65537", "100000", str(10**30), "1.5", "x", "", "nan", "0x2"))
        asked = [command, "x", "--threads", threads]
        yield Case(
            "commands", f"{' '.join(asked)} {number}", lambda folder, a=asked: a, lambda folder: "accepted:"
        )


def result_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Results of an evaluation, for `report`: damaged text, and parts that are missing or of another kind."""
    whole = (Path(__file__).parents[2] / "benchmarks" / "results" / "shapes-var-quality.json").read_bytes()
    document = json.loads(whole)
    for _ in range(count):
        if rng.random() < 0.4:
            data, name = damaged_bytes(whole, rng)
        else:
            changed = json.loads(whole)
            at: Any = changed
            for _ in range(rng.randrange(4)):  # go down to some part
                inner = at.values() if isinstance(at, dict) else at
                inner = [part for part in inner if isinstance(part, dict | list) and part]
                if not inner:
                    break
                at = rng.choice(inner)
            place: Any = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
            if rng.random() < 0.5:
                del at[place]
                name = f"without {place}"
            else:
                at[place] = rng.choice((None, [], {}, "x", -1, "<script>", [1], {"a": 1}))
                name = f"{place}={at[place]!r}"
            data = json.dumps(changed).encode()

        def prepare(folder: Path, data: bytes = data) -> list[str]:
            (folder / "results.json").write_bytes(data)
            return ["report", str(folder / "results.json"), "--out", str(folder / "out.html")]

        yield Case("results for report", name[:80], prepare, _whole_page)
    assert document


def _whole_page(folder: Path) -> bool | str:
    text = (folder / "out.html").read_text()
    return ("</html>" in text and "<script>x" not in text) or "half a page:"


def special_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """What is no regular file, in place of every file."""
    places = [
        ("pictures/" + part)
        for part in ("model_index.json", "transformer/config.json", "sampler/sampler_config.json")
    ]
    places += ["pictures/vq_model/diffusion_pytorch_model.safetensors", "music/codec/model.safetensors"]
    places += ["music/codec/config.json", "pictures/text_encoder/config.json"]
    kinds = ("fifo", "folder", "loop", "zero", "gone")
    for place, what in itertools.islice(itertools.product(places, kinds), count):

        def prepare(folder: Path, place: str = place, what: str = what) -> list[str]:
            kind, _, path = place.partition("/")
            model = copied(ground, kind, folder)
            (model / path).unlink()
            if what == "fifo":
                os.mkfifo(model / path)
            elif what == "folder":
                (model / path).mkdir()
            elif what == "loop":
                (model / path).symlink_to(path.rpartition("/")[2])
            elif what == "zero":
                (model / path).symlink_to("/dev/zero")
            return generate(kind, model, folder / "out")

        yield Case("no regular files", f"{what} at {place}", prepare, lambda folder: "accepted:")
