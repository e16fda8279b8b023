"""A plug-in of SGLang: accelerates the GLM-Image that SGLang loads into its own process.

SGLang calls `register` in every process (entry point `sglang.multimodal_gen.plugins`). Nothing happens unless
`VISUAL_SPEC_SAMPLER` names a sampler, such as `speculative-jacobi:window=32`. Then the loaded encoder is passed to
`visual_spec.accelerate`, and SGLang's own call of its `generate` draws with windows (sglang 0.5.23).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os

LOADER = (
    "sglang.multimodal_gen.runtime.loader.component_loaders.vl_encoder_loader."
    "VisionLanguageEncoderLoader.load_customized"
)
VARIABLE = "VISUAL_SPEC_SAMPLER"


def register() -> None:
    """Hook the loader of the encoder, if a sampler is named."""
    if not os.environ.get(VARIABLE):
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry
    from sglang.srt.plugins.hook_registry import HookType

    HookRegistry.register(LOADER, accelerated, HookType.AFTER)


def accelerated(encoder: object, *_: object, **__: object) -> object:
    """Return what the loader returned, accelerated; the address of an encoder elsewhere as it is."""
    import visual_spec

    return encoder if isinstance(encoder, str) else visual_spec.accelerate(encoder, os.environ[VARIABLE])
