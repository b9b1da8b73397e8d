"""What files, folders, globs and saved data sets become, and in which order."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
from helpers.data_fixtures import write_blobs, write_fineweb, write_lines
from palimpsa_data import DataError
from palimpsa_data.sources import find_inputs


def names(*patterns: object, loose: str = "") -> list[str]:
    return [item.name for item in find_inputs([str(pattern) for pattern in patterns], loose)]  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "fw"
    write_fineweb(root / "data" / "CC-MAIN-2024-10" / "train-00001.parquet")
    write_fineweb(root / "data" / "CC-MAIN-2024-10" / "train-00000.parquet")
    write_fineweb(root / "data" / "CC-MAIN-2019-04" / "train-00000.parquet")
    write_lines(root / "more.jsonl.gz", [{"text": "x"}])
    for name in ("README.md", "notes.txt", ".hidden.jsonl", "_SUCCESS.json", ".cache/x.parquet", "x.jsonl.gz.tmp"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("no input")
    return root


IN_FOLDER = [
    "fw/data/CC-MAIN-2019-04/train-00000.parquet",
    "fw/data/CC-MAIN-2024-10/train-00000.parquet",
    "fw/data/CC-MAIN-2024-10/train-00001.parquet",
    "fw/more.jsonl.gz",
]


def test_a_folder_is_searched_to_its_ends_in_a_fixed_order(folder: Path) -> None:
    assert names(folder) == IN_FOLDER


def test_the_order_does_not_depend_on_how_the_files_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = [item.path.resolve() for item in find_inputs([str(folder)])]
    for patterns in (
        ["fw"],
        ["fw/more.jsonl.gz", "fw/data"],
        ["fw/data/CC-MAIN-2024-10/*.parquet", str(folder / "more.*"), "fw/data/CC-MAIN-2019-04"],
        ["fw/**/*.parquet", "fw/more.jsonl.gz"],
    ):
        assert [item.path.resolve() for item in find_inputs(patterns)] == whole


def test_inputs_do_not_depend_on_where_they_lie(folder: Path, tmp_path: Path) -> None:
    before = [(item.name, item.bytes, item.sha256()) for item in find_inputs([str(folder)])]
    shutil.move(folder, tmp_path / "elsewhere" / "fw")
    assert [(i.name, i.bytes, i.sha256()) for i in find_inputs([str(tmp_path / "elsewhere" / "fw")])] == before
    assert len({sha256 for *_, sha256 in before}) == 2  # the three parquet files hold the same


def test_inputs_go_to_other_processes(folder: Path) -> None:
    found = find_inputs([str(folder)])
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.json.zst", "x.parquet", "x.ndjson", "x.JSONL"])
def test_stems_say_no_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    (item,) = find_inputs([str(tmp_path / name)])
    assert item.stem.lower() in ("x", "x.jsonl")


def test_the_same_file_twice_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"more\.jsonl\.gz is named twice"):
        names(folder, folder / "more.jsonl.gz")
    link = folder / "link.jsonl.gz"
    link.symlink_to(folder / "more.jsonl.gz")
    with pytest.raises(DataError, match="is named twice"):
        names(folder)


def test_folders_and_what_is_in_them_come_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [item.path for item in find_inputs(["fw/**"])] == [Path(name) for name in IN_FOLDER]
    assert names("fw/**", loose="text") == names("fw", loose="text")
    with pytest.raises(DataError, match=r"notes\.txt is named twice: its folder is an input too"):
        names("fw", "fw/notes.txt", loose="text")


def test_a_set_prepared_among_its_inputs_is_none(folder: Path) -> None:
    write_lines(folder / "out" / "job.json", [{}])
    write_lines(folder / "out" / "out-00000-of-00002.input.json", [{}])
    write_lines(folder / "out" / "deeper" / "report.json", [{}])
    assert names(folder) == IN_FOLDER


def test_a_set_that_was_only_begun_among_its_inputs_is_none(folder: Path) -> None:
    """Killed right after job.json, which is a .json file as any other."""
    job = {"format": 1, "kind": "text", "recipe": 1, "inputs": [], "tokenizer": {}}
    write_lines(folder / "out" / "job.json", [job])
    assert names(folder) == IN_FOLDER
    write_lines(folder / "other" / "job.json", [{"text": "a row"}])
    assert names(folder) == sorted([*IN_FOLDER, "fw/other/job.json"])


def test_links_to_folders_are_followed_once(folder: Path, tmp_path: Path) -> None:
    (folder / "data" / "back").symlink_to(folder, target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    write_lines(tmp_path / "elsewhere" / "far.jsonl", [{"text": "x"}])
    (folder / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (folder / "linked-again").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert names(folder) == sorted([*IN_FOLDER, "fw/linked/far.jsonl"])


@pytest.mark.parametrize("name", ["gone.parquet", "gone.txt", "pipe.jsonl"])
def test_what_should_be_a_file_and_is_none_is_said(folder: Path, name: str) -> None:
    path = folder / "data" / name
    os.mkfifo(path) if name.startswith("pipe") else path.symlink_to("nowhere")
    for pattern in (folder, folder / "data" / "[gp]*"):
        with pytest.raises(DataError, match=rf"{name} is a link to nothing, or no regular file"):
            names(pattern, loose="text")


def test_a_name_that_no_record_could_hold_is_said(folder: Path) -> None:
    shutil.copy(folder / "more.jsonl.gz", os.fsencode(folder) + b"/caf\xe9.jsonl.gz")
    with pytest.raises(DataError, match=r"caf\\xe9.jsonl.gz': the name is not UTF-8"):
        names(folder)


@pytest.mark.parametrize("pattern", ["absent.parquet", "absent/*.parquet", "fw/data/*.jsonl", "/absent/folder/"])
def test_what_is_not_there_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is no such file or folder"):
        names(pattern)


@pytest.mark.parametrize("pattern", ["notes.txt", "*.txt", "empty", "archive.zip", "x.parquet.gz"])
def test_what_is_no_input_is_said_with_what_is(folder: Path, pattern: str) -> None:
    (folder / "empty").mkdir()
    (folder / "archive.zip").write_bytes(b"PK")
    (folder / "x.parquet.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"accepted are \.parquet, \.jsonl, "):
        names(folder / pattern)


def test_text_files_of_a_folder_are_one_input(folder: Path) -> None:
    assert names(folder, loose="text") == ["fw", *IN_FOLDER]
    (item,) = find_inputs([str(folder / "notes.txt")], "text")
    assert (item.name, item.format, item.stem) == ("notes.txt", "text", "notes")
    before = find_inputs([str(folder)], "text")[0].sha256()
    (folder / "README.md").write_text("Another text.")
    assert find_inputs([str(folder)], "text")[0].sha256() != before


def test_blobs_of_a_folder_are_one_input(tmp_path: Path) -> None:
    blobs = {f"{number:040x}": b"x" for number in range(4)}
    write_blobs(tmp_path / "swh", blobs, layout="content/{}.gz")
    (tmp_path / "swh" / "content" / "index.txt").write_text("no blob")
    (item,) = find_inputs([str(tmp_path / "swh")], "blobs")
    assert (item.name, item.format) == ("swh/content", "blobs")
    assert item.bytes == sum(path.stat().st_size for path in (tmp_path / "swh" / "content").glob("*.gz"))


def test_saved_datasets_are_read_file_by_file(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": [str(number) for number in range(10)]})
    rows.save_to_disk(tmp_path / "saved", num_shards=3)
    found = find_inputs([str(tmp_path / "saved")])
    assert [item.name for item in found] == [f"saved/data-0000{n}-of-00003.arrow" for n in range(3)]
    assert {item.format for item in found} == {"arrow"}
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "dict")
    with pytest.raises(DataError, match=r"holds several splits; name one: .*dict/train, .*dict/test"):
        names(tmp_path / "dict")
    assert names(tmp_path / "dict" / "train") == ["train/data-00000-of-00001.arrow"]
    found[1].path.unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00003\.arrow is missing"):
        names(tmp_path / "saved")
