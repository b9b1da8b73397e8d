from pathlib import Path

import pytest

from megatron_palimpsa import launcher


@pytest.mark.parametrize(
    ("share", "ranks", "cores"),
    [(None, "4", 3), ("max 100000", "4", 3), ("600000 100000", "2", 3), ("50000 100000", "1", 1), ("bad", "12", 1)],
)
def test_ranks_share_the_cores_that_the_machine_or_the_container_has(
    share: str | None, ranks: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpu.max"
    if share is not None:
        path.write_text(share)
    monkeypatch.setattr(launcher, "_CPU_SHARE", path)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert launcher.cores() == cores
