"""From official files to pictures: loading directly, converting to folders, class-conditional drawing, bad input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.command import last_line
from tests.helpers.official import (
    add_tiny_presets,
    arpg_shapes,
    lpd_shapes,
    random_weights,
    transformer_shapes,
    write_class_model,
    write_text_model,
    write_tokenizer,
)
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded, tiny_pipeline, tiny_transformer, tiny_vq_model
from tests.helpers.tiny_t5 import tiny_features, tiny_t5, tiny_tokenizer
from visual_spec.cli import main
from visual_spec.models.next_token import arpg, lpd
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.convert import convert
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.speculative import SpeculativeMaskedSampler
from visual_spec.samplers.orders.any_order import AnyOrderSampler
from visual_spec.samplers.orders.any_order_speculative import SpeculativeAnyOrderSampler
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

NAMES = ["tench, Tinca tinca", "goldfish", "shark", "crane", "hen", "crane", "owl"]


@pytest.fixture(autouse=True)
def tiny_presets(monkeypatch):
    add_tiny_presets(monkeypatch)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {
        "class": write_class_model(tmp_path),
        "text": write_text_model(tmp_path),
        "tokenizer": write_tokenizer(tmp_path),
    }


@pytest.fixture
def t5_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "t5"
    tiny_t5().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def class_pipeline(files, **settings) -> Any:
    return quiet(
        ClassImagePipeline.from_official(files["class"], files["tokenizer"], image_size=8, **settings)
    )


# -- classes -----------------------------------------------------------------------------------------------------------


def test_classes_are_drawn_from_official_files(files):
    pipe = class_pipeline(files)
    assert isinstance(pipe.sampler, SpeculativeJacobiSampler) and pipe.image_size == (8, 8)
    assert (pipe.config["default_guidance_scale"], pipe.config["default_top_k"]) == (2.0, 0)
    out = pipe([3, 5], num_images_per_label=2, generator=seeded(1, 2, 3, 4))
    assert len(out.images) == 4 and out.images[0].size == (8, 8) and out.tokens.shape == (4, 16)
    # The same by hand: plain sampling of one picture with the default law.
    plain = AutoregressiveSampler()(
        pipe.transformer, torch.tensor([5]), law=TokenLaw(guidance_scale=2.0), generator=seeded(3)
    )
    assert plain.tokens[0].equal(out.tokens[2])
    pictures = pipe.vq_model.decode_tokens(plain.tokens)[0].permute(1, 2, 0) / 2 + 0.5
    assert np.array_equal(
        np.asarray(out.images[2]), (pictures.detach().numpy() * 255).round().astype(np.uint8)
    )


def test_classes_differ_and_labels_may_be_names(files):
    pipe = class_pipeline(files, id2label=NAMES)
    drawn = pipe(
        [0, "Tinca tinca", "0", np.int64(0), "goldfish"], generator=seeded(*[9] * 5), guidance_scale=6.0
    )
    assert all(drawn.tokens[0].equal(tokens) for tokens in drawn.tokens[:4])
    assert not drawn.tokens[0].equal(drawn.tokens[4])
    assert pipe.label_ids(torch.tensor([2, 6])) == [2, 6] and pipe.label_ids("crane") == [3]


def test_near_to_far_files_are_drawn_in_their_order(files, tmp_path):
    """The keys of NAR: blocks and a head for the slot below. Saved, loaded, and refused to samplers of raster order."""
    weights = random_weights(transformer_shapes(3, 16, vocab=12, classes=7))
    lower = {
        "medusa_norm.weight": weights["norm.weight"] * 0.9,
        "medusa_output.weight": weights["output.weight"] * 0.8,
    }
    torch.save({"model": weights | lower}, tmp_path / "nar.pt")
    pipe: Any = ClassImagePipeline.from_official(tmp_path / "nar.pt", files["tokenizer"], image_size=8)
    assert isinstance(pipe.sampler, OrderedSampler) and pipe.transformer.trained_order == "nar"
    assert (pipe.plain_sampler, pipe.fast_sampler) == ("ordered", "ordered")
    drawn = quiet(pipe)([3, 5], generator=seeded(1, 2))
    assert drawn.tokens.shape == (2, 16) and (drawn.trace.target_calls == 7).all() and drawn.trace.lossless
    pipe.save_pretrained(tmp_path / "saved")
    again = quiet(load_pipeline(tmp_path / "saved"))
    assert again([3, 5], generator=seeded(1, 2)).tokens.equal(drawn.tokens)
    pipe.sampler = SpeculativeJacobiSampler()
    refuses(ValueError, "'nar'.*OrderedSampler", pipe, [3])


def test_any_order_files_are_drawn_in_any_order(files, tmp_path, capsys):
    """RandAR's keys. Saved, loaded, drawn on the command line beside one token a call; refused to other samplers."""
    weights = random_weights(transformer_shapes(2, 16, vocab=12, classes=7))
    weights["pos_instruct_embeddings"] = weights["cls_embedding.embedding_table.weight"][:1] * 0.7
    torch.save({"model": weights}, tmp_path / "randar.pt")
    pipe: Any = ClassImagePipeline.from_official(tmp_path / "randar.pt", files["tokenizer"], image_size=8)
    assert isinstance(pipe.sampler, SpeculativeAnyOrderSampler) and pipe.transformer.trained_order == "any"
    assert (pipe.plain_sampler, pipe.fast_sampler) == ("any-order", "speculative-any-order")
    drawn = quiet(pipe)([3, 5], generator=seeded(1, 2))
    assert drawn.tokens.shape == (2, 16) and (drawn.trace.target_calls <= 16).all() and drawn.trace.identical
    pipe.save_pretrained(tmp_path / "saved")
    again = quiet(load_pipeline(tmp_path / "saved"))
    assert again([3, 5], generator=seeded(1, 2)).tokens.equal(drawn.tokens)
    pipe.sampler = AnyOrderSampler("raster", steps=5)
    assert (pipe.plain_sampler, pipe.fast_sampler) == (
        "any-order:order=raster",
        "speculative-any-order:num_drafts=15,order=raster",
    )
    parallel = pipe([3, 5], generator=seeded(1, 2))
    assert (parallel.trace.target_calls == 5).all() and not parallel.trace.lossless
    assert pipe.num_timesteps == 5
    pipe.sampler = AnyOrderSampler("halton", steps=5, guidance_start=1.0)
    law = "order=halton,guidance_start=1.0"
    assert pipe.plain_sampler == f"any-order:{law}"
    assert pipe.fast_sampler == f"speculative-any-order:num_drafts=15,{law}"
    # Several tokens in a call are no plain decoding: what promises the plain tokens is compared with one a call.
    pipe.save_pretrained(tmp_path / "parallel")
    command = [
        "generate",
        "3",
        "--model",
        str(tmp_path / "parallel"),
        "--out",
        str(tmp_path / "two"),
        "--json",
    ]
    assert main([*command, "--guidance-scale", "2", "--compare"]) == 0
    [row] = last_line(capsys)["comparison"]
    assert row["identical"] and row["plain_calls"] == 16
    pipe.sampler = SpeculativeMaskedSampler()  # of the same settings
    refuses(TypeError, "those that fit: AnyOrderSampler", pipe, [3])
    pipe.sampler = SpeculativeJacobiSampler()
    refuses(ValueError, "'any'.*AnyOrderSampler", pipe, [3])

    capsys.readouterr()
    command = ["generate", "3", "--model", str(tmp_path / "saved"), "--out", str(tmp_path / "out"), "--json"]
    assert main([*command, "--sampler", "speculative-any-order:num_drafts=3", "--compare"]) == 0
    document = last_line(capsys)
    assert document["comparison"][0]["identical"] and document["comparison"][0]["plain_calls"] == 16


@pytest.mark.parametrize("name", ["arpg", "lpd"])
def test_files_of_position_queries_are_drawn_as_their_public_code_does(
    name, files, tmp_path, capsys, monkeypatch
):
    """Converted on the command line, loaded, and drawn in the calls, order and ramp of the public code."""
    shapes, module = {"arpg": (arpg_shapes(), arpg), "lpd": (lpd_shapes(side=4), lpd)}[name]
    monkeypatch.setitem(
        module.PRESETS, "tiny", {"num_layers": 4 if name == "arpg" else 2, "num_heads": 2, "dim": 16}
    )
    torch.save({"model": random_weights(shapes)}, tmp_path / "file.pt")
    pipe: Any = ClassImagePipeline.from_official(tmp_path / "file.pt", files["tokenizer"], image_size=64)
    drawn = quiet(pipe)([3, 5], generator=seeded(1, 2))
    assert pipe.sampler.config.schedule == name and pipe.sampler.config.guidance_start == 1.0
    assert pipe.sampler.config.order == {"arpg": "random", "lpd": "locality"}[name]
    assert (drawn.trace.target_calls == 16).all() and not drawn.trace.identical
    assert drawn.images[0].size == (8, 8)  # two pixels a token of this tokenizer
    order = {"arpg": "", "lpd": "order=locality,"}[name]
    assert pipe.plain_sampler == f"any-order:{order}guidance_start=1.0"
    assert pipe.fast_sampler == f"speculative-any-order:num_drafts=15,{order}guidance_start=1.0"
    command = [
        "convert",
        str(tmp_path / "file.pt"),
        str(files["tokenizer"]),
        "--out",
        str(tmp_path / "saved"),
    ]
    assert main([*command, "--image-size", "64"]) == 0
    again = quiet(load_pipeline(tmp_path / "saved"))
    assert again([3, 5], generator=seeded(1, 2)).tokens.equal(drawn.tokens)
    capsys.readouterr()
    command = ["generate", "3", "--model", str(tmp_path / "saved"), "--out", str(tmp_path / "out"), "--json"]
    assert main([*command, "--sampler", again.fast_sampler, "--guidance-scale", "2", "--compare"]) == 0
    [row] = last_line(capsys)["comparison"]
    assert row["identical"] and row["plain_calls"] == 16
    with pytest.raises(ValueError, match="draws from class labels.*ClassImagePipeline"):
        ImagePipeline.from_official(tmp_path / "file.pt", files["tokenizer"], image_size=64)


def test_guidance_may_end_before_the_picture(files):
    """Slots before the boundary as under guidance, slots after it from the conditional law alone."""
    pipe = class_pipeline(files)
    settings = dict(guidance_scale=5.0, generator=seeded(1, 2, 3), num_images_per_label=3)
    until = pipe(4, guidance_until=7, **settings).tokens
    law = TokenLaw(guidance_scale=5.0, guidance_until=7)
    plain = AutoregressiveSampler()(
        pipe.transformer, torch.tensor([4] * 3), law=law, generator=seeded(1, 2, 3), batch_size=3
    )
    assert until.equal(plain.tokens)
    settings["generator"] = seeded(1, 2, 3)
    whole = pipe(4, **settings).tokens
    assert until[:, :7].equal(whole[:, :7]) and not until.equal(whole)


def test_a_class_pipeline_is_saved_with_its_names_and_defaults(files, tmp_path):
    pipe = class_pipeline(files, id2label=NAMES, sampler=SpeculativeJacobiSampler(window=5))
    pipe.save_pretrained(tmp_path / "saved")
    again = quiet(load_pipeline(tmp_path / "saved"))
    assert isinstance(again, ClassImagePipeline) and again.sampler.config["window"] == 5
    assert again.config["id2label"] == NAMES and again.config["default_guidance_scale"] == 2.0
    assert set(again.components) == {"transformer", "vq_model", "sampler", "drafter"}
    remade: Any = ClassImagePipeline.from_pipe(again)
    first, second, third = (p("goldfish", generator=seeded(5)).tokens for p in (pipe, again, remade))
    assert first.equal(second) and first.equal(third)


BAD_LABELS = {
    "beyond": (7, ValueError, "class 7.*0.*6"),
    "negative": (-1, ValueError, "class -1 given"),
    "empty": ([], ValueError, "labels.*empty"),
    "digits": ("12", ValueError, "class 12.*0.*6"),
    "near miss": ("goldfisch", ValueError, "'goldfisch'.*'goldfish'"),
    "far miss": ("xyzzy", ValueError, r"'xyzzy'.*pipe\.config\['id2label'\]"),
    "fraction": ([1.5], TypeError, r"label 1\.5"),
    "bool": (True, TypeError, "label True"),
    "none": (None, TypeError, "class_labels"),
    "bytes": (b"12", TypeError, "labels=b'12'"),
    "table": (torch.tensor([[1]]), TypeError, r"label \[1\]"),
    "floats": (np.array([1.0]), TypeError, r"label 1\.0"),
    "flags": (torch.tensor([True]), TypeError, "label True"),
    "no array": (np.array([], int), ValueError, "labels.*empty"),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_bad_labels_are_refused_before_any_computation(files, monkeypatch, name):
    labels, error, message = BAD_LABELS[name]
    pipe = class_pipeline(files, id2label=NAMES)
    monkeypatch.setattr(pipe.transformer, "prefill", lambda *_, **__: pytest.fail("computed"))
    refuses(error, message, pipe, labels)


def test_other_bad_input_of_classes_is_refused(files):
    pipe = class_pipeline(files)
    refuses(ValueError, "'goldfish'.* 0 to 6", pipe, "goldfish")
    refuses(ValueError, "guidance_until=-1", pipe, 1, guidance_until=-1)
    refuses(ValueError, "3.*7 classes", class_pipeline, files, id2label=["a", "b", "c"])


def test_each_pipeline_refuses_the_other_kind(files):
    with pytest.raises(ValueError, match=r"c2i_tiny\.pt.*ClassImagePipeline\.from_official"):
        ImagePipeline.from_official(files["class"], files["tokenizer"], image_size=8)
    with pytest.raises(ValueError, match=r"t2i_tiny\.pt.*ImagePipeline\.from_official"):
        ClassImagePipeline.from_official(files["text"], files["tokenizer"], image_size=8)
    classes = tiny_transformer(num_classes=3, caption_dim=None, prefix_length=1)
    with pytest.raises(ValueError, match="ClassImagePipeline"):
        ImagePipeline(classes, tiny_vq_model(), None, AutoregressiveSampler())
    with pytest.raises(ValueError, match="ImagePipeline"):
        ClassImagePipeline(tiny_transformer(), tiny_vq_model(), AutoregressiveSampler())


# -- captions ----------------------------------------------------------------------------------------------------------


def test_captions_are_drawn_from_official_files(files, t5_folder, tmp_path):
    cache = tmp_path / "cache"
    pipe = quiet(
        ImagePipeline.from_official(
            files["text"], files["tokenizer"], t5_folder, image_size=8, feature_cache=cache
        )
    )
    assert (pipe.config["default_guidance_scale"], pipe.config["default_top_k"]) == (7.5, 1000)
    assert pipe.text_encoder.max_words == 6
    prompts = ["a red circle", "a blue square ."]
    drawn = pipe(prompts, generator=seeded(1, 2))
    assert len(list(cache.rglob("*.safetensors"))) == 2
    condition = tiny_features()(prompts)  # 10 words long: the model's six are its last ones
    given = pipe(
        prompt_embeds=condition.features[:, 4:],
        prompt_attention_mask=condition.mask[:, 4:],
        generator=seeded(1, 2),
    )
    assert drawn.tokens.equal(given.tokens)
    with pytest.warns(UserWarning, match="at most 5 tokens; 'square' at the end"):
        pipe("a red circle on a square")
    pipe.save_pretrained(tmp_path / "saved")
    again = quiet(load_pipeline(tmp_path / "saved"))
    assert type(again) is ImagePipeline and again.config["default_top_k"] == 1000
    assert again(prompts, generator=seeded(1, 2)).tokens.equal(drawn.tokens)


def test_captions_without_a_text_encoder_take_features(files):
    pipe = quiet(ImagePipeline.from_official(files["text"], files["tokenizer"], image_size=8))
    refuses(ValueError, "prompt_embeds", pipe, "a red circle")
    assert len(pipe(prompt_embeds=torch.randn(1, 6, 8)).images) == 1


def test_defaults_of_the_embedded_pipeline_are_what_they_were():
    pipe = tiny_pipeline()
    assert pipe.make_law() == TokenLaw(guidance_scale=3.0)
    assert pipe.make_law(guidance_scale=1.0, top_k=5, top_p=0.9) == TokenLaw(
        guidance_scale=1.0, top_k=5, top_p=0.9
    )


# -- converting --------------------------------------------------------------------------------------------------------


def test_two_files_become_a_pipeline_in_any_order(files, t5_folder, tmp_path):
    facts = convert([files["tokenizer"], files["class"]], tmp_path / "out", image_size=8)
    assert facts["class"] == "ClassImagePipeline" and set(facts["parameters"]) == {"transformer", "vq_model"}
    assert facts["files"][str(files["class"])] == "LlamaGen-tiny, class-conditional"
    loaded, direct = quiet(load_pipeline(tmp_path / "out")), class_pipeline(files)
    assert loaded([1, 2], generator=seeded(1, 2)).tokens.equal(direct([1, 2], generator=seeded(1, 2)).tokens)
    written = [path.suffix for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert set(written) == {".json", ".safetensors", ".py", ".md"}  # pipeline.py, and the card

    facts = convert(
        [files["text"], files["tokenizer"]], tmp_path / "text", image_size=8, text_encoder=t5_folder
    )
    assert facts["class"] == "ImagePipeline" and "text_encoder" in facts["parameters"]
    assert quiet(ImagePipeline.from_pretrained(tmp_path / "text"))("a red circle").images
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_one_file_becomes_a_model_and_the_dtype_is_chosen(files, tmp_path):
    facts = convert([files["class"]], tmp_path / "gpt", image_size=64, dtype=torch.bfloat16)
    assert facts["class"] == "LlamaGenTransformer"
    model = LlamaGenTransformer.from_pretrained(tmp_path / "gpt", torch_dtype=torch.bfloat16)
    expected = torch.load(files["class"], weights_only=True)["model"]
    assert all(torch.equal(v, expected[k].bfloat16()) for k, v in model.state_dict().items())
    convert([files["tokenizer"]], tmp_path / "vq")
    assert VQModel.from_pretrained(tmp_path / "vq").config["image_size"] == 256


def test_what_is_in_the_way_stays(files, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    refuses(FileExistsError, "--overwrite", convert, [files["class"]], out, image_size=8)
    with pytest.raises(FileExistsError, match=r"conversion\.json"):
        convert([files["class"]], out, image_size=8, overwrite=True)
    with pytest.raises(FileExistsError, match="is a file"):
        convert([files["class"]], files["text"], image_size=8, overwrite=True)
    assert (out / "mine.txt").read_text() == "mine"

    done = tmp_path / "done"
    convert([files["class"]], done, image_size=64)
    before = (done / "config.json").read_text()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LlamaGenTransformer, "save_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert([files["class"]], done, image_size=128, overwrite=True)
    assert (done / "config.json").read_text() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    convert([files["class"]], done, image_size=128, overwrite=True)
    assert LlamaGenTransformer.from_pretrained(done).grid.width == 8


def test_only_what_a_conversion_wrote_is_replaced(files, tmp_path):
    """A folder with a config.json may be anyone's: a repository of code, or a model that was trained for a week."""
    own = tmp_path / "own"
    own.mkdir()
    for name in ("config.json", "model_index.json", "conversion.json"):
        for text in ("{}", '{"written_by": "me", "files": {}}', "[]", "not JSON"):
            (own / name).write_text(text)
            with pytest.raises(FileExistsError, match=r"conversion\.json"):
                convert([files["class"]], own, image_size=8, overwrite=True)
    assert len(list(own.iterdir())) == 3

    done = tmp_path / "done"
    convert([files["class"]], done, image_size=64)
    for change in ("notes.txt", "deeper/notes.txt", "config.json"):
        path = done / change
        before = path.read_text() if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.write_text("a week of work")
        with pytest.raises(FileExistsError, match=f"{change}.*changed"):
            convert([files["class"]], done, image_size=8, overwrite=True)
        assert path.read_text() == "a week of work"
        path.unlink() if before is None else path.write_text(before)
    (done / "link").symlink_to(own)
    refuses(FileExistsError, "link.*changed", convert, [files["class"]], done, image_size=8, overwrite=True)
    (done / "link").unlink()
    convert([files["class"]], done, image_size=128, overwrite=True)


def test_a_link_is_not_replaced_by_a_folder(files, tmp_path):
    done = tmp_path / "done"
    convert([files["class"]], done, image_size=64)
    for target in (done, tmp_path / "nowhere"):
        link = tmp_path / "link"
        link.symlink_to(target)
        with pytest.raises(FileExistsError, match=f"link to {target}"):
            convert([files["class"]], link, image_size=128, overwrite=True)
        assert link.is_symlink() and (done / "config.json").exists()
        link.unlink()


def test_what_was_there_comes_back_if_the_new_folder_cannot_be_put_there(files, tmp_path, monkeypatch):
    done = tmp_path / "done"
    convert([files["class"]], done, image_size=64)
    rename = Path.rename

    def fail(self, target):
        if self.parent.name == "new":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    refuses(OSError, "no", convert, [files["class"]], done, image_size=128, overwrite=True)
    assert LlamaGenTransformer.from_pretrained(done).grid.width == 4


def test_files_that_make_no_pipeline_are_refused(files, t5_folder, tmp_path):
    out = tmp_path / "out"
    refuses(ValueError, "LlamaGen", convert, [files["class"], files["text"]], out, image_size=8)
    with pytest.raises(ValueError, match=r"text_encoder.*t5.*c2i_tiny\.pt, LlamaGen"):
        convert([files["class"], files["tokenizer"]], out, image_size=8, text_encoder=t5_folder)
    refuses(ValueError, r"c2i_tiny\.pt.*tell", convert, [files["class"], files["tokenizer"]], out)
    assert not out.exists()


# -- folders and files that are no pipeline --------------------------------------------------------------------------


def test_a_file_or_a_folder_without_configuration_is_told_what_to_do(files, tmp_path):
    for load in (ImagePipeline.from_pretrained, ClassImagePipeline.from_pretrained, load_pipeline):
        refuses(ValueError, r"c2i_tiny\.pt.*from_official", load, files["class"])
        refuses(ValueError, r"model_index\.json.*c2i_tiny\.pt, t2i_tiny\.pt, vq_tiny\.pt", load, tmp_path)


def test_a_pipeline_of_another_library_is_named(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    refuses(ValueError, "FluxPipeline.*DistilledImagePipeline.*ClassImagePipeline", load_pipeline, tmp_path)
