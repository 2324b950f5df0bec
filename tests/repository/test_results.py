"""Recorded results are rows made from a run's files, and the documented table is made of them."""

import json
import os

import pytest
import yaml

from grpo_dist.runtime.files import replace_part
from tests.evidence.learning_runs import README, RESULTS, record, rows_of, settings_digest, table
from tests.support.documents import ROOT

CONFIG = {
    "name": "demo", "output_dir": "/x/runs", "tracking": {"wandb": None},
    "checkpoint": {"every": 5, "resume": "never"}, "policy": {"optimizer": {"lr": 1e-5}},
    "code_paths": [str(ROOT / "tests")], "seed": 3, "steps": 5, "model": {"path": "sft"},
    "sft": {"model": "demo:tiny"}, "data": {"eval": [{"path": "demo:add3", "name": None, "max_rows": 64}]},
    "evaluation": {"samples_per_prompt": 2},
}  # fmt: skip
ENVIRONMENT = {
    "started": "2026-11-23T08:00:00+00:00",
    "command": [
        "cli.py", "train", "/x/configs/demo.yaml", "checkpoint.resume=never", "seed=3", "output_dir=y",
    ],
    "cpus": 2,
    "processor": "AMD EPYC",
    "gpus": [],
    "git": "0123456789ab",
    "git_changed": [],
}  # fmt: skip


def write_config(run_dir, **changes):
    (run_dir / "config.yaml").write_text(yaml.safe_dump(CONFIG | changes))


def read(results):
    return [json.loads(line) for line in results.read_text().splitlines()]


@pytest.fixture
def run_dir(tmp_path):
    write_config(tmp_path)
    (tmp_path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    evals = [
        {"eval/add3/pass@1": x, "eval/add3/pass@1_stderr": 0.02, "eval/add3/avg@2": x} for x in (0.5, 0.9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    for name, seconds in ((".lock", 1000), ("DONE", 1450)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    return tmp_path


def test_a_row_shows_what_was_run_on_what_and_what_came_out(run_dir):
    (row,) = rows_of(run_dir)
    assert row == {
        "configuration": "configs/demo.yaml", "overrides": ["seed=3"], "settings": settings_digest(CONFIG),
        "model": "demo:tiny", "seed": 3,
        "steps": 5, "minutes": 7.5, "hardware": "2 cores of AMD EPYC", "commit": "0123456789ab",
        "date": "2026-11-23", "set": "add3", "measure": "pass@1", "problems": "64 x 2",
        "before": 0.5, "before_error": 0.02, "after": 0.9, "after_error": 0.02,
    }  # fmt: skip
    assert "; 3: 50.0±2.0 → 90.0±2.0 | 7.5 |" in table([row])


def test_a_new_run_of_the_same_command_replaces_its_row(run_dir, tmp_path):
    results = tmp_path / "results.jsonl"
    (first,) = record(run_dir, results)
    other = first | {"overrides": ["seed=4"]}
    results.write_text(json.dumps(other) + "\n" + results.read_text())
    record(run_dir, results)
    assert read(results) == [first, other]


def test_the_settings_digest_ignores_the_place_and_the_trackers_of_a_run():
    changes = {
        "name": "x", "output_dir": "/y", "tracking": {"wandb": "w"},
        "checkpoint": {"every": 5, "resume": "auto"}, "code_paths": ["tests"],
    }  # fmt: skip
    assert settings_digest(CONFIG | changes) == settings_digest(CONFIG)
    for other in (
        {"seed": 4},
        {"checkpoint": {"every": 6, "resume": "never"}},
        {"code_paths": ["grpo_dist"]},
    ):
        assert settings_digest(CONFIG | other) != settings_digest(CONFIG)


@pytest.mark.parametrize(
    ("changed", "commit"),
    [
        (["tests/evidence/README.md", "tests/evidence/results.jsonl"], "0123456789ab"),
        (["tests/evidence/results.jsonl", "grpo_dist/cli.py"], "0123456789ab-dirty"),
        (None, "0123456789ab-dirty"),  # a run of code that did not list them
    ],
)
def test_what_a_recording_writes_makes_no_commit_dirty(run_dir, changed, commit):
    facts = ENVIRONMENT | {"git": "0123456789ab-dirty", "git_changed": changed}
    (run_dir / "environment.json").write_text(json.dumps({k: v for k, v in facts.items() if v is not None}))
    assert [row["commit"] for row in rows_of(run_dir)] == [commit]


def test_a_run_that_did_not_finish_has_no_row(run_dir):
    (run_dir / "DONE").unlink()
    with pytest.raises(FileNotFoundError):
        rows_of(run_dir)


def test_the_documented_table_has_the_recorded_rows():
    rows = read(RESULTS)
    assert README.read_text() == replace_part(README.read_text(), "results", table(rows))
    assert rows and all((ROOT / row["configuration"]).exists() for row in rows)
