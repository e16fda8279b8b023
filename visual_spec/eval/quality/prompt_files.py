"""Prompts of published evaluations, read from the files that they are released as.

| file | what is read |
|---|---|
| `*.txt` | one prompt a line |
| `*.jsonl` | one object a line, its `prompt`, `caption` or `text`; GenEval's `evaluation_metadata.jsonl` by its `tag` |
| `*.csv`, `*.tsv` | the column `prompt`, `caption` or `text`, in any case, also as a plural; PartiPrompts, DrawBench |
| `*.json` | COCO captions: the first caption of every picture, in the order of their ids |
| `*.json` | a list of prompts, or of objects with one; an object of such objects, as MJHQ-30K's `meta_data.json` |
| `VBench_full_info.json` | VBench: every prompt once, and prompts of its dimension temporal_flickering five times |
| a folder of `*.txt` | DPG-Bench: one prompt a file, in the order of their names |
| `classes` | no file: the classes of a class model in turn, as often as it takes; `imagenet` says the same |

GenEval and DPG-Bench have scorers that read four pictures a prompt from a layout of their own, and VBench's reads five
videos a prompt; `PromptSet.layout` names the layout. VBench asks for 25 videos where a filter drops those that move.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_spec.files.documents import json_text
from visual_spec.files.reading import lines_of, parse, read_text

FLAT, GENEVAL, DPG, VBENCH = "flat", "geneval", "dpg", "vbench"
CLASSES = ("classes", "imagenet")
_COLUMNS = ("prompt", "caption", "text")
_PER_PROMPT = {FLAT: 1, GENEVAL: 4, DPG: 4, VBENCH: 5}  # samples of each prompt, as the scorers read them
_LONGEST_NAME = 255  # bytes of a file's name, on the usual file systems
_FLICKERING = 5  # times as many videos of VBench's prompts for temporal_flickering


@dataclass(frozen=True)
class PromptSet:
    """What is asked for, in order.

    Attributes:
        texts: one a prompt.
        layout: "flat", "geneval", "dpg" or "vbench".
        labels: what the pipeline is asked for in place of the texts: numbers of classes, as two may share a name.
        names: of DPG-Bench, the name of each prompt's file without ending; of VBench, the number of the first video.
        records: of GenEval, the line of each prompt.
        source: what tells them all, in place of the texts: of prompts without end.
    """

    texts: tuple[str, ...]
    layout: str = FLAT
    labels: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    source: str = ""

    @property
    def per_prompt(self) -> int:
        """Samples that each prompt gets."""
        return _PER_PROMPT[self.layout]

    @property
    def fingerprint(self) -> str:
        """Changes with any prompt, their order and the layout."""
        if self.source:
            return self.source
        text = json_text([self.layout, self.texts, self.names, self.records])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        """Samples of all prompts, each with as many as its layout takes."""
        return len(self.texts) * self.per_prompt

    def of(self, sample: int) -> int:
        """The prompt of a sample. The first prompt follows the last one."""
        return sample // self.per_prompt % len(self.texts)

    def asked(self, sample: int) -> str:
        """Return what the pipeline is asked for."""
        return (self.labels or self.texts)[self.of(sample)]


def read_prompts(source: str, class_names: Sequence[str] | None = None) -> PromptSet:
    """Read a file or folder of prompts, or take the classes of a model in turn.

    Args:
        source: a path, or "classes".
        class_names: of the model, where it draws classes.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file of another form, which names the line, or no prompts in it; "classes" of a model without
            classes.
    """
    if source in CLASSES:
        if not class_names:
            raise ValueError(f"--prompts {source} is for models that draw classes; pass a file of prompts.")
        if source == "imagenet" and len(class_names) != 1000:
            raise ValueError(
                f"--prompts imagenet, but the model has {len(class_names)} classes; pass --prompts classes."
            )
        return PromptSet(tuple(class_names), labels=tuple(map(str, range(len(class_names)))))
    path = Path(source)
    if path.is_dir():
        return _dpg(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no file of prompts at {source}; pass one, or --prompts classes for a class model."
        )
    readers: dict[str, Callable[[Path], PromptSet]] = {
        ".txt": _lines,
        ".jsonl": _json_lines,
        ".csv": _table,
        ".tsv": _table,
        ".json": _json,
    }
    if path.suffix.lower() not in readers:
        raise ValueError(
            f"{path}: prompts are read from {', '.join(readers)} files and from folders of .txt files."
        )
    try:
        prompts = readers[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    return _checked(prompts, path)


def _checked(prompts: PromptSet, path: Path) -> PromptSet:
    if not prompts.texts:
        raise ValueError(f"{path} holds no prompts.")
    for number, text in enumerate(prompts.texts):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path}: prompt {number + 1} is {text!r}; every prompt needs some text.")
        try:
            letters = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{path}: prompt {number + 1} holds half of a pair of surrogates ({text!r}); write the letter whole."
            ) from error
        if prompts.layout == VBENCH and (len(letters) > _LONGEST_NAME - len("-24.mp4") or "/" in text):
            raise ValueError(
                f"{path}: prompt {number + 1} of {len(letters)} bytes cannot be in a file's name, where VBench reads "
                f"it: pass prompts of at most {_LONGEST_NAME - len('-24.mp4')} bytes without a slash."
            )
    return prompts


def _lines(path: Path) -> PromptSet:
    lines = (line.strip() for line in lines_of(read_text(path)))
    return PromptSet(tuple(line for line in lines if line))


def _json_lines(path: Path) -> PromptSet:
    texts, records, tagged = [], [], True
    for number, line in enumerate(lines_of(read_text(path)), 1):
        if not line.strip():
            continue
        record = parse(line, f"{path}, line {number}")
        texts.append(_prompt_of(record, f"{path}, line {number}"))
        records.append(json_text(record))
        tagged = tagged and "tag" in record
    return (
        PromptSet(tuple(texts), GENEVAL, records=tuple(records))
        if texts and tagged
        else PromptSet(tuple(texts))
    )


def _prompt_of(record: object, where: str) -> str:
    if isinstance(record, dict):
        for name in _COLUMNS:
            if isinstance(record.get(name), str):
                return record[name]
    raise ValueError(f"{where} has no text under {', '.join(_COLUMNS)}.")


def _table(path: Path) -> PromptSet:
    text, delimiter = read_text(path), "\t" if path.suffix.lower() == ".tsv" else ","
    rows = _rows(path, text, delimiter, csv.QUOTE_MINIMAL)
    if delimiter == "\t" and (isinstance(rows, csv.Error) or _uneven(rows)):
        # As PartiPrompts: quotation marks are letters there.
        rows = _rows(path, text, delimiter, csv.QUOTE_NONE)
    if isinstance(rows, csv.Error):
        raise ValueError(f"{path} is no table ({rows}).")
    header = [name.strip().lower() for name in (rows[0][1] if rows else [])]
    column = next(
        (header.index(name + s) for name in _COLUMNS for s in ("", "s") if name + s in header), None
    )
    if column is None or len(rows) == 1:
        raise ValueError(
            f"{path} has no column {', '.join(_COLUMNS)} in its first line, or no lines after it."
        )
    if wrong := _uneven(rows):
        number, row = wrong[0]
        raise ValueError(
            f"{path}, line {number} has {len(row)} fields, and the first line names {len(header)}; put a prompt that "
            f"holds {delimiter!r} in quotation marks."
        )
    return PromptSet(tuple(row[column].strip() for _, row in rows[1:]))


def _rows(path: Path, text: str, delimiter: str, quoting: Any) -> list[tuple[int, list[str]]] | csv.Error:
    """The rows of a table that hold something, each with the number of its last line; or why it is none."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
    try:
        return [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        return error


def _uneven(rows: list[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """The rows with another number of fields than the first one has."""
    return [(number, row) for number, row in rows if len(row) != len(rows[0][1])]


def _json(path: Path) -> PromptSet:
    content = parse(read_text(path), str(path))
    if isinstance(content, list) and content:
        if all(isinstance(text, str) for text in content):
            return PromptSet(tuple(content))
        if all(isinstance(entry, dict) and {"prompt_en", "dimension"} <= entry.keys() for entry in content):
            return _vbench(content)
        return PromptSet(tuple(_prompt_of(entry, f"{path}, entry {i}") for i, entry in enumerate(content, 1)))
    if isinstance(content, dict) and content and all(isinstance(entry, dict) for entry in content.values()):
        return PromptSet(tuple(_prompt_of(entry, f"{path}, {key}") for key, entry in content.items()))
    return _coco(content, path)


def _vbench(entries: list[dict[str, Any]]) -> PromptSet:
    """A prompt that two dimensions share is drawn once. One that takes 25 videos comes five times."""
    repeats: dict[str, int] = {}
    for entry in entries:
        prompt = entry["prompt_en"]
        often = _FLICKERING if "temporal_flickering" in entry["dimension"] else 1
        repeats[prompt] = max(repeats.get(prompt, 0), often)
    places = [(prompt, place) for prompt, often in repeats.items() for place in range(often)]
    numbers = tuple(str(place * _PER_PROMPT[VBENCH]) for _, place in places)
    return PromptSet(tuple(prompt for prompt, _ in places), VBENCH, names=numbers)


def _coco(content: Any, path: Path) -> PromptSet:
    try:
        notes = content["annotations"]
        rows = sorted((note["image_id"], note["id"], note["caption"]) for note in notes)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no file of COCO captions ({type(error).__name__}: {error}); it needs annotations with "
            "image_id, id and caption."
        ) from error
    first: dict[object, str] = {}
    for image, _, text in rows:
        first.setdefault(image, str(text).strip())
    return PromptSet(tuple(first.values()))


def _dpg(path: Path) -> PromptSet:
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".txt")
    texts = [" ".join(read_text(file).split()) for file in files]
    return _checked(PromptSet(tuple(texts), DPG, names=tuple(file.stem for file in files)), path)
