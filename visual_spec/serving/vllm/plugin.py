"""The plug-in: what vLLM runs in each of its processes.

vLLM is not changed. The one exception: its second model runner has no registration for a speculator, so `register` puts
a function before `init_speculator`, where its interfaces are the known ones.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in an environment of its own only.
from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from visual_spec.serving.vllm.start import RUN, missing, settings_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
    from vllm.v1.worker.gpu.states import RequestState

logger = logging.getLogger(__name__)

MODELS = {
    "VisualSpecLlamaGen": "visual_spec.serving.vllm.llamagen:ServedLlamaGen",
    "VisualSpecJanus": "visual_spec.serving.vllm.decoders:ServedJanus",
    "VisualSpecGlmImage": "visual_spec.serving.vllm.decoders:ServedGlmImage",
}


def register() -> None:
    """Entry point `vllm.general_plugins`: make our models and our speculator known. May run several times."""
    from vllm import ModelRegistry, __version__

    for architecture, place in MODELS.items():
        ModelRegistry.register_model(architecture, place)
    if missing():
        logger.warning(
            "vLLM %s has no %s; visual_spec, which was run with %s, serves nothing",
            __version__,
            ", ".join(missing()),
            ", ".join(RUN),
        )
        return
    from vllm.v1.worker.gpu import model_runner

    usual = model_runner.init_speculator
    if getattr(usual, "of_visual_spec", False):
        return

    def init_speculator(
        vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> BaseSpeculator:
        if settings_of(vllm_config) is None:
            return usual(vllm_config, device, req_states)
        from visual_spec.serving.vllm.speculator import JacobiSpeculator

        return JacobiSpeculator(vllm_config, device, req_states)

    init_speculator.of_visual_spec = True  # type: ignore[attr-defined]
    model_runner.init_speculator = init_speculator
