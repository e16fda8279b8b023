"""Official checkpoint files to `save_pretrained` folders: safetensors and configurations.

Which files there are, how they are recognised and loaded, stands in the table of families (`FileLayout`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer

from visual_spec.families import FAMILIES, all_families, all_pipelines
from visual_spec.models.columns.audiocraft import CODEC, LANGUAGE_MODEL, kind_of
from visual_spec.models.core.checkpoints import Checkpoint, read_content, unpack_checkpoint
from visual_spec.models.next_token.llamagen_checkpoint import recognise
from visual_spec.models.video.self_forcing_checkpoint import is_lora, is_wan, load_self_forcing
from visual_spec.pipelines import components
from visual_spec.pipelines.embedded import INDEX
from visual_spec.pipelines.folders import check_replaceable, write_folder
from visual_spec.pipelines.saved_index import read_index_file
from visual_spec.records import Family, OfficialFile

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

File = Path | Checkpoint  # a folder, or a file read


def convert(
    files: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    *,
    text_encoder: str | os.PathLike | None = None,
    image_size: int | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a folder that `from_pretrained` loads: a pipeline of two or three files, or the model of one.

    The folder appears complete or not at all.

    Args:
        files: a LlamaGen transformer or a ControlAR, its tokenizer, or both in any order; or a VAR transformer, a
            smaller one that refines what it drafts (CoDe), and their tokenizer, or some of them; or a transformer of
            Infinity (of the 8B the folder of its shards), its tokenizer, or both; or a Halton-MaskGIT and LlamaGen's
            tokenizer; or a MAGE, which holds its tokenizer; or the files of MaskGCT, or of one of its models;
            or a MAR, a smaller one that drafts, and KL-16, or some; or a BitDance, its tokenizer, or both; or a
            FlowAR, KL-16, or both; or a student of LlamaGen or VAR, the tokenizer of that family, and the model that
            taught it, or some; or Self-Forcing's transformer alone; told apart by their keys. Or the folder of a
            BitDance of texts, or of a MusicGen of audiocraft, which needs its text encoder.
        out: folder to write.
        text_encoder: folder or Hub id of flan-t5-xl, to be copied into a text-conditional pipeline. None leaves it out;
            it can be given at loading, or prompts as embeddings. Of MusicGen, the T5 that its settings name (t5-base).
        image_size: side of the pictures in pixels; None: what the file or its name says. A transformer by itself is
            taken for one over VQ-16 tokens. Of VAR only its tokenizer, where it stands alone, needs to be told: 256 if
            it is not. Of Infinity the name of the transformer says it (`size_by_name`); its tokenizer, alone, is made
            for 1024. MAR's sizes say it.
        dtype: of the weights written; None keeps each file's own.
        overwrite: replace what an earlier conversion wrote at `out`.

    Returns:
        folder; class, the one to load it with; files, {path: architecture}; parameters, {component: count}.

    Raises:
        ValueError, OSError: a file that is none of these, two of one kind, or a folder that is in the way.
    """
    out = Path(out)
    check_replaceable(out, overwrite)
    exported = [Path(file) for file in files if (Path(file) / LANGUAGE_MODEL).is_file()]
    if exported:
        if len(files) > 1:
            raise ValueError(f"{exported[0]} is a folder of audiocraft; pass it alone.")
        made = _assemble_musicgen(exported[0], text_encoder, image_size, dtype)
        return _written(made, out)
    sources = [_read(Path(file)) for file in files]
    family = _family(sources)
    own: Any = family.layout
    settings = text_encoder, image_size, dtype
    if own.assemble:
        for name, value in {"text_encoder": text_encoder, "image_size": image_size}.items():
            if value is not None:
                raise ValueError(
                    f"{name}={value} given for {_path(sources[0])}, of {family.name}, which takes none; leave it out."
                )
        made = _named(own.assemble)(sources, dtype)
    else:
        made = _assemble(family, sources, *settings)
    return _written(made, out)


def _named(path: str) -> Callable[..., Any]:
    """The function that a `FileLayout` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"visual_spec.{module}"), name)


def _path(source: File) -> Path:
    return source if isinstance(source, Path) else source.path


def _read(path: Path) -> File:
    """A folder as it is, a file read. Refuses folders that are pipelines of ours already."""
    if path.is_dir():
        if (path / INDEX).is_file() and (saved := read_index_file(path)["_class_name"]) in all_pipelines():
            raise ValueError(f"{path} is a {saved} already; load it by its from_pretrained.")
        return path
    content = read_content(path)
    if isinstance(content, Mapping) and "best_state" in content:
        raise ValueError(
            f"{path} is of audiocraft; pass its folder, with {LANGUAGE_MODEL} (the language model) and {CODEC} in it."
        )
    kinds = [kind for family in all_families() if family.layout for kind in family.layout.files]
    unpackers = (kind.function(kind.unpack) for kind in kinds if kind.unpack)
    found = (unpacked for unpack in unpackers if (unpacked := unpack(path, content)) is not None)
    return next(found, None) or unpack_checkpoint(path, content)


def _family(sources: Sequence[File]) -> Family:
    """The family that a file is of."""
    known = [family for family in all_families() if family.layout is not None]
    # Registered families may share a tokenizer with one of ours, and files of other families have LlamaGen's keys, too.
    for family in sorted(known, key=lambda family: (family in FAMILIES, family.name == "LlamaGen")):
        own: Any = family.layout
        for source in sources:
            kind = None if own.recognise else _kind(family, source)
            if _named(own.recognise)(source) if own.recognise else kind is not None and kind.own:
                return family
    for source in sources:
        if isinstance(source, Checkpoint):
            recognise(source)  # says how far it is from what is known
    raise ValueError(f"{_path(sources[0])} is of no known layout; pass official files (visual-spec models).")


def _kind(family: Family, source: File) -> OfficialFile | None:
    """Which file of a family it is; None: none of them."""
    files: Any = family.layout and family.layout.files
    if isinstance(source, Path):
        return next((kind for kind in files if kind.folder), None)
    return next((kind for kind in files if kind.fits(source.weights)), None)


def _name(kind: OfficialFile, source: File) -> str:
    return kind.function(kind.name)(source) if ":" in kind.name else kind.name


def _assemble(
    family: Family,
    sources: Sequence[File],
    text_encoder: str | os.PathLike | None,
    image_size: int | None,
    dtype: torch.dtype | None,
) -> tuple[DiffusionPipeline | ModelMixin, dict[str, str]]:
    """The pipeline or model of a family's files, and what each of them is."""
    own: Any = family.layout
    parts = _parts(family, sources)
    names = {str(_path(source)): _name(kind, source) for kind, source in parts.values()}
    tokenizers = [role for role in parts if role in ("vq_model", "vae")]
    drawing, source = parts.get("transformer", next(iter(parts.values())))
    whole = "transformer" in parts and bool(tokenizers)
    if drawing.holds and not tokenizers and not isinstance(source, Path):
        whole = drawing.function(drawing.holds)(source.weights)
    reads_text = bool(drawing.pipeline) and all_pipelines()[drawing.pipeline].condition == "text"
    if text_encoder is not None and not (whole and reads_text):
        raise ValueError(
            f"text_encoder={text_encoder} given for {_path(source)}, {_name(drawing, source)}; it belongs into a "
            "pipeline that draws from captions: pass such a transformer and its tokenizer, or leave it out."
        )
    if not whole and len(parts) > 1:
        given = " and ".join(str(_path(one)) for _, one in parts.values())
        raise ValueError(f"{given} given without their tokenizer; pass {own.tokenizer} too.")
    if not whole:
        model = _alone(drawing, source, image_size, dtype)
        side = (
            16
            * (
                model.scales[-1]
                if hasattr(model, "scales")
                else model.grid.height * getattr(model, "patch", 1)
            )
            if drawing.pipeline
            else None
        )
        taken = bool(drawing.size)
    else:
        more = {role: one for role, (_, one) in parts.items() if role != "transformer"}
        more |= {own.size: image_size} if own.size else {}
        more |= {"text_encoder": text_encoder} if text_encoder is not None else {}
        model = getattr(components, drawing.pipeline).from_official(source, **more, dtype=dtype)
        side, taken = model.image_size[0], bool(own.size)
    if image_size is not None and not taken and image_size != side:
        draws = "takes pictures of any size" if side is None else f"draws {side} pixels"
        raise ValueError(f"image_size={image_size} given, but {_path(source)} {draws}; leave it out.")
    return model, names


def _parts(family: Family, sources: Sequence[File]) -> dict[str, tuple[OfficialFile, File]]:
    """The files of a family by their role; of two transformers where it takes two, the smaller one is the second."""
    own: Any = family.layout
    by_role: dict[str, list[tuple[OfficialFile, File]]] = {}
    for source in sources:
        kind = _kind(family, source)
        if kind is None:
            raise ValueError(
                f"{_path(source)} is not of {family.name}, and other files are; pass files of one family, one after "
                f"the other: a transformer and {own.tokenizer}, or some of them."
            )
        by_role.setdefault(kind.role, []).append((kind, source))
    drawing = sorted(by_role.get("transformer", []), key=lambda pair: _count(pair[1]), reverse=True)
    if own.second and len(drawing) == 2 and _count(drawing[0][1]) != _count(drawing[1][1]):
        by_role["transformer"], by_role[own.second] = drawing[:1], drawing[1:]
    for several in by_role.values():
        if len(several) > 1:
            smaller = f", and as its {own.second} a smaller one" if own.second else ""
            raise ValueError(
                f"{_path(several[0][1])} and {_path(several[1][1])} are both of one kind "
                f"({_name(*several[0])}); pass one transformer, one tokenizer, or one of each{smaller}."
            )
    return {role: several[0] for role, several in by_role.items()}


def _alone(kind: OfficialFile, source: File, image_size: int | None, dtype: torch.dtype | None) -> ModelMixin:
    """The model of one file."""
    sized = kind.function(kind.sizes)(image_size, _path(source)) if kind.sizes else image_size
    options = {kind.size: sized} if kind.size and sized is not None else {}
    return kind.function(kind.load)(source, dtype=dtype, **options)


def _count(source: File) -> int:
    return 0 if isinstance(source, Path) else sum(tensor.numel() for tensor in source.weights.values())


def _written(made: tuple[DiffusionPipeline | ModelMixin, dict[str, str]], out: Path) -> dict[str, Any]:
    model, names = made
    write_folder(model.save_pretrained, out)
    components = getattr(model, "components", {"model": model})
    counts = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in components.items()
        if isinstance(part, torch.nn.Module)
    }
    return {"folder": str(out), "class": type(model).__name__, "files": names, "parameters": counts}


def _assemble_musicgen(
    folder: Path, text_encoder: str | os.PathLike | None, image_size: int | None, dtype: torch.dtype | None
) -> tuple[DiffusionPipeline, dict[str, str]]:
    """The pipeline of an exported MusicGen, and what the folder is."""
    kind = kind_of(folder)
    if kind != "MusicGen":
        raise ValueError(
            f"{folder} is a {kind} of audiocraft, whose projection of the text has no place in a saved folder; "
            "load the official files by AudioPipeline.from_magnet(folder, text_encoder, tokenizer)."
        )
    if image_size is not None:
        raise ValueError(f"image_size={image_size} given for {folder}, which is music; leave it out.")
    if text_encoder is None:
        raise ValueError(
            f"{folder} is a MusicGen of audiocraft, whose files lack its text encoder; name it, too: text_encoder "
            "(--text-encoder on the command line), the folder or Hub id of the T5 in its settings (t5-base for music)."
        )
    tokenizer = AutoTokenizer.from_pretrained(text_encoder)
    pipe = components.AudioPipeline.from_audiocraft(folder, text_encoder, tokenizer, dtype=dtype)
    return pipe, {str(folder): "MusicGen"}


def is_of_wan(source: Path | Checkpoint) -> bool:
    """Whether a file is a transformer of Wan, or low-rank changes of one."""
    return isinstance(source, Checkpoint) and (is_wan(source) or is_lora(source))


def assemble_wan(
    sources: Sequence[File], dtype: torch.dtype | None
) -> tuple[WanTransformer3DModel, dict[str, str]]:
    """The transformer of Self-Forcing's file, for diffusers, and what the files are."""
    checkpoints = [source for source in sources if isinstance(source, Checkpoint)]
    changes = [checkpoint for checkpoint in checkpoints if not is_wan(checkpoint)]
    checkpoints = [checkpoint for checkpoint in checkpoints if is_wan(checkpoint)]
    if len(checkpoints) != 1 or len(changes) > 1:
        given = " and ".join(str(checkpoint.path) for checkpoint in (*checkpoints, *changes))
        raise ValueError(f"{given} given; pass one transformer of Wan, alone or with one LoRA of it.")
    model = load_self_forcing(checkpoints[0], lora=changes[0] if changes else None, dtype=dtype)
    return model, {str(checkpoints[0].path): "Wan"} | {str(change.path): "LoRA of Wan" for change in changes}


def is_of_bitdance(source: Path | Checkpoint) -> bool:
    """Whether a path is an official folder of BitDance of texts."""
    return isinstance(source, Path) and (source / "vision_head_config.json").is_file()


def assemble_bitdance(
    sources: Sequence[File], dtype: torch.dtype | None
) -> tuple[DiffusionPipeline, dict[str, str]]:
    """The pipeline of an official folder of BitDance of texts, and what it is."""
    first = sources[0]
    if len(sources) > 1 or not isinstance(first, Path):
        raise ValueError("a folder of BitDance holds all of its models; pass it alone.")
    pipe = components.BitDanceImagePipeline.from_official(first, dtype=dtype)
    return pipe, {str(first): "BitDance of texts"}
