"""Console lines about stages between steps."""

import os
import re
import subprocess
import sys
import threading

import pytest

from grpo_dist.cli import main
from grpo_dist.errors import Preempted
from grpo_dist.observe.tracker import Tracker
from grpo_dist.runs import session
from grpo_dist.runtime import stage_log
from grpo_dist.runtime.stage_log import LoopStages, StageLog, join_names, log_ready, open_stages, stage
from tests.support import fakes
from tests.support.documents import ROOT
from tests.support.good_inputs import CONFIG, GOOD, write
from tests.support.patience import HANG_S

OFF = {"console": False, "tensorboard": False}


class Recorded(list):
    """Records the lines of a log with a fake clock."""

    now = 100.0

    def __init__(self):
        super().__init__()
        self.log = StageLog(self.append, every_s=15.0, clock=lambda: self.now)

    def texts(self):
        """Return the lines without time of day and durations."""
        return [re.sub(r"^\d\d:\d\d:\d\d +\S+ (s|min)  ", "", line) for line in self]


@pytest.fixture
def recorded(monkeypatch):
    lines = Recorded()
    monkeypatch.setattr(stage_log, "_current", lines.log)
    return lines


def test_a_stage_has_a_line_when_it_begins_and_when_it_ends_with_the_time(recorded):
    recorded.now += 2.0
    with stage("export", "the model is written"):
        recorded.now += 1.5
    assert re.fullmatch(r"\d\d:\d\d:\d\d     2\.0 s  export: the model is written", recorded[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d     3\.5 s  export: done in 1\.5 s", recorded[1])


def test_while_stages_last_a_line_shows_what_each_waits_for(recorded):
    waiting = ["rollout-0", "rollout-1"]
    with stage("engines", waits_for=lambda: join_names(waiting)), stage("reference"):
        for _ in range(40):  # seconds
            recorded.now += 1.0
            recorded.log.beat()
        waiting.pop(0)
        recorded.now += 15.0
        recorded.log.beat()
    assert recorded.texts() == [
        "engines: begins",
        "reference: begins",
        "waiting: engines 15.0 s (rollout-0, rollout-1); reference 15.0 s",
        "waiting: engines 30.0 s (rollout-0, rollout-1); reference 30.0 s",
        "waiting: engines 55.0 s (rollout-1); reference 55.0 s",
        "reference: done in 55.0 s",
        "engines: done in 55.0 s",
    ]


def test_a_line_is_printed_at_least_every_20_seconds_until_the_last_stage_ends():
    """With the real thread, a hundred times faster than in a run."""
    waiting_printed, log = threading.Event(), None
    lines = []

    def say(line):
        lines.append(line)
        if "waiting" in line:
            waiting_printed.set()

    log = StageLog(say, every_s=0.15)
    threading.Thread(target=log.run, daemon=True).start()
    running = log.begin("engines", "", str, quiet=False)
    assert waiting_printed.wait(HANG_S)
    log.end(running)
    log.close()
    assert stage_log._EVERY_S < 20 and "engines: done" in lines[-1]


def test_a_view_may_read_the_stages_while_a_line_is_printed(monkeypatch):
    """A live view holds the terminal's lock while it reads stages, and printing a line takes that lock."""
    waited = []

    def say(line):
        asking = threading.Thread(target=open_stages, daemon=True)
        asking.start()
        asking.join(HANG_S)
        waited.append(asking.is_alive())

    log = StageLog(say, every_s=0.0)
    monkeypatch.setattr(stage_log, "_current", log)
    with stage("engines"):
        log.beat()
    assert waited == [False, False, False]


def test_a_stage_that_fails_is_reported_and_raises(recorded):
    with pytest.raises(RuntimeError, match="no room"), stage("Ray"):
        raise RuntimeError("no room")
    assert recorded.texts()[-1] == "Ray: failed after 0.0 s"


def test_the_loop_prints_stages_of_its_first_step_and_what_is_long_in_later_ones(recorded):
    loop = LoopStages()
    loop.phase("evaluate")
    loop.logged(step=False)
    for phase in ("sample", "update", "sync"):
        loop.phase(phase)
        recorded.now += 15.0
        recorded.log.beat()
    loop.logged(step=True)
    for phase in ("sample", "update", "evaluate"):  # a short evaluation after a later step
        loop.phase(phase)
        recorded.now += 5.0
        recorded.log.beat()
    loop.logged(step=False)
    loop.phase("save")
    recorded.now += 16.0
    recorded.log.beat()
    for phase in ("sample", "update"):  # later steps print a line every two minutes, and no end
        loop.phase(phase)
        for _ in range(3):
            recorded.now += 50.0
            recorded.log.beat()
    assert open_stages() == []  # the live view shows the phases of a step
    loop.logged(step=False)  # a concurrent evaluation
    recorded.now += 150.0
    recorded.log.beat()
    loop.logged(step=True)
    loop.end()
    log_ready()  # after a recovery: steps do not count as start-up
    assert recorded.texts()[:-1] == [
        "evaluation: held-out problems are sampled and scored",
        "evaluation: done in 0.0 s",
        "first step: samples, rewards and an update",
        "waiting: first step 15.0 s (sample)",
        "waiting: first step 30.0 s (update)",
        "waiting: first step 45.0 s (sync)",
        "first step: done in 45.0 s",
        "waiting: checkpoint 16.0 s",
        "checkpoint: done in 16.0 s",
        "waiting: step 2:30 min (sample)",
        "waiting: step 5:00 min (update)",
        "waiting: step 7:30 min (update)",
    ]
    assert "step 7" not in recorded[-1] and "first step 45.0 s" in recorded[-1]


def test_a_run_that_fails_in_its_first_step_ends_that_stage(recorded, tmp_path):
    with pytest.raises(RuntimeError), Tracker(fakes.config(tracking=OFF), tmp_path) as tracker:
        tracker.phase("sample")
        raise RuntimeError("lost")
    assert recorded.texts()[-1] == "first step: failed after 0.0 s" and open_stages() == []


def test_a_run_that_is_asked_to_end_has_saved_its_checkpoint(recorded, tmp_path):
    with pytest.raises(Preempted), Tracker(fakes.config(tracking=OFF), tmp_path) as tracker:
        tracker.phase("save")
        recorded.now += 16.0
        recorded.log.beat()
        tracker.phase("end")
        recorded.now += 5.0  # clean-up
        raise Preempted("ended as asked")
    assert recorded.texts()[-1] == "checkpoint: done in 16.0 s" and open_stages() == []


# Runs each command up to its first slow import, and prints which library that is.
UP_TO_THE_LIBRARIES = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "ray", "vllm", "transformers", "deepspeed"):
            print("imports", name, flush=True)
            raise SystemExit

sys.meta_path.insert(0, Finder())
from grpo_dist.cli import main
for command in sys.argv[1:]:
    print("command", command)
    try:
        main(command.split())
    except SystemExit:
        pass
"""


@pytest.mark.slow
def test_every_command_that_takes_long_says_what_it_does_before_it_imports_what_takes_long(tmp_path):
    config, pipeline = f"{ROOT}/configs/demo.yaml", f"{ROOT}/configs/pipelines/r1_demo.yaml"
    commands = [
        *(f"{name} {config}" for name in ("train", "sft", "sample", "bench", "eval", "score rows.jsonl")),
        f"pipeline {pipeline}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", UP_TO_THE_LIBRARIES, *commands], cwd=tmp_path, capture_output=True,
        text=True, timeout=HANG_S, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, *outputs = re.split(r"^command .*\n", done.stdout, flags=re.MULTILINE)
    assert len(outputs) == len(commands)
    for command, output in zip(commands, outputs, strict=True):
        first, second, *_ = output.splitlines()
        assert re.fullmatch(r"\d\d:\d\d:\d\d .*  libraries: are loaded", first), command
        assert second.startswith("imports "), command
    assert list(tmp_path.iterdir()) == []


def test_stages_before_the_actors_are_printed_from_the_first_second(tmp_path, monkeypatch, capsys):
    async def nothing(run, point):
        return run, {}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "_session", nothing)
    monkeypatch.setattr(session, "audit", lambda run: "")
    write("train.jsonl", GOOD)
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert main(["train", "config.yaml", "tracking.tensorboard=false"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]
    names = [re.split(r" {2,}", line)[2].partition(":")[0] for line in lines]
    started = [name for name, line in zip(names, lines, strict=True) if "done in" not in line]
    started = [name for name in started if name != "waiting"]  # on a busy machine
    assert started == [
        "libraries", "actors", "checks", "data", "model", "model files", "tokenizer", "prompts", "reward",
    ]  # fmt: skip
    assert sum("done in" in line for line in lines) == len(started)
