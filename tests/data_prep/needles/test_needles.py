"""Needles: answers that the text gives, any length, the same for the same seed, nothing shared with evaluation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from palimpsa_data import DataError
from palimpsa_data.documents import Document, Example
from palimpsa_data.needles import TASKS, NeedleOptions, needle
from palimpsa_data.needles.draws import Draw
from palimpsa_data.needles.names import split_of, value, word

RULER = """
One of the special magic numbers for ambitious-harbor is: 1234567. A special magic number is hidden within the following
text. Make sure to memorize it. I will quiz you about the number afterwards. What is the special magic number for
ambitious-harbor mentioned in the provided text? The special magic number for ambitious-harbor mentioned in the provided
text is. The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. Memorize and track
the chain(s) of variable assignment hidden in the following text. VAR ABCDE = 12345. Find all variables that are
assigned the value 12345 in the text above. According to the chain(s) of variable assignment in the text above,
variables are assigned the value 12345, they are. Below is a numbered list of words. In these words, some appear more
often than others. Memorize the ones that appear most often. What are the 10 most common words in the above list? The
top 10 words that appear most often in the list are. Read the following coded text and track the frequency of each coded
word. Find the three most frequently appeared coded words. Do not provide any explanation. Please ignore the dots. What
are the three most frequently appeared words in the above coded text? According to the coded text above, the three most
frequently appeared words are.
"""


def tokens(texts: Sequence[str]) -> list[int]:
    """A stand-in for a tokenizer: words of up to four characters and every sign."""
    return [len(re.findall(r" ?[A-Za-z]{1,4}|[0-9]|\S|\s", text)) for text in texts]


def options(task: str = "single", length: int = 1024, **changes: object) -> NeedleOptions:
    return NeedleOptions(**{"documents": 10, "shortest": length, "longest": length, "tasks": (task,), **changes})  # type: ignore[arg-type]


def example(task: str, index: int = 0, length: int = 1024) -> Example:
    made = needle(options(task, length), index, tokens)
    assert isinstance(made, Example)
    return made


def size(item: Document | Example) -> int:
    texts = [item.text] if isinstance(item, Document) else [item.prompt, item.answer]
    return sum(tokens(texts)) + 1


def answers(made: Example) -> list[str]:
    return made.answer.strip().split(", ")


def question(made: Example) -> str:
    return made.prompt[made.prompt.rindex("\nQuestion:") :]


def body(made: Example) -> str:
    return made.prompt.split("\n\n")[1]


# Length


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [512, 2000, 9000])
@pytest.mark.parametrize("loss", ["answer", "all"])
def test_documents_have_the_length_asked_for(task: str, length: int, loss: str) -> None:
    for index in range(5):
        made = needle(options(task, length, loss=loss), index, tokens)
        assert length - 60 <= size(made) <= length


def test_a_document_of_a_hundred_thousand_tokens() -> None:
    assert 99_900 < size(example("variable-tracing", length=100_000)) <= 100_000


def test_lengths_are_spread_over_the_range() -> None:
    spread = NeedleOptions(documents=60, shortest=512, longest=4096)
    sizes = sorted(size(needle(spread, index, tokens)) for index in range(60))
    assert 450 < sizes[0] < 700
    assert 1000 < sizes[30] < 2200
    assert 3000 < sizes[-1] <= 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("singles",)}, "unknown task 'singles'; known ones are single, multi-key"),
        ({"tasks": ()}, "--tasks: name one"),
        ({"documents": 0}, "--documents 0 in --shards 1"),
        ({"documents": 2, "shards": 3}, "--documents 2 in --shards 3"),
        ({"seed": -1}, "--seed must not be negative"),
        ({"shortest": 511}, "--shortest 511 --longest 1024: 512 is the least"),
        ({"longest": 1000}, "--shortest 1024 --longest 1000"),
        ({"loss": "some"}, "--loss takes answer or all, not 'some'"),
    ],
)
def test_impossible_options(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        options(**changes)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(DataError, match="single does not fit into 512 tokens"):
        needle(options(length=512), 0, lambda texts: [10 * count for count in tokens(texts)])


# Answers, found in the text by other means


RECORD = re.compile(
    r"(?:locker of|register,|ticket that|asks for) (\w+) (?:opens with|was filed under|holds reads|is told) (\S+)\."
)


@pytest.mark.parametrize("index", range(12))
@pytest.mark.parametrize("task", ["single", "multi-key", "multi-query", "multi-value"])
def test_records_are_in_the_text_once(task: str, index: int) -> None:
    made = example(task, index)
    records = RECORD.findall(body(made))
    asked = [name for name in dict.fromkeys(name for name, _ in records) if re.search(rf"\b{name}\b", question(made))]
    asked.sort(key=question(made).index)
    assert [value for name in asked for own, value in records if own == name] == answers(made)
    expected = {"single": 1, "multi-key": 1, "multi-value": 1}
    assert len(asked) == expected.get(task, len(answers(made)))
    if task in ("multi-value", "multi-query"):
        assert len(answers(made)) > 1
    if task != "single":
        assert len(records) > 1


@pytest.mark.parametrize("index", range(12))
def test_variables_are_traced(index: int) -> None:
    made = example("variable-tracing", index)
    held: dict[str, str] = {}
    pattern = "|".join(
        (
            r"(\w+) starts out as (\S+)\.",
            r"At first (\w+) is set to (\S+)\.",
            r"Then (\w+) takes over what (\w+) has\.",
            r"(\w+) becomes the same as (\w+)\.",
        )
    )
    for groups in re.findall(pattern, body(made)):
        name, given = (part for part in groups if part)
        held[name] = held.get(given, given)
    (asked,) = re.findall(r"the value (\S+) at the end", question(made))
    assert [name for name, got in held.items() if got == asked] == answers(made)
    assert len(answers(made)) > 1


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("length", [512, 3000])
def test_common_words_are_the_most_common(index: int, length: int) -> None:
    made = example("common-words", index, length)
    counts = Counter(body(made).split("; "))
    ranked = counts.most_common()
    count = len(answers(made))
    assert sorted(name for name, _ in ranked[:count]) == answers(made)
    assert ranked[count - 1][1] > ranked[count][1] + 1
    assert f"the {count} words" in question(made)


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("length", [512, 3000])
def test_frequent_words_are_in_front_without_a_tie(index: int, length: int) -> None:
    ranked = Counter(body(made := example("frequent-words", index, length)).split()).most_common(4)
    assert [name for name, _ in ranked[:3]] == answers(made)
    assert all(more > fewer for (_, more), (_, fewer) in pairwise(ranked))


def test_needles_stand_at_every_depth() -> None:
    depths = []
    for index in range(60):
        made = example("single", index, 512)
        found = RECORD.search(body(made))
        assert found is not None
        depths.append(found.start() / len(body(made)))
    assert min(depths) < 0.1
    assert max(depths) > 0.85
    assert all(sum(low <= depth < low + 0.25 for depth in depths) > 5 for low in (0.0, 0.25, 0.5, 0.75))


def test_loss_on_all_is_the_same_text() -> None:
    made = needle(options("multi-key", loss="all"), 3, tokens)
    assert isinstance(made, Document)
    assert made.source == example("multi-key", 3).source == "multi-key"
    assert made.text == example("multi-key", 3).prompt + example("multi-key", 3).answer


# Seeds


def test_a_seed_fixes_everything_for_good() -> None:
    assert example("multi-query", 5) == example("multi-query", 5)
    assert [Draw(1, 2).below(1000) for _ in range(2)] == [Draw(1, 2).below(1000)] * 2
    draw = Draw(1, 2)
    assert [draw.below(1000) for _ in range(4)] == [432, 379, 37, 528]
    assert (word(Draw(7)), value(Draw(7))) == ("kerhiorurt", "38490537")


def test_every_index_and_seed_gives_another_document() -> None:
    made = {
        needle(NeedleOptions(shortest=512, longest=512, seed=seed), index, tokens)
        for seed in range(3)
        for index in range(9)
    }
    assert len(made) == 27


def test_all_tasks_come_up() -> None:
    drawn = Counter(needle(NeedleOptions(shortest=512, longest=512), index, tokens).source for index in range(210))
    assert drawn.keys() == TASKS.keys()
    assert min(drawn.values()) > 10


# Disjoint from evaluation


def test_names_are_of_the_training_half() -> None:
    draw = Draw(11)
    found = {word(draw) for _ in range(500)}
    assert len(found) > 490
    assert {split_of(name) for name in found} == {"train"}
    assert sum(split_of(name[::-1]) == "evaluation" for name in found) > 150


@pytest.mark.parametrize("task", TASKS)
def test_nothing_of_rulers_wording(task: str) -> None:
    def grams(text: str) -> set[tuple[str, ...]]:
        found = re.findall(r"[a-z]+", text.lower())
        return set(zip(*(found[i:] for i in range(4)), strict=False))

    for index in range(10):
        made = example(task, index, 512)
        assert not grams(made.prompt) & grams(RULER)
        assert not re.search(r"magic|VAR |\b\d{7}\b", made.prompt + made.answer)


def test_values_are_of_other_kinds_than_rulers() -> None:
    draw = Draw(3)
    kinds = Counter(re.sub(r"[A-Z]", "A", re.sub(r"\d", "0", value(draw))) for _ in range(300))
    assert set(kinds) == {"0" * 5, "0" * 6, "0" * 8, "AA-0000-A"}
