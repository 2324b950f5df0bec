"""The demo with a calculator, evaluated with real engines, environment workers and graders: `grpo-dist eval`,
then `score` and `report` on the episodes that it writes.
"""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.documents import ROOT
from tests.support.patience import HANG_S, wait_for_end
from tests.support.real_runs import survivors
from tests.support.reports import pieces

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.long]

# The cold start is much shorter than the recipe's, and each of its demonstrations calls the tool: the model
# calls it too, with arguments that are right or wrong by chance.
ARGUMENTS = (
    "sft.steps=200", "sft.data.0={noise: 0, examples: 2000}",
    "data.eval.0.max_rows=8", "data.eval.1.max_rows=8",
    "evaluation.samples_per_prompt=4", "evaluation.k=[1,4]", "rollout.kv_cache_gib=0.25",
    "rollout.enforce_eager=true", "environments.timeout_s=1200", "environments.num_workers=2",
)  # fmt: skip


def command(directory: Path, *arguments: str) -> str:
    """Return the output of `grpo-dist`; assert that it leaves no process."""
    mark = uuid.uuid4().hex
    out, err = directory / "out", directory / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_dist.cli", *arguments],
            cwd=directory, stdout=stdout, stderr=stderr, env=os.environ | {"GRPO_DIST_TEST_RUN": mark},
        )  # fmt: skip
        wait_for_end(process, lambda: [path.stat().st_size for path in (out, err)])
    assert process.returncode == 0, out.read_text()[-3000:] + err.read_text()[-5000:]
    assert not survivors(mark, seconds=HANG_S)
    return out.read_text()


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """Return the directory of the evaluation and what was printed."""
    here = tmp_path_factory.mktemp("evaluation")
    config = str(ROOT / "configs/tools_demo.yaml")
    return here / "result", command(here, "eval", config, *ARGUMENTS, "--output", "result")


def rows_of(directory, name):
    paths = sorted((directory / "samples" / name).glob("part_*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_tools_answer_during_an_evaluation_and_what_was_called_is_counted(evaluation):
    directory, output = evaluation
    rows = rows_of(directory, "with_tools")
    assert len(rows) == 8 * 4
    calls = [call for row in rows for turn in row["turns"] for call in turn["calls"]]
    assert calls, "the cold start taught no call"
    for call in calls:
        if call["outcome"] == "ok" and call["arguments"].replace("*", "").isdigit():
            factors = map(int, call["arguments"].split("*"))
            product = 1
            for factor in factors:
                product *= factor
            assert int(call["result"]) == product
    for row in rows:
        turns = row["turns"]
        assert row["completion"] == turns[-1]["text"]
        from_env = [not sampled for sampled in row["sampled"] or []]
        assert any(from_env) == (len(turns) > 1), "each further turn follows an answer of the environment"

    measured = {m["set"]: m for m in json.loads((directory / "result.json").read_text())["measured"]}
    with_tools = measured["with_tools"]
    episodes = with_tools["episodes"]
    assert measured["without_tools"]["episodes"] is None
    assert not any(row.get("turns") for row in rows_of(directory, "without_tools"))
    assert episodes["episodes"] == 32 and episodes["turns"] == sum(len(r["turns"]) for r in rows) / 32
    assert episodes["tool_calls"] == len(calls) / 32
    has_call = [any(turn["calls"] for turn in row["turns"]) for row in rows]
    assert episodes["tool_call_share"]["value"] == pytest.approx(sum(has_call) / 32)
    failed = sum(call["outcome"] != "ok" for call in calls)
    assert episodes["tool_error_share"] == pytest.approx(failed / len(calls))
    ends = {end: sum(row["finish_reason"] == end for row in rows) / 32 for end in episodes["ends"]}
    assert episodes["ends"] == ends and sum(ends.values()) == pytest.approx(1)
    right = sum(row["outcome"] == "correct" for row in rows) / 32
    assert with_tools["estimates"]["pass@1"]["value"] == pytest.approx(right)
    assert "failed calls" in output and "sandbox:" not in output, "a calculator needs no sandbox"


def test_episodes_of_an_evaluation_are_scored_again_with_the_same_verdicts(evaluation, tmp_path):
    directory, _ = evaluation
    for part in sorted((directory / "samples/with_tools").glob("part_*.parquet")):
        command(tmp_path, "score", str(part), "--reward", "math")
        lines = (tmp_path / f"{part.stem}.scored.jsonl").read_text().splitlines()
        rows = pq.read_table(part).to_pylist()
        assert [json.loads(line)["score"]["outcome"] for line in lines] == [row["outcome"] for row in rows]
        assert [json.loads(line)["score"]["reward"] for line in lines] == [row["reward"] for row in rows]


def test_the_report_of_an_evaluation_shows_each_turn_and_call(evaluation, tmp_path):
    directory, _ = evaluation
    command(tmp_path, "report", str(directory), "--output", "page.html")
    manifest, data = pieces(tmp_path / "page.html")
    (run,) = manifest["runs"]
    assert not run["about"]["notices"] and run["has_tokens"]
    assert {entry["kind"] for entry in run["samples"]} == {"with_tools", "without_tools"}
    keys = [entry["key"] for entry in run["samples"] if entry["kind"] == "with_tools"]
    page_turns = [turns for key in keys for turns in data[f"0/texts/{key}"]["turns"]]
    rows = rows_of(directory, "with_tools")
    assert [[turn["text"] for turn in turns] for turns in page_turns] == [
        [turn["text"] for turn in row["turns"]] for row in rows
    ]
    assert [[turn["calls"] for turn in turns] for turns in page_turns] == [
        [turn["calls"] for turn in row["turns"]] for row in rows
    ]
    call_counts = [n for key in keys for n in data[f"0/rows/{key}"]["calls"]]
    assert call_counts == [sum(len(turn["calls"]) for turn in row["turns"]) for row in rows]
