"""The command line as a whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.cli import command_parser, main
from grpo_dist.tools.arguments import parse
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.machine
@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["check", "none.yaml"], 2)])
def test_a_command_whose_output_nobody_reads_ends_without_a_traceback(arguments, code):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as unread:
        process = subprocess.run(
            [sys.executable, "-m", "grpo_dist.cli", *arguments],
            cwd=ROOT, stdout=unread, stderr=subprocess.PIPE, text=True, timeout=HANG_S,
        )  # fmt: skip
    assert process.returncode == code
    assert "Traceback" not in process.stderr and "Exception ignored" not in process.stderr


@pytest.mark.parametrize(("line", "config", "overrides"), [
    ("report a --serve b", ["a", "b"], []),
    ("eval --output d demo:tiny gsm8k seed=1 --by level math500", "demo:tiny",
     ["gsm8k", "seed=1", "math500"]),
    ("eval --compare a b", None, []),
    ("score c.jsonl --output o.jsonl my.yaml", "c.jsonl", ["my.yaml"]),
    ("report a --output x.html b", ["a", "b"], []),
    ("train a.yaml steps=3", "a.yaml", ["steps=3"]),
    ("plan a.yaml --cluster 1x8xH100 steps=3", "a.yaml", ["steps=3"]),
    ("bench --compare a.json b.json", None, []),
])  # fmt: skip
def test_words_behind_an_option_are_those_of_the_command(line, config, overrides):
    args = parse(command_parser(), line.split())
    assert (args.config, args.overrides) == (config, overrides)


@pytest.mark.parametrize(("line", "words"), [
    ("train a.yaml --steps 50", ["--steps 50", "settings are given as key=value: steps=50"]),
    ("train a.yaml --policy.num_workers=4", ["key=value: policy.num_workers=4"]),
    ("train a.yaml --data.train.0.max_rows 4", ["key=value: data.train.0.max_rows=4"]),
    ("train a.yaml --max-staleness 1 seed=2", ["key=value: max_staleness=1"]),
    ("train a.yaml --seed", ["key=value: seed=..."]),
    ("eval demo:tiny --prompts_per_step=4", ["key=value: batch.prompts_per_step=4"]),
    ("train a.yaml --num_generations 8", ["did you mean `batch.samples_per_prompt`?", "TRL's"]),
    ("train a.yaml --nonsense", ["key=value, e.g. steps=50"]),
    ("train a.yaml --tracking.wandb.api_key=abcdef", ["api_key=***"]),
])  # fmt: skip
def test_an_unknown_option_is_answered_with_the_setting(line, words, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(line.split())
    error = capsys.readouterr().err
    assert exit_info.value.code == 2 and all(word in error for word in words) and "abcdef" not in error


@pytest.mark.parametrize(
    "line", ["plan a.yaml --cluster 1x8xH100 b.yaml", "report a --nonsense", "status a --x"]
)
def test_a_word_that_a_command_does_not_take_is_refused(line, capsys):
    with pytest.raises(SystemExit):
        main(line.split())
    error = capsys.readouterr().err
    assert "unrecognized arguments" in error and "steps=50" not in error
