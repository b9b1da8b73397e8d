"""What is said of inputs that could not be prepared."""

from __future__ import annotations

from palimpsa_data.failures import Failures


def failures(*errors: tuple[int, str, str]) -> tuple[Failures, list[str]]:
    found = Failures()
    return found, [found.add(*error) for error in errors]


def test_one_reason_is_said_once() -> None:
    found, said = failures(*((index, f"in/{index}.parquet", f"in/{index}.parquet holds ids") for index in (2, 0, 1)))
    assert said == ["in/2.parquet holds ids", "in/0.parquet: the same", "in/1.parquet: the same"]
    assert len(found) == 3
    assert found.text(3) == (
        "3 of 3 shards could not be prepared:\nin/0.parquet holds ids\nthe same: in/1.parquet, in/2.parquet"
    )


def test_several_reasons_in_the_order_of_the_inputs() -> None:
    found, said = failures(
        (3, "in/c", "in/c is a web page"), (1, "in/a", "cannot read in/a: gone"), (2, "in/b", "in/b is a web page")
    )
    assert said == ["in/c is a web page", "cannot read in/a: gone", "in/b: the same"]
    assert found.text(5).splitlines() == [
        "3 of 5 shards could not be prepared; the others are done:",
        "cannot read in/a: gone",
        "in/b is a web page",
        "the same: in/c",
    ]


def test_of_many_the_first_are_named() -> None:
    found, _ = failures(*((index, f"<{index}>", f"<{index}> is none") for index in range(25)))
    assert found.text(25).splitlines()[2].endswith("<19>, <20> and 4 more")
    found, _ = failures(*((index, f"<{index}>", f"<{index}> is of kind {index}") for index in range(12)))
    assert found.text(12).splitlines()[-2:] == ["<9> is of kind 9", "... and 2 more reasons"]


def test_nothing_failed() -> None:
    assert not Failures()
