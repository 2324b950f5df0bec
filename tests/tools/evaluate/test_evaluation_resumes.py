"""An evaluation on the real engine and graders, killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.patience import HANG_S

pytestmark = pytest.mark.machine

ARGUMENTS = (
    "sampling.max_new_tokens=16", "data.max_prompt_tokens=128", "data.eval.0.max_rows=96",
    "evaluation.samples_per_prompt=8", "evaluation.k=[1,4]", "rollout.kv_cache_gib=0.25",
    "rollout.enforce_eager=true", "rollout.max_num_seqs=8",
)  # fmt: skip


def evaluate(directory: Path, *more: str, kill_after: int | None = None) -> str:
    """Return the output of `grpo-dist eval`; ``kill_after``: number of parts after which it is killed."""
    command = [sys.executable, "-m", "grpo_dist.cli", "eval", "demo:tiny", "demo:add3", *ARGUMENTS, *more]
    out, err = directory / "out", directory / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(command, cwd=directory, stdout=stdout, stderr=stderr)
        while kill_after and len(parts(directory)) < kill_after:
            assert process.poll() is None, err.read_text()[-5000:]
            time.sleep(0.02)
        if kill_after:
            process.send_signal(signal.SIGKILL)
        code = process.wait(timeout=HANG_S)
    assert code == (-signal.SIGKILL if kill_after else 0), err.read_text()[-5000:]
    return out.read_text()


def parts(directory: Path) -> list[Path]:
    return sorted(directory.glob("result/verdicts/add3/part_*.jsonl"))


def results(directory: Path) -> tuple[str, str]:
    return tuple((directory / "result" / name).read_text() for name in ("result.json", "problems.jsonl"))


@pytest.mark.slow
def test_a_killed_evaluation_resumes_to_the_same_bytes_and_then_reads_its_own_files(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    evaluate(whole, "--output", "result")
    evaluate(cut, "--output", "result", kill_after=3)
    mtimes = {path: path.stat().st_mtime_ns for path in parts(cut)}
    assert 3 <= len(mtimes) < 12 and not (cut / "result/result.json").exists()
    output = evaluate(cut, "--output", "result")
    assert f"{8 * len(mtimes)} of 96 problems are done" in output
    assert results(cut) == results(whole)
    assert all(path.stat().st_mtime_ns == when for path, when in mtimes.items())
    rows = [
        row for p in sorted(cut.glob("result/samples/add3/*.parquet")) for row in pq.read_table(p).to_pylist()
    ]
    assert len({(row["uid"], row["sample"]) for row in rows}) == 96 * 8
    measured = json.loads(results(cut)[0])["measured"][0]
    names = {"pass@1", "pass@4", "avg@8", "maj@4", "cons@8"}
    assert measured["problems"] == 96 and set(measured["estimates"]) == names

    # The result is read without Ray.
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    command = [sys.executable, "-m", "grpo_dist.cli", "eval", "demo:tiny", "demo:add3", *ARGUMENTS]
    process = subprocess.run(
        [*command, "--output", "result"], cwd=cut, env=environment, capture_output=True, text=True,
        timeout=HANG_S,
    )  # fmt: skip
    assert process.returncode == 0 and "all 96 problems are done" in process.stdout, process.stderr[-3000:]
    assert results(cut) == results(whole)
