"""External trackers: what they get, and that none can stop a run, slow it or delay its end."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_dist.batch.token_values import TokenValues
from grpo_dist.errors import UserError
from grpo_dist.observe import trackers
from grpo_dist.observe.completions import COLUMNS, Table, step_of, table_of
from grpo_dist.observe.console import print_before_after
from grpo_dist.observe.tracker import EVENTS, Tracker
from grpo_dist.observe.trackers import AsyncSink, ShownConfig, check_trackers, close_all, online_mode
from grpo_dist.runtime.stage_log import drop_unread_output, print_line
from tests.support import fakes, services
from tests.support.made_groups import group
from tests.support.patience import HANG_S, longer

ROOT = Path(__file__).resolve().parents[2]
OFF = {"console": False, "tensorboard": False}


@dataclass
class RecordingSink:
    """A sink that records. ``fails_on``: steps that raise. ``gate``: what it waits for."""

    fails_on: tuple[int, ...] = ()
    gate: threading.Event | None = None
    steps: list[int] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    failed: bool | None = None

    def log(self, step, metrics):
        if self.gate is not None:
            self.gate.wait(HANG_S)
        if step in self.fails_on:
            raise ConnectionError(f"step {step}:\nno route to host")
        self.steps.append(step)

    def table(self, step, table):
        self.log(step, {})
        self.tables.append(step)

    def close(self, *, failed):
        self.failed = failed


def async_sink(sink):
    warnings: list[str] = []
    return AsyncSink("kept", lambda tell: sink, warnings.append), warnings


def test_a_tracker_gets_everything_in_order_and_how_the_run_ended():
    recording = RecordingSink()
    sink, warnings = async_sink(recording)
    for step in range(200):
        sink.log(step, {"reward/mean": 1.0})
    close_all([sink], failed=True)
    assert recording.steps == list(range(200)) and recording.failed is True and warnings == []


def test_a_failing_tracker_is_reported_once_and_gets_later_metrics():
    recording = RecordingSink(fails_on=(1, 2, 5))
    sink, warnings = async_sink(recording)
    for step in range(8):
        sink.log(step, {})
    close_all([sink], failed=False)
    assert recording.steps == [0, 3, 4, 6, 7] and recording.failed is False
    assert [re.sub(r" \(/.*/test_sinks\.py:\d+ in log\)", "", warning) for warning in warnings] == [
        "kept: failed; records that it refuses are dropped: ConnectionError: step 1: no route to host",
        "kept: 3 of 8 records are missing; the run directory has all of them",
    ]


def test_a_tracker_that_does_not_start_is_left_out():
    def broken(tell):
        raise RuntimeError("no such server")

    warnings: list[str] = []
    sink = AsyncSink("broken", broken, warnings.append)
    for step in range(3000):
        sink.log(step, {})
    close_all([sink], failed=False)
    [failure] = [w for w in warnings if "records" not in w]  # its queue may be full before it starts
    assert failure.startswith(
        "broken: cannot be started; the run continues without it: RuntimeError: no such server (/"
    )
    assert warnings[-1].startswith("broken: 3000 of 3000 records are missing")

    warnings.clear()
    sink = AsyncSink("broken", broken, warnings.append)
    sink._thread.join(HANG_S)
    for step in range(20):  # not delivered, but not slow either
        sink.table(step, Table("samples", ()))
    close_all([sink], failed=False)
    assert len(warnings) == 2 and not any("too slow" in warning for warning in warnings)


def test_a_hanging_tracker_delays_neither_the_loop_nor_the_end(monkeypatch):
    for close_s in longer(0.3):
        monkeypatch.setattr(trackers, "_CLOSE_S", close_s)
        hanging, healthy = RecordingSink(gate=threading.Event()), RecordingSink()
        sink, warnings = async_sink(hanging)
        second, _ = async_sink(healthy)
        for step in range(5000):  # waiting for the sink would take forever
            sink.log(step, {})
        second.log(1, {})
        assert warnings == ["kept: too slow or hanging; records that do not fit its queue are dropped"]
        close_all([sink, second], failed=False)
        closed = healthy.failed is False
        assert warnings[1] == f"kept: did not finish within {close_s:g} s and was abandoned"
        hanging.gate.set()
        if closed:
            break
    assert closed and healthy.steps == [1]


def test_a_run_whose_trackers_all_fail_has_its_record(tmp_path, monkeypatch, capsys):
    def broken(*arguments, **options):
        raise OSError("nobody is there")

    for name in ("TensorBoard", "WandbRun"):
        monkeypatch.setattr(f"grpo_dist.observe.tracker.{name}", broken)
    tracking = {"console": True, "tensorboard": True, "wandb": "w"}
    with Tracker(fakes.config(tracking=tracking), tmp_path) as tracker:
        monkeypatch.setattr(tracker._console, "log", broken)
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": float(step)})
        tracker.samples("eval_x_step_000003", [group(0, np.random.default_rng(0))])
    record = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward/mean"] for line in record] == [1.0, 2.0, 3.0]
    messages = [json.loads(line)["message"] for line in (tmp_path / EVENTS).read_text().splitlines()]
    for name in ("TensorBoard", "wandb"):
        assert sum(m.startswith(f"{name}: cannot be started") for m in messages) == 1
    assert sum("terminal output failed and is off from now on" in m for m in messages) == 1
    assert (tmp_path / "samples/eval_x_step_000003.parquet").exists()


def test_a_run_goes_on_when_nobody_reads_its_output_any_longer(tmp_path, monkeypatch):
    reads, writes = os.pipe()
    os.close(reads)
    metrics = {"time/step_s": 1.0, "throughput/completion_tokens_per_s": 1.0}
    scores = {"eval/x/pass@1": 0.5, "eval/x/pass@1_stderr": 0.1}
    with os.fdopen(writes, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        tracking = {"console": True, "tensorboard": False}
        with Tracker(fakes.config(tracking=tracking), tmp_path) as tracker:
            for step in (1, 2, 3):
                tracker.log(step, metrics)
                print_line("a line of its own")
        print_before_after({}, scores, str(tmp_path))
        assert drop_unread_output()  # otherwise closing the file fails
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    (event,) = (json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines())
    assert "terminal output failed and is off" in event["message"]


def test_a_record_that_cannot_be_written_ends_the_run(tmp_path):
    tracker = Tracker(fakes.config(tracking=OFF), tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(OSError, match=r"metrics\.jsonl"), tracker:
        tracker.log(1, {"reward/mean": 1.0})


def test_a_table_has_whole_groups_with_all_values_of_each_sample():
    rng = np.random.default_rng(0)
    groups = [group(i, rng, samples=16) for i in range(6)]
    nan = group(9, rng, samples=2, rewards=[np.nan, 1.0])
    values = {("p0", 3): TokenValues(0.5, np.array([0.5, 0.5], np.float32))}
    table = table_of("step_000010", groups, values)
    assert len(table.rows) == 64 and {row[0] for row in table.rows} == {"p0", "p1", "p2", "p3"}
    assert table.name == "completions" and table.rows[3][COLUMNS.index("advantage")] == 0.5
    assert table.rows[2][COLUMNS.index("advantage")] is None
    evaluated = table_of("eval_aime_24_step_000030", [nan], None)
    assert evaluated.name == "completions/aime_24" and step_of("eval_aime_24_step_000030") == 30
    assert [row[COLUMNS.index("reward")] for row in evaluated.rows] == [None, 1.0]


def test_trackers_get_every_key_and_no_secret():
    judge = {"function": "judge", "kwargs": {"api_key": "sk-1", "base_url": "http://me:pw@host/v1"}}
    config = fakes.config(rewards={"functions": [{"function": "math"}, judge]})
    flat = ShownConfig.from_config(config).flat()
    assert flat["policy.optimizer.lr"] == 1e-6 and flat["rewards.functions.0.function"] == "math"
    assert flat["rewards.functions.1.kwargs.api_key"] == "***" and "sk-1" not in str(flat)
    assert flat["rewards.functions.1.kwargs.base_url"] == "http://***@host/v1"
    assert flat["data.eval"] == "[]" and flat["model.revision"] == "None"


def test_a_tracker_that_is_not_installed_is_refused_before_the_start(monkeypatch):
    settings = fakes.config(tracking={"wandb": "w"}).tracking
    monkeypatch.setattr("grpo_dist.observe.trackers.find_spec", lambda name: None if name == "wandb" else 1)
    with pytest.raises(UserError, match=r"`tracking\.wandb` = w, .*pip install wandb"):
        check_trackers(settings)
    assert check_trackers(fakes.config().tracking) == "metrics.jsonl, tensorboard"


def test_wandb_without_a_key_is_offline_and_warns_if_online_was_requested(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    notes: list[str] = []
    assert online_mode(tmp_path, notes.append) == "offline" and notes == []
    monkeypatch.setenv("WANDB_MODE", "online")
    assert online_mode(tmp_path, notes.append) == "offline"
    assert notes == [f"no key is set; the run is stored in {tmp_path / 'wandb'}; upload it with `wandb sync`"]


@pytest.mark.parametrize(
    ("variable", "mode"),
    [("offline", "offline"), ("disabled", "disabled"), ("online", "online"), ("", "online")],
)
def test_wandb_with_a_key_has_the_mode_of_its_variable(monkeypatch, tmp_path, variable, mode):
    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setenv("WANDB_MODE", variable)
    assert online_mode(tmp_path, print) == mode


def test_tensorboard_has_every_scalar_the_configuration_and_hyperparameters(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    config = fakes.config(tracking={"console": False})
    with Tracker(config, tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": step / 2, "loss/total": float("nan")})
    with Tracker(config, tmp_path, start=2) as tracker:  # step 3 is repeated
        tracker.log(3, {"reward/mean": 9.0})
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(e.step, e.value) for e in accumulator.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert np.isnan([e.value for e in accumulator.Scalars("loss/total")]).all()
    text = accumulator.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "samples_per_prompt: 2" in text
    assert "_hparams_/experiment" in accumulator.summary_metadata


@pytest.mark.slow
def test_wandb_has_metrics_tables_and_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = fakes.config(tracking=OFF | {"wandb": "w"})
    sampled = group(0, np.random.default_rng(0), rewards=[0, 1, 0.5, np.nan])
    with Tracker(config, tmp_path) as tracker:
        values = {("p0", 0): TokenValues(0.25, np.full(3, 0.25, np.float32))}
        tracker.samples("step_000001", [sampled], values)
        tracker.log(1, {"reward/mean": 0.5, "loss/total": float("nan")})
        tracker.log(1, {"eval/held/pass@1": 0.75})
        tracker.samples("step_000002", [sampled])  # a step without values is only in the run directory
        tracker.log(2, {"reward/mean": 0.6})
    run = services.offline_run(tmp_path / "wandb")
    first, second = services.history(run)
    assert first["reward/mean"] == 0.5 and first["eval/held/pass@1"] == 0.75 and np.isnan(first["loss/total"])
    assert (first["_step"], second["_step"], second["reward/mean"]) == (1, 2, 0.6)
    assert first["completions/nrows"] == 4 and "completions/path" not in second
    (path,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/completions_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == list(COLUMNS)
    assert [row[-2:] for row in table["data"]] == [[0.0, 0.25], [1.0, None], [0.5, None], [None, None]]
    assert services.config(run)["steps"] == config.steps


_HANGS = """
import os, socket, sys
server = socket.create_server(("127.0.0.1", 0))  # accepts connections and never answers
os.environ |= {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}
sys.path.insert(0, ".")
from tests.support import fakes
from pathlib import Path
from grpo_dist.observe.tracker import Tracker
config = fakes.config(tracking={"console": False, "tensorboard": False, "wandb": "w"})
with Tracker(config, Path(sys.argv[1])) as tracker:
    for step in range(1, 4):
        tracker.log(step, {"reward/mean": float(step)})
    print("logged", file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_a_server_of_wandb_that_never_answers_leaves_an_offline_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _HANGS, str(tmp_path)], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"WANDB_SILENT": "true", "PYTHONPATH": str(ROOT)}, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logged, _, later = done.stderr.partition("logged\n")
    assert "Failed to authenticate" not in logged  # the run did not wait for it
    assert "wandb: Failed to authenticate" in later and "`wandb sync`" in done.stderr
    rows = services.history(services.offline_run(tmp_path / "wandb"))
    assert [row["reward/mean"] for row in rows] == [1.0, 2.0, 3.0]


class FakeRun(list):
    """A run of SwanLab or Trackio, with the interface of both (swanlab 0.10.3, trackio 0.43.0)."""

    def log(self, metrics, step):
        self.append((step, metrics))

    def finish(self, *state):
        self.append(state)


@pytest.mark.parametrize("failed", [False, True])
def test_swanlab_and_trackio_get_the_metrics_and_a_resumed_run_stays_one(tmp_path, monkeypatch, failed):
    monkeypatch.setenv("HOME", str(tmp_path))  # no login
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    monkeypatch.delenv("SWANLAB_MODE", raising=False)
    runs, opened = {"swanlab": FakeRun(), "trackio": FakeRun()}, []

    def open_run(package, /, **settings):
        opened.append((package, settings))
        return runs[package]

    for package in runs:
        table = lambda columns, data: (columns, data)  # noqa: E731
        module = SimpleNamespace(init=partial(open_run, package), Table=table, __spec__=1)
        monkeypatch.setitem(sys.modules, package, module)
    config = fakes.config(name="r", tracking={**OFF, "swanlab": "s", "trackio": "t"})
    assert check_trackers(config.tracking) == "metrics.jsonl, swanlab, trackio"
    with suppress(OSError), Tracker(config, tmp_path, wandb_id="abc") as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        for sink in tracker._sinks:
            sink.table(1, Table("samples", (("u",) * len(COLUMNS),)))
        if failed:
            raise OSError
    assert runs["swanlab"] == [(1, {"reward/mean": 0.5}), ("crashed" if failed else "success",)]
    table = (list(COLUMNS), [["u"] * len(COLUMNS)])
    assert runs["trackio"] == [(1, {"reward/mean": 0.5}), (1, {"samples": table}), ()]
    settings = dict(opened)
    assert settings["swanlab"]["id"] == "abc" and settings["trackio"]["name"] == "r-abc"
    assert settings["swanlab"]["mode"] == "offline" and settings["swanlab"]["log_dir"].endswith("/swanlab")
    for name, project in (("swanlab", "s"), ("trackio", "t")):
        assert (settings[name]["project"], settings[name]["resume"]) == (project, "allow")
        assert settings[name]["config"]["name"] == "r"
