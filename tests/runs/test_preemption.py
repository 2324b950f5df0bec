"""On a stop request a run saves its finished step if time allows; its exit code says so."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from grpo_dist.cli import report_end
from grpo_dist.data.order import step_prompts
from grpo_dist.driver import run
from grpo_dist.errors import RERUN, Preempted, RunEnded, StateLost, Unhealthy
from grpo_dist.evaluation.sampling import EvalSet
from grpo_dist.plugins.user_code import SOURCE, failures_named
from grpo_dist.runs import session as session_of
from grpo_dist.runs.checkpoint import ResumePoint
from grpo_dist.runs.preemption import Interrupted, Interruption, ended_by_sigterm
from grpo_dist.runs.prepare import RunInputs
from grpo_dist.runs.start_checks import readable_model
from tests.support import fakes
from tests.support.patience import HANG_S

KILL = {"TERM": signal.SIGTERM, "INT": signal.SIGINT}


def stop_during(world, *, step, number=signal.SIGTERM, then=None):
    """Send a signal during the update of ``step``, then continue with ``then``."""
    update = world.update

    async def update_then_signal(batches, **options):
        metrics = await update(batches, **options)
        if len(world.updates) == step:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)  # for the loop to handle it
            if then:
                await then()
        return metrics

    world.update = update_then_signal


def session(world, config, messages, eval_sets=(), **kwargs):
    async def train():
        interruption = Interruption(grace_s=config.checkpoint.grace_s, say=messages.append)
        async with interruption:
            with interruption.finishing():
                await run(
                    config, world.workers(), fakes.prompts(40), list(eval_sets), world, world,
                    stop_requested=interruption.stop_requested, **kwargs,
                )  # fmt: skip

    asyncio.run(train())


def check_resume(uninterrupted, world, config, step, jitter=False):
    """Resume ``world`` from ``step``; check that both have the batches of ``uninterrupted``."""
    resumed = fakes.World(jitter=jitter)
    resumed.version = step
    session(resumed, config, [], progress=world.saved[step])
    for a, b in zip(uninterrupted.updates, [*world.updates, *resumed.updates], strict=True):
        assert torch.equal(a[0].tokens, b[0].tokens)
    return resumed


@pytest.mark.parametrize("name", KILL)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_asked_to_stop_finishes_its_step_and_the_same_command_resumes(staleness, name):
    config, messages = fakes.config(steps=5, max_staleness=staleness), []
    uninterrupted, world = fakes.World(), fakes.World()
    session(uninterrupted, config, messages)
    stop_during(world, step=2, number=KILL[name])
    with pytest.raises(Preempted, match="stopped on request; step 2") as end:
        session(world, config, messages)
    assert end.value.exit_code == 75 and world.events[-2:] == ["settled", "end"]
    assert len(messages) == 1 and "stopping after this step and its checkpoint, within 60 s" in messages[0]
    assert list(world.saved) == [2] and 2 in world.logged and 3 not in world.logged
    check_resume(uninterrupted, world, config, 2, jitter=True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_run_asked_to_stop_in_its_last_step_is_saved_once_and_exits_as_preempted():
    world, messages = fakes.World(), []
    stop_during(world, step=3)
    with pytest.raises(Preempted):
        session(world, fakes.config(steps=3), messages)
    assert list(world.saved) == [3]


def test_a_step_longer_than_the_grace_period_is_abandoned():
    world, messages = fakes.World(), []
    stop_during(world, step=2, then=lambda: asyncio.sleep(60))
    config = fakes.config(steps=5, checkpoint={"grace_s": 0.05, "every": 1})
    with pytest.raises(Preempted, match=r"not finished within `checkpoint\.grace_s` = 0\.05 s"):
        session(world, config, messages)
    assert list(world.saved) == [1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_stop_during_sampling_keeps_finished_groups_and_waits_for_no_others(staleness):
    """One group of step 3 never finishes: the checkpoint of step 2 has the other three groups."""
    config, messages = fakes.config(steps=4, max_staleness=staleness, weight_sync={"mode": "keep"}), []
    uninterrupted = fakes.World(jitter=False)
    session(uninterrupted, config, messages)

    class Slow(fakes.World):
        async def sample(self, prompt, **request):
            samples = await super().sample(prompt, **request)
            if prompt.uid == third[1]:
                while len(self.updates) < 2:  # it may be sampled during the second update
                    await asyncio.sleep(0)
                for _ in range(1000):  # the others finish long before
                    await asyncio.sleep(0)
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(HANG_S)
            return samples

    third = [fakes.prompts(40)[i].uid for i in step_prompts(40, 4, 0, 2 + staleness)]
    world = Slow(jitter=False)
    with pytest.raises(Preempted, match="stopped on request; step"):
        session(world, config, messages)
    (step,) = world.saved
    progress = world.saved[step]
    assert {g.prompt.uid for g in progress.pipeline.partial[2 + staleness]} == {*third} - {third[1]}
    resumed = check_resume(uninterrupted, world, config, step)
    assert [uid for uid, *_ in resumed.sampled if uid in third] == [third[1]]


def test_a_stop_during_sampling_gives_up_what_is_in_flight_before_it_saves():
    """A colocated policy can save only once no sample is in flight."""
    config, messages, in_flight = fakes.config(steps=4), [], set()

    class Slow(fakes.World):
        async def sample(self, prompt, **request):
            if len(self.updates) < 2:
                return await super().sample(prompt, **request)
            in_flight.add(prompt.uid)
            try:
                os.kill(os.getpid(), signal.SIGTERM) if len(in_flight) == 4 else None
                await asyncio.sleep(HANG_S)
            finally:
                in_flight.remove(prompt.uid)

        async def save(self, step, workers, progress):
            assert not in_flight
            await super().save(step, workers, progress)

    world = Slow(jitter=False)
    with pytest.raises(Preempted, match="stopped on request; step 2 saved"):
        session(world, config, messages)
    assert list(world.saved) == [2]


def test_a_stop_during_an_evaluation_saves_the_step_and_evaluates_on_resume():
    """The evaluation takes longer than the grace period."""
    evaluation = {"before": True, "after": False, "every": 2, "samples_per_prompt": 1, "k": [1]}
    config, messages = fakes.config(steps=4, evaluation=evaluation), []
    eval_sets = [EvalSet("held", [dataclasses.replace(p, uid=f"held {p.uid}") for p in fakes.prompts(3)])]
    uninterrupted = fakes.World(jitter=False)
    session(uninterrupted, config, messages, eval_sets=eval_sets)

    class Long(fakes.World):
        async def sample(self, prompt, **request):
            if prompt.uid.startswith("held") and len(self.updates) == 2:
                if prompt.uid == "held p0":
                    os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)
            return await super().sample(prompt, **request)

    world = Long(jitter=False)
    with pytest.raises(Preempted, match="stopped on request; step 2 saved"):
        session(world, config, messages, eval_sets=eval_sets)
    assert list(world.saved) == [2] and world.saved[2].evaluation_pending
    assert not any(name.startswith("eval/") for name in world.logged[2])
    resumed = fakes.World(jitter=False)
    resumed.version = 2
    session(resumed, config, messages, eval_sets=eval_sets, progress=world.saved[2])
    assert not resumed.saved[4].evaluation_pending
    evaluated = {s: logged for s, logged in uninterrupted.logged.items() if "eval/held/pass@1" in logged}
    assert sorted(evaluated) == [0, 2, 4]
    for step in (2, 4):
        for name in (n for n in evaluated[step] if n.startswith("eval/")):
            assert resumed.logged[step][name] == evaluated[step][name]


def test_a_stop_while_engines_drain_saves_the_finished_step():
    """A sample of the next batch never finishes, and a weight sync would wait for it."""
    config, messages = fakes.config(steps=5, max_staleness=1), []
    uninterrupted = fakes.World(jitter=False)
    session(uninterrupted, config, messages)

    class Slow(fakes.World):
        async def sample(self, prompt, **request):
            samples = await super().sample(prompt, **request)
            if prompt.uid == third[1]:
                asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)
            return samples

    third = [fakes.prompts(40)[i].uid for i in step_prompts(40, 4, 0, 2)]
    world = Slow(jitter=False)
    with pytest.raises(Preempted, match="stopped on request; step 2 saved"):
        session(world, config, messages)
    assert list(world.saved) == [2] and len(world.updates) == 2 and world.version == 1
    check_resume(uninterrupted, world, config, 2)


def test_a_failure_during_the_stop_does_not_prevent_it():
    world, messages = fakes.World(), []

    async def lose():
        raise StateLost("policy-1 is lost")

    stop_during(world, step=2, then=lose)
    with pytest.raises(Preempted, match=r"the step was not saved \(policy-1 is lost\)"):
        session(world, fakes.config(steps=5), messages)


def test_a_second_signal_ends_at_once():
    world, messages = fakes.World(), []

    async def signal_again():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    stop_during(world, step=2, then=signal_again)
    with pytest.raises(Interrupted, match="SIGTERM, again: stopped at once") as end:
        session(world, fakes.config(steps=5), messages)
    assert end.value.exit_code == 143 and not world.saved


def test_a_stop_that_cannot_be_announced_still_has_its_grace_period():
    """Ctrl-C also kills a `tee` that reads the output."""

    async def train():
        def say(text):
            raise BrokenPipeError

        async with Interruption(grace_s=0.05, say=say) as interruption:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            with interruption.finishing():
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(HANG_S)

    with pytest.raises(Preempted, match=r"not finished within `checkpoint\.grace_s`") as end:
        asyncio.run(train())
    assert end.value.exit_code == 75


def test_a_stop_during_the_start_ends_at_once_and_leaves_no_worker():
    cleaned_up = []

    async def start():
        async with Interruption(grace_s=60, say=print):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)
            finally:
                cleaned_up.append(True)

    with pytest.raises(Preempted, match="rerun the same command"):
        asyncio.run(start())
    assert cleaned_up


@pytest.mark.parametrize(
    "during",
    [nullcontext, lambda: failures_named(SOURCE, "m:f"), lambda: readable_model(Path("m"), "tokenizer")],
)
def test_sigterm_before_the_first_worker_is_handled(during):
    """Also where every exception is reported as a failure of user code, or of a file."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="SIGTERM: stopped"), ended_by_sigterm(), during():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("asked", [False, True])
def test_sigterm_after_the_loop_ends_the_run_in_order_and_a_second_signal_kills_it(asked):
    """The ledger, the model card and the trackers come after the loop."""

    async def train():
        async with Interruption(grace_s=60, say=print) as interruption:
            with interruption.finishing():
                if asked:
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.sleep(0.01)

    with ended_by_sigterm():
        before, before_int = map(signal.getsignal, (signal.SIGTERM, signal.SIGINT))
        with pytest.raises(Preempted, match="last step is saved") if asked else nullcontext():
            asyncio.run(train())
        assert signal.getsignal(signal.SIGTERM) is (signal.SIG_DFL if asked else before)
        assert signal.getsignal(signal.SIGINT) is (signal.default_int_handler if asked else before_int)


def test_the_signal_handler_of_ray_is_recognised():
    """It exits with the signal's number; other exits are unchanged."""
    with pytest.raises(Preempted, match="SIGTERM: stopped"), ended_by_sigterm():
        raise SystemExit(signal.SIGTERM)
    with pytest.raises(SystemExit), ended_by_sigterm():
        raise SystemExit(1)


@pytest.mark.parametrize(("end", "code"), [(Preempted("x"), 75), (Interrupted("x", 143), 143)])
def test_the_exit_code_shows_whether_to_rerun(end, code, capsys):
    assert report_end(end) == code
    assert capsys.readouterr().err == "x\n"


@pytest.mark.parametrize(
    ("resume", "end", "added"),
    [
        ("auto", Preempted(f"ended; {RERUN}"), ""),
        ("never", Preempted(f"ended; {RERUN}"), "; add checkpoint.resume=auto name=run-2 to it ("),
        ("never", Interrupted(f"ended; {RERUN}", 143), "; add checkpoint.resume=auto name=run-2 to it ("),
        ("never", Unhealthy("bad; rerunning the same command resumes"), "; add checkpoint.resume=auto name="),
        ("never", RunEnded("the ledger is wrong"), ""),
    ],
)
def test_a_run_that_never_resumes_says_which_name_resumes_it(tmp_path, monkeypatch, resume, end, added):
    """Otherwise the same command would start run-3."""
    (tmp_path / "run").mkdir()
    config = fakes.config(output_dir=str(tmp_path), name="run", checkpoint={"resume": resume})
    message, code = str(end), end.exit_code

    async def failing_session(run, point):
        raise end

    inputs = RunInputs(Path(), fakes.prompts(4), []), ResumePoint()
    monkeypatch.setattr(session_of, "_load_inputs", lambda *_: inputs)
    monkeypatch.setattr(session_of, "_session", failing_session)
    with pytest.raises(type(end)) as raised:
        session_of.train(config)
    assert str(raised.value).startswith(message + added) and (added or str(raised.value) == message)
    assert raised.value.exit_code == code
    assert (tmp_path / ("run" if resume == "auto" else "run-2") / "config.yaml").is_file()


@pytest.mark.parametrize("stop", [signal.raise_signal, sys.exit])  # `sys.exit`: as Ray's handler does
def test_a_run_that_never_resumes_and_is_stopped_at_its_start_says_it_too(tmp_path, monkeypatch, stop):
    config = fakes.config(output_dir=str(tmp_path), name="run", checkpoint={"resume": "never"})
    monkeypatch.setattr(session_of, "_load_inputs", lambda *_: stop(signal.SIGTERM))
    with pytest.raises(Preempted, match=r"; add .*resume=auto name=run to it"), ended_by_sigterm():
        session_of.train(config)


WHILE_RAY_IS_THERE = """
import os, signal, sys, time
from tests.support import fakes
from actors import connection
from grpo_dist.errors import RunEnded
from grpo_dist.runs.preemption import ended_by_sigterm
try:
    with ended_by_sigterm():
        connection.connect(fakes.config(cluster={"num_cpus": 1}).cluster)
        import ray  # after `actors`, which sets what Ray reads when it is imported
        session = ray._private.worker._global_node.get_session_dir_path()
        for path in (session, os.path.expanduser("~/.ray/auth_token")):
            print(oct(os.stat(path).st_mode & 0o777), flush=True)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        finally:
            time.sleep(4)  # cleaning up
            print("put away", flush=True)
except RunEnded as end:
    sys.exit(end.exit_code)
"""


def test_a_run_with_a_ray_of_its_own_keeps_it_to_its_user_and_has_time_to_clean_up(tmp_path):
    """Ray's handler aborts a program three seconds after a SIGTERM, also during its start. Session and token
    are private, although Ray itself makes them world-readable.
    """
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "HOME": str(tmp_path)}
    environment = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", WHILE_RAY_IS_THERE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (75, "0o700\n0o600\nput away\n"), done.stderr[-3000:]
