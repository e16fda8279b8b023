"""Importing this, before vLLM, makes vLLM's second model runner run on a CPU: by Triton's interpreter. For tests only.

The runner needs Triton, and Triton has no backend for CPUs; vLLM would fall back to its first runner.
"""

import os
import types

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import triton.backends  # noqa: E402

_driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
triton.backends.backends["cpu"] = types.SimpleNamespace(compiler=None, driver=_driver)  # type: ignore[assignment]
