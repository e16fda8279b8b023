"""What somebody may send: damaged autoencoders, sets of samples, arrays as pictures, bombs and pipes, and programs."""

import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.attack.damage import WRONG_VALUES, damaged_bytes
from tests.attack.ground import Ground
from tests.attack.outcome import Case
from visual_spec.eval.quality.set_files import MANIFEST, RUN, SCORES, TIMES
from visual_spec.files.pictures import unit_pixels

# -- components of other libraries' classes ----------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda weight: weight * torch.nan,
    "one nan": lambda weight: torch.where(
        torch.arange(weight.numel()).view_as(weight) == 0, torch.nan, weight
    ),
    "inf": lambda weight: weight + torch.inf,
    "int8": lambda weight: weight.to(torch.int8),
    "int64": lambda weight: weight.long(),
    "bool": lambda weight: weight.bool(),
    "a row less": lambda weight: weight[1:],
    "a dimension more": lambda weight: weight[None],
}


def autoencoder_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """The autoencoder of a MAR, which is diffusers' own class, with a damaged weight."""
    path = Path("vae") / "diffusion_pytorch_model.safetensors"
    weights = load_file(ground.latents / path)
    for _ in range(count):
        key, name = rng.choice(sorted(weights)), rng.choice(sorted(DAMAGE))

        def prepare(folder: Path, key: str = key, name: str = name) -> list[str]:
            model = Path(shutil.copytree(ground.latents, folder / "model"))
            save_file(
                {**weights, key: DAMAGE[name](weights[key]).contiguous()}, model / path, {"format": "pt"}
            )
            return ["generate", "1", "--model", str(model), "--out", str(folder / "out"), "--device", "cpu"]

        yield Case("autoencoders", f"{key}: {name}", prepare, lambda folder: "accepted:")


# -- sets of samples ---------------------------------------------------------------------------------------------------

NESTED = (
    "[" * 100_000,
    '{"a":' * 100_000,
    "[" * 500 + "]" * 500,
    "",
    "null",
    "[]",
    "3",
    '"x"',
    "\x00",
    "{}\n[]\n",
)


def _commands(folder: Path, which: int) -> list[str]:
    drawn = str(folder / "drawn")
    score = ["score", drawn, "--reference", drawn, "--out", str(folder / "scores")]
    return [["report", drawn, "--out", str(folder / "page.html")], score, [*score, "--compare-to", drawn]][
        which
    ]


def record_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """manifest.jsonl, run.json, seconds.jsonl, scores.json: edited, nested, damaged."""
    for _ in range(count):
        file, which = rng.choice((MANIFEST, RUN, TIMES, SCORES)), rng.randrange(3)
        whole = (ground.drawn / file).read_bytes()
        if rng.random() < 0.2:
            data, name = damaged_bytes(whole, rng)
        elif rng.random() < 0.2:
            data = rng.choice(NESTED).encode()
            name = repr(data[:12])
        else:
            data, name = _edited(whole, rng)

        def prepare(folder: Path, file: str = file, data: bytes = data, which: int = which) -> list[str]:
            shutil.copytree(ground.drawn, folder / "drawn")
            (folder / "drawn" / file).write_bytes(data)
            return _commands(folder, which)

        yield Case("records of sets", f"{which} {file}: {name}", prepare, partial(_scored, ground, which))


def _edited(whole: bytes, rng: Random) -> tuple[bytes, str]:
    """A line with one wrong value, or without an entry."""
    lines = (
        whole.decode().splitlines() if whole.count(b"\n") > 1 and whole[:2] != b"{\n" else [whole.decode()]
    )
    place = rng.randrange(len(lines))
    record = at = json.loads(lines[place])
    while rng.random() < 0.4 and (inner := [part for part in at.values() if isinstance(part, dict) and part]):
        at = rng.choice(inner)
    entry = rng.choice(sorted(at))
    if rng.random() < 0.2:
        del at[entry]
        name = f"without {entry}"
    else:
        at[entry] = rng.choice(WRONG_VALUES)
        name = f"{entry}={at[entry]!r}"[:60]
    lines[place] = json.dumps(record)
    return ("\n".join(lines) + "\n").encode(), name


def _scored(ground: Ground, which: int, folder: Path) -> bool | str:
    """Whether a page or scores were made, and hold nothing but what the set holds."""
    if which:
        found = json.loads((folder / "scores" / "scores.json").read_text())
        return found["samples"] == 7 or "scored another number of samples:"
    page = (folder / "page.html").read_text()
    return ("</html>" in page and "<script" not in page) or "half a page:"


def escape_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Names that leave the set, and links in it."""
    ways = [
        "../secret.png",
        "a/../../secret.png",
        "absolute",
        "link",
        "linked folder",
        "linked record",
        "linked batch",
    ]
    ways += ["./../secret.png", "..", ".", "/dev/zero", "/proc/self/environ", "\x00", "x" * 5000, "loop"]
    for number in range(count):
        way, which, index = ways[number % len(ways)], rng.randrange(3), rng.randrange(7)

        def prepare(folder: Path, way: str = way, which: int = which, index: int = index) -> list[str]:
            drawn = Path(shutil.copytree(ground.drawn, folder / "drawn"))
            secret = folder / "secret.png"
            shutil.copy(drawn / "000001.png", secret)
            target = drawn / f"{index:06d}.png"
            names = {"absolute": str(secret), "linked folder": "away/secret.png"}
            if way in ("link", "loop"):
                target.unlink()
                target.symlink_to(secret if way == "link" else target.name)
            elif way in ("linked record", "linked batch"):
                shutil.move(drawn / MANIFEST, folder / "manifest")
                (drawn / MANIFEST).symlink_to(folder / "manifest")
            else:
                (drawn / "away").symlink_to(folder)
                lines = [json.loads(line) for line in (drawn / MANIFEST).read_text().splitlines()]
                lines[index]["file"] = names.get(way, way)
                (drawn / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in lines))
            return _commands(folder, which)

        yield Case("names that leave", f"{way[:20]} at {index}, {which}", prepare, lambda folder: "accepted:")


# -- pictures as arrays ------------------------------------------------------------------------------------------------

_TYPES = "u1 i1 u2 i2 i4 i8 u8 f2 f4 f8 c8 ? >f4 >u2 M8[s] S1 O".split()
_RANGES = ((0, 1), (0, 255), (-1, 1), (0, 65_535), (0, 2), (0.2, 0.8), (7, 7), (0, 0), (-0.1, 1.1))

_SHAPES: dict[bool, tuple[tuple[int, ...], ...]] = {  # of masks and of pictures; the first ones fit
    True: ((6, 5), (6, 5), (1, 6, 5), (6, 5, 3), (0, 5), (6, 5, 1)),
    False: ((6, 5, 3),) * 4 + ((3, 6, 5), (6, 5, 4), (6, 5)),
}


def array_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Pictures, masks and controls of every type of numbers and range. Those that fit are read as what they mean."""
    for number in range(count):
        kind, span, mask = rng.choice(_TYPES), rng.choice(_RANGES), rng.random() < 0.4
        shape = rng.choice(_SHAPES[mask])
        values = (
            np.random.default_rng(number).uniform(*span, shape)
            if span[0] != span[1]
            else np.full(shape, span[0])
        )
        values = values.round() if kind[-2:-1] in "iu" or rng.random() < 0.2 else values
        broken = rng.choice((None, None, None, np.nan, np.inf)) if "f" in kind and values.size else None
        with np.errstate(all="ignore"):
            array = values.astype(kind)
        if broken is not None:
            array.flat[0] = broken
        tensor = rng.random() < 0.3 and kind in ("u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "?")

        def prepare(
            folder: Path, array: Any = array, mask: bool = mask, tensor: bool = bool(tensor)
        ) -> Callable:
            given = array
            if tensor:
                given = torch.from_numpy(array if mask or array.ndim < 3 else array.transpose(2, 0, 1).copy())

            def read() -> None:
                np.save(
                    folder / "read.npy", unit_pixels(given, "mask" if mask else "image", mask=mask).numpy()
                )

            return read

        name = f"{number} {'mask' if mask else 'image'} {kind} {list(shape)} of {span} {broken or ''}"
        yield Case("arrays as pictures", name, prepare, partial(_meant, array, mask))


def _meant(array: np.ndarray, mask: bool, folder: Path) -> bool | str:
    """Whether what was read is what the numbers mean, worked out from the array alone."""
    values = array.astype(np.float64)
    if not np.isfinite(values).all() or values.min() < -1e-3:
        return "numbers out of range were read:"
    whole = array.dtype.kind in "?biu"
    eight = array.dtype == np.uint8 and not (mask and values.max() <= 1)
    if values.max() > (255 if eight else 1 + (0 if whole else 1e-3)) or (whole and not eight and not mask):
        return "numbers out of range were read:"
    expected = (values / 255 if eight else values).clip(0, 1)
    expected = expected.reshape(1, *array.shape[-2:]) if mask else expected.transpose(2, 0, 1)
    return np.allclose(np.load(folder / "read.npy"), expected, atol=1e-3) or "another picture was read:"


# -- bombs, pipes and devices ------------------------------------------------------------------------------------------


def png_bomb(path: Path, side: int = 60_000) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")
    )


def npz_bomb(path: Path, shape: str = "(1000000000000, 8, 8, 3)") -> None:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "arr_0.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + bytes(999)
        )


def checkpoint_bomb(path: Path) -> None:
    torch.save({"model": {"a": torch.ones(1).expand(10**10), "b": torch.ones(2)}}, path)


def deep_picture(path: Path) -> None:
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(path, "png")


PUT: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "folder": lambda path: path.mkdir(),
    "png bomb": png_bomb,
    "npz bomb": npz_bomb,
    "npz of minus one": partial(npz_bomb, shape="(-1, 8, 8, 3)"),
    "checkpoint bomb": checkpoint_bomb,
    "16 bits": deep_picture,
    "nothing": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(Random(0).randbytes(5000)),
    "gone": lambda path: None,
}
PLACES = ("000003.png", MANIFEST, RUN, TIMES, "reference.npz", "prompts.txt", "prompts.jsonl", "weights.pth")
PLACES = (*PLACES, "vq_tiny.pt")


def put_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """Bombs, pipes, devices and noise in place of a sample, a record, a reference, prompts, weights, a checkpoint."""
    for number in range(count):
        what, place = list(PUT)[number % len(PUT)], PLACES[number // len(PUT) % len(PLACES)]
        which = 0 if place == TIMES else 2 if place == RUN else rng.randrange(3)

        def prepare(folder: Path, what: str = what, place: str = place, which: int = which) -> list[str]:
            drawn = Path(shutil.copytree(ground.drawn, folder / "drawn"))
            path = (drawn if (drawn / place).exists() else folder) / place
            path.unlink(missing_ok=True)
            PUT[what](path)
            out = str(folder / "out")
            if place == "reference.npz":
                return ["score", str(drawn), "--reference", str(path), "--out", out]
            if place.startswith("prompts"):
                model = str(ground.folder / "pictures")
                return ["sample", "--model", model, "--prompts", str(path), "--out", out, "--num", "1"]
            if place == "weights.pth":
                weights = ["--feature-weights", str(path), "--metrics", "fid"]
                return ["score", str(drawn), "--reference", str(drawn), "--out", out, *weights]
            if place == "vq_tiny.pt":
                return ["convert", str(path), str(ground.files[0]), "--image-size", "8", "--out", out]
            return _commands(folder, which)

        yield Case("bombs and pipes", f"{number} {what} as {place}", prepare, lambda folder: "accepted:")


# -- programs ----------------------------------------------------------------------------------------------------------


class _Raises(nn.Module):
    def forward(self, x: Tensor, rescale: bool, resize: bool, return_features: bool) -> Tensor:
        raise RuntimeError("no such layer")


class _Other(nn.Module):
    def forward(self, x: Tensor, rescale: bool, resize: bool, return_features: bool) -> Tensor:
        return x.sum()


def program_cases(ground: Ground, rng: Random, count: int) -> Iterator[Case]:
    """TorchScript in place of an I3D: untrusted, or one that fails."""
    made: list[nn.Module] = [_Raises(), _Other()]
    for number in range(count):
        network, trusted = made[number % 2], number < 2

        def prepare(folder: Path, network: nn.Module = network, trusted: bool = trusted) -> list[str]:
            torch.jit.script(network).save(str(folder / "i3d.pt"))
            np.savez(folder / "videos.npz", arr_0=np.zeros((3, 2, 8, 8, 3), np.uint8))
            command = [
                "score",
                str(folder / "videos.npz"),
                "--reference",
                str(folder / "videos.npz"),
                "--metrics",
            ]
            command += ["fvd", "--i3d", str(folder / "i3d.pt"), "--out", str(folder / "out")]
            return [*command, "--trust-program"] if trusted else command

        name = f"{number} {type(network).__name__} {'trusted' if trusted else ''}"
        yield Case("programs", name, prepare, lambda folder: "accepted:")


COUNTS: dict[str, tuple[Callable[[Ground, Random, int], Iterator[Case]], int]] = {
    "autoencoders": (autoencoder_cases, 60),
    "records of sets": (record_cases, 450),
    "names that leave": (escape_cases, 90),
    "arrays as pictures": (array_cases, 500),
    "bombs and pipes": (put_cases, 108),
    "programs": (program_cases, 6),
}
