"""Official checkpoint files to `save_pretrained` folders: safetensors and configurations."""

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from visual_spec.families import FAMILIES, PIPELINES
from visual_spec.models.columns.audiocraft import CODEC, LANGUAGE_MODEL, kind_of
from visual_spec.models.continuous.mar_checkpoint import (
    is_kl16,
    is_mar,
    load_kl16_checkpoint,
    load_mar_checkpoint,
)
from visual_spec.models.core.checkpoints import Checkpoint, read_content, unpack_checkpoint
from visual_spec.models.next_scale.infinity_checkpoint import load_infinity_checkpoint
from visual_spec.models.next_scale.infinity_scales import scales_for
from visual_spec.models.next_scale.infinity_vq import load_infinity_vq_checkpoint
from visual_spec.models.next_scale.var import SCALES, VARTransformer, load_var_checkpoint
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel, load_var_vq_checkpoint
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_checkpoint import load_tokenizer, load_transformer, recognise
from visual_spec.models.video.self_forcing_checkpoint import is_lora, is_wan, load_self_forcing
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.convert_students import read_student
from visual_spec.pipelines.folders import check_replaceable, write_folder
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.infinity import InfinityPipeline, infinity_size
from visual_spec.pipelines.latent_image import LatentImagePipeline
from visual_spec.pipelines.saved_index import INDEX, read_index_file
from visual_spec.pipelines.scale_image import ScaleImagePipeline


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
            tokenizer; or a MAGE, which holds its tokenizer; or the files of MaskGCT, or those of one of its models;
            or a MAR, a smaller one that drafts, and KL-16, or some; or a student of LlamaGen or VAR, the tokenizer
            of that family, and the model that taught it, or some; or Self-Forcing's transformer alone; told apart by
            their keys. Or the folder of a MusicGen of audiocraft, which needs its text encoder.
        out: folder to write.
        text_encoder: folder or Hub id of flan-t5-xl, to be copied into a text-conditional pipeline. None leaves it out;
            it can be given at loading, or prompts as embeddings. Of MusicGen, the T5 that its settings name (t5-base).
        image_size: side of the pictures in pixels; None: what the file or its name says. A transformer by itself is
            taken for one over VQ-16 tokens. Of VAR only its tokenizer, where it stands alone, needs to be told: 256 if
            it is not. Of Infinity the name of the transformer says it (`size_by_name`); its tokenizer, alone, is made
            for 1024. MAR's sizes say it.
        dtype: of the weights written; None keeps that of each file.
        overwrite: replace what an earlier conversion wrote at `out`.

    Returns:
        folder; class, the one to load it with; files, {path: architecture}; parameters, {component: count}.

    Raises:
        ValueError, OSError: a file that is none of these, two of one kind, or a folder that is in the way.
    """
    out = Path(out)
    check_replaceable(out, overwrite)
    found: dict[type, Checkpoint] = {}
    names: dict[str, str] = {}
    exported = [Path(file) for file in files if (Path(file) / LANGUAGE_MODEL).is_file()]
    if exported:
        if len(files) > 1:
            raise ValueError(f"{exported[0]} is a folder of audiocraft; pass it alone.")
        model, names = _assemble_musicgen(exported[0], text_encoder, image_size, dtype)
        return _written(model, out, names)
    sources = [_read(Path(file)) for file in files]
    for layout in {family.layout: None for family in FAMILIES if family.layout is not None}:
        if any(_named(layout.recognise)(source) for source in sources):
            model, names = _named(layout.assemble)(sources, text_encoder, image_size, dtype)
            return _written(model, out, names)
    checkpoints = [source for source in sources if isinstance(source, Checkpoint)]
    for file, checkpoint in zip(files, checkpoints, strict=True):
        architecture = recognise(checkpoint)
        if architecture.model in found:
            raise ValueError(
                f"{found[architecture.model].path} and {file} are both of one kind ({architecture.name}); pass one "
                "transformer, one tokenizer, or one of each."
            )
        found[architecture.model], names[str(file)] = checkpoint, architecture.name
    return _written(_assemble(found, text_encoder, image_size, dtype), out, names)


def _named(path: str) -> Any:
    """The function of a `FileLayout`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"visual_spec.{module}"), name)


def _read(path: Path) -> Path | Checkpoint:
    """A folder as it is, a file read. Refuses folders that are pipelines of ours already."""
    if path.is_dir():
        if (path / INDEX).is_file() and (saved := read_index_file(path)["_class_name"]) in PIPELINES:
            raise ValueError(f"{path} is a {saved} already; load it by its from_pretrained.")
        return path
    content = read_content(path)
    if isinstance(content, Mapping) and "best_state" in content:
        raise ValueError(
            f"{path} is of audiocraft; pass its folder, with {LANGUAGE_MODEL} (the language model) and {CODEC} in it."
        )
    if (student := read_student(path, content)) is not None:
        return student
    if isinstance(content, Mapping) and is_mar(content.get("model_ema") or {}):
        return Checkpoint(
            path, dict(content["model_ema"])
        )  # beside it are the weights that were not averaged
    return unpack_checkpoint(path, content)


def _written(model: Any, out: Path, names: dict[str, str]) -> dict[str, Any]:
    write_folder(model.save_pretrained, out)
    components = getattr(model, "components", {"model": model})
    counts = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in components.items()
        if isinstance(part, torch.nn.Module)
    }
    return {"folder": str(out), "class": type(model).__name__, "files": names, "parameters": counts}


def _assemble_musicgen(
    folder: Path, text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
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
    return AudioPipeline.from_audiocraft(folder, text_encoder, tokenizer, dtype=dtype), {
        str(folder): "MusicGen"
    }


def is_of_mar(source: Path | Checkpoint) -> bool:
    """Whether a file is of MAR: a transformer, or KL-16."""
    return isinstance(source, Checkpoint) and (is_mar(source.weights) or is_kl16(source.weights))


def assemble_mar(
    sources: Sequence[Path | Checkpoint], text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    """The pipeline or model of MAR's files, and what each of them is."""
    found = [source for source in sources if isinstance(source, Checkpoint)]
    other = [source for source in sources if not is_of_mar(source)]
    if other:
        path = other[0] if isinstance(other[0], Path) else other[0].path
        raise ValueError(
            f"{path} is not of MAR, and other files are; pass files of one family, one after the other."
        )
    if text_encoder is not None:
        raise ValueError("MAR draws from class labels; leave the text encoder out.")
    tokenizers = [source for source in found if is_kl16(source.weights)]
    # The smaller one drafts.
    models = sorted((source for source in found if is_mar(source.weights)), key=_count, reverse=True)
    same = len(models) == 2 and _count(models[0]) == _count(models[1])
    if len(tokenizers) > 1 or len(models) > 2 or same:
        several = tokenizers if len(tokenizers) > 1 else models
        raise ValueError(
            f"{several[0].path} and {several[1].path} are both of one kind; pass one tokenizer, one MAR, and as its "
            "drafter a smaller one."
        )
    if len(models) == 2 and not tokenizers:
        raise ValueError(
            f"{models[0].path} and {models[1].path} given without their tokenizer; pass kl16.ckpt too."
        )
    if not models:
        if image_size is not None:
            raise ValueError(f"image_size={image_size} given, but KL-16 takes any; leave it out.")
        return load_kl16_checkpoint(tokenizers[0].path, dtype=dtype), {str(tokenizers[0].path): "KL-16"}
    # By their paths: files with the arguments of a training run are refused there, which says what to do.
    parts = [load_mar_checkpoint(source.path, dtype=dtype) for source in models]
    side = 16 * parts[0].grid.height
    if image_size not in (None, side):
        raise ValueError(
            f"image_size={image_size} given, but {models[0].path} draws {side} pixels; leave image_size out."
        )
    names = {str(source.path): f"MAR of {_count(source) / 1e6:.0f}M weights" for source in models}
    names |= {str(source.path): "KL-16" for source in tokenizers}
    if not tokenizers:
        return parts[0], names
    drafter = parts[1] if len(parts) == 2 else None
    pipe = LatentImagePipeline.from_official(parts[0], tokenizers[0].path, dtype=dtype, drafter=drafter)
    return pipe, names


def is_of_infinity(source: Path | Checkpoint) -> bool:
    """Whether a file or folder is of Infinity: a transformer, or its tokenizer."""
    # Folders of shards there are only of Infinity.
    return isinstance(source, Path) or "cfg_uncond" in source.weights or _is_infinity_tokenizer(source)


def _is_infinity_tokenizer(source: Path | Checkpoint) -> bool:
    if isinstance(source, Path) or _is_var_tokenizer(source) or is_kl16(source.weights):
        return False
    return any(key.startswith("encoder.down.0.") for key in source.weights)


def assemble_infinity(
    sources: Sequence[Path | Checkpoint], text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    """The pipeline or model of Infinity's files, and what each of them is."""

    def path(source: Path | Checkpoint) -> str:
        return str(source if isinstance(source, Path) else source.path)

    other = [path(source) for source in sources if not is_of_infinity(source)]
    if other:
        raise ValueError(
            f"{other[0]} is not of Infinity, and other files are; pass files of one family, one after the other."
        )
    tokenizers = [source for source in sources if _is_infinity_tokenizer(source)]
    models = [source for source in sources if not _is_infinity_tokenizer(source)]
    for several in (tokenizers, models):
        if len(several) > 1:
            raise ValueError(
                f"{path(several[0])} and {path(several[1])} are both of one kind; pass one transformer of Infinity, "
                "its tokenizer, or both."
            )
    known = {path(source): "Infinity" for source in models}
    known |= {path(source): "Infinity's tokenizer" for source in tokenizers}
    if models and tokenizers:
        return InfinityPipeline.from_official(
            models[0], tokenizers[0], text_encoder, size=image_size, dtype=dtype
        ), known
    if text_encoder is not None:
        raise ValueError(
            "a text encoder belongs into a pipeline; pass Infinity's transformer and its tokenizer."
        )
    if tokenizers:
        # One tokenizer serves all sizes.
        scales = scales_for(1024 if image_size is None else image_size)
        return load_infinity_vq_checkpoint(tokenizers[0], scales=scales, dtype=dtype), known
    scales = scales_for(infinity_size(models[0]) if image_size is None else image_size)
    return load_infinity_checkpoint(models[0], scales=scales, dtype=dtype), known


def is_of_wan(source: Path | Checkpoint) -> bool:
    """Whether a file is a transformer of Wan, or low-rank changes of one."""
    return isinstance(source, Checkpoint) and (is_wan(source) or is_lora(source))


def assemble_wan(
    sources: Sequence[Path | Checkpoint], text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    """The transformer of Self-Forcing's file, for diffusers, and what the files are."""
    checkpoints = [source for source in sources if isinstance(source, Checkpoint)]
    changes = [checkpoint for checkpoint in checkpoints if not is_wan(checkpoint)]
    checkpoints = [checkpoint for checkpoint in checkpoints if is_wan(checkpoint)]
    if len(checkpoints) != 1 or len(changes) > 1:
        given = " and ".join(str(checkpoint.path) for checkpoint in (*checkpoints, *changes))
        raise ValueError(f"{given} given; pass one transformer of Wan, alone or with one LoRA of it.")
    for name, value in {"text_encoder": text_encoder, "image_size": image_size}.items():
        if value is not None:
            raise ValueError(
                f"{name}={value} given for {checkpoints[0].path}, a transformer of Wan; leave it out."
            )
    model = load_self_forcing(checkpoints[0], lora=changes[0] if changes else None, dtype=dtype)
    return model, {str(checkpoints[0].path): "Wan"} | {str(change.path): "LoRA of Wan" for change in changes}


def is_of_var(source: Path | Checkpoint) -> bool:
    """Whether a file is of VAR: a transformer, or the tokenizer."""
    return isinstance(source, Checkpoint) and ("pos_1LC" in source.weights or _is_var_tokenizer(source))


def _is_var_tokenizer(checkpoint: Checkpoint) -> bool:
    return any(key.startswith("quantize.quant_resi.") for key in checkpoint.weights)


def assemble_var(
    sources: Sequence[Path | Checkpoint], text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    """The pipeline or model of VAR's files, and what each of them is."""
    checkpoints = [source for source in sources if isinstance(source, Checkpoint)]
    if other := [one for one in checkpoints if not is_of_var(one)]:
        raise ValueError(
            f"{other[0].path} is not of VAR, and other files are; pass files of one family, one after the other."
        )
    if text_encoder is not None:
        raise ValueError("VAR draws from class labels; leave the text encoder out.")
    tokenizers = [checkpoint for checkpoint in checkpoints if _is_var_tokenizer(checkpoint)]
    models = [checkpoint for checkpoint in checkpoints if not _is_var_tokenizer(checkpoint)]
    # The larger one drafts.
    models.sort(key=_count, reverse=True)
    if (
        len(tokenizers) > 1
        or len(models) > 2
        or (len(models) == 2 and _count(models[0]) == _count(models[1]))
    ):
        several = tokenizers if len(tokenizers) > 1 else models
        raise ValueError(
            f"{several[0].path} and {several[1].path} are both of one kind; pass one tokenizer, one VAR transformer, "
            "and for CoDe a smaller one."
        )
    if len(models) == 2 and not tokenizers:
        raise ValueError(
            f"{models[0].path} and {models[1].path} given without their tokenizer; pass vae_ch160v4096z32.pth too."
        )
    parts: list[VARTransformer] = [load_var_checkpoint(checkpoint, dtype=dtype) for checkpoint in models]
    sizes = {sum(side * side for side in scales): pixels for pixels, scales in SCALES.items()}
    found = sizes.get(parts[0].offsets[-1]) if parts else None
    if parts and image_size not in (None, found):
        raise ValueError(
            f"image_size={image_size} given, but {models[0].path} has {parts[0].offsets[-1]} tokens"
            f"{f', those of {found} pixels' if found else ''}; leave image_size out."
        )
    names = {
        str(checkpoint.path): f"VAR-d{part.config['num_layers']}"
        for checkpoint, part in zip(models, parts, strict=True)
    } | {str(checkpoint.path): "VAR's tokenizer" for checkpoint in tokenizers}
    if not parts:
        size = image_size or min(SCALES)
        if size not in SCALES:
            raise ValueError(f"image_size={size}; VAR draws {' or '.join(map(str, SCALES))} pixels.")
        tokenizer: MultiscaleVQModel = load_var_vq_checkpoint(
            tokenizers[0].path, dtype=dtype, scales=SCALES[size]
        )
        return tokenizer, names
    if not tokenizers:
        return parts[0], names
    refiner = models[1] if len(models) == 2 else None
    pipe = ScaleImagePipeline.from_official(models[0], tokenizers[0].path, refiner=refiner, dtype=dtype)
    return pipe, names


def _count(checkpoint: Checkpoint) -> int:
    return sum(tensor.numel() for tensor in checkpoint.weights.values())


def _assemble(
    found: dict[type, Checkpoint], text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> Any:
    transformer = found.get(LlamaGenTransformer)
    tokenizer = next(
        (checkpoint for kind, checkpoint in found.items() if kind is not LlamaGenTransformer), None
    )
    text = transformer is not None and "cls_embedding.uncond_embedding" in transformer.weights
    if text_encoder is not None and not (text and tokenizer is not None):
        raise ValueError(
            "a text encoder belongs into a text-conditional pipeline; pass a t2i file and its tokenizer with it."
        )
    if transformer is None:
        assert tokenizer is not None
        return load_tokenizer(tokenizer, image_size=image_size or 256, dtype=dtype)
    if tokenizer is None:
        return load_transformer(transformer, image_size=image_size, dtype=dtype)
    options: dict[str, Any] = dict(image_size=image_size, dtype=dtype)
    if text:
        return ImagePipeline.from_official(transformer, tokenizer, text_encoder, **options)
    return ClassImagePipeline.from_official(transformer, tokenizer, **options)
