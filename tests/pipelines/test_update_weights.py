"""New weights in place: the same tokens as a fresh pipeline of them, whatever was built on the old ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig
from diffusers.quantizers.quantization_config import TorchAoConfig
from torch import Tensor, nn

import visual_spec
from tests.helpers.nextstep import NextStep, conditions, filled
from tests.helpers.pipelines import ALL, Kind
from tests.helpers.recordings import repeated, traced
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded, tiny_pipeline, tiny_transformer
from tests.helpers.tiny_scales import tiny_scale_pipeline
from tests.helpers.tiny_t5 import tiny_features
from tests.helpers.transformers_models import draw
from tests.models.next_token import tiny_transformers as tiny
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.core.projections import fuse_projections
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.next_scale.scale_cache import CompressedVAR
from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.weights import replace_weights
from visual_spec.samplers.core import graph
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.scales.scales import ScaleWiseSampler

State = dict[str, Tensor]
PROMPT = "a red circle on a blue square"


def snapshot(model: nn.Module) -> State:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def perturbed(model: nn.Module, seed: int = 5) -> State:
    """Other weights of the same model: each is moved by half of its own spread."""
    noise = torch.Generator().manual_seed(seed)
    state: State = {}
    moved: State = {}  # by place: tied weights stay tied
    for key, value in model.state_dict().items():
        place = f"{value.data_ptr()} {tuple(value.shape)}"
        if value.is_floating_point() and place not in moved:
            spread = value.std(correction=0).nan_to_num() + 0.05
            drawn = torch.randn(value.shape, generator=noise, dtype=value.dtype)
            moved[place] = value + 0.5 * spread * drawn
        state[key] = (moved[place] if place in moved else value).clone()
    return state


def drawn(kind: Kind, pipe: Any, **settings: Any) -> Any:
    made = kind.ask(pipe, **settings)
    return next(
        getattr(made, name) for name in ("tokens", "codes", "latents", "images") if hasattr(made, name)
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.every_set
@pytest.mark.parametrize("name", ALL)
def test_an_updated_pipeline_draws_as_one_that_was_made_with_the_weights(name: str) -> None:
    kind = ALL[name]
    pipe, fresh = kind.make(), kind.make()
    before, first = snapshot(pipe.transformer), drawn(kind, pipe)
    new, places = perturbed(pipe.transformer), [one.data_ptr() for one in pipe.transformer.parameters()]
    fresh.transformer.load_state_dict(new)
    expected = drawn(kind, fresh)
    assert not same(first, expected)
    pipe.update_weights(new)
    assert same(drawn(kind, pipe), expected)
    assert places == [one.data_ptr() for one in pipe.transformer.parameters()]
    pipe.update_weights(iter(before.items()))
    assert same(drawn(kind, pipe), first)


@pytest.mark.every_set
@pytest.mark.parametrize("name", ALL)
def test_every_component_can_be_updated(name: str) -> None:
    kind = ALL[name]
    pipe, fresh = kind.make(), kind.make()
    kind.ask(pipe)
    for part, model in fresh.components.items():
        if isinstance(model, nn.Module):
            new = perturbed(model)
            model.load_state_dict(new)
            pipe.update_weights(new, part)
            assert fingerprint([getattr(pipe, part)]) == fingerprint([model])
    assert same(drawn(kind, pipe), drawn(kind, fresh))


# -- what was built on the old weights ---------------------------------------------------------------------------------


def ids(pipe: Any, seed: int = 0, **settings: Any) -> Tensor:
    return pipe(PROMPT, generator=seeded(seed, seed + 1), num_images_per_prompt=2, **settings).tokens


def fresh_ids(new: State, sampler: Any = None) -> Tensor:
    pipe = tiny_pipeline(sampler)
    pipe.transformer.load_state_dict(new)
    return ids(pipe)


@pytest.fixture
def recordings() -> Iterator[list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        yield from repeated(patch)


def test_recorded_calls_stay_and_read_the_new_weights(recordings: list[Any]) -> None:
    pipe = tiny_pipeline(SpeculativeJacobiSampler(4, graph="auto"))
    old, new = snapshot(pipe.transformer), perturbed(pipe.transformer)
    first = [ids(pipe) for _ in range(3)][-1]
    made, known = len(recordings), dict(graph._RECORDINGS[pipe.transformer])
    assert made
    pipe.update_weights(new)
    assert torch.equal(ids(pipe), fresh_ids(new, SpeculativeJacobiSampler(4, graph=False)))
    pipe.update_weights(old)
    assert torch.equal(ids(pipe), first)
    # No new graph, no new cache.
    assert len(recordings) == made and graph._RECORDINGS[pipe.transformer] == known


def test_weights_in_other_memory_are_recorded_anew(recordings: list[Any]) -> None:
    """A trainer that replaces the tensors themselves: a recording of the old ones is not used."""
    pipe = tiny_pipeline(SpeculativeJacobiSampler(4, graph="auto"))
    for _ in range(3):
        ids(pipe)
    made, new = len(recordings), perturbed(pipe.transformer)
    pipe.transformer.load_state_dict(new, assign=True)
    assert torch.equal(ids(pipe), fresh_ids(new, SpeculativeJacobiSampler(4, graph=False)))
    assert len(recordings) > made


def test_a_recording_of_fixed_addresses_reads_the_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations on the memory that they were recorded with, as in a CUDA graph."""
    layer, made, x = nn.Linear(3, 3), traced(monkeypatch), torch.randn(2, 3)
    recorded = graph.RecordedFunction(layer, layer.forward)
    with torch.no_grad():
        for _ in range(3):
            recorded(x)
        replace_weights(layer, perturbed(layer), "layer")
        torch.testing.assert_close(recorded(x), layer(x))
        assert len(made) == 1


def test_joined_projections_follow() -> None:
    pipe = tiny_pipeline()
    state, new = snapshot(pipe.transformer), perturbed(pipe.transformer)
    fuse_projections(pipe.transformer)
    joined = pipe.transformer.layers[0].feed_forward.w1
    pipe.update_weights(new)
    assert torch.equal(
        joined.weight, torch.cat([new[f"layers.0.feed_forward.{name}.weight"] for name in ("w1", "w3")])
    )
    assert pipe.transformer.layers[0].feed_forward.w1 is joined
    assert torch.equal(ids(pipe), fresh_ids(new))
    narrow = new | {"layers.0.feed_forward.w3.weight": new["layers.0.feed_forward.w3.weight"][1:]}
    with pytest.raises(
        ValueError, match=r"1 of another shape: layers.0.feed_forward.w3.weight \[\d+, 16\] instead"
    ):
        pipe.update_weights(narrow)
    pipe.update_weights(state)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_drafter_that_fell_out_of_date_changes_no_token(guidance: float) -> None:
    target = tiny_transformer()
    drafter = EagleDrafter.for_target(target).eval()
    pipe = tiny_pipeline(DraftedSampler(3, acceptance="identical"))
    pipe.drafter = drafter
    new = perturbed(pipe.transformer)
    ids(pipe, guidance_scale=guidance)
    pipe.update_weights(new)
    plain = tiny_pipeline()
    plain.transformer.load_state_dict(new)
    for seed in range(4):
        assert torch.equal(
            ids(pipe, seed, guidance_scale=guidance), ids(plain, seed, guidance_scale=guidance)
        )
    # A copy of the old weights as the draft model is wrong more often than one of the new.
    old = tiny_transformer()
    pipe.drafter = old
    stale = pipe(PROMPT, generator=seeded(0)).trace
    pipe.update_weights(new, "drafter")
    again = pipe(PROMPT, generator=seeded(0)).trace
    assert stale.target_calls.sum() > again.target_calls.sum()


def test_a_compiled_transformer_follows() -> None:
    pipe = tiny_pipeline()
    new = perturbed(pipe.transformer)
    compiled = torch.compile(pipe.transformer.layers[0].feed_forward, backend="eager")
    pipe.transformer.layers[0].feed_forward = compiled
    ids(pipe)
    pipe.update_weights(new)  # whose keys have no `_orig_mod`
    assert torch.equal(ids(pipe), fresh_ids(new))


def test_adapters_stay_and_fused_ones_are_refused() -> None:
    pytest.importorskip("peft")
    pipe, fresh = tiny_pipeline(), tiny_pipeline()
    adapter = {
        f"layers.0.attention.wqkv.lora_{part}.weight": torch.randn(shape, generator=seeded(3)[0])
        for part, shape in (("A", (2, 16)), ("B", (48, 2)))
    }
    new = perturbed(pipe.transformer)
    pipe.load_lora_weights(adapter, "mine")
    ids(pipe)
    pipe.update_weights(new)
    fresh.transformer.load_state_dict(new)
    fresh.load_lora_weights(adapter, "mine")
    assert torch.equal(ids(pipe), ids(fresh)) and not torch.equal(ids(pipe), fresh_ids(new))
    first = "layers.0.attention.wqkv."
    pipe.update_weights({key.replace(first, f"{first}base_layer."): value for key, value in new.items()})
    pipe.fuse_lora()
    with pytest.raises(ValueError, match=r"fused adapters \(layers.0.attention.wqkv\); unfuse_lora\(\)"):
        pipe.update_weights(new)


def test_offloaded_weights_are_written_where_they_rest() -> None:
    pipe = tiny_pipeline()
    new = perturbed(pipe.transformer)
    cpu_offload(pipe.transformer, execution_device=torch.device("cpu"))
    assert next(pipe.transformer.parameters()).is_meta
    ids(pipe)
    pipe.update_weights(new)
    assert torch.equal(ids(pipe), fresh_ids(new))


def test_weights_offloaded_to_disk_are_refused(tmp_path: Any) -> None:
    pipe = tiny_pipeline()
    new = perturbed(pipe.transformer)
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
    )
    refuses(ValueError, "offloaded by groups.*before enable_group_offload", pipe.update_weights, new)


def test_weights_loaded_in_inference_mode_can_be_updated() -> None:
    with torch.inference_mode():
        pipe = tiny_pipeline()
    assert next(pipe.transformer.parameters()).is_inference()
    new = perturbed(tiny_transformer())
    pipe.update_weights(new)
    assert torch.equal(ids(pipe), fresh_ids(new))


def test_features_kept_on_disk_are_of_the_weights_that_made_them(tmp_path: Any) -> None:
    features, new = tiny_features(tmp_path), perturbed(tiny_features())
    before = features(["a red circle"]).features
    replace_weights(features, new, "text_encoder")
    fresh = tiny_features()
    fresh.load_state_dict(new)
    after = features(["a red circle"]).features
    assert not torch.equal(before, after) and torch.equal(after, fresh(["a red circle"]).features)


def test_a_measured_budget_is_measured_anew() -> None:
    def kept(pipe: Any) -> Any:
        return [stage.model.budget for stage in pipe.stages() if isinstance(stage.model, CompressedVAR)]

    pipe, fresh = tiny_scale_pipeline(), tiny_scale_pipeline()
    for one in (pipe, fresh):
        one.sampler = ScaleWiseSampler(cache_share=0.7)
    before = kept(pipe)
    new = next(
        state
        for state in (perturbed(tiny_scale_pipeline().transformer, seed) for seed in range(20))
        if not fresh.transformer.load_state_dict(state).missing_keys and kept(fresh) != before
    )
    pipe.update_weights(new)
    assert before and kept(pipe) == kept(fresh)


# -- what is taken and what is refused ---------------------------------------------------------------------------------


def test_all_that_is_wrong_is_said_at_once_and_nothing_is_written() -> None:
    pipe = tiny_pipeline()
    before, new = snapshot(pipe.transformer), perturbed(pipe.transformer)
    wrong = dict(new)
    del wrong["norm.weight"]
    wrong["head.weight"] = torch.zeros(2)
    wrong["output.weight"] = new["output.weight"].T
    wrong["layers.1.attention.wo.weight"] = new["layers.1.attention.wo.weight"].long()
    for given in (wrong, iter(wrong.items())):
        with pytest.raises(ValueError) as refusal:
            pipe.update_weights(given)
        said = str(refusal.value)
        assert "transformer" in said and "nothing was changed" in said
        assert "1 missing: norm.weight" in said and "1 unexpected: head.weight" in said
        assert "1 of another shape: output.weight [16, 12] instead of [12, 16]" in said
        assert "1 of another type: layers.1.attention.wo.weight (Tensor of int64 instead of float32)" in said
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match=r"nan or infinite: norm.weight \(float32\); nothing"):
            pipe.update_weights(new | {"norm.weight": torch.full_like(new["norm.weight"], bad)})
    assert all(torch.equal(value, before[key]) for key, value in pipe.transformer.state_dict().items())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"norm.weight": [1.0]}, "norm.weight is a list; pass tensors"),
        (["norm.weight"], "'norm.weight'; pass a state dict, or pairs"),
        ([("norm.weight", torch.ones(16))] * 2, "hold norm.weight twice"),
        ({}, "20 missing: cls_embedding.cap_proj"),
    ],
)
def test_what_is_no_state_dict_is_refused(given: Any, said: str) -> None:
    refuses((TypeError, ValueError), said, tiny_pipeline().update_weights, given)


def test_an_unknown_component_is_told_the_others() -> None:
    with pytest.raises(ValueError, match="component='unet'; pass one of transformer, vq_model, text_encoder"):
        tiny_pipeline().update_weights({}, "unet")


def test_numbers_are_cast_and_must_fit_the_type() -> None:
    pipe = tiny_pipeline()
    new = perturbed(pipe.transformer)
    pipe.transformer.to(torch.float16)
    pipe.update_weights({key: value.double() for key, value in new.items()})
    assert all(torch.equal(value, new[key].half()) for key, value in pipe.transformer.state_dict().items())
    with pytest.raises(ValueError, match=r"norm.weight \(float16\)"):
        pipe.update_weights(new | {"norm.weight": new["norm.weight"] * 1e6})
    with pytest.raises(ValueError, match=r"norm.weight \(Tensor of float8_e4m3fn instead of float16\)"):
        pipe.update_weights(new | {"norm.weight": new["norm.weight"].to(torch.float8_e4m3fn)})


def test_a_sender_may_use_the_same_memory_for_every_tensor() -> None:
    pipe = tiny_pipeline()
    new = perturbed(pipe.transformer)
    bucket = torch.empty(max(value.numel() for value in new.values()))

    def sent() -> Iterator[tuple[str, Tensor]]:
        for key, value in new.items():
            place = bucket[: value.numel()].view(value.shape)
            yield f"module.{key}", place.copy_(value)
            bucket.fill_(torch.nan)

    pipe.update_weights((key.removeprefix("module."), value) for key, value in sent())
    assert torch.equal(ids(pipe), fresh_ids(new))


def test_what_wrappers_add_to_keys_is_ignored() -> None:
    pipe = tiny_pipeline()
    new = perturbed(pipe.transformer)
    pipe.update_weights({f"module._orig_mod.{key}": value for key, value in new.items()})
    assert torch.equal(ids(pipe), fresh_ids(new))


def test_sharded_tensors_are_made_whole(tmp_path: Any) -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        pipe = tiny_pipeline()
        new = perturbed(pipe.transformer)
        sharded = {key: distribute_tensor(value, mesh, [Shard(0)]) for key, value in new.items()}
        pipe.update_weights(sharded)
        fresh = tiny_pipeline()
        fresh.transformer.load_state_dict(sharded, assign=True)
        refuses(ValueError, "transformer is sharded", fresh.update_weights, new)
    finally:
        destroy_process_group()
    assert all(torch.equal(value, new[key]) for key, value in pipe.transformer.state_dict().items())


def test_tied_weights_are_one() -> None:
    pipe = tiny_pipeline()
    model = pipe.transformer
    model.layers[1].feed_forward.w3.weight = model.layers[1].feed_forward.w1.weight
    new = perturbed(tiny_transformer())
    one, other = (f"layers.1.feed_forward.{name}.weight" for name in ("w1", "w3"))
    refuses(ValueError, f"{other} is tied.*two differ", pipe.update_weights, new)
    expected = fresh_ids(new | {other: new[one]})
    for given in (new | {other: new[one]}, {key: new[key] for key in new if key != other}):
        pipe.update_weights(given)
        assert torch.equal(ids(pipe), expected)
        assert model.layers[1].feed_forward.w3.weight is model.layers[1].feed_forward.w1.weight
    with pytest.raises(ValueError, match="2 missing"):
        pipe.update_weights({key: new[key] for key in new if key not in (one, other)})


def test_no_weights_are_written_under_a_call() -> None:
    pipe = tiny_pipeline()
    new = snapshot(pipe.transformer)

    def update(pipe: Any, *_: Any) -> None:
        pipe.update_weights(new)

    refuses(RuntimeError, "at work", ids, pipe, callback_on_step_end=update)
    pipe.update_weights(new)


# -- quantised weights -------------------------------------------------------------------------------------------------


def by_torchao(bits: str) -> PipelineQuantizationConfig:
    quantization = pytest.importorskip("torchao.quantization")
    how = {
        "8": quantization.Int8WeightOnlyConfig(),
        "4": quantization.IntxWeightOnlyConfig(vars(torch)["int4"]),
        "e4m3": quantization.Float8WeightOnlyConfig(),
    }[bits]
    return PipelineQuantizationConfig(quant_mapping={"transformer": TorchAoConfig(how)})


@pytest.mark.parametrize("bits", ["8", "4", "e4m3"])
def test_quantised_weights_are_quantised_anew(bits: str, tmp_path: Any) -> None:
    source = quiet(ClassImagePipeline(*parts_of_classes()))
    source.save_pretrained(tmp_path / "old")
    old, new = snapshot(source.transformer), perturbed(source.transformer)
    source.update_weights(new)
    source.save_pretrained(tmp_path / "new")
    pipe, fresh = (
        quiet(
            ClassImagePipeline.from_pretrained(
                tmp_path / name, quantization_config=by_torchao(bits), dtype=torch.float32
            )
        )
        for name in ("old", "new")
    )

    def classes(pipe: Any) -> Tensor:
        return pipe([1, 3], generator=seeded(0, 1)).tokens

    first = classes(pipe)
    weight = pipe.transformer.layers[0].attention.wqkv.weight
    pipe.update_weights(new)
    assert pipe.transformer.layers[0].attention.wqkv.weight is weight
    assert fingerprint([pipe.transformer]) == fingerprint([fresh.transformer])
    assert torch.equal(classes(pipe), classes(fresh))
    pipe.update_weights(pipe.transformer.state_dict() | old)
    assert torch.equal(classes(pipe), first)
    pipe.update_weights(fresh.transformer.state_dict())  # quantised in the same way
    assert torch.equal(classes(pipe), classes(fresh))


def parts_of_classes() -> tuple[Any, ...]:
    from tests.helpers.tiny import tiny_vq_model

    transformer = tiny_transformer(num_classes=5, caption_dim=None, prefix_length=1, dim=32)
    return transformer, tiny_vq_model(), SpeculativeJacobiSampler(4)


def test_weights_quantised_in_an_unknown_way_are_refused() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    pipe = quiet(ClassImagePipeline(*parts_of_classes()))
    new = snapshot(pipe.transformer)
    quantization.quantize_(pipe.transformer, quantization.Int8WeightOnlyConfig())
    refuses(ValueError, "is quantised .Int8Tensor.*not known how", pipe.update_weights, new)
    other = quiet(ClassImagePipeline(*parts_of_classes()))
    quantization.quantize_(other.transformer, quantization.Float8WeightOnlyConfig())
    refuses(ValueError, "of another type.*Float8Tensor", pipe.update_weights, other.transformer.state_dict())


# -- models of other libraries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["janus", "chameleon", "emu3", "glm"])
def test_an_accelerated_model_reads_the_users_weights(name: str) -> None:
    make = {"janus": tiny.janus, "chameleon": tiny.chameleon, "emu3": tiny.emu3, "glm": tiny.glm_image}[name]
    model = make()
    sampler = SpeculativeJacobiSampler(4)
    before = draw(model, name, sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    noise = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        spread = parameter.detach().std(correction=0)
        parameter.grad = spread * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
    optimizer.step()
    fresh = make()
    fresh.load_state_dict(model.state_dict())
    after = draw(model, name, sampler)
    assert not torch.equal(after, before)
    assert torch.equal(after, draw(fresh, name, AutoregressiveSampler()))


def test_a_head_of_nextstep_embeds_its_times_by_the_present_weights() -> None:
    made: Any = NextStep()
    filled(made.image_head)
    plain = copy.deepcopy(made)
    visual_spec.accelerate(made)

    def token(model: Any) -> Any:
        torch.manual_seed(5)
        return model.image_head.sample(conditions(8), cfg=3.0)

    before = token(made)
    with torch.no_grad():
        for model in (made, plain):
            model.image_head.net.time_embed.mlp[0].weight.mul_(3)
        expected = token(plain)
    assert (token(made) - before).abs().max() > 1e-2
    torch.testing.assert_close(token(made), expected, rtol=1e-5, atol=1e-5)
