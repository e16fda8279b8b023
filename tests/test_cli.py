"""The command line, run on a tiny real model."""

import errno
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import visual_spec
from tests.helpers.command import check_refused, generate, last_line, pixels
from tests.helpers.official import add_tiny_presets, write_class_model, write_tokenizer
from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_masked_pipeline, tiny_pipeline
from visual_spec import cli
from visual_spec.files.whole import ready_folder
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

PROMPT = "a red circle"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_pipeline().save_pretrained(folder)
    return str(folder)


def test_generate_writes_a_picture_per_seed(model, tmp_path, capsys):
    assert (
        generate(model, tmp_path, PROMPT, "a blue square", "--num-images", "2", "--seed", "5", "--json") == 0
    )
    document = last_line(capsys)
    assert [image["seed"] for image in document["images"]] == [5, 6, 7, 8]
    assert [image["prompt"] for image in document["images"]] == [PROMPT] * 2 + ["a blue square"] * 2
    assert document["sampler"]["name"] == "speculative-jacobi"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == "000-a-red-circle-seed5.png" and len(names) == 4
    for image in document["images"]:
        assert pixels(image["file"]).shape == (8, 8, 3)
        assert image["tokens_per_call"] == pytest.approx(16 / image["calls"])


def test_a_picture_can_be_drawn_again_alone_and_plainly(model, tmp_path, capsys):
    generate(
        model, tmp_path / "all", PROMPT, "--num-images", "3", "--seed", "1", "--batch-size", "2", "--json"
    )
    third = last_line(capsys)["images"][2]
    generate(model, tmp_path / "one", PROMPT, "--seed", "3", "--sampler", "autoregressive", "--json")
    again = last_line(capsys)["images"][0]
    assert third["seed"] == again["seed"] == 3
    assert np.array_equal(pixels(third["file"]), pixels(again["file"]))
    assert third["calls"] < again["calls"] == 16


def test_sampler_and_law_settings_arrive(model, tmp_path, capsys):
    sampler = ["--window", "4", "--coupling", "maximal", "--acceptance", "exact", "--initial-draft", "left"]
    law = ["--guidance-scale", "1", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9"]
    assert generate(model, tmp_path / "short", PROMPT, *sampler, *law, "--json") == 0
    document = last_line(capsys)
    whole = ["--sampler", ":window=4,coupling=maximal", "--sampler", ":acceptance=exact,initial_draft=left"]
    assert generate(model, tmp_path / "whole", PROMPT, *whole, *law, "--json") == 0
    assert document["sampler"] == last_line(capsys)["sampler"]
    settings = {"window": 4, "coupling": "maximal", "acceptance": "exact", "initial_draft": "left"}
    assert {"name": "speculative-jacobi", **settings}.items() <= document["sampler"].items()
    assert (document["guidance_scale"], document["temperature"]) == (1.0, 0.5)
    assert (document["top_k"], document["top_p"]) == (3, 0.9)


def test_dtype_and_threads_arrive(model, tmp_path, capsys, monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert generate(model, tmp_path, PROMPT, "--dtype", "bfloat16", "--threads", "1", "--json") == 0
    document = last_line(capsys)
    assert document["dtype"] == "bfloat16" and threads == [1]
    law = "same tokens as autoregressive sampling up to near-ties (bfloat16; none with exact_width=True)"
    assert document["images"][0]["output_law"] == law
    assert 0 <= document["images"][0]["near_ties"] < 16


@pytest.mark.parametrize(
    "sampler, output",
    [
        ("speculative-jacobi", "same tokens as autoregressive sampling"),
        ("speculative-jacobi:acceptance=exact", "lossless"),
        ("zipar:window=2", "lossy"),
        ("zipar:window=2,measure=true", r"lossy, measured divergence 0\.\d+"),
    ],
)
def test_what_was_drawn_from_is_said(model, tmp_path, capsys, sampler, output):
    assert generate(model, tmp_path, PROMPT, "--sampler", sampler, "--json") == 0
    header, _, line, document = capsys.readouterr().out.strip().splitlines()
    (image,) = json.loads(document)["images"]
    assert re.fullmatch(output, image["output_law"])
    assert header.split()[-1] == "output" and line.endswith(image["output_law"])


def test_compare_proves_equality_and_writes_the_report(model, tmp_path, capsys):
    assert generate(model, tmp_path, PROMPT, "a blue square", "--compare", "--window", "8") == 0
    out = capsys.readouterr().out
    header, rule, *rows = out.splitlines()
    assert header.split() == ["prompt", "calls", "tokens/call", "seconds", "speed-up", "identical"]
    assert set(rule) == {"-"}
    assert rows[0].startswith(PROMPT) and rows[0].endswith("yes") and rows[1].endswith("yes")
    assert "plain -> accelerated: calls of the model, tokens that a call commits, seconds of decoding" in out
    assert "Every picture is the same, pixel for pixel." in out
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["identical"] for row in document["comparison"]] == [True, True]
    for row in document["comparison"]:
        assert row["calls"] < row["plain_calls"] == 16
        assert row["seconds"] > 0 < row["plain_seconds"]
    assert pixels(tmp_path / "comparison.png").ndim == 3
    page = (tmp_path / "comparison.html").read_text()
    assert PROMPT in page and "data:image/png;base64," in page
    assert "window=8" in page and "gumbel" in page
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".png", ".html", ".json")]


def test_a_masked_model_is_compared_with_what_one_would_draw_with(model, tmp_path, capsys):
    """Alone beside its reference, without a speed-up over it; and beside a model of the same tokens."""
    masked = str(tmp_path / "masked")
    tiny_masked_pipeline().save_pretrained(masked)
    assert generate(masked, tmp_path / "alone", PROMPT, "--compare") == 0
    out = capsys.readouterr().out
    assert "16 -> 3" in out and not re.search(r"\dx\b", out) and "no one's choice" in out
    page = (tmp_path / "alone" / "comparison.html").read_text().split("<main>")[1]
    assert "reference" in page and not re.search(r"\b(paid|free|accepted)\b|\dx\b", page)
    both = ["--compare", "--masked", masked]
    assert generate(model, tmp_path / "both", PROMPT, *both, "--json") == 0
    out = capsys.readouterr().out
    (row,) = json.loads(out.splitlines()[-1])["comparison"]
    assert (row["plain_calls"], row["calls"], row["identical"]) == (16, 3, False) and re.search(r"\dx\b", out)
    page = (tmp_path / "both" / "comparison.html").read_text().split("<main>")[1]
    assert "as fast" in page and "another law" in page and not re.search(r"\b(paid|free|accepted)\b", page)
    alone, beside = (next((tmp_path / name).glob("000*.png")).read_bytes() for name in ("alone", "both"))
    assert alone == beside
    assert generate(masked, tmp_path / "wrong", PROMPT, "--compare", "--masked", model) == 2
    assert f"--masked {model} given" in capsys.readouterr().err


def test_compare_says_when_tokens_differ(model, tmp_path, capsys):
    settings = ["--coupling", "independent", "--acceptance", "exact", "--seed", "3"]
    assert generate(model, tmp_path, PROMPT, "--compare", *settings) == 0
    out = capsys.readouterr().out
    assert " no" in out and "Not what plain decoding draws with these seeds. The output is: lossless." in out
    measured = ["--sampler", "zipar:window=2,measure=true"]
    assert generate(model, tmp_path / "lossy", PROMPT, "a blue square", "--compare", *measured) == 0
    written = json.loads((tmp_path / "lossy" / "comparison.json").read_text())
    laws = [row["output_law"] for row in written["comparison"]]
    assert all(law.startswith("lossy, measured divergence 0.") for law in laws)
    low, high = sorted(float(re.findall(r"\d\.\d{4}", law)[0]) for law in laws)
    assert low < high  # two pictures, one statement with the range of both
    said = re.sub(r"\d\.\d{4}", f"{low:.4f} to {high:.4f}", laws[0], count=1)
    assert f"The output is: {said}." in capsys.readouterr().out


def test_compare_fails_when_the_promise_is_broken(model, tmp_path, capsys, monkeypatch):
    def wrong(self, *args, **kwargs):
        result = plain(self, *args, **kwargs)
        result.tokens[:, -1] = (result.tokens[:, -1] + 1) % 12
        return result

    plain = AutoregressiveSampler.__call__
    monkeypatch.setattr(AutoregressiveSampler, "__call__", wrong)
    assert generate(model, tmp_path / "float32", PROMPT, "--compare") == 1
    assert "promises the plain tokens, and did not give them" in capsys.readouterr().err
    # Below float32 rounding may decide between two tokens, so another one breaks no promise.
    assert generate(model, tmp_path / "bfloat16", PROMPT, "--compare", "--dtype", "bfloat16") == 0
    captured = capsys.readouterr()
    found = re.search(
        r"same tokens as autoregressive sampling up to near-ties \(bfloat16; none with exact_width=True\), (\d+) near-",
        captured.out,
    )
    (row,) = json.loads((tmp_path / "bfloat16/comparison.json").read_text())["comparison"]
    assert found is not None and int(found[1]) == row["near_ties"]
    assert "error" not in captured.err
    # Calls of one width make the promise in bfloat16, too, so that it can be broken.
    options = ["--compare", "--dtype", "bfloat16", "--sampler", "speculative-jacobi:exact_width=true"]
    assert generate(model, tmp_path / "exact", PROMPT, *options) == 1
    assert "promises the plain tokens" in capsys.readouterr().err
    monkeypatch.undo()
    assert generate(model, tmp_path / "kept", PROMPT, *options) == 0
    assert "Every picture is the same" in capsys.readouterr().out


def test_nothing_is_overwritten_unasked(model, tmp_path, capsys, monkeypatch):
    assert generate(model, tmp_path, PROMPT) == 0
    (picture,) = tmp_path.iterdir()
    picture.write_bytes(b"mine")
    with monkeypatch.context() as patch:  # refused before the model is loaded
        patch.setattr("visual_spec.pipelines.loading.load_pipeline", lambda *_: pytest.fail("loaded"))
        assert generate(model, tmp_path, PROMPT) == 2
    assert "000-a-red-circle-seed0.png exists" in capsys.readouterr().err
    assert picture.read_bytes() == b"mine"
    assert generate(model, tmp_path, PROMPT, "--overwrite") == 0
    assert pixels(picture).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "has no words"),
        (
            [PROMPT, "--sampler", "medusa"],
            "unknown sampler 'medusa'; pass one of autoregressive, speculative-jacobi",
        ),
        ([PROMPT, "--sampler", "zippar"], "distilled. Did you mean zipar?"),
        ([PROMPT, "--sampler", "zipar:windw=3"], "Did you mean window?"),
        ([PROMPT, "--window", "0"], "window=0"),
        ([PROMPT, "--coupling", "tight"], "coupling='tight'; pass one of gumbel, independent, maximal"),
        ([PROMPT, "--coupling", "maximal"], "acceptance='identical'"),
        (
            [PROMPT, "--sampler", "autoregressive", "--window", "4"],
            "autoregressive sampler has no setting window",
        ),
        ([PROMPT, "--guidance-scale", "-2"], "guidance_scale=-2.0"),
        ([PROMPT, "--temperature", "nan"], "temperature=nan"),
        ([PROMPT, "--top-p", "0"], "top_p=0.0"),
        ([PROMPT, "--guidance-until", "-2"], "guidance_until=-2"),
        ([PROMPT, "--guidance-scale", "1e39"], "guidance_scale=1e+39"),
        ([PROMPT, "--temperature", "1e39"], "temperature=1e+39"),
        ([PROMPT, "--seed", str(2**64)], f"--seed {2**64} given"),
        ([PROMPT, "--seed", str(2**64 - 1), "--num-images", "2"], f"the last seed would be {2**64}"),
        (
            [PROMPT, "--sampler", "speculative-jacobi:window=4", "--window", "8"],
            "sampler 'speculative-jacobi:window=4,window=8' sets window twice",
        ),
        ([PROMPT, "--sampler", "tree", "--sampler", "zipar"], "--sampler tree and --sampler zipar given"),
        ([PROMPT, "--format", "flac"], "--format flac is of music"),
        (
            [PROMPT, "--drafter", "shapes_nar"],
            "drafts without one; pass --sampler drafted or tree or block-drafts or multiscale too",
        ),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(model, tmp_path, capsys, arguments, message):
    check_refused(generate(model, tmp_path / "out", *arguments), message, capsys, tmp_path / "out")


@pytest.mark.parametrize(
    ("device", "message"), [("abacus", "abacus is no"), ("", "'' is no"), ("meta", "meta holds no")]
)
def test_unusable_device_is_refused(model, tmp_path, capsys, device, message):
    asked = ["generate", PROMPT, "--model", model, "--out", str(tmp_path), "--device", device]
    check_refused(cli.main(asked), f"--device {message}", capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "required: PROMPT"),
        (["generate", PROMPT, "--num-images", "1.5"], "1.5 given; pass an integer of at least 1"),
        (["generate", PROMPT, "--num-images", "0"], "0 given; pass an integer of at least 1"),
        (["generate", PROMPT, "--seed", "-1"], "-1 given; pass an integer of at least 0"),
        (["paint"], "invalid choice: 'paint'"),
    ],
)
def test_bad_arguments_end_with_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and message in said
    # No page of options first.
    assert said.startswith("visual-spec") and said.count("\n") == 1 and "--help" in said


@pytest.mark.parametrize("command", ["generate", "bench", "eval", "report"])
def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    model, tmp_path, capsys, monkeypatch, command
):
    (tmp_path / "file").write_text("mine")
    out = str(tmp_path / "file" / "out")
    monkeypatch.setattr("visual_spec.pipelines.loading.load_pipeline", lambda *_: pytest.fail("loaded"))
    given = {"generate": [PROMPT], "report": [str(tmp_path / "file")]}.get(command, [])
    of = [] if command == "report" else ["--model", model]
    assert cli.main([command, *given, *of, "--out", out]) == 2
    error = capsys.readouterr().err.strip()
    assert "cannot write to" in error and str(tmp_path / "file") in error and "\n" not in error


def test_an_interruption_keeps_what_is_finished(model, tmp_path, capsys, monkeypatch):
    def interrupted(self, *args, **kwargs):
        calls.append(0)
        if len(calls) == 4:  # after the warm-up and the first prompt
            raise KeyboardInterrupt
        return plain(self, *args, **kwargs)

    plain, calls = AutoregressiveSampler.__call__, []
    monkeypatch.setattr(AutoregressiveSampler, "__call__", interrupted)
    assert generate(model, tmp_path, PROMPT, "--num-images", "3", "--compare") == 130
    error = capsys.readouterr().err.strip()
    assert error == "visual-spec: interrupted; files that were finished are kept"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"00{index}-a-red-circle-seed{index}.png" for index in (0, 1)]


def device_out_of_memory() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB"
    )


def no_pages() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def a_file_that_does_not_fit() -> None:
    try:
        np.empty(2**57)
    except MemoryError as error:
        raise ValueError("weights.pt is damaged") from error


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.empty(2**60),
        lambda: np.empty(2**57),
        device_out_of_memory,
        no_pages,
        a_file_that_does_not_fit,
    ],
)
def test_out_of_memory_is_one_line_that_names_the_size_of_batches(model, tmp_path, capsys, monkeypatch, fail):
    monkeypatch.setattr(Sampler, "__call__", lambda *args, **kwargs: fail())
    status = generate(model, tmp_path, PROMPT, "--num-images", "3", "--quiet")
    check_refused(status, "pass a smaller --batch-size", capsys, tmp_path)
    options: dict[Any, str] = dict(eval="size", sample="size", score="size", bench="sizes")
    for command, option in options.items():
        module = importlib.import_module(f"visual_spec.commands.{command}")
        capsys.readouterr()
        with pytest.raises(SystemExit):
            module.main(["--help"])
        assert f"--batch-{option} " in capsys.readouterr().out
        monkeypatch.setattr(module, "main", lambda arguments: fail())
        check_refused(cli.main(["--quiet", command]), f"--batch-{option}", capsys)


def test_other_errors_of_a_program_are_not_taken_for_a_lack_of_memory(model, tmp_path, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Sampler, "__call__", fail)
    refuses(RuntimeError, "shapes", generate, model, tmp_path, PROMPT)


def test_a_reader_that_has_gone_ends_the_command_quietly(tmp_path):
    code = "import sys; from visual_spec.cli import main; sys.exit(main(['models', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk_under_the_output_is_one_line():
    code = "import sys; from visual_spec.cli import main; sys.exit(main(['models', '--json']))"
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and ran.stderr.startswith("visual-spec: error: [Errno 28]")


def test_a_second_interruption_ends_at_once_without_a_trace():
    code = """
import os, signal, sys, threading, time, visual_spec.cli as cli, visual_spec.commands.models
def work(args):
    threading.Thread(target=time.sleep, args=(60,)).start()  # what the interpreter waits for when it ends
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
visual_spec.commands.models.run = work
status = cli.main(["models"])
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
sys.exit(status)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ran.returncode == -signal.SIGINT
    assert ran.stderr.strip() == "visual-spec: interrupted; files that were finished are kept"


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_console_that_cannot_show_the_prompt_does_not_end_the_command(model, tmp_path, encoding):
    command = [
        sys.executable,
        "-m",
        "visual_spec",
        "generate",
        "ein roter Kreis \u5927\u304d",
        "--model",
        str(model),
    ]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [*command, "--out", str(tmp_path / "o"), "--json"], capture_output=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) and list((tmp_path / "o").glob("*.png"))


def test_bytes_that_are_no_text_are_refused_before_the_work(model, tmp_path, capsys):
    assert generate(model, tmp_path / "o", "a red \udcff circle") == 2
    assert "no letter in Unicode" in capsys.readouterr().err and not list(tmp_path.rglob("*.png"))


def test_version_is_said(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"visual-spec {visual_spec.__version__}\n"


def test_what_a_killed_run_left_is_removed(model, tmp_path):
    code = f"""
import os, time
from visual_spec.files.whole import write_atomically
os.fsync = lambda _: (print(flush=True), time.sleep(600))
write_atomically({str(tmp_path / "a.png")!r}, b"half")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        (half,) = tmp_path.iterdir()
        (tmp_path / ".other.tmp").write_text("not ours")
        ready_folder(tmp_path)
        assert half.exists()  # its writer is still at it
        writer.kill()
    assert generate(model, tmp_path, PROMPT) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.tmp", "000-a-red-circle-seed0.png"]


def test_unknown_words_are_a_warning(model, tmp_path, capsys):
    assert generate(model, tmp_path, "a giraffe") == 0
    assert "visual-spec: warning: the text encoder does not know 'giraffe'" in capsys.readouterr().err


def test_official_files_are_converted_and_drawn_from(tmp_path, capsys, monkeypatch):
    add_tiny_presets(monkeypatch)
    files = [str(write_class_model(tmp_path)), str(write_tokenizer(tmp_path))]
    out = tmp_path / "converted"
    arguments = ["convert", *files, "--out", str(out), "--image-size", "8", "--dtype", "bfloat16"]
    assert cli.main([*arguments, "--json"]) == 0
    assert last_line(capsys)["class"] == "ClassImagePipeline"
    assert cli.main(arguments) == 2 and "exists and is not empty" in capsys.readouterr().err
    assert cli.main([*arguments, "--overwrite"]) == 0
    assert "c2i_tiny.pt: LlamaGen-tiny, class-conditional, every key accounted for" in capsys.readouterr().out
    assert generate(str(out), tmp_path / "drawn", "3", "5", "--guidance-until", "9", "--compare") == 0
    assert "Every picture is the same, pixel for pixel." in capsys.readouterr().out
    assert json.loads((tmp_path / "drawn" / "comparison.json").read_text())["guidance_until"] == 9
    assert generate(str(out), tmp_path / "drawn", "12") == 2
    assert "class 12 given; allowed are 0 to 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.pt", "--out", "x"], "there is no file nowhere.pt"),
        ([__file__, "--out", "x"], "is no checkpoint: it begins with"),
    ],
)
def test_bad_files_are_not_converted(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    check_refused(cli.main(["convert", *arguments]), message, capsys, tmp_path / "x")


def test_an_official_file_in_place_of_a_model_is_told_what_to_do(tmp_path, capsys):
    path = write_class_model(tmp_path)
    assert generate(str(path), tmp_path / "out", PROMPT) == 2
    assert f"`visual-spec convert {path} --out DIR`" in capsys.readouterr().err


def test_nothing_stands_beside_the_one_sampler_of_a_model(tmp_path, capsys):
    assert generate("shapes_nar", tmp_path, PROMPT, "--compare") == 2
    assert "no other sampler fits it, so leave --compare out" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 1])
def test_quiet_and_verbose(model, tmp_path, capsys, place):
    said = {}
    for level in ("--quiet", "--verbose", ""):
        arguments = ["generate", "a red zebra", "--model", model, "--out", str(tmp_path / (level or "x"))]
        arguments[place:place] = [level] if level else []
        assert cli.main(arguments) == 0
        said[level] = capsys.readouterr()
    assert said["--quiet"].err == "" and "seed0.png" in said["--quiet"].out
    warned = "visual-spec: warning: "
    assert warned in said[""].err and warned in said["--verbose"].err  # of the zebra
    assert "loaded in" in said["--verbose"].err and "loaded in" not in said[""].err
    assert "16 tokens" in said["--verbose"].err  # of the trace


def test_a_negative_prompt_reaches_the_pipeline(model, tmp_path, capsys):
    assert generate(model, tmp_path, PROMPT, "--negative-prompt", "a blue square", "--json") == 0
    document = last_line(capsys)
    pipe = visual_spec.ImagePipeline.from_pretrained(model)
    wanted = pipe(PROMPT, negative_prompt="a blue square", generator=torch.Generator().manual_seed(0))
    assert document["negative_prompt"] == "a blue square"
    assert np.array_equal(pixels(document["images"][0]["file"]), np.asarray(wanted.images[0]))
    assert generate(model, tmp_path / "b", PROMPT, "--negative-prompt", "x", "--guidance-scale", "1") == 2
    assert "guidance_scale=1.0" in capsys.readouterr().err and not (tmp_path / "b" / "x").exists()


def test_a_set_of_samples_is_led_away_from_a_negative_prompt(model, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "drawn"
    prompts.write_text(f"{PROMPT}\n")
    command = ["sample", "--model", model, "--prompts", str(prompts), "--batch-size", "1", "--out"]
    assert cli.main([*command, str(out), "--negative-prompt", "a blue square"]) == 0
    pipe = visual_spec.ImagePipeline.from_pretrained(model)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    pipe.sampler = visual_spec.AutoregressiveSampler()
    wanted = pipe(PROMPT, negative_prompt="a blue square", generator=generators[0]).images[0]
    assert not np.array_equal(np.asarray(wanted), np.asarray(pipe(PROMPT, generator=generators[1]).images[0]))
    assert np.array_equal(pixels(out / "000000.png"), np.asarray(wanted))
    assert json.loads((out / "run.json").read_text())["negative_prompt"] == "a blue square"
    capsys.readouterr()
    assert cli.main([*command, str(out)]) == 2  # the folder holds samples that were drawn otherwise
    assert "negative_prompt" in capsys.readouterr().err
    command[command.index("--model") + 1] = "shapes_var"
    assert cli.main([*command, str(tmp_path / "none"), "--negative-prompt", "x"]) == 2
    assert "shapes_var takes no --negative-prompt; leave it out." in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_painting_into_a_picture(model, tmp_path, capsys):
    folder, picture, mask = tmp_path / "masked", tmp_path / "picture.png", tmp_path / "mask.png"
    pipe = tiny_masked_pipeline()
    pipe.save_pretrained(folder)
    content = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    PIL.Image.fromarray(content).save(picture)
    hidden = np.zeros((8, 8), np.uint8)
    hidden[:, 4:] = 255
    PIL.Image.fromarray(hidden).save(mask)
    given = ["--image", str(picture), "--mask", str(mask)]
    assert generate(str(folder), tmp_path / "a", PROMPT, *given, "--json") == 0
    document = last_line(capsys)
    wanted = pipe(PROMPT, image=content, mask=hidden > 0, generator=torch.Generator().manual_seed(0))
    assert (document["image"], document["mask"]) == (str(picture), str(mask))
    assert np.array_equal(pixels(document["images"][0]["file"]), np.asarray(wanted.images[0]))
    for name, arguments, wrong in (
        (str(folder), ["--mask", str(mask)], "mask given without image"),
        (model, given, "SpeculativeJacobiSampler"),
        ("shapes_var", given, "shapes_var takes no --image"),
        (str(folder), ["--image", str(folder / "model_index.json"), "--strength", "0.5"], "model_index.json"),
        (str(folder), ["--image", str(picture), "--strength", "2"], "strength=2.0"),
    ):
        assert generate(name, tmp_path / "b", "red circle", *arguments) == 2
        assert wrong in capsys.readouterr().err
