"""Chameleon, Anole and Lumina-mGPT against transformers' own `generate`, once its ban on image tokens is lifted."""

from copy import copy
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers import vqgan
from tests.helpers.refusals import refuses
from tests.models.next_token.tiny_transformers import chameleon, prompts
from visual_spec.models.core.transformers_cache import Prompt
from visual_spec.models.next_token.chameleon import ChameleonImageModel
from visual_spec.models.next_token.chameleon_vq import ChameleonVQDecoder
from visual_spec.models.next_token.movq import MoVQDecoder
from visual_spec.pipelines.accelerate import accelerate, restore
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

MODEL = chameleon()
SCATTERED = chameleon(scattered=True)
INPUTS = prompts([6, 4, 7, 3], low=68, high=80, pad=1, last=70, first=0)
START, ROW_END, END = 9, 11, 10
SIZE = (4, 6)  # of Lumina-mGPT; 12 and 13 are its size tokens here, two and three pairs
LUMINA: dict[str, Any] = dict(layout="lumina-mgpt", image_sizes=SIZE)
CHAMELEON: dict[str, Any] = dict(layout="chameleon")


def plan(model, inputs, *, guided=False, **more):
    prompt = Prompt(inputs["input_ids"], inputs["attention_mask"])
    return ChameleonImageModel.plan(model, prompt, guided=guided, **more)


def native(model, opened: Prompt, width: int, *, row_ends: bool, steps: int, **guidance) -> torch.Tensor:
    """`generate`, allowed image tokens only, and forced row ends."""
    image_ids = model.model.vocabulary_mapping.image_tokens
    start = opened.ids.shape[1]

    def allowed(_, ids):
        place = len(ids) - start
        if place == steps:
            return [END]
        return [ROW_END] if row_ends and place % (width + 1) == width else image_ids

    mapping = model.model.vocabulary_mapping
    mapping.__dict__["image_tokens"] = []  # what `forward` forbids
    try:
        return model.generate(
            opened.ids,
            attention_mask=opened.mask.long(),
            max_new_tokens=steps + 1,
            do_sample=False,
            prefix_allowed_tokens_fn=allowed,
            **guidance,
        )
    finally:
        mapping.__dict__["image_tokens"] = image_ids


@pytest.mark.parametrize("model", [MODEL, SCATTERED], ids=["consecutive ids", "scattered ids"])
@pytest.mark.parametrize("lumina", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_greedy_tokens_are_those_of_generate(model, lumina, scale):
    image_model, condition = plan(model, INPUTS, guided=scale > 1, **(LUMINA if lumina else {}))
    steps, width = (28, 6) if lumina else (16, 4)
    guidance: dict[str, Any] = {}
    if scale > 1:
        assert condition.unconditional is not None
        guidance = dict(
            guidance_scale=scale,
            negative_prompt_ids=condition.unconditional.ids,
            negative_prompt_attention_mask=condition.unconditional.mask.long(),
        )
    want = native(model, condition.prompt, width, row_ends=lumina, steps=steps, **guidance)
    law = TokenLaw(temperature=0.0, guidance_scale=scale)
    got = AutoregressiveSampler()(image_model, condition, law=law, batch_size=4)
    assert torch.equal(image_model.output(condition, got.tokens), want)
    assert len(got.tokens.unique()) > 4


def test_the_opening_is_added_where_it_is_missing():
    ids = INPUTS["input_ids"]
    for last, added in [((), (START,)), ((START,), ())]:
        given = torch.cat([ids, ids.new_tensor(last).expand(4, -1)], 1)
        _, condition = plan(MODEL, {"input_ids": given, "attention_mask": torch.ones_like(given)})
        assert torch.equal(condition.prompt.ids, torch.cat([given, ids.new_tensor(added).expand(4, -1)], 1))
    opening = (START, 13, 14)  # two and three pairs of tokens
    for count in range(4):
        given = torch.cat([ids, ids.new_tensor(opening[:count]).expand(4, -1)], 1)
        image_model, condition = plan(
            MODEL, {"input_ids": given, "attention_mask": torch.ones_like(given)}, guided=True, **LUMINA
        )
        assert image_model.opening == list(opening)
        assert torch.equal(condition.prompt.ids, torch.cat([ids, ids.new_tensor(opening).expand(4, -1)], 1))
        assert condition.unconditional is not None
        assert condition.unconditional.ids.tolist() == [list(opening)] * 4
    mixed = ids.clone()
    mixed[0, -1] = START
    with pytest.raises(ValueError, match=r"prompts.*\[9\]"):
        plan(MODEL, {"input_ids": mixed, "attention_mask": INPUTS["attention_mask"]})


def test_the_default_unconditional_prompt_of_chameleon_is_text_start_and_image_start():
    _, condition = plan(MODEL, INPUTS, guided=True)
    assert condition.unconditional is not None
    assert condition.unconditional.ids.tolist() == [[0, START]] * 4


def test_pictures_in_the_prompt_become_their_tokens():
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    ids = torch.tensor([[0, 70, *[8] * 16, 71]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    image_model, condition = plan(MODEL, inputs, pixel_values=pixels)
    state = image_model.prefill(condition, batch_size=1, guided=False, window=1)
    opened = torch.cat([ids, torch.tensor([[START]])], 1)
    want = MODEL.lm_head(MODEL.model(input_ids=opened, pixel_values=pixels).last_hidden_state[:, -1])
    assert (state.logits - want[:, MODEL.model.vocabulary_mapping.image_tokens]).abs().max() < 1e-10
    with pytest.raises(ValueError, match="15.*input_ids.*16"):
        plan(
            MODEL,
            {"input_ids": ids[:, 3:], "attention_mask": torch.ones_like(ids[:, 3:])},
            pixel_values=pixels,
        )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(layout="anole"), "layout='anole'.*chameleon"),
        (dict(image_sizes=(4, 4)), r"image_sizes=\(4, 4\).*Anole"),
        (dict(layout="lumina-mgpt"), "image_sizes=None"),
        (dict(layout="lumina-mgpt", image_sizes=(4, 5)), "even numbers"),
        (dict(layout="lumina-mgpt", image_sizes=(4, 20)), "lacks <reserved08810>"),
        (dict(layout="lumina-mgpt", image_sizes=[[4, 4], [4, 6]]), r"\[\[4, 4\], \[4, 6\]\]"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(more, message):
    refuses(ValueError, message, plan, MODEL, INPUTS, **more)


def test_a_lumina_checkpoint_is_known_by_its_config():
    model = chameleon(num_hidden_layers=1)
    model.config.architectures = ["ChameleonXLLMXForConditionalGeneration"]
    image_model, _ = plan(model, INPUTS, image_sizes=[list(SIZE)] * 4)
    assert image_model.row_end == ROW_END and (image_model.grid.height, image_model.grid.width) == SIZE


# -- the picture decoder ---------------------------------------------------------------------------------------------


def decoder(size: int = 24) -> ChameleonVQDecoder:
    torch.manual_seed(0)
    return ChameleonVQDecoder(
        base_channels=32,
        channel_multipliers=(1, 2),
        blocks_per_level=1,
        latent_channels=8,
        codebook_size=size,
        codebook_dim=8,
    ).double()


def test_the_official_decoder_has_the_official_keys():
    """Against the layout of taming-transformers' VQGAN with ch_mult (1, 1, 2, 2, 4)."""
    with torch.device("meta"):
        state = ChameleonVQDecoder().state_dict()
    want = vqgan.networks(128, (1, 1, 2, 2, 4), 2, 256, 256, attends="mid")
    want = {key: shape for key, shape in want.items() if key.startswith("decoder.")}
    want |= {"quantize.embedding.weight": (8192, 256)} | vqgan.convolution("post_quant_conv", 256, 256)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == want


@pytest.mark.parametrize("layout", ["vqgan.ckpt", "anole folder", "wrapped folder"])
def test_the_decoder_is_read_from_official_files(tmp_path, layout):
    wanted = decoder()
    tensors = wanted.state_dict()
    if layout == "vqgan.ckpt":
        path = tmp_path / "vqgan.ckpt"
        torch.save(
            {"state_dict": {**tensors, "encoder.conv_in.weight": torch.zeros(1), "loss.x": torch.zeros(1)}},
            path,
        )
    else:
        path = tmp_path
        start = "module._orig_mod." if layout == "wrapped folder" else ""
        named = {f"{start}model.vqmodel.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        half = sorted(named)[::2]
        save_file({name: named[name] for name in half}, tmp_path / "model-00001-of-00002.safetensors")
        rest = {name: tensor for name, tensor in named.items() if name not in half}
        save_file({**rest, "lm_head.weight": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    got = ChameleonVQDecoder.from_file(path, MODEL.config.vq_config)
    assert all(torch.equal(tensor, got.state_dict()[name]) for name, tensor in tensors.items())
    codes = torch.randint(0, 24, (2, 4, 4))
    assert torch.equal(got.decode_codes(codes), wanted.decode_codes(codes))


def test_files_that_hold_no_decoder_are_refused(tmp_path):
    refuses(FileNotFoundError, r"no file", ChameleonVQDecoder.from_file, tmp_path)
    tensors = decoder().state_dict()
    del tensors["decoder.conv_in.bias"]
    torch.save(tensors, tmp_path / "short.ckpt")
    with pytest.raises(ValueError, match="1 missing: decoder.conv_in.bias"):
        ChameleonVQDecoder.from_file(tmp_path / "short.ckpt", MODEL.config.vq_config)
    torch.save({"model": decoder()}, tmp_path / "pickle.ckpt")
    with pytest.raises(ValueError, match="refused"):
        ChameleonVQDecoder.from_file(tmp_path / "pickle.ckpt", MODEL.config.vq_config)


@pytest.mark.parametrize("lumina", [False, True])
def test_pixels_are_those_of_the_codes_after_the_ids(lumina):
    more = LUMINA if lumina else {}
    image_model, condition = plan(SCATTERED, INPUTS, **more)
    tokens = torch.randint(
        0, 24, (4, image_model.grid.num_tokens), generator=torch.Generator().manual_seed(5)
    )
    names = {value: name for name, value in SCATTERED.config.vocabulary_map.items()}
    by_id = sorted(value for value, name in names.items() if name.startswith("IMGIMG"))
    digits = [names[value][len("IMGIMG") : -1] for value in by_id]
    code = [int("".join(str(ord(letter) - ord("A")) for letter in word)) for word in digits]
    codes = torch.tensor(code)[tokens].unflatten(1, (image_model.grid.height, -1))
    got = ChameleonImageModel.pixels(SCATTERED, image_model.output(condition, tokens), decoder(), **more)
    assert torch.equal(got, decoder().decode_codes(codes))


def test_pixels_need_a_decoder_and_a_picture():
    refuses(ValueError, "Chameleon", ChameleonImageModel.pixels, MODEL, torch.zeros(1, 30, dtype=torch.long))
    with pytest.raises(ValueError, match=r"ids \[0\]"):
        ChameleonImageModel.pixels(MODEL, torch.zeros(1, 30, dtype=torch.long), decoder())


# -- Lumina-mGPT 2.0 -------------------------------------------------------------------------------------------------

SECOND: dict[str, Any] = dict(layout="lumina-mgpt-2", image_sizes=(4, 8))
FIRST_ID = 155000
# Codes of `create_logits_processor(cfg, image_top_k=1)` of github.com/Alpha-VLLM/Lumina-mGPT-2.0 in `generate` of the
# model below, for the first two prompts, by guidance: pictures of 4 x 8 codes.
RELEASED = {
    1.0: [
        "2504 6090 2504 6090 7561 6640 15683 1382 "
        "5438 7742 8828 10572 11053 4754 12697 14015 "
        "10027 14905 6615 2462 5694 108 10859 15284 "
        "6123 12438 9923 12697 11192 7459 10302 6543",
        "13157 14792 16345 14905 10685 11192 2504 9662 "
        "14618 291 2587 13882 8896 11604 2981 8470 "
        "7678 6220 11903 10607 9354 4345 2240 8079 "
        "15287 4 2367 5124 3138 8935 2367 12801",
    ],
    4.0: [
        "8143 12697 11053 5694 291 8922 14905 7183 "
        "15618 2966 6640 4270 9851 8260 10610 14850 "
        "2887 8260 1830 7288 5821 5939 15683 3960 "
        "5124 4740 10302 3967 10384 5779 2171 13838",
        "5230 11053 1830 11442 15832 8079 13145 11442 "
        "6640 5230 14905 166 8152 10806 15462 12298 "
        "12483 9936 14115 974 10903 12483 8938 5640 "
        "5935 5669 974 10903 9957 8143 14905 1518",
    ],
}


@pytest.fixture(scope="module")
def second() -> Any:
    return chameleon(vocab_size=171384, hidden_size=16)


@pytest.mark.parametrize("scale", RELEASED)
def test_pictures_of_lumina_mgpt_2_are_those_of_its_program(second, scale):
    """As a user draws them: the vocabulary says what it is, size tokens count 32 pixels, rows end in a token."""
    codes = torch.tensor([[*map(int, row.split())] for row in RELEASED[scale]]).unflatten(1, (4, 8))
    accelerate(second, SpeculativeJacobiSampler(6))
    try:
        ids = second.generate_images(**INPUTS, image_sizes=(4, 8), guidance_scale=scale, do_sample=False)
        decoder = MoVQDecoder(32, blocks_per_level=1)
        pictures = second.decode_images(ids, image_sizes=(4, 8), vq_decoder=decoder)
    finally:
        restore(second)
    assert second.config.vocab_size == 171384
    want = torch.cat([FIRST_ID + codes, torch.full((2, 4, 1), ROW_END)], 2).flatten(1)
    opening = torch.tensor([[START, 12, 13]] * 2)  # one and two units of 32 pixels
    want = torch.cat([INPUTS["input_ids"][:2], opening, want, torch.full((2, 1), END)], 1)
    assert torch.equal(ids[:2], want)
    assert pictures.shape == (4, 3, 32, 64)
    assert torch.allclose(pictures[:2], decoder.decode_codes(codes), atol=1e-5)


def test_lumina_mgpt_2_is_known_by_its_vocabulary(second):
    """Its config names the class of 1.0 and keeps its loss weight; only the ids tell them apart."""
    model: Any = copy(MODEL)
    model.config = copy(MODEL.config)
    model.config.architectures, model.config.z_loss_weight = ["ChameleonXLLMXForConditionalGeneration"], 1e-5
    assert plan(model, INPUTS, image_sizes=SIZE)[0].grid.width == SIZE[1]
    image_model, condition = plan(second, INPUTS, guided=True, image_sizes=(4, 8))
    assert condition.unconditional is not None and condition.unconditional.ids[0].tolist() == [START, 12, 13]
    assert (image_model.vocab_size, image_model.image_rows) == (16384, slice(FIRST_ID, FIRST_ID + 16384))
    for which, more in ((second, LUMINA), (second, CHAMELEON), (model, SECOND)):
        with pytest.raises(ValueError, match=rf"vocab_size={which.config.vocab_size}: .* Leave layout out"):
            plan(which, INPUTS, **more)
    refused = [
        (dict(image_sizes=(4, 6)), "4 tokens"),
        (dict(image_sizes=(4, 40)), r"reserved08810.*vocabulary_map=tokenizer\.get_vocab"),
        (dict(image_sizes=(4, 8), pixel_values=torch.zeros(1, 3, 8, 8)), "155000"),
    ]
    for more, words in refused:
        refuses(ValueError, words, plan, second, INPUTS, **more)
    with pytest.raises(ValueError, match="pass vq_decoder=MoVQDecoder"):
        ChameleonImageModel.pixels(second, torch.zeros(1, 40, dtype=torch.long), image_sizes=(4, 8))
