"""Every entry point of a model works under the hooks of accelerate and of diffusers. All between CPU, disk and CPU."""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from diffusers.hooks.group_offloading import apply_group_offloading

from tests.helpers.pipelines import KINDS
from tests.helpers.tiny import quiet, seeded
from tests.helpers.tiny_audio import RATE, clip_of
from tests.helpers.tiny_scales import tiny_scale_pipeline
from visual_spec.models.core.offload import at_hand

CPU = torch.device("cpu")


def by_group(model, folder, kind):
    options: Any = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    apply_group_offloading(
        model, CPU, CPU, offload_type=kind, offload_to_disk_path=str(folder / type(model).__name__), **options
    )


OFFLOAD = {
    "accelerate": lambda model, folder: cpu_offload(model, CPU, offload_buffers=bool(model._parameters)),
    "blocks on disk": lambda model, folder: by_group(model, folder, "block_level"),
    "leaves on disk": lambda model, folder: by_group(model, folder, "leaf_level"),
}


def models_of(pipe):
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def drawn(pipe, name):
    """Pictures or waves, and the tokens that they were made of."""
    heard: Any = dict(audio=clip_of(3), sampling_rate=RATE) if "music" in name else {}
    made = KINDS[name].ask(pipe, seed=1, return_dict=False, **heard)
    return made[0], made[2 if "music" in name else 1]


def same(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class Plain(torch.nn.Module):
    """The control: a model as diffusers expects it, of which `forward` is all."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.shift = torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + self.shift


@pytest.mark.parametrize("how", OFFLOAD)
def test_offloading_takes_the_weights_away_between_calls(how, tmp_path):
    """The control: what follows would be true of any model if the weights stayed where they are."""
    model, x = Plain(), torch.randn(2, 4)
    want, before = model(x), weights_of(model)
    OFFLOAD[how](model, tmp_path)
    for weight in model.parameters():  # those on disk are of any value
        weight.data = torch.empty_like(weight, device="meta") if weight.is_meta else weight.data.fill_(7.0)
    assert torch.equal(model(x), want)
    with at_hand(model):
        assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
        assert torch.equal(model(x), want)
    assert not any(
        not value.is_meta and torch.equal(before[name], value) and value.any()
        for name, value in model.named_parameters()
    )
    assert torch.equal(model(x), want)  # the hooks of `forward` are back


@pytest.mark.parametrize("how", OFFLOAD)
@pytest.mark.parametrize("name", KINDS)
def test_an_offloaded_pipeline_draws_the_same(name, how, tmp_path):
    pipe = KINDS[name].make()
    want = drawn(pipe, name)
    for part, model in models_of(pipe).items():
        OFFLOAD[how](model, tmp_path / part)
        with torch.no_grad():
            for weight in model.parameters():
                if not weight.is_meta:
                    weight.data = torch.full_like(weight, torch.nan) if weight.is_floating_point() else weight
    assert same(drawn(pipe, name), want)
    assert same(drawn(pipe, name), want)  # and again, from where the first one left the weights
    # The codec is heard between two calls of the transformer.
    assert ("music" in name) == ("codec" in pipe._exclude_from_cpu_offload)


@pytest.mark.parametrize("how", OFFLOAD)
def test_models_work_outside_a_pipeline(how, tmp_path):
    """`prefill`, a call and `decode_tokens`, each by itself."""
    pipe = KINDS["captions"].make()
    model, tokenizer = pipe.transformer, pipe.vq_model
    condition = pipe.make_condition("a red circle")
    slots = torch.arange(2)[None]

    def run():
        state = model.prefill(condition, batch_size=1, guided=False, window=2)
        scores = model(state, torch.zeros(1, 2, dtype=torch.long), slots)
        pictures = tokenizer.decode_tokens(torch.zeros(1, model.grid.num_tokens, dtype=torch.long))
        return state.logits, scores, pictures

    with torch.no_grad():
        want = run()
        for part in (model, tokenizer):
            OFFLOAD[how](part, tmp_path)
        assert all(torch.equal(*pair) for pair in zip(run(), want, strict=True))


def test_weights_go_back_when_a_model_fails(tmp_path):
    model = Plain()
    OFFLOAD["accelerate"](model, tmp_path)
    with pytest.raises(RuntimeError, match="mine"), at_hand(model):
        assert not any(weight.is_meta for weight in model.parameters())
        raise RuntimeError("mine")
    assert all(weight.is_meta for weight in model.parameters())


def test_components_of_one_class_are_offloaded_to_folders_of_their_own(tmp_path):
    pipe = quiet(tiny_scale_pipeline())
    want = pipe(3, generator=seeded(0), num_draft_scales=1).tokens
    pipe.enable_group_offload(CPU, offload_type="leaf_level", offload_to_disk_path=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["refiner", "transformer", "vq_model"]
    assert torch.equal(pipe(3, generator=seeded(0), num_draft_scales=1).tokens, want)
