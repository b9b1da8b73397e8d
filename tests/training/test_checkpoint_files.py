import hashlib
import json
import logging
from pathlib import Path

import pytest

from megatron_palimpsa.training import checkpoint_files as files


def write(folder: Path, step: int, keep: int = 2, content: str = "weights") -> Path:
    """A checkpoint of one file, saved by the protocol."""
    final, temporary = folder / f"step-{step}", folder / f".tmp-step-{step}"
    files.prepare(folder, temporary)
    records = {"shard.distcp": files.write_file(temporary / "shard.distcp", f"{content} {step}".encode())}
    files.seal(temporary, {"step": step}, records)
    files.publish(temporary, final, keep)
    return final


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_checkpoints_are_kept_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (5, 10, 100):
        write(folder, step)
    assert names(folder) == ["latest", "step-10", "step-100"]
    assert (folder / "latest").read_text() == "step-100"
    assert names(folder / "step-100") == ["COMPLETE", "manifest.json", "shard.distcp", "state.json"]
    assert files.latest_intact(folder) == folder / "step-100"


def test_nothing_saved_yet(tmp_path: Path) -> None:
    assert files.latest_intact(tmp_path) is None
    assert files.latest_intact(tmp_path / "missing") is None


def remove_marker(path: Path) -> None:
    (path / "COMPLETE").unlink()


def flip_bit(path: Path) -> None:
    data = bytearray((path / "shard.distcp").read_bytes())
    data[3] ^= 1
    (path / "shard.distcp").write_bytes(data)


def truncate(path: Path) -> None:
    (path / "shard.distcp").write_text("w")


def remove_file(path: Path) -> None:
    (path / "shard.distcp").unlink()


def change_state(path: Path) -> None:
    (path / "state.json").write_text('{"step": 8}')


def rewrite_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{}")


def garble_marker(path: Path) -> None:
    (path / "COMPLETE").write_bytes(b"\xff\xfe\x00")


def make_unreadable(path: Path) -> None:
    """Root reads everything, but nobody reads a folder as a file."""
    (path / "shard.distcp").unlink()
    (path / "shard.distcp").mkdir()
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["shard.distcp"]["bytes"] = (path / "shard.distcp").stat().st_size
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "COMPLETE").write_text(hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest())


def remove_all(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


DAMAGES = {
    remove_marker: "COMPLETE is missing",
    flip_bit: "shard.distcp does not match its checksum",
    truncate: "shard.distcp has 1 bytes",
    remove_file: "shard.distcp is missing",
    change_state: "state.json",
    rewrite_manifest: "manifest.json does not match",
    garble_marker: "manifest.json does not match COMPLETE",
    make_unreadable: "shard.distcp cannot be read: Is a directory",
    remove_all: "not there",
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(damage, reason: str, tmp_path: Path, caplog) -> None:
    write(tmp_path, 5)
    damage(write(tmp_path, 9))
    with caplog.at_level(logging.WARNING):
        assert files.latest_intact(tmp_path) == tmp_path / "step-5"
    assert len(caplog.records) == 1
    assert "step-9" in caplog.text
    assert reason in caplog.text


def test_no_intact_checkpoint(tmp_path: Path, caplog) -> None:
    for step in (1, 2):
        flip_bit(write(tmp_path, step))
    assert files.latest_intact(tmp_path) is None
    assert "step-1" in caplog.text
    assert "step-2" in caplog.text


def test_missing_pointer_is_replaced_by_the_newest(tmp_path: Path, caplog) -> None:
    for step in (9, 10):
        write(tmp_path, step)
    (tmp_path / "latest").unlink()
    assert files.latest_intact(tmp_path) == tmp_path / "step-10"
    assert "latest is missing" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"step-99"])
def test_pointer_that_names_nothing_gives_the_newest(tmp_path: Path, caplog, content: bytes) -> None:
    for step in (9, 10):
        write(tmp_path, step)
    (tmp_path / "latest").write_bytes(content)
    assert files.latest_intact(tmp_path) == tmp_path / "step-10"
    assert "which is not there" in caplog.text


def test_pointer_rules_over_later_steps(tmp_path: Path, caplog) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    (tmp_path / "latest").write_text("step-1\n")
    assert files.latest_intact(tmp_path) == tmp_path / "step-1"
    assert not caplog.records


@pytest.mark.parametrize("interrupted", ["prepare", "write", "seal", "rename", "point"])
def test_save_killed_anywhere_leaves_a_usable_latest(interrupted: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    final, temporary = tmp_path / "step-2", tmp_path / ".tmp-step-2"
    files.prepare(tmp_path, temporary)
    if interrupted != "prepare":
        record = files.write_file(temporary / "shard.distcp", b"weights 2")
    if interrupted in ("seal", "rename", "point"):
        files.seal(temporary, {"step": 2}, {"shard.distcp": record})
    if interrupted in ("rename", "point"):
        temporary.rename(final)
    if interrupted == "point":
        (tmp_path / ".latest").write_text("step")
    assert files.latest_intact(tmp_path) == tmp_path / "step-1"
    write(tmp_path, 3)
    assert files.latest_intact(tmp_path) == tmp_path / "step-3"
    assert not [name for name in names(tmp_path) if name.startswith(".tmp")]


def test_step_saved_again_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 1)
    flip_bit(write(tmp_path, 2))
    write(tmp_path, 2, content="new")
    assert (files.latest_intact(tmp_path) / "shard.distcp").read_text() == "new 2"
    assert names(tmp_path) == ["latest", "step-1", "step-2"]


def test_half_written_folders_do_not_count_as_kept(tmp_path: Path) -> None:
    write(tmp_path, 1)
    remove_marker(write(tmp_path, 2))
    write(tmp_path, 3)
    assert files.latest_intact(tmp_path) == tmp_path / "step-3"
    flip_bit(tmp_path / "step-3")
    assert files.latest_intact(tmp_path) == tmp_path / "step-1"
