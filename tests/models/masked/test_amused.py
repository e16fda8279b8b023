"""aMUSEd through diffusers' modules: the sampler's ids are those of diffusers' scheduler for equal noise."""

from dataclasses import replace
from typing import Any

import torch
from diffusers.models.unets.uvit_2d import UVit2DModel
from diffusers.schedulers.scheduling_amused import AmusedScheduler
from torch import Tensor

from tests.helpers.amused import CODES, MASK, SIDE, STEPS, VQ_SIZES, diffusers_ids, transformer
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from visual_spec.models.core.settings import of_settings
from visual_spec.models.masked.amused import AmusedTransformer, AmusedVQModel, ClipCondition
from visual_spec.samplers.core.noise import draw_keys
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.presets import PRESETS


def condition(count: int) -> ClipCondition:
    draw = torch.Generator().manual_seed(5)
    shapes = (count, 8), (count, 7, 8), (1, 8), (1, 7, 8)
    pooled, states, null_pooled, null_states = (torch.randn(shape, generator=draw) for shape in shapes)
    return ClipCondition(pooled, states, null_pooled, null_states)


def cast_to(dtype: torch.dtype, clip: ClipCondition) -> ClipCondition:
    parts = {name: part.to(dtype) for name, part in vars(clip).items() if isinstance(part, Tensor)}
    return replace(clip, **parts)


def test_ids_are_those_of_diffusers_for_equal_noise(monkeypatch):
    model, told, preset = transformer(), condition(3), PRESETS["amused"]
    wanted = diffusers_ids(
        monkeypatch, model, told, draw_keys(seeded(1, 2, 3), 3), torch.full((3, SIDE * SIDE), MASK)
    )
    # The Gumbel scale falls from 2 to 0 over however many steps there are.
    settings = preset.settings | {"steps": STEPS, "choice_temperature": 2.0 * STEPS / (STEPS - 1)}
    found = of_settings(MaskedSampler, **settings)(
        model, told, law=preset.law, generator=seeded(1, 2, 3), batch_size=3
    )
    assert torch.equal(found.tokens, wanted)
    assert len(found.tokens.unique()) > 5 and found.trace.target_calls.tolist() == [STEPS] * 3


def test_known_tokens_stay_in_half_precision():
    """With half precision diffusers' scheduler hides some of them again (its mark for them is a finite number)."""
    model, told = transformer().half(), cast_to(torch.float16, condition(64))
    known = torch.randint(CODES, (64, SIDE * SIDE), generator=torch.Generator().manual_seed(0))
    given = known.clone()
    given[:, ::2] = MASK
    logits = torch.randn(64, SIDE * SIDE, CODES, dtype=torch.float16)
    scheduler: Any = AmusedScheduler(mask_token_id=MASK)
    scheduler.set_timesteps(12, (2, 0))
    hidden_again = 0
    for seed in range(20):
        torch.manual_seed(seed)
        step = scheduler.step(logits, 11, given.clone(), starting_mask_ratio=0.5)
        hidden_again += int((step.prev_sample[:, 1::2] == MASK).sum())
    assert hidden_again > 0  # the mistake is still there, so this test says something
    model = model.float()  # this CPU has no half-precision convolutions of depth; the draws are what matters
    told = cast_to(torch.float32, told)
    sampler = PRESETS["amused"].sampler(steps=4)
    found = sampler(model, told, law=PRESETS["amused"].law, known_tokens=given, batch_size=64)
    assert torch.equal(found.tokens[:, 1::2], known[:, 1::2])
    assert (found.tokens < CODES).all()


def test_conditions_that_do_not_fit_are_refused():
    model = transformer()
    refuses(TypeError, "NoneType.*aMUSEd.*ClipCondition", model.prepare, None, batch_size=1, guided=False)
    refuses(ValueError, "2 prompts.*3", model.prepare, condition(2), batch_size=3, guided=False)


def test_it_is_loaded_from_folders_that_diffusers_writes(tmp_path):
    model = transformer()
    UVit2DModel.from_config(model.config).save_pretrained(tmp_path / "transformer")  # pyright: ignore
    loaded: Any = AmusedTransformer.from_pretrained(tmp_path, subfolder="transformer")
    assert isinstance(loaded, AmusedTransformer)
    assert (loaded.mask_id, loaded.vocab_size, loaded.grid.num_tokens) == (MASK, CODES, SIDE**2)


def test_pictures_become_tokens_and_tokens_pictures():
    torch.manual_seed(0)
    vq_model = AmusedVQModel(**VQ_SIZES).eval()
    images = 2 * torch.rand(2, 3, 16, 16) - 1
    tokens = vq_model.encode_tokens(images)
    assert tokens.shape == (2, 64) and vq_model.patch_size == 2
    latents: Any = vq_model.encode((images + 1) / 2)
    code = vq_model.quantize.embedding.weight
    nearest = torch.cdist(latents.latents.flatten(2).mT, code[None]).argmin(-1)
    assert torch.equal(tokens, nearest)
    whole: Any = vq_model.decode(code[nearest].mT.unflatten(2, (8, 8)), force_not_quantize=False)
    assert torch.allclose(vq_model.decode_tokens(tokens), 2 * whole.sample.clamp(0, 1) - 1, atol=1e-5)
