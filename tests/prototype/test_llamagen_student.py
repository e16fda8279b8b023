"""LlamaGen's students: the released layout, and its forward written out in one row, slot by slot."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.llamagen import on_meta
from tests.helpers.llamagen_student import SLOTS, straight_line
from tests.helpers.official import transformer_shapes, write_class_model
from tests.helpers.refusals import refuses
from tests.helpers.tiny_students import (
    CLASSES,
    DIM,
    LENGTH,
    SIDE,
    SIZE,
    VOCAB,
    student_shapes,
    student_weights,
    tiny_student,
    write_student,
    write_var_student,
)
from tests.models.next_token import straight
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.prototype.students import llamagen as llamagen_student
from visual_spec.prototype.students.llamagen import LlamaGenStudent, load_llamagen_student

VECTORS = torch.randn(3, SLOTS, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
LABELS = torch.tensor([2, 0, CLASSES - 1])


@pytest.mark.parametrize("known", [0, SIZE["restart"]])
def test_a_call_computes_what_the_layout_says(known):
    model, weights = tiny_student(), student_weights()
    answer = model(model.prefill(LABELS, batch_size=3), VECTORS, known)
    split = SIZE["first_continuous"]
    assert answer.logits.shape == (3, split - known, VOCAB) and answer.vectors.shape == (
        3,
        SLOTS - split,
        LENGTH,
    )
    for row in range(3):
        logits, vectors = straight_line(weights, int(LABELS[row]), VECTORS[row], known)
        assert torch.allclose(answer.logits[row], logits[known:split], atol=1e-9)
        assert torch.allclose(answer.vectors[row], vectors[split:], atol=1e-9)


def test_where_codes_end_before_the_second_call_it_draws_vectors_only():
    model = tiny_student(first_continuous=3)
    answer = model(model.prefill(LABELS, batch_size=3), VECTORS, SIZE["restart"])
    assert answer.logits.shape[1] == 0 and answer.vectors.shape[1] == SLOTS - SIZE["restart"]
    expected = straight_line(student_weights(), 2, VECTORS[0], SIZE["restart"])[1][SIZE["restart"] :]
    assert torch.allclose(answer.vectors[0], expected, atol=1e-9)


def test_a_slot_depends_on_itself_and_on_those_before_it_alone():
    model = tiny_student()
    classes, changed = model.prefill(LABELS, batch_size=3), VECTORS.clone()
    changed[:, 5] += 1
    before, after = model(classes, VECTORS, 0), model(classes, changed, 0)
    moved = (before.logits != after.logits).any(-1).any(0)
    assert moved.tolist() == [slot >= 5 for slot in range(SIZE["first_continuous"])]


def test_the_averaged_weights_are_read_and_saved_again(tmp_path, monkeypatch):
    monkeypatch.setitem(llamagen_student.STUDENTS, "tiny", SIZE)
    model = load_llamagen_student(write_student(tmp_path), dtype=torch.float64)
    answer = model(model.prefill(LABELS, batch_size=3), VECTORS, 0)
    weights = {key: value.double() for key, value in student_weights(torch.float32).items()}
    assert torch.allclose(answer.logits[1], straight_line(weights, 0, VECTORS[1], 0)[0][:9], atol=1e-9)
    model.save_pretrained(tmp_path / "folder")
    again = LlamaGenStudent.from_pretrained(tmp_path / "folder", torch_dtype=torch.float64)
    assert (again.first_continuous, again.restart, again.grid.width) == (9, 6, SIDE)
    assert torch.equal(again(again.prefill(LABELS, batch_size=3), VECTORS, 0).vectors, answer.vectors)


@pytest.mark.parametrize(("name", "layers", "dim", "split"), [("B", 12, 768, 80), ("L", 24, 1024, 130)])
def test_no_key_of_a_release_is_missing_or_left_over(name, layers, dim, split):
    shapes = transformer_shapes(layers, dim, classes=1000) | {
        "tok_embeddings.weight": (dim, 8),
        "tok_embeddings.bias": (dim,),
        "n_d_embed.weight": (2, dim),
        "final_layer_conti.linear.weight": (8, dim),
        "final_layer_conti.linear.bias": (8,),
        "final_layer_conti.scale_shift_table": (2, dim),
        "freqs_cis": (257, dim // {"B": 12, "L": 16}[name] // 2, 2),
    }
    model = load_llamagen_student(on_meta(shapes))
    assert (model.grid.num_tokens, model.first_continuous, model.restart) == (256, split, 80)


def test_what_does_not_fit_is_refused_by_name(tmp_path, monkeypatch):
    refuses(ValueError, "2.*16.*12.*768", load_llamagen_student, write_student(tmp_path))
    monkeypatch.setitem(llamagen_student.STUDENTS, "tiny", SIZE)
    refuses(ValueError, r"LlamaGen.*n_d_embed\.weight", load_llamagen_student, write_class_model(tmp_path))
    with pytest.raises(ValueError, match=r"var-tiny\.pth.*LlamaGen.*tok_embeddings\.weight"):
        load_llamagen_student(write_var_student(tmp_path))
    shapes = student_shapes()
    del shapes["final_layer_conti.scale_shift_table"]
    with pytest.raises(ValueError, match="1 missing: final_layer_conti.scale_shift_table"):
        load_llamagen_student(on_meta(shapes | {"layers.0.extra": (1,)}))
    refuses(ValueError, "first_continuous=80.*restart=80.*16", LlamaGenStudent, VOCAB, LENGTH, 16, 1, 2, SIDE)
    model = tiny_student()
    classes = model.prefill(LABELS, batch_size=3)
    refuses(ValueError, r"\(3, 15, 4\).*\[B, 16, 4\]", model, classes, VECTORS[:, :15], 0)
    refuses(ValueError, "known=5", model, classes, VECTORS, 5)
    refuses(ValueError, r"\[2, 0, 7\].*3.*0.*6", model.prefill, torch.tensor([2, 0, 7]), batch_size=3)
    refuses(TypeError, "Tensor.*LongTensor", model.prefill, torch.zeros(3), batch_size=3)


def captions_student(**changes: Any) -> Any:
    """A student of captions whose slots all hold codes, with random weights."""
    size = {**SIZE, "first_continuous": SLOTS, **changes}
    model = LlamaGenStudent(
        VOCAB, LENGTH, num_classes=None, caption_dim=6, prefix_length=5, zero_prefix_keys=False, **size
    )
    generator = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2
    return model.eval()


def captions(rows: int = 3) -> TextCondition:
    features = torch.randn(rows, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return TextCondition(features, torch.arange(5) >= torch.tensor([[0], [3], [4]])[:rows])


def straight_captions(model: Any, told: TextCondition, row: int, vectors: Tensor, known: int) -> Tensor:
    """Logits [L, V] of one picture after its words, padding left out; `known` tokens are given."""
    weights = model.state_dict()
    words = told.features[row][told.mask[row]] @ weights["cls_embedding.cap_proj.fc1.weight"].T
    prefix = F.gelu(words, approximate="tanh") @ weights["cls_embedding.cap_proj.fc2.weight"].T
    tokens = vectors @ weights["tok_embeddings.weight"].T + weights["tok_embeddings.bias"]
    x = torch.cat([prefix, tokens])
    for place in range(len(x)):
        x[place] = x[place] + weights["n_d_embed.weight"][1 if place < len(prefix) + known else 0]
    turn = straight.turns(torch.arange(SLOTS) // SIDE, torch.arange(SLOTS) % SIDE, DIM // 2)
    turn = torch.cat([torch.ones_like(turn[:1]).expand(len(prefix), -1), turn])[:, None]  # words do not turn
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    for index in range(2):
        x = straight.layer(weights, index, x, mask, turn)
    return straight.norm(weights, x[len(prefix) :], "norm") @ weights["output.weight"].T


@pytest.mark.parametrize("known", [0, SIZE["restart"]])
def test_a_student_of_captions_reads_the_words_and_draws_codes_alone(known):
    model, told = captions_student(), captions()
    assert not any(key.startswith("final_layer_conti") for key in model.state_dict())
    answer = model(model.prefill(told, batch_size=3), VECTORS, known)
    assert answer.logits.shape == (3, SLOTS - known, VOCAB) and answer.vectors.shape == (3, 0, LENGTH)
    for row in range(3):
        logits = straight_captions(model, told, row, VECTORS[row], known)
        assert torch.allclose(answer.logits[row], logits[known:], atol=1e-9)


def test_a_pass_of_training_gives_each_row_tokens_of_its_own_number():
    model, told, known = captions_student(), captions(), torch.tensor([0, 9, 2])
    logits = model.teacher_forced(VECTORS, told, known)
    for row in range(3):
        want = straight_captions(model, told, row, VECTORS[row], int(known[row]))
        assert torch.allclose(logits[row], want, atol=1e-9)
    logits.sum().backward()
    assert model.n_d_embed.weight.grad.abs().sum() > 0


def test_a_student_of_captions_refuses_labels_and_other_words():
    model = captions_student()
    refuses(TypeError, "Tensor.*TextCondition", model.prefill, LABELS, batch_size=3)
    refuses(ValueError, r"\(2, 5, 6\).*\(3, 5, 6\)", model.prefill, captions(2), batch_size=3)
    with pytest.raises(ValueError, match="num_classes=7.*caption_dim=6"):
        LlamaGenStudent(VOCAB, LENGTH, num_classes=7, caption_dim=6, **SIZE)
