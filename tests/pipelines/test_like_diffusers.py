"""What users of diffusers expect of a pipeline, in the spirit of its own pipeline tests, of every kind of ours."""

import pytest
import torch

from tests.tiny_pipelines import KINDS
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.scale_image import ScaleImagePipeline


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def test_a_call_tells_its_guidance_and_its_length(kind):
    pipe = kind.make()
    default = pipe.default_settings()["guidance_scale"]
    assert (pipe.guidance_scale, pipe.num_timesteps) == (default, 0)
    seen = []
    kind.ask(
        pipe,
        guidance_scale=1.5,
        callback_on_step_end=lambda pipe, step, timestep, tensors: seen.append(
            (pipe.guidance_scale, pipe.num_timesteps, step)
        ),
    )
    guidance, lengths, steps = zip(*seen, strict=True)
    assert all(one in (1.5, [1.5] * len(one) if isinstance(one, list) else None) for one in guidance)
    assert len(set(lengths)) == 1 and lengths[0] == pipe.num_timesteps > 0
    if pipe.unit == "scales":
        assert max(steps) + 1 == pipe.num_timesteps
    kind.ask(pipe)
    assert pipe.guidance_scale == ([default] * pipe.num_timesteps if seen[0][0] != 1.5 else default)


@pytest.mark.parametrize("name", ["classes", "scales"])
def test_labels_go_by_their_names_in_diffusers(name):
    kind = KINDS[name]
    pipe = kind.make()
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    want = pipe([3], num_images_per_label=2, generator=generators).tokens
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    assert pipe(class_labels=[3], num_images_per_prompt=2, generator=generators).tokens.equal(want)
    for given, message in [
        (dict(labels=3, class_labels=3), "both of labels and class_labels given"),
        ({}, "neither of labels and class_labels given"),
        (
            dict(labels=3, num_images_per_label=1, num_images_per_prompt=1),
            "both of num_images_per_label and num_images_per_prompt given",
        ),
    ]:
        with pytest.raises(TypeError, match=message):
            pipe(**given)


def test_a_class_that_does_not_load_a_pipeline_names_the_one_that_does(tmp_path):
    with pytest.raises(
        ValueError, match="shapes_var holds a ScaleImagePipeline; load it with visual_spec.Scale"
    ):
        ImagePipeline.from_pretrained("shapes_var")
    KINDS["captions"].make().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="holds a ImagePipeline; load it with visual_spec.ImagePipeline.from_pret"
    ):
        ScaleImagePipeline.from_pretrained(tmp_path)

    class Mine(ImagePipeline):
        pass

    assert isinstance(Mine.from_pretrained(tmp_path), Mine)
