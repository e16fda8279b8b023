"""VAR's students: the released layout, and its forward written out for one picture, place by place."""

from typing import Any

import pytest
import torch

from tests.helpers.llamagen import on_meta
from tests.helpers.refusals import refuses
from tests.helpers.tiny_scales import SIDES, tiny_var
from tests.helpers.tiny_students import (
    VAR_SIZE,
    VAR_SLOTS,
    tiny_var_student,
    var_student_shapes,
    var_student_weights,
    write_var_student,
)
from tests.helpers.var import LEVELS, student_logits
from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.next_scale.var import SCALES
from visual_spec.prototype.students.var import STUDENTS, VARStudent, load_var_student

VECTORS = torch.randn(3, VAR_SLOTS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
LABELS = torch.tensor([2, 0, 4])


@pytest.mark.parametrize("known", [0, 5])
@pytest.mark.parametrize("split", [0, 5, 14, VAR_SLOTS])
def test_a_call_computes_what_the_layout_says(known, split):
    model = tiny_var_student(first_continuous=split)
    answer = model(model.prefill(LABELS, batch_size=3), VECTORS, known)
    after = max(known, split)
    assert answer.logits.shape == (3, after - known, 12)
    assert answer.vectors.shape == (3, VAR_SLOTS - after, 2)
    for row in (0, 2):
        logits, vectors = student_logits(model, int(LABELS[row]), VECTORS[row], known)
        assert torch.allclose(answer.logits[row], logits[known:after], atol=1e-9)
        assert torch.allclose(answer.vectors[row], vectors[after:], atol=1e-9)


def test_a_slot_depends_on_itself_and_on_earlier_scales_alone():
    model = tiny_var_student(first_continuous=VAR_SLOTS)
    classes, changed = model.prefill(LABELS, batch_size=3), VECTORS.clone()
    changed[:, 2] += 1  # of scale 1, which is slots 1 to 4
    moved = (model(classes, VECTORS, 0).logits != model(classes, changed, 0).logits).any(-1).any(0)
    assert moved.tolist() == [slot == 2 or slot >= 5 for slot in range(VAR_SLOTS)]


def test_the_averaged_weights_are_read_and_saved_again(tmp_path):
    model = load_var_student(write_var_student(tmp_path), scales=SIDES, dtype=torch.float64, **VAR_SIZE)
    want = tiny_var_student()
    want.load_state_dict({key: value.double() for key, value in var_student_weights(torch.float32).items()})
    answers = [each(each.prefill(LABELS, batch_size=3), VECTORS, 5) for each in (model, want)]
    assert torch.equal(answers[0].logits, answers[1].logits)
    model.save_pretrained(tmp_path / "folder")
    again = VARStudent.from_pretrained(tmp_path / "folder", torch_dtype=torch.float64)
    assert (again.first_continuous, again.restart, again.scales) == (14, 5, SIDES)
    assert torch.equal(again(again.prefill(LABELS, batch_size=3), VECTORS, 5).vectors, answers[0].vectors)


@pytest.mark.parametrize(("depth", "split"), [(16, 55), (20, 30), (24, 30)])
def test_no_key_of_a_release_is_missing_or_left_over(depth, split):
    size: dict[str, Any] = dict(vocab=4096, token_dim=32, classes=1000, sides=SCALES[256])
    shapes = var_student_shapes(depth, 64 * depth, depth, **size)
    shapes |= {"lvl_1L": (1, 681), "attn_bias_for_masking": (1, 1, 681, 681)}
    shapes |= {f"blocks.{layer}.attn.zero_k_bias": (64 * depth,) for layer in range(depth)}
    model = load_var_student(on_meta(shapes))
    assert (model.grid.num_tokens, model.first_continuous, model.restart) == (680, split, split)
    # 1 + 4 + 9 + 16 slots hold codes, and of the smallest student 25 more.
    assert model.config["num_heads"] == depth and model.offsets[4 + (depth == 16)] == split


def test_constants_of_a_file_must_be_those_that_are_computed(tmp_path):
    weights = var_student_weights(torch.float32)
    mask = torch.tensor([[0.0 if a > b or i == j else -torch.inf for j, b in enumerate(LEVELS)]
                         for i, a in enumerate(LEVELS)])  # fmt: skip
    constants = {"lvl_1L": torch.tensor(LEVELS)[None], "attn_bias_for_masking": mask[None, None]}
    settings: dict[str, Any] = dict(scales=SIDES, **VAR_SIZE)
    model = load_var_student(Checkpoint(tmp_path / "a.pth", weights | constants), **settings)
    assert torch.equal(model.head.weight, weights["head.weight"])
    constants["attn_bias_for_masking"] = torch.zeros(1, 1, 31, 31)
    with pytest.raises(ValueError, match="attn_bias_for_masking"):
        load_var_student(Checkpoint(tmp_path / "a.pth", weights | constants), **settings)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    refuses(ValueError, r"2.*16.*d16 \(16.*1024", load_var_student, write_var_student(tmp_path), scales=SIDES)
    refuses(ValueError, "30.*680.*`scales`", load_var_student, write_var_student(tmp_path), **VAR_SIZE)
    torch.save(tiny_var().state_dict(), tmp_path / "var.pth")
    with pytest.raises(ValueError, match=r"VAR.*n_d_embed\.weight"):
        load_var_student(tmp_path / "var.pth", scales=SIDES, **VAR_SIZE)
    shapes = var_student_shapes(16, 1024, 16, vocab=4096, token_dim=32, classes=1000, sides=SCALES[256])
    del shapes["layerwise_n_d_embed.16.bias"]
    refuses(ValueError, "1 missing: layerwise_n_d_embed.16.bias", load_var_student, on_meta(shapes))
    refuses(ValueError, "first_continuous=14.*restart=6.*0, 1, 5, 14, 30", tiny_var_student, restart=6)
    refuses(ValueError, "coarse", tiny_var_student, scales=(2, 1))
    refuses(ValueError, "dim=16.*num_heads=3", tiny_var_student, num_heads=3)
    model = tiny_var_student()
    classes = model.prefill(LABELS, batch_size=3)
    refuses(ValueError, r"\(3, 29, 2\).*\[B, 30, 2\]", model, classes, VECTORS[:, :29], 0)
    refuses(ValueError, "known=14", model, classes, VECTORS, 14)
    refuses(ValueError, r"\[2, 0, 5\].*3.*0.*4", model.prefill, torch.tensor([2, 0, 5]), batch_size=3)
    refuses(TypeError, "Tensor.*LongTensor", model.prefill, torch.zeros(3), batch_size=3)


def test_released_sizes_are_those_of_their_teachers():
    assert {name: (size["num_layers"], size["dim"]) for name, size in STUDENTS.items()} == {
        "d16": (16, 1024), "d20": (20, 1280), "d24": (24, 1536),
    }  # fmt: skip
