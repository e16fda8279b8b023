"""PromptSet as published evaluations release them."""

import json

import pytest

from tests.helpers.refusals import refuses
from visual_spec.eval.quality.prompt_files import read_prompts


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_form_of_one_list_gives_the_same_prompts(tmp_path):
    texts = ("a red dog", 'two "quoted", birds', "crème brûlée")
    coco = {
        "annotations": [  # the first caption of a picture is that with the lowest id, wherever it stands
            {"image_id": 7, "id": 9, "caption": "later"},
            {"image_id": 9, "id": 4, "caption": texts[2]},
            {"image_id": 7, "id": 3, "caption": texts[1]},
            {"image_id": 2, "id": 8, "caption": texts[0] + "\n"},
        ]
    }
    escaped = ['"' + text.replace('"', '""') + '"' for text in texts]
    forms = [
        write(tmp_path / "a.txt", "\ufeff" + "\n\n".join(texts) + "\n"),
        write(tmp_path / "a.jsonl", "".join(json.dumps({"caption": text}) + "\n" for text in texts)),
        write(tmp_path / "a.csv", "id,Prompt\n" + "".join(f"1,{text}\n" for text in escaped)),
        write(tmp_path / "a.tsv", "Prompt\tCategory\n" + "".join(f"{text}\tfood\n" for text in escaped)),
        write(tmp_path / "a.json", json.dumps(coco)),
        write(tmp_path / "list.json", json.dumps(texts)),
    ]
    for form in forms:
        found = read_prompts(form)
        assert found.texts == texts, form
        assert (found.layout, len(found), found.asked(4)) == ("flat", 3, texts[1])
    assert len({read_prompts(form).fingerprint for form in forms}) == 1


@pytest.mark.every_set
@pytest.mark.parametrize(
    "name, text, texts",
    [
        # PartiPrompts: what looks like quoting is part of the prompt.
        ("P.tsv", 'Prompt\tCategory\nbond\tA\n"O P E N" on a door\tB\n', ("bond", '"O P E N" on a door')),
        ("drawbench.csv", "Prompts,Category\nA red colored car.,Colors\n", ("A red colored car.",)),
        (
            "coco.csv",
            'image_id,id,caption\n9,6,"meat, ""fruit"""\n9,7,a tray \n',
            ('meat, "fruit"', "a tray"),
        ),
        ("MJHQ.json", json.dumps({"a": {"category": "people", "prompt": "an old man"}}), ("an old man",)),
        ("list.JSON", json.dumps([{"prompt": "a"}, {"caption": "b"}]), ("a", "b")),
        ("LINES.TXT", "a\u2028b\r\nc\x85d\re\x0cf\n", ("a\u2028b", "c\x85d", "e\x0cf")),
        ("l.Jsonl", '{"prompt": "a\u2028b"}\n{"prompt": "c"}\n', ("a\u2028b", "c")),
    ],
)
def test_files_of_the_field_are_read_whole(tmp_path, name, text, texts):
    assert read_prompts(write(tmp_path / name, text)).texts == texts


@pytest.mark.every_set
@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.csv", "id,prompt\n1,a red\n2,a small, blue square\n", "line 3 has 3 fields, .* names 2"),
        ("a.csv", "id,prompt\n1\n", "line 2 has 1 fields"),
        ("a.csv", 'prompt\n"a" red\n', "no table"),
        ("a.jsonl", '{"prompt": "a \\ud83d b"}\n', "prompt 1 .*surrogates"),
        (
            "V.json",
            json.dumps([{"prompt_en": "x" * 300, "dimension": ["color"]}]),
            "prompt 1 of 300 bytes.* 248",
        ),
        ("V.json", json.dumps([{"prompt_en": "a/b", "dimension": ["color"]}]), "slash"),
    ],
)
def test_what_would_be_cut_or_cannot_be_kept_is_refused_when_it_is_read(tmp_path, name, text, said):
    refuses(ValueError, said, read_prompts, write(tmp_path / name, text))


def test_geneval_and_dpg_ask_for_four_pictures_of_each_prompt(tmp_path):
    lines = [
        {"tag": "counting", "prompt": f"{n} cups", "include": [{"class": "cup", "count": n}]} for n in (2, 3)
    ]
    found = read_prompts(write(tmp_path / "meta.jsonl", "".join(json.dumps(line) + "\n" for line in lines)))
    assert (found.layout, len(found)) == ("geneval", 8)
    assert [found.asked(i) for i in (0, 3, 4, 7, 8)] == ["2 cups", "2 cups", "3 cups", "3 cups", "2 cups"]
    assert json.loads(found.records[1]) == lines[1]
    (tmp_path / "dpg").mkdir()
    for name in ("b", "a"):
        write(tmp_path / "dpg" / f"{name}.txt", f"prompt\n{name}\n")
    found = read_prompts(str(tmp_path / "dpg"))
    assert (found.layout, found.texts, found.names) == ("dpg", ("prompt a", "prompt b"), ("a", "b"))


def test_vbench_asks_for_five_videos_and_twenty_five_where_it_drops_some(tmp_path):
    entries = [
        ("a cat", "color"),
        ("a still cat", "temporal_flickering"),
        ("a dog", "scene"),
        ("a cat", "scene"),
    ]
    info = [{"prompt_en": prompt, "dimension": [name]} for prompt, name in entries]
    found = read_prompts(write(tmp_path / "VBench_full_info.json", json.dumps(info)))
    assert found.texts == ("a cat", *["a still cat"] * 5, "a dog") and (found.layout, len(found)) == (
        "vbench",
        35,
    )
    assert found.names == ("0", "0", "5", "10", "15", "20", "0")


def test_classes_are_asked_for_by_number(tmp_path):
    names = ["crane", "crane", "tench"]
    found = read_prompts("classes", names)
    assert [found.asked(i) for i in range(4)] == ["0", "1", "2", "0"] and found.texts == tuple(names)
    refuses(ValueError, "--prompts.*models", read_prompts, "classes")
    refuses(ValueError, "3 classes", read_prompts, "imagenet", names)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n \n", r"a\.txt.*prompts"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt"\n', "2.*JSON"),
        ("a.jsonl", '{"prompt": 3}\n', "line 1"),
        ("a.jsonl", "[1]\n", "line 1"),
        ("a.csv", "id,words\n1,a\n", r"a\.csv.*column"),
        ("a.csv", "prompt\n", r"a\.csv.*lines"),
        ("a.csv", "prompt,id\n  ,1\n", "prompt 1 is ''"),
        ("a.json", "[]", "COCO"),
        ("a.json", '{"annotations": [{"id": 1}]}', "COCO"),
        ("a.yaml", "a", r"a\.yaml: prompts"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, name, text, message):
    path = write(tmp_path / name, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path)
    assert path in str(caught.value)


def test_no_file_an_empty_folder_and_other_encodings(tmp_path):
    refuses(FileNotFoundError, "no file", read_prompts, str(tmp_path / "none.txt"))
    refuses(ValueError, "prompts", read_prompts, str(tmp_path))
    (tmp_path / "latin.txt").write_bytes("ein Bär".encode("latin-1"))
    refuses(ValueError, "UTF-8", read_prompts, str(tmp_path / "latin.txt"))
