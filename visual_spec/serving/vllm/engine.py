"""An engine for pictures: the settings that vLLM is started with, and pictures as its requests."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in an environment of its own only.
from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from visual_spec.samplers.core.law import TokenLaw
from visual_spec.serving.request import settings_of
from visual_spec.serving.vllm.start import PROPOSER
from visual_spec.serving.windows import Served

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


def engine_arguments(
    folder: str | os.PathLike, *, window: int = 32, requests: int = 16, second: bool = False, **more: Any
) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` or `EngineArgs` for a folder of `save_for_vllm` or `save_model_for_vllm`.

    Args:
        window: W, slots that a call scores for each request; 1: no window.
        requests: the most requests in the engine; a guided picture is two.
        second: for vLLM's second model runner (a GPU), else the first.
        more: other arguments, which take precedence.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    served = Served.of(config["visual_spec"], config["eos_token_id"])
    prompt = config["visual_spec"]["prompt_tokens"]
    length = prompt + len(served.places) + 2 * window + 2  # where less room is left, vLLM drafts for nobody
    drafts: dict[str, object] = {"num_speculative_tokens": window - 1}
    drafts |= {"method": "ngram"} if second else {"method": "custom_class", "model": PROPOSER}
    if second:
        drafts |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}  # vLLM asks for them; nobody looks up
    return {
        "model": str(folder),
        # vLLM's "auto" takes bfloat16 for float32, and so draws other tokens than the pipeline.
        "dtype": config.get("dtype") or config["torch_dtype"],  # transformers writes the first
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": length,
        "max_num_seqs": requests,
        "max_num_batched_tokens": max(length, requests * max(window, prompt)),
        **({"speculative_config": drafts} if window > 1 else {}),
        **more,
    }


class Prompts(Protocol):
    """Prompts as ids: `PromptIds`, `ModelPrompts`."""

    def of(self, prompt: Any, /) -> Sequence[list[int]]:
        """Return the ids of a prompt, and of the prompt that guidance leads away from."""
        ...


def requests_of(
    ids: Prompts, prompt: object, seed: int, law: TokenLaw, length: int, pair: str
) -> list[tuple[dict[str, list[int]], SamplingParams]]:
    """Return the requests of a picture: prompt and `SamplingParams` each, two of them with guidance.

    Args:
        length: tokens of a picture.
        pair: a name that no other picture in the engine has.

    Raises:
        ValueError: see `of` of the prompts, and `PictureRequest.of`.
    """
    from vllm import SamplingParams

    settings = settings_of(law, seed, pair)
    try:
        params = [
            SamplingParams(temperature=0, max_tokens=length, detokenize=False, extra_args=extra)
            for extra in settings
        ]
    except Exception as error:  # its refusals are of a class of its own, which is no ValueError
        raise ValueError(str(error)) from error
    return [({"prompt_token_ids": own}, one) for own, one in zip(ids.of(prompt), params, strict=False)]


def check_whole(tokens: Sequence[int], length: int) -> None:
    """Refuse a picture that the engine ended early, by RuntimeError."""
    if len(tokens) != length:
        raise RuntimeError(
            f"the engine ended the picture at slot {len(tokens) - 1} of {length}: the two requests of a guided picture "
            "were not in the same call. The engine's log says why. Send it again with its seed: the same picture comes."
        )


def draw_tokens(
    engine: LLM, ids: Prompts, prompts: Sequence[object], seeds: Sequence[int], law: TokenLaw, length: int
) -> Tensor:
    """Draw pictures by a `vllm.LLM`, all at once: long [B, L], the ids of a pipeline for the same seeds.

    Args:
        length: places of a request, row ends included (`Served.places`). `Served.codes` reads ids of a model
            that has some, or several grids.

    Raises:
        ValueError, RuntimeError: as `requests_of` and `check_whole`.
    """
    pairs = [
        requests_of(ids, prompt, seed, law, length, f"{index}")
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    prompt_ids, params = zip(*(request for pair in pairs for request in pair), strict=True)
    outputs = engine.generate(list(prompt_ids), list(params), use_tqdm=False)
    drawn = [list(output.outputs[0].token_ids) for output in outputs]
    for tokens in drawn:
        check_whole(tokens, length)
    return torch.tensor(drawn).view(len(pairs), -1, length)[:, 0]
