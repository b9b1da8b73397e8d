"""`generate` on a published model that was converted, against its source implementation."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers.published_mamba2 import random_mamba2
from helpers.runs import run, start
from palimpsa_data import tokenizers
from palimpsa_kernels import dispatch

from megatron_palimpsa import cli
from megatron_palimpsa.commands import generate
from megatron_palimpsa.convert.mamba2 import convert
from megatron_palimpsa.export.write import export
from megatron_palimpsa.inference import text
from megatron_palimpsa.model import generation

PROMPTS = ["hello world", "d", "return others in if"]
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a stage, and its export; `continuations.json`, the source implementation's greedy texts of PROMPTS."""
    folder = tmp_path_factory.mktemp("generate")
    theirs = random_mamba2(n_groups=2, vocab_size=312, tie_word_embeddings=False)
    with torch.no_grad():
        # The end of a document is never the likeliest: texts go on for as long as they may.
        theirs.lm_head.weight[0] = 0
    theirs.save_pretrained(folder / "source")
    words = ["def return f(x) for in if else  \n" * 20, "hello world and others " * 30]
    (folder / "source" / "tokenizer.json").write_bytes(tokenizers.train_json(words * 10, 310))
    convert(str(folder / "source"), folder / "base")
    export(folder / "base", folder / "exported", "fp32")
    tokenizer = tokenizers.load(folder / "source" / "tokenizer.json")
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).tolist()])
        # The two ids that the tokenizer lacks are not drawn.
        whole = theirs.generate(ids, max_new_tokens=COUNT, do_sample=False, suppress_tokens=[310, 311], eos_token_id=0)
        texts.append(tokenizer.decode(whole[0, ids.shape[1] :].tolist()))
    (folder / "continuations.json").write_text(json.dumps(texts))
    return folder


def expected(folder: Path) -> list[str]:
    texts = json.loads((folder / "continuations.json").read_text())
    assert len(set(texts)) == 3
    return texts


def called(*arguments: object, precision: str = "fp32") -> int:
    """The stage's own precision is bf16, in which the source implementation was not asked."""
    return cli.main(["generate", *map(str, arguments), "--precision", precision])


def test_one_prompt_is_continued_as_by_the_source_and_speed_and_state_are_said(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPTS[2]))
    sources = (
        [folder / "base", PROMPTS[0]],
        [folder / "base" / "checkpoints" / "step-0", PROMPTS[1]],
        # The prompt comes from standard input.
        [folder / "exported"],
    )
    for row, arguments in enumerate(sources):
        assert called(*arguments, "--max-new-tokens", COUNT) == 0
        captured = capsys.readouterr()
        assert captured.out == expected(folder)[row] + "\n"
        speed, state = captured.err.splitlines()[-2:]
        assert re.fullmatch(
            r"prefill: \d+ tokens in [\d.]+ s, [\d,.]+ tokens/s \| decode: 11 tokens in [\d.]+ s, [\d,.]+ tokens/s",
            speed,
        )
        # 3 layers; 8 heads of 8 by 16, and 3 inputs of 128 channels, in fp32.
        assert state == (
            "state: 16,896 bytes: content 12,288, importance 0, convolution 4,608, attention's keys and values 0"
        )


def test_an_option_may_stand_before_the_prompt_whose_text_no_notice_of_a_kernel_cuts(folder, monkeypatch):
    real = text.stream_texts

    def noticed(*arguments, **settings):
        for number, pieces in enumerate(real(*arguments, **settings)):
            dispatch.say_once(f"notice {number}")
            yield pieces

    dispatch.say_once.cache_clear()
    monkeypatch.setattr(text, "stream_texts", noticed)
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    assert called(folder / "base", "--max-new-tokens", COUNT, PROMPTS[0]) == 0
    before, after = terminal.getvalue().split(expected(folder)[0] + "\n")
    assert before.endswith("notice 0\n")
    assert after.startswith("prefill: ")


@pytest.mark.parametrize("prompts", [["--seed", "1", "a", "b"], ["a", "--seed", "1", "b"], ["--seed", "1", "-b"]])
def test_two_prompts_and_unknown_options_are_refused(capsys, prompts):
    with pytest.raises(SystemExit) as caught:
        called("folder", *prompts)
    assert caught.value.code == 2
    assert "unrecognized arguments: " in capsys.readouterr().err


def test_a_file_of_prompts_gives_an_object_each_in_their_order(folder, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("\n".join(PROMPTS))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    for file, batch in (("p.txt", 8), ("p.jsonl", 2)):
        arguments = ["--prompts", tmp_path / file, "--batch-size", batch, "--max-new-tokens", COUNT]
        assert called(folder / "base", *arguments) == 0
        objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert objects == [{"prompt": p, "text": t} for p, t in zip(PROMPTS, expected(folder), strict=True)]


def test_draws_depend_on_the_seed_and_the_line_not_on_the_batch(folder, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("hello\nhello\nhello\n")
    texts = []
    for seed, batch in ((1, 1), (1, 3), (2, 3)):
        settings = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.95, "--seed", seed]
        arguments = ["--prompts", tmp_path / "p.txt", "--batch-size", batch, "--max-new-tokens", 8]
        assert called(folder / "base", *arguments, *settings, precision="bf16") == 0
        texts.append([json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()])
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_text_is_printed_while_it_is_made(folder, monkeypatch):
    printed = io.StringIO()
    monkeypatch.setattr("sys.stdout", printed)
    before_each_token = []
    decode = generation.decode

    def watched(*arguments):
        before_each_token.append(printed.getvalue())
        return decode(*arguments)

    monkeypatch.setattr(generation, "decode", watched)
    assert called(folder / "base", PROMPTS[0], "--max-new-tokens", COUNT) == 0
    text = expected(folder)[0]
    assert len(before_each_token) == COUNT - 1
    assert all(text.startswith(part) for part in before_each_token)
    # Most tokens of this text are one letter, and none is more than a word.
    assert len(set(before_each_token)) > COUNT // 2


def test_texts_come_as_soon_as_those_before_them_have_ended():
    steps = iter([["a", "b", "c"], ["d", "", "e"], ["f", None, ""], [None, None, None]])
    whole = generate._whole(steps)
    assert next(whole) == "adf"
    assert next(steps, None) is None
    assert list(whole) == ["b", "ce"]


def test_a_long_wait_is_told_with_the_time_left(monkeypatch):
    now = [0.0]
    told = []
    monkeypatch.setattr(generate.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(generate.logger, "info", lambda line, *values: told.append(line % values))
    progress = generate._Progress("prompt tokens read")
    for now[0], done in ((4, 1024), (20, 5000), (25, 6000), (40, 9000), (60, 10000)):
        progress(done, 10000)
    assert told == [
        "5,000 of 10,000 prompt tokens read | 0:00:20 left",
        "9,000 of 10,000 prompt tokens read | 0:00:04 left",
    ]


@pytest.mark.parametrize("end", [KeyboardInterrupt, BrokenPipeError])
def test_ctrl_c_and_a_reader_that_has_gone_end_quietly(folder, capfd, monkeypatch, end):
    def cut(*arguments, **settings):
        yield ["abc"]
        raise end

    monkeypatch.setattr(text, "stream_texts", cut)
    if end is BrokenPipeError:
        # What `cli` does to standard output then is undone with the file that stands for it.
        with (folder / "output").open("w") as output:
            monkeypatch.setattr("sys.stdout", output)
            assert called(folder / "base", "x") == 1
    else:
        assert called(folder / "base", "x") == 130
    assert "Error" not in (err := capfd.readouterr().err)
    assert "interrupted" not in err
    assert "Traceback" not in err


@pytest.mark.long
def test_a_real_ctrl_c_and_a_closed_pipe_end_quietly(folder):
    """On a process of its own, in the middle of its text."""
    for send, code in ((signal.SIGINT, 130), (None, 1)):
        with start("generate", folder / "base", "hello", "--max-new-tokens", 2**20) as process:
            assert process.stdout.read(5)
            if send is None:
                process.stdout.close()
            else:
                process.send_signal(send)
            err = process.stderr.read()
            assert process.wait(timeout=300) == code
        assert "Traceback" not in err
        assert "rror" not in err


@pytest.mark.long
def test_nothing_but_the_text_goes_to_standard_output_of_a_process(folder):
    done = run("generate", folder / "base", PROMPTS[0], "--max-new-tokens", COUNT, "--precision", "fp32")
    assert (done.returncode, done.stdout) == (0, expected(folder)[0] + "\n")


@pytest.fixture(scope="module")
def damaged(folder: Path) -> Path:
    """Stages with something wrong, by name."""
    for name in ("no-checkpoint", "torn", "no-tokenizer"):
        shutil.copytree(folder / "base", folder / name)
    shutil.rmtree(folder / "no-checkpoint" / "checkpoints" / "step-0")
    for file in (folder / "torn" / "checkpoints" / "step-0").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    config = folder / "no-tokenizer" / "config.yaml"
    config.write_text(re.sub(r"(?m)^( *tokenizer:).*$", r"\1 ''", config.read_text()))
    larger = ["def return f(x) for in if else  \n" * 20, "hello world and many others, so that there are more " * 30]
    (folder / "larger.json").write_bytes(tokenizers.train_json(larger * 10, 330))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["base", ""], "the prompt is empty"),
        (["base", "a\udcff"], "the prompt is not UTF-8 text"),
        (["base", "abc", "--prompts", "p.txt"], "a prompt and --prompts exclude each other"),
        (["base", "--prompts", "p.txt", "abc"], "a prompt and --prompts exclude each other"),
        (["base", "--prompts", "none.txt"], "cannot read the prompts"),
        (["base", "abc", "--top-p", "2"], "top_p=2.0"),
        (["base", "abc", "--tokenizer", "none.json"], "cannot read the tokenizer"),
        (["base", "  ", "--tokenizer", "larger.json"], "ids outside of the model's vocabulary of 312"),
        (["missing", "abc"], "missing"),
        (["source", "abc"], "source: holds no stage"),
        (["no-checkpoint", "abc"], "holds no intact checkpoint"),
        (["torn", "abc"], "holds no intact checkpoint"),
        (["torn/checkpoints/step-0", "abc"], "is damaged"),
        (["no-tokenizer", "abc"], "names no tokenizer; name its file with --tokenizer"),
    ],
)
def test_wrong_input_is_one_message(damaged, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(damaged)
    assert cli.main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *_, last = captured.err.splitlines()
    assert last.startswith("megatron-palimpsa: error: ")
    assert message in last
    assert captured.err.count("error") == 1


def test_a_stage_without_a_tokenizer_takes_a_named_one(damaged, capsys):
    arguments = ["--tokenizer", damaged / "source" / "tokenizer.json", "--max-new-tokens", COUNT]
    assert called(damaged / "no-tokenizer", PROMPTS[0], *arguments) == 0
    assert capsys.readouterr().out == expected(damaged)[0] + "\n"


def test_standard_input_that_is_no_text_is_wrong_input(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert called(folder / "base") == 2
    assert "the prompt is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "x", "1e3", "99999999999999999999"])
def test_impossible_numbers_of_tokens_are_refused(capsys, count):
    with pytest.raises(SystemExit) as caught:
        called("folder", "abc", "--max-new-tokens", count)
    assert caught.value.code == 2
    assert "must be an integer from 1 to 1048576" in capsys.readouterr().err
