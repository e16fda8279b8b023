"""Training VAR and its tokenizer at a tiny size: they learn, resume to the same weights, and report what is true."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from scripts.train import var, var_tokenizer
from scripts.train.classes import object_slots, sample_one_object_scenes
from scripts.train.codebook import CodeAverages
from scripts.train.tokenizer import reconstruction_loss
from scripts.train.var import (
    VarTraining,
    accuracy_of_draws,
    deepened,
    guided_laws,
    held_out_losses,
    initialise,
    random_scales,
    slot_losses,
    slot_weights,
    start_from_codes,
    student_loss,
    tokenize_classes,
    train_var,
)
from scripts.train.var_tokenizer import VarTokenizerTraining, train_var_tokenizer
from tests.helpers.flexvar import LABELS, LATENTS, tiny, tiny_vq
from tests.helpers.refusals import refuses
from tests.helpers.training import check_training, trained
from visual_spec.data.shapes import render, sample_dataset
from visual_spec.data.shapes_classes import class_of
from visual_spec.models.next_scale.flexvar import FlexVARTransformer, FlexVQModel
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.training.tokens import to_signed

SCALES = (1, 2, 4)
BOUNDS = (0, 1, 5, 21)


SIDE = 32  # pixels


def tiny_tokenizer() -> MultiscaleVQModel:
    torch.manual_seed(0)
    return MultiscaleVQModel(4, (1, 1, 1, 2), 1, 16, 4, SCALES, norm_groups=None)


@pytest.fixture(scope="module")
def vq_model() -> MultiscaleVQModel:
    """Random codes as far apart as the latents of pictures are."""
    model = tiny_tokenizer().eval().requires_grad_(False)
    latents = model.encode_latents(to_signed(sample_dataset(4, 0, size=SIDE)[1])).movedim(1, -1).flatten(0, 2)
    model.codebook.copy_(latents[torch.randperm(len(latents))[:16]])
    return model


def tiny_model(**changes: Any) -> VARTransformer:
    torch.manual_seed(1)
    model = VARTransformer(
        16, 4, **{"dim": 16, "num_layers": 2, "num_heads": 2, **changes}, num_classes=48, scales=SCALES
    )
    initialise(model)
    return model


@pytest.fixture
def small_pictures(monkeypatch):
    monkeypatch.setattr(var_tokenizer, "sample_dataset", partial(sample_dataset, size=SIDE))


@pytest.fixture(autouse=True)
def few_pictures_are_judged(monkeypatch):
    monkeypatch.setattr(var_tokenizer, "judge", partial(var_tokenizer.judge, count=4))
    monkeypatch.setattr(var, "held_out_losses", partial(var.held_out_losses, count=6))


# -- the tokenizer ----------------------------------------------------------------------------------------------------

TOKENIZER = VarTokenizerTraining(
    steps=24, batch_size=1, continuous_steps=9, learning_rate=4e-3, idle_steps=1, revive_until=1.0, scenes=12
)


@pytest.mark.slow
def test_the_tokenizer_learns(tmp_path, small_pictures):
    model = tiny_tokenizer()
    record = train_var_tokenizer(model, replace(TOKENIZER, steps=51, batch_size=2), tmp_path)
    losses = dict(record["loss"])
    assert list(losses) == [0, 50] and losses[50] < 0.75 * losses[0]
    assert record["held_out_pictures"] == 4
    pictures = to_signed(sample_dataset(4, 12345, held_out=True, size=SIDE)[1])
    with torch.no_grad():
        error = (model(pictures) - pictures).square().flatten(1).mean(1)
    assert record["psnr_db"] == pytest.approx(float((10 * torch.log10(4 / error)).mean()), abs=0.01)


def test_an_interrupted_tokenizer_resumes_to_the_same_weights(tmp_path, small_pictures):
    train = trained(tiny_tokenizer, train_var_tokenizer, TOKENIZER)
    check_training(tmp_path, train, 17, every=8, saved={"": MultiscaleVQModel})


def test_the_objective_is_the_published_one():
    """Its values, and what reaches the encoder: the gradient of the decoder as it is, and the commitment."""
    model = tiny_tokenizer().double()
    settings = replace(TOKENIZER, commitment=0.3, spread_weight=0.7)
    model.quantize.embedding.requires_grad_(False).weight.normal_(std=0.2)
    target = to_signed(sample_dataset(2, 5, size=SIDE)[1]).double()
    loss, distance, vectors, ids = var_tokenizer._losses(model, target, settings, True)
    encoder = list(model.encoder.parameters())
    got = torch.autograd.grad(loss + distance, encoder)

    latents = model.encode_latents(target)
    wanted, tokens, canvases = model.quantise(latents)
    last = canvases[-1].detach().requires_grad_(True)
    wanted_loss = reconstruction_loss(model.decode_latents(last), target)
    squares = torch.stack([(latents - canvas).square().mean() for canvas in canvases])
    assert loss.item() == pytest.approx(wanted_loss.item(), abs=1e-12)
    spread = (latents - latents.mean((0, 2, 3), keepdim=True)).square().sum((0, 2, 3)) / (2 * 16 - 1)
    held = 0.7 * (spread.mean().sqrt() - 1) ** 2
    assert distance.item() == pytest.approx(1.3 * squares.mean().item() + held.item(), abs=1e-12)
    assert vectors.shape == (2 * 21, 4) and torch.equal(ids, torch.cat([part.flatten() for part in tokens]))
    assert torch.equal(vectors[2 + 4 + 3], wanted[1][1, :, 1, 1])  # picture 1, second scale, last token
    pull = sum(0.3 / 3 * 2 * (latents - canvas).detach() / latents.numel() for canvas in canvases)
    pull = pull + torch.autograd.grad(held, latents, retain_graph=True)[0]
    expected = torch.autograd.grad(latents, encoder, torch.autograd.grad(wanted_loss, last)[0] + pull)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).abs().max() < 1e-12


def test_codes_are_the_running_means_of_what_they_serve():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(5, 3, generator=generator)
    averages = CodeAverages(codes)
    count, total = [1.0] * 5, [code.clone() for code in codes]
    for _ in range(7):
        vectors = torch.randn(11, 3, generator=generator)
        ids = torch.randint(0, 4, (11,), generator=generator)  # code 4 serves nothing
        averages.follow(codes, vectors, ids, 0.9)
        for code in range(5):
            mine = [vector for vector, owner in zip(vectors, ids.tolist(), strict=True) if owner == code]
            count[code] = 0.9 * count[code] + 0.1 * len(mine)
            total[code] = 0.9 * total[code] + 0.1 * sum(mine, torch.zeros(3))
    for code in range(5):
        assert (codes[code] - total[code] / count[code]).abs().max() < 1e-5
    assert averages.idle[4] == 7 and averages.idle[:4].max() < 7
    before = codes[4].clone()
    for _ in range(1200):  # a code that serves nothing stays where it is, however long
        averages.follow(codes, vectors, ids, 0.9)
    assert (codes[4] - before).abs().max() < 1e-5 and codes.isfinite().all()


def test_only_idle_codes_are_moved_and_onto_what_is_badly_coded():
    codes = torch.tensor([[0.0, 0.0], [9.0, 9.0], [5.0, 5.0]])
    averages = CodeAverages(codes)
    averages.idle.copy_(torch.tensor([0.0, 30.0, 3.0]))
    vectors = torch.zeros(200, 2)
    vectors[77] = torch.tensor([3.0, 1.0])
    noise = torch.rand(200, generator=torch.Generator().manual_seed(0))
    averages.revive(codes, vectors, torch.zeros(200, dtype=torch.long), 5, noise)
    assert codes.tolist() == [[0, 0], [3, 1], [5, 5]] and averages.idle.tolist() == [0, 0, 3]
    assert (averages.total[1] / averages.count[1]).tolist() == [3, 1]


def test_first_codes_lie_closer_than_drawn_vectors():
    model = tiny_tokenizer().requires_grad_(False)
    var_tokenizer.initialise(model)
    _, pictures = sample_dataset(12, 0, size=SIDE)
    latents = model.encode_latents(to_signed(pictures))
    model.codebook.copy_(latents.movedim(1, -1).flatten(0, 2)[torch.randperm(192)[:16]])
    drawn = (model.quantise(latents)[2][-1] - latents).square().mean()
    model.codebook.copy_(var_tokenizer._first_codes(model, pictures, 16, np.random.default_rng(0)))
    assert (model.quantise(latents)[2][-1] - latents).square().mean() < 0.7 * drawn
    with pytest.raises(ValueError, match="252.*253"):
        var_tokenizer._first_codes(model, pictures, 253, np.random.default_rng(0))


def test_reconstructions_are_judged_by_the_parser():
    """A tokenizer that shows its pictures as they are but for the first, of which it makes another one."""
    _, pictures = sample_dataset(4, 12345, held_out=True)
    shown = to_signed(pictures)
    shown[0] = shown[1]

    class Perfect:
        device = torch.device("cpu")

        def encode_tokens(self, images: Tensor) -> Tensor:
            return torch.arange(len(images))[:, None]

        def decode_tokens(self, tokens: Tensor) -> Tensor:
            return shown[tokens[:, 0]] + 1e-3

    found = var_tokenizer.judge(cast(Any, Perfect()))
    assert found["all_attributes_right"] == 0.75 and found["codes_used"] == 4


def test_the_tokenizer_must_be_for_pictures_of_the_data_set(tmp_path):
    model = MultiscaleVQModel(4, (1, 1), 1, 16, 4, SCALES, norm_groups=None)
    refuses(ValueError, "8.*128", train_var_tokenizer, model, TOKENIZER, tmp_path)


# -- pictures as tokens -----------------------------------------------------------------------------------------------


def test_tokens_of_classes_are_those_of_their_pictures(vq_model, tmp_path):
    labels, tokens = tokenize_classes(vq_model, 45, 5, cache=tmp_path)
    scenes = sample_one_object_scenes(45, 5)
    assert labels.tolist() == [class_of(scene) for scene in scenes]
    pictures = to_signed(np.stack([render(scene, SIDE) for scene in scenes]))
    assert torch.equal(tokens.long(), vq_model.encode_tokens(pictures)) and tokens.unique().numel() > 4
    again = tokenize_classes(vq_model, 45, 5, cache=tmp_path)
    assert torch.equal(again[0], labels) and torch.equal(again[1], tokens)
    refuses(ValueError, "tokenizer.*--out", tokenize_classes, tiny_tokenizer(), 45, 5, cache=tmp_path)


# -- the transformer --------------------------------------------------------------------------------------------------

TRANSFORMER = VarTraining(steps=60, batch_size=4, scenes=8, learning_rate=1e-2, label_dropout=0.25)


def test_losses_of_slots_are_those_of_plain_loops():
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 2, 3, 5, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 5, (2, 3), generator=generator)
    plain, distilled = slot_losses(logits, tokens), slot_losses(logits, tokens, teacher)
    for b in range(2):
        for slot in range(3):
            law, other = logits[b, slot].softmax(0), teacher[b, slot].softmax(0)
            assert plain[b, slot].item() == pytest.approx(-law[tokens[b, slot]].log().item())
            divergence = sum(float(q * (q.log() - p.log())) for p, q in zip(law, other, strict=True))
            assert distilled[b, slot].item() == pytest.approx(divergence)


def test_weights_of_slots_follow_the_settings():
    assert slot_weights(SCALES, TRANSFORMER, 0).tolist() == [1] * 21
    refiner = replace(TRANSFORMER, scales_from=2, earlier_weight=1.0)
    for step, earlier in ((0, 1.0), (15, 0.5), (30, 0.0), (59, 0.0)):
        assert slot_weights(SCALES, refiner, step).tolist() == [earlier] * 5 + [1] * 16
    assert slot_weights(SCALES, replace(refiner, earlier_weight=0.0), 0).tolist() == [0] * 5 + [1] * 16
    assert slot_weights(SCALES, replace(TRANSFORMER, scales_until=2), 0).tolist() == [1] * 5


def test_a_model_that_saw_few_pictures_enough_knows_their_classes(vq_model, tmp_path):
    """The class is heard: the right one lowers the loss, and the null class was trained beside it."""
    settings = replace(TRANSFORMER, steps=120, label_dropout=0.2)
    model = tiny_model()
    train_var(model, vq_model, settings, tmp_path)
    labels, tokens = tokenize_classes(vq_model, settings.scenes, settings.seed + 1, cache=tmp_path)
    maps, tokens = vq_model.maps_of(tokens.long()), tokens.long()

    def loss(rows: Tensor, dropped: Tensor | None = None) -> float:
        with torch.no_grad():
            return slot_losses(model.teacher_forced(maps, rows, dropped), tokens).mean().item()

    right = loss(labels)
    nothing = loss(labels, torch.ones(len(labels), dtype=torch.bool))
    assert right < nothing - 0.05 and right < loss(labels.roll(1)) - 0.1


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_null_class_is_learned_as_often_as_labels_are_dropped(vq_model, tmp_path, share: float):
    model, before = tiny_model(), tiny_model()
    train_var(model, vq_model, replace(TRANSFORMER, steps=30, label_dropout=share), tmp_path)
    null, start = model.class_emb.weight[-1], before.class_emb.weight[-1]
    turned = 1 - torch.cosine_similarity(null, start, dim=0).item()
    assert (turned > 1e-4) == (share > 0)  # weight decay shortens it, and does not turn it


@pytest.mark.parametrize("earlier_weight", [0.0, 0.5])
def test_the_loss_counts_slots_by_their_weights(vq_model, tmp_path, earlier_weight: float):
    settings = replace(
        TRANSFORMER, steps=1, scenes=1, label_dropout=0.0, scales_from=1, earlier_weight=earlier_weight,
        object_weight=4.0,
    )  # fmt: skip
    model = tiny_model()
    model.head.weight.data.mul_(40)  # laws far from uniform, so that the scales' losses differ
    labels, tokens = tokenize_classes(vq_model, 1, settings.seed + 1)
    with torch.no_grad():
        losses = slot_losses(model.teacher_forced(vq_model.maps_of(tokens.long()), labels), tokens.long())[0]
    record = train_var(model, vq_model, settings, tmp_path)
    shown = object_slots(sample_one_object_scenes(1, settings.seed + 1), model.scales)[0]
    weights = torch.tensor([4.0 if slot else 1.0 for slot in shown])
    weights[0] *= earlier_weight
    expected = (weights * losses).sum() / weights.sum()
    assert 0 < shown.sum() < len(shown)
    assert abs(losses.mean() - expected) > 0.01
    assert record["loss"][0][1] == pytest.approx(expected.item(), abs=1e-3)


def test_an_interrupted_run_resumes_to_the_same_weights(vq_model, tmp_path):
    settings = replace(TRANSFORMER, steps=30, scales_from=1, earlier_weight=1.0)

    train = trained(tiny_model, train_var, vq_model, settings, teacher=tiny_model(num_layers=1))
    check_training(tmp_path, train, 24, every=10, saved={"": VARTransformer})


def test_a_drafter_is_trained_on_its_scales_only(vq_model, tmp_path):
    model, before = tiny_model(), tiny_model()
    train_var(model, vq_model, replace(TRANSFORMER, steps=5, scales_until=2), tmp_path)
    changed = (model.pos_1LC != before.pos_1LC).any(-1)[0].tolist()
    assert changed == [True] * 5 + [False] * 16


def test_a_refiner_comes_closer_to_its_teacher_and_the_teacher_stays(vq_model, tmp_path):
    teacher, model = tiny_model(), tiny_model(dim=8)
    with torch.no_grad():
        teacher.head.weight.mul_(40)  # laws worth learning
    copy = {key: value.clone() for key, value in teacher.state_dict().items()}
    labels, tokens = tokenize_classes(vq_model, 8, 1)
    maps = vq_model.maps_of(tokens.long())

    def divergence() -> list[float]:
        with torch.no_grad():
            losses = slot_losses(
                model.teacher_forced(maps, labels), tokens.long(), teacher.teacher_forced(maps, labels)
            )
        return [losses[:, first:end].mean().item() for first, end in zip(BOUNDS, BOUNDS[1:], strict=False)]

    before = divergence()
    settings = replace(TRANSFORMER, scales_from=2, earlier_weight=0.0)
    train_var(model, vq_model, settings, tmp_path, teacher=teacher)
    after = divergence()
    assert after[2] < 0.5 * before[2]
    assert all(torch.equal(value, copy[key]) for key, value in teacher.state_dict().items())


def test_a_deeper_model_begins_as_the_one_it_grew_from(vq_model):
    model = tiny_model()
    deeper: Any = deepened(model, 4)
    labels, tokens = tokenize_classes(vq_model, 8, 1)
    maps = vq_model.maps_of(tokens.long())
    logits = deeper.teacher_forced(maps, labels)
    assert torch.equal(logits, model.teacher_forced(maps, labels))
    logits.square().mean().backward()
    for block in deeper.blocks[2:]:
        assert block.ada_lin[1].weight.grad[:32].abs().max() > 0  # it will not stay so
    refuses(ValueError, "num_layers=2.*2", deepened, model, 2)


def test_guidance_of_a_teacher_grows_from_scale_to_scale(vq_model):
    teacher = tiny_model()
    labels, tokens = tokenize_classes(vq_model, 20, 1)
    settings = replace(TRANSFORMER, scales_from=1, teacher_guidance=2.5, label_dropout=0.0)
    got = guided_laws(teacher, vq_model, labels, tokens, settings)
    assert got.shape == (20, 20, 16)
    for number in (0, 17):
        maps = vq_model.maps_of(tokens[number : number + 1].long())
        label = labels[number : number + 1]
        with torch.no_grad():
            plain = teacher.teacher_forced(maps, label)[0].double()
            null = teacher.teacher_forced(maps, label, torch.tensor([True]))[0].double()
        for slot in range(1, 21):
            strength = 1 + 1.5 * (1 if slot < 5 else 2) / 2
            want = (strength * plain[slot] + (1 - strength) * null[slot]).log_softmax(-1)
            torch.testing.assert_close(got[number, slot - 1].double(), want, atol=4e-3, rtol=2e-3)
    with pytest.raises(ValueError, match=r"teacher_guidance=2\.5.*label_dropout=0\.25.*0, 0.*None"):
        replace(settings, label_dropout=0.25)


def test_held_out_losses_are_means_over_slots_of_all_and_of_each_scale(vq_model):
    model = tiny_model().eval()
    labels, tokens = tokenize_classes(vq_model, 6, 777, held_out=True)
    with torch.no_grad():
        laws = model.teacher_forced(vq_model.maps_of(tokens.long()), labels).log_softmax(-1)
    losses = -laws.gather(-1, tokens.long()[..., None])[..., 0]
    found = held_out_losses(model, vq_model, 6)
    assert found["held_out_loss"] == pytest.approx(losses.mean().item(), abs=1e-4)
    by_scale = [losses[:, a:b].mean().item() for a, b in zip(BOUNDS, BOUNDS[1:], strict=False)]
    assert found["held_out_loss_by_scale"] == pytest.approx(by_scale, abs=1e-4)


def test_models_that_do_not_fit_are_refused(vq_model, tmp_path):
    settings = TRANSFORMER
    other = VARTransformer(16, 4, dim=8, num_layers=1, num_heads=2, num_classes=48, scales=(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"\(1, 2, 4\), 16, 4.*\(1, 2, 3, 4\), 16, 4"):
        train_var(other, vq_model, settings, tmp_path)
    refuses(ValueError, "the teacher", train_var, tiny_model(), vq_model, settings, tmp_path, teacher=other)
    few = VARTransformer(16, 4, dim=8, num_layers=1, num_heads=2, num_classes=7, scales=SCALES)
    refuses(ValueError, "7 classes.*48", train_var, few, vq_model, settings, tmp_path)
    for changes in ({"scales_from": 3}, {"scales_until": 4}):
        with pytest.raises(ValueError, match="3 scales"):
            train_var(tiny_model(), vq_model, replace(settings, **changes), tmp_path)
    assert not list(tmp_path.iterdir())


def test_settings_that_train_nothing_are_refused():
    for name in ("steps", "batch_size", "scenes"):
        refuses(ValueError, f"{name}=0", VarTraining, **cast(Any, {name: 0}))
    refuses(ValueError, "scales_from=2.*scales_until=2", VarTraining, scales_from=2, scales_until=2)
    refuses(ValueError, "label_dropout=1.5", VarTraining, label_dropout=1.5)


def test_drawn_pictures_are_judged_from_seeds_of_their_own(monkeypatch):
    """A class that comes again must not be drawn with the same noise: 480 pictures were 48 once."""
    seeds, labels = [], []

    def sampler(model, part, *, tokenizer, generator, batch_size, law):
        seeds.extend(one.initial_seed() for one in generator)
        labels.extend(part.tolist())
        assert len(generator) == len(part) == batch_size
        return SimpleNamespace(canvas=torch.zeros(batch_size, 3, 4, 4))

    monkeypatch.setattr(var, "ScaleWiseSampler", lambda: sampler)
    monkeypatch.setattr(var, "class_accuracy", lambda pictures, ids: {"seen": (len(pictures), ids)})
    vq_model: Any = SimpleNamespace(decode_canvas=lambda canvas: canvas)
    found = accuracy_of_draws(None, vq_model, 2.0, 100)  # pyright: ignore[reportArgumentType]
    assert len(set(seeds)) == 100 and labels == [k % 48 for k in range(100)]
    assert found["seen"] == (100, labels)


# -- FlexVAR ----------------------------------------------------------------------------------------------------------


def test_lists_of_scales_are_those_of_the_public_trainer_or_shorter():
    rng = np.random.default_rng(0)
    lists = [random_scales(rng, 16) for _ in range(600)]
    assert all(sides == tuple(sorted(set(sides))) and sides[0] == 1 and sides[-1] == 16 for sides in lists)
    assert max(sum(side * side for side in sides) for sides in lists) <= 680
    counts = np.bincount([len(sides) for sides in lists], minlength=11)
    assert counts[:4].sum() == 0 and (counts[4:10] > 20).all()
    assert {side for sides in lists for side in sides} == set(range(1, 17))
    assert random_scales(rng, 4)[-1] == 4


def flexible_tokenizer() -> FlexVQModel:
    torch.manual_seed(0)
    model = FlexVQModel(4, (1, 1, 1, 2), 1, 4, 16, 4, norm_groups=None, image_size=SIDE, scales=(1, 2, 4))
    return model.eval().requires_grad_(False)


def flexible_model(vq_model: FlexVQModel, dim: int = 16) -> FlexVARTransformer:
    torch.manual_seed(1)
    model = FlexVARTransformer(
        16, 4, dim, 2, 2, num_classes=48, scales=(1, 2, 4), shared_adaln=True, position_side=4
    )
    initialise(model)
    start_from_codes(model, vq_model)
    return model


def test_a_flexvar_starts_by_repeating_codes():
    vq_model = flexible_tokenizer()
    model = flexible_model(vq_model, dim=256)
    words = model.word_embed.weight @ vq_model.codebook.T  # [dim, V]
    assert torch.equal((model.head.weight @ words).argmax(0), torch.arange(16))


def test_an_interrupted_flexvar_resumes_to_the_same_weights_in_8_bits(tmp_path):
    vq_model = flexible_tokenizer()

    train = trained(lambda: flexible_model(vq_model), train_var, vq_model, replace(TRANSFORMER, steps=30))
    record = check_training(tmp_path, train, 24, every=10, saved={"": FlexVARTransformer})
    assert record["held_out_loss_by_scale"][-1] > 0 and record["loss"][0][1] > record["loss"][-1][1]
    model = FlexVARTransformer.from_pretrained(tmp_path / "whole")
    matrix = model.get_parameter("blocks.0.ffn.fc1.weight").data
    assert torch.equal(matrix, matrix.to(torch.float8_e4m3fn).to(matrix.dtype))
    # Tokens of every side are kept, so that any list of scales can be cut out of them.
    labels, tokens = tokenize_classes(
        vq_model.at((1, 2, 3, 4)), TRANSFORMER.scenes, TRANSFORMER.seed + 1, cache=tmp_path / "whole"
    )
    assert tokens.shape[1] == 30


# Recorded: the losses and a gradient of `trainer.py` of GengzeZhou/SAR@5fadd47 in float64, weights of
# tests/helpers/flexvar.py, scales 1 to 4, sf_use_sampling=False, sigma=0.01.
SAR = {
    "drawn": (1.141314207645997, [0.1572721327721761, -0.017974779629828262, 0.03759501443860373]),
    "tokens": (3.336983137131997, [0.15790956322007316, -0.018179708224417477, 0.03904137332412711]),
}


@pytest.mark.parametrize("target", SAR)
def test_losses_of_student_forcing_are_those_of_the_public_trainer(target):
    model, vq_model = tiny(), tiny_vq()
    token_ids = torch.cat(vq_model.tokens_of(LATENTS), 1)
    maps, settings = vq_model.maps_of(token_ids), VarTraining(label_dropout=0, student_target=target)
    logits = model.teacher_forced(maps, LABELS)
    first = torch.nn.functional.cross_entropy(logits.mT, token_ids)
    own = student_loss(model, vq_model, logits.double(), maps, token_ids, LABELS, settings, 0)
    assert first.item() == pytest.approx(4.031223540302563, rel=1e-9)
    assert own.item() == pytest.approx(SAR[target][0], rel=1e-6)  # of float32 logits
    (first + 0.01 * own).backward()
    gradient: Any = model.word_embed.weight.grad
    assert gradient.flatten()[:3].tolist() == pytest.approx(SAR[target][1], rel=1e-5)


def test_draws_for_student_forcing_follow_the_guided_law(monkeypatch):
    """Counts of drawn codes beside the law by hand: guidance rises by scale, 1 + 1.2 * 5 / 6 and 1 + 1.2 here."""
    model, vq_model = tiny(), tiny_vq()
    settings = VarTraining(label_dropout=0, student_guidance=1.2)
    token_ids = torch.cat(vq_model.tokens_of(LATENTS), 1)
    maps = vq_model.maps_of(token_ids)
    logits, null = (model.teacher_forced(maps, label) for label in (LABELS, torch.tensor([5, 5])))
    seen: list[Tensor] = []
    real = FlexVQModel.codes_of

    def watched(self: Any, tokens: Tensor, scale: int, like: Tensor) -> Tensor:
        seen.append(tokens)
        return real(self, tokens, scale, like)

    monkeypatch.setattr(FlexVQModel, "codes_of", watched)
    with torch.no_grad():
        for step in range(400):
            student_loss(model, vq_model, logits, maps, token_ids, LABELS, settings, step)
        mixed = null + (1 + 1.2 * 0.5 * (1 + 2 / 3)) * (logits - null)
        law = mixed[:, 5:14].softmax(-1)  # of scale 2
        ranked, order = law.sort(-1, descending=True)
        kept = (ranked.cumsum(-1) - ranked < 0.96) * ranked
        law = torch.zeros_like(law).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
    counts = torch.nn.functional.one_hot(torch.stack(seen), 12).double().mean(0)
    assert (counts - law).abs().max() < 4 * (0.25 / 400) ** 0.5
    assert (counts[law == 0] == 0).all() and (law == 0).any()


def test_an_interrupted_run_with_student_forcing_resumes_to_the_same_weights(tmp_path):
    vq_model = flexible_tokenizer()
    settings = replace(TRANSFORMER, steps=12, student_weight=0.1, student_guidance=1.2)

    train = trained(lambda: flexible_model(vq_model), train_var, vq_model, settings)
    check_training(tmp_path, train, 8, every=4, saved={"": FlexVARTransformer})
    with pytest.raises(ValueError, match="student_weight=0.1.*FlexVAR"):
        train_var(tiny_model(), tiny_tokenizer(), settings, tmp_path / "other")
