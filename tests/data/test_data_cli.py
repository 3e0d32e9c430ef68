from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import typer
from typer.testing import CliRunner

from swarmtrain.cli.data import app
from swarmtrain.cli.data import prepare as prepare_command
from swarmtrain.data.prepare import DEFAULT_SHARD_TOKENS
from swarmtrain.data.shards import open_shards
from swarmtrain.errors import DataError

root = typer.Typer()
root.add_typer(app, name="data")


def test_prepare_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    command = ["data", "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--json"]
    answer = CliRunner().invoke(root, command)
    assert answer.exit_code == 0, answer.output
    report = json.loads(answer.stdout)
    assert (report["done"], report["tokens"], report["documents"], report["shards"]) == (True, 6, 1, 1)
    assert report["digest"] == open_shards(tmp_path / "out", verify=True).digest
    again = CliRunner().invoke(root, command[:-1])
    assert "6 tokens (6 of them from an earlier run) of 1 document in 1 shard, vocabulary 256" in again.stdout


def test_every_option_reaches_prepare(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "hello hello"}\n' * 20)
    out = tmp_path / "out"
    options = ["--train-bpe", "260", "--text-field", "body", "--shard-tokens", "7"]
    answer = CliRunner().invoke(root, ["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(out), *options])
    assert answer.exit_code == 0, answer.output
    index = open_shards(out, verify=True).index
    assert index.tokenizer.vocab_size == 260
    assert index.shards[0].tokens == 7
    command = ["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "two"), "--text-field", "body"]
    answer = CliRunner().invoke(root, [*command, "--tokenizer", str(out / "tokenizer.json"), "--end-of-text", "h"])
    assert answer.exit_code == 0, answer.output
    assert open_shards(tmp_path / "two").index.tokenizer.end_of_text != 0


def test_errors_reach_the_caller_as_they_are(tmp_path: Path) -> None:
    answer = CliRunner().invoke(root, ["data", "prepare", str(tmp_path / "none"), "--out", str(tmp_path / "out")])
    assert isinstance(answer.exception, DataError)


def test_the_default_in_the_help_is_the_real_one() -> None:
    assert inspect.signature(prepare_command).parameters["shard_tokens"].default == DEFAULT_SHARD_TOKENS


def test_asking_for_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, swarmtrain.cli.data; print(sorted({'torch', 'numpy', 'tokenizers', 'pyarrow'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert answer.stdout.strip() == "[]"
