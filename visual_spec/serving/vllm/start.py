"""What vLLM is refused to start with, and the pictures that all parts of one engine share."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in an environment of its own only.
from __future__ import annotations

import functools
import importlib
import inspect
import logging
from typing import TYPE_CHECKING, Any

from visual_spec.serving.windows import Served, Windows

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

RUN = ("0.32.0", "0.33.0")  # the versions of vLLM that were run
# What our parts stand on: a module, a name in it, and the fields or arguments that it has.
INTERFACES = (
    ("vllm.v1.sample.logits_processor.interface", "LogitsProcessor.apply", ("logits",)),
    ("vllm.v1.sample.logits_processor.interface", "LogitsProcessor.update_state", ("batch_update",)),
    ("vllm.v1.sample.logits_processor.interface", "MoveDirectionality.SWAP", ()),
    ("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", ("vllm_config",)),
    ("vllm.v1.worker.gpu.sample.logits_processor.interface", "LogitsProcessor.apply", ("logits", "ctx")),
    (
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsProcessor.add_request",
        ("req_idx", "sampling_params"),
    ),
    (
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsContext",
        ("expanded_idx_mapping", "pos", "input_ids"),
    ),
    ("vllm.v1.worker.gpu.model_runner", "init_speculator", ("vllm_config", "device", "req_states")),
    ("vllm.v1.worker.gpu.spec_decode.speculator", "BaseSpeculator.propose", ("input_batch",)),
)
PROPOSER = "visual_spec.serving.vllm.drafting.JacobiProposer"
_WINDOWS = "_visual_spec_windows"


@functools.cache
def missing() -> tuple[str, ...]:
    """Return what the installed vLLM lacks of what our parts stand on. Warns of a version that was not run."""
    from vllm import __version__

    lacking = []
    for module, name, parts in INTERFACES:
        try:
            place: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            lacking.append(f"{module}.{name}")
            continue
        known = inspect.signature(place).parameters if parts else {}
        lacking += [f"{part} of {module}.{name}" for part in parts if part not in known]
    if not lacking and __version__.split("+")[0] not in RUN:
        logger.warning("vLLM %s has the interfaces of %s, and was not run", __version__, ", ".join(RUN))
    return tuple(lacking)


def settings_of(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """Return `visual_spec` of `--additional-config`, or else of the model; None: it does not serve pictures."""
    settings = vllm_config.additional_config
    settings = settings.get("visual_spec") if isinstance(settings, dict) else None
    return settings or getattr(vllm_config.model_config.hf_config, "visual_spec", None)


def windows_of(vllm_config: VllmConfig) -> Windows | None:
    """Return the pictures of an engine, the same for all its parts; None if it does not serve pictures.

    Raises:
        ValueError: the engine was started with settings under which pictures are not safe; see `check_start`.
    """
    known = getattr(vllm_config, _WINDOWS, None)
    settings = settings_of(vllm_config)
    if known is None and settings is not None:
        served = Served.of(settings, _end_of(vllm_config.model_config.hf_config))
        check_start(vllm_config, served)
        known = Windows(served, num_drafts_of(vllm_config))
        object.__setattr__(vllm_config, _WINDOWS, known)
    return known


def num_drafts_of(vllm_config: VllmConfig) -> int:
    """Return how many drafts of a request a call tests; 0 without a window."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else speculative.num_speculative_tokens


def check_start(vllm_config: VllmConfig, served: Served) -> None:
    """Refuse, before the model is loaded and by ValueError, settings under which pictures would be wrong or pairs would
    part.
    """
    if missing():
        raise ValueError(
            f"this vLLM has no {', '.join(missing())}; visual_spec was run with {', '.join(RUN)}. Install one of these."
        )
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if cache.enable_prefix_caching:
        raise ValueError(
            "enable_prefix_caching=True; a request with a cached prompt starts before its pair does. Pass "
            "enable_prefix_caching=False."
        )
    if scheduler.max_num_seqs % 2:
        raise ValueError(
            f"max_num_seqs={scheduler.max_num_seqs}; pairs take two places. Pass an even number."
        )
    longest = served.prompt_tokens or max(1, vllm_config.model_config.max_model_len - len(served.places))
    needed = scheduler.max_num_seqs * max(num_drafts_of(vllm_config) + 1, longest)
    budget = getattr(scheduler, "max_num_scheduled_tokens", None) or scheduler.max_num_batched_tokens
    if budget < needed:
        raise ValueError(
            f"max_num_batched_tokens={budget}; {scheduler.max_num_seqs} requests need "
            f"{needed} to be in every call. Pass that, or a smaller max_num_seqs."
        )
    if 0 < scheduler.long_prefill_token_threshold < longest:
        raise ValueError(
            f"long_prefill_token_threshold={scheduler.long_prefill_token_threshold} splits prompts of {longest} "
            "tokens; leave it out."
        )
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}; drafts are made where the model begins and "
            "ends. Pass 1."
        )
    if speculative is not None:
        _check_drafts(vllm_config)


def _check_drafts(vllm_config: VllmConfig) -> None:
    """Refuse drafts that are not ours: without our part an engine would draw the most probable tokens."""
    speculative, second = vllm_config.speculative_config, vllm_config.use_v2_model_runner
    ours = speculative.method == "ngram" if second else speculative.model == PROPOSER
    if not ours:
        use = '"ngram"' if second else f'"custom_class" and model "{PROPOSER}"'
        raise ValueError(
            f"speculative_config with method {speculative.method!r} and model {speculative.model!r}; with "
            f"vLLM's {'second' if second else 'first'} model runner pass method {use}, or none for plain decoding."
        )


def check_cache(vllm_config: VllmConfig) -> None:
    """Refuse, by ValueError, a cache in which a request could be preempted: pairs would part. The size is known after
    loading only.
    """
    cache, most = vllm_config.cache_config, vllm_config.scheduler_config.max_num_seqs
    length = vllm_config.model_config.max_model_len
    if cache.num_gpu_blocks is None:
        return
    held = cache.num_gpu_blocks * cache.block_size
    needed = most * -(-length // cache.block_size) * cache.block_size
    if held < needed:
        raise ValueError(
            f"the cache holds {held} tokens; {most} requests of {length} need {needed}, or one could be preempted. "
            "Pass a smaller max_num_seqs or max_model_len, or more memory."
        )


def _end_of(config: object) -> int | None:
    end = getattr(config, "eos_token_id", None)
    return end[0] if isinstance(end, list) else end
