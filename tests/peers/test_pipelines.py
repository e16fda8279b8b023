"""Cases of diffusers' `PipelineTesterMixin` for the two kinds that draw from neither texts nor classes.

Restated from huggingface/diffusers, `tests/pipelines/test_pipelines_common.py`, whose tests are not in its wheel;
`tests/pipelines/test_like_diffusers.py` has them for all other kinds. A batch of MAGE is its `batch_size`, as of
diffusers' unconditional pipelines; a batch of MaskGCT is a list of each input, as diffusers' `batch_params`. One case
cannot hold: `test_callback_inputs` writes zeros into "latents" at the last step, and committed tokens stay.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.mage import mage_pipeline
from tests.helpers.maskgct import given_prompt, maskgct_pipeline, write_official
from tests.helpers.tiny import quiet, seeded

pytestmark = pytest.mark.peers


@dataclass(frozen=True)
class Kind:
    make: Callable[[Path], Any]
    inputs: dict[str, Any]
    batched: tuple[str, ...] = ()

    def ask(self, pipe: Any, size: int | None = None, **settings: Any) -> Any:
        """What the pipeline makes of one request, or of a batch of them with the seeds 0, 1, ..."""
        inputs, seeds = self.inputs, 1 if size is None else size
        if size is not None:
            inputs = {
                name: [inputs[name]] * size if name in self.batched else inputs[name] for name in inputs
            }
            inputs |= {"batch_size": size} if "batch_size" in inputs else {}
        return pipe(**{**inputs, "generator": seeded(*range(seeds)), "output_type": "np"} | settings)


SPOKEN = {"phones": [1, 2, 3, 4, 5, 6], "prompt_phones": [2, 7, 1], **given_prompt()}
KINDS = {
    "MAGE": Kind(lambda _: mage_pipeline(), {"batch_size": 1}),
    "MaskGCT": Kind(maskgct_pipeline, SPOKEN | {"audio_length_in_s": 20 / 4000}, tuple(SPOKEN)),
}


@pytest.fixture(params=KINDS)
def kind(request: Any) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("MaskGCT")
    write_official(folder)
    return folder


@pytest.fixture
def pipe(kind: Kind, official: Path) -> Any:
    return kind.make(official)


def test_pipeline_call_signature(kind, pipe):
    parameters = inspect.signature(pipe.__call__).parameters
    assert {*kind.inputs} <= {*parameters}
    optional = {name for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    assert {"generator", "output_type", "return_dict"} <= optional


def test_inference_batch_consistent(kind, pipe):
    assert len(kind.ask(pipe, 2)[0]) == 2


def test_inference_batch_single_identical(kind, pipe):
    assert np.abs(kind.ask(pipe, 3)[0][0] - kind.ask(pipe)[0][0]).max() < 1e-4


def test_dict_tuple_outputs_equivalent(kind, pipe):
    assert np.array_equal(kind.ask(pipe)[0], kind.ask(pipe, return_dict=False)[0])


def test_save_load_local(kind, pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    assert np.array_equal(kind.ask(quiet(type(pipe).from_pretrained(tmp_path)))[0], kind.ask(pipe)[0])


def test_save_load_optional_components(kind, pipe, tmp_path):
    for name in pipe._optional_components:
        setattr(pipe, name, None)
    pipe.save_pretrained(tmp_path)
    loaded = quiet(type(pipe).from_pretrained(tmp_path))
    assert all(getattr(loaded, name) is None for name in pipe._optional_components)
    assert np.array_equal(kind.ask(loaded)[0], kind.ask(pipe)[0])


def test_callback_inputs_and_cfg(kind, pipe):
    seen, default = [], pipe.guidance_scale

    def grow(pipe, step, timestep, tensors):
        seen.append({*tensors})
        pipe._guidance_scale += 1.0
        return tensors

    names = list(pipe._callback_tensor_inputs)
    kind.ask(pipe, callback_on_step_end=grow, callback_on_step_end_tensor_inputs=names)
    assert all(names == {*pipe._callback_tensor_inputs} for names in seen)
    assert pipe.guidance_scale == default + pipe.num_timesteps == default + len(seen)


@pytest.mark.parametrize("dtype", [torch.float16, {"default": torch.float16}], ids=["alias", "dict"])
def test_dtypes(pipe, dtype, tmp_path):
    pipe.save_pretrained(tmp_path)
    models = [one for one in pipe.components.values() if isinstance(one, nn.Module)]
    assert all(model.dtype == torch.float32 for model in models)
    loaded = type(pipe).from_pretrained(tmp_path, dtype=dtype)
    cast = pipe.to(dtype=torch.float16)
    for part in (loaded, cast):
        models = [one for one in part.components.values() if isinstance(one, nn.Module)]
        assert models and all(model.dtype == torch.float16 for model in models)


def test_loading_with_variants(kind, pipe, tmp_path):
    pipe.save_pretrained(tmp_path / "fp16", variant="fp16")
    loaded = quiet(type(pipe).from_pretrained(tmp_path / "fp16", variant="fp16"))
    assert np.array_equal(kind.ask(loaded)[0], kind.ask(pipe)[0])
    pipe.save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match="variant=fp16"):
        type(pipe).from_pretrained(tmp_path / "none", variant="fp16")
