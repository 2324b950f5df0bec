"""Runs submitted to a real Slurm: its controller and two nodes on this machine, as Debian packages them
(slurmctld, slurmd, slurm-client, munge). No event of a job may change the numbers of a run.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from grpo_dist.cli import main
from tests.chaos.verdict import difference
from tests.support.patience import HANG_S, wait_until
from tests.support.processes import free_port
from tests.support.real_runs import BASE, has_checkpoint, metrics, survivors
from tests.support.submissions import BIN, ROOT, command, config_in

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]
pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"no {', '.join(MISSING)}; on Debian: apt-get install slurmctld slurmd slurm-client munge",
    ),
    pytest.mark.skipif(os.getuid() != 0, reason="slurmd starts jobs, which needs root"),
]

STEPS = 8
SLOW = '{name: slow, function: "end_to_end_rewards:slow"}'
CONFIG = BASE.replace("{function: math},", f"{{function: math}}, {SLOW},")
NODES = ("n1", "n2")
ACTIVE_STATES = ("PENDING", "RUNNING", "COMPLETING", "SIGNALING", "REQUEUED")
# One task plugin, no cgroups and no accounting, as on a machine without systemd.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket,cred_expire=5
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobRequeue=1
ReturnToService=2
SlurmdTimeout=15
KillWait=120
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A controller and two nodes; SLURM_CONF leads Slurm's programs to them."""

    def __init__(self):
        self.place = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short, because it holds sockets
        for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
            (self.place / name).mkdir(mode=0o700)
        self.conf = self.place / "slurm.conf"
        host = socket.gethostname()
        nodes = [
            f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=16" for n in NODES
        ]
        user = psutil.Process().username()
        self.conf.write_text(
            CONF.format(host=host, port=free_port(), user=user, place=self.place, nodes="\n".join(nodes))
        )
        self.daemons = {}

    def start(self):
        munge = self.place / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "log-file": "log", "pid-file": "pid"}
        options = [f"--{k}={munge / v}" for k, v in (files | {"seed-file": "seed"}).items()]
        self._start("munged", "--foreground", "--force", *options)
        wait_until((munge / "socket").exists, self.logs)
        self._start("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        up = ("sinfo", "--noheader", "--format=%D %t")
        wait_until(lambda: self.ask(*up).split() == ["2", "idle"], self.logs)

    def start_node(self, node):
        self._start("slurmd", "-D", "-N", node, name=node)

    def lose_node(self, node):
        """Kill the node's daemon and all its processes at once, like a power cut."""
        lost = [self.daemons.pop(node), *self.processes_of(node)]
        for act in (psutil.Process.suspend, psutil.Process.kill):  # none reports another's end
            for process in lost:
                with suppress(psutil.NoSuchProcess):
                    act(process)

    def processes_of(self, node):
        """Return the processes of jobs on ``node``, and Slurm's processes that watch them."""
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.name() == "slurmstepd":
                    sockets = (socket.laddr for socket in process.net_connections(kind="unix"))
                    if any(str(address).startswith(f"{self.place}/spool-{node}/") for address in sockets):
                        processes.append(process)
                    continue
                environment = process.environ()
                if environment.get("SLURM_CONF") == str(self.conf) and (
                    environment.get("SLURMD_NODENAME") == node
                ):
                    processes.append(process)
        return processes

    def ask(self, *command):
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True).stdout

    def job(self, number):
        """Return the controller's fields of a job."""
        words = self.ask("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def logs(self):
        return "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in self.place.glob("*.out"))

    def end(self):
        with suppress(subprocess.SubprocessError):
            self.ask("scancel", "--user", psutil.Process().username())
            self.ask("scancel", "--signal=KILL", "--full", "--user", psutil.Process().username())
        for node in NODES:
            for process in self.processes_of(node):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(30)
            except psutil.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(self.place, ignore_errors=True)

    def _start(self, program, *arguments, name=None):
        environment = {k: v for k, v in os.environ.items() if k != "GRPO_DIST_TEST_RUN"}  # outlives a test
        with (self.place / f"{name or program}.out").open("a") as out:
            self.daemons[name or program] = psutil.Popen(
                [program, *arguments], stdout=out, stderr=out, env=environment
            )


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        slurm = Cluster()
        patch.setenv("SLURM_CONF", str(slurm.conf))
        patch.setenv("PATH", f"{BIN}:{os.environ['PATH']}:/usr/sbin:/sbin")
        patch.setenv("PYTHONPATH", str(ROOT))
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.end()


@pytest.fixture
def place(tmp_path, monkeypatch):
    mark = secrets.token_hex(16)
    monkeypatch.setenv("GRPO_DIST_TEST_RUN", mark)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not survivors(mark, seconds=HANG_S)


def submit(directory, *arguments, name="run", steps=STEPS, nodes=2):
    """Submit a run on ``nodes`` nodes, all of them by default; return its job."""
    settings = (f"name={name}", f"steps={steps}", "checkpoint.every=1", "checkpoint.keep=20")
    command = ["submit", str(config_in(directory, CONFIG)), "--to", "slurm", "--gpus-per-node", "0"]
    assert main([*command, "--nodes", str(nodes), *arguments, *settings]) == 0
    return json.loads((directory / f"runs/{name}/submitted.json").read_text())["job"]


@pytest.fixture
def full(cluster):
    """Occupy both nodes with another job."""
    number = cluster.ask(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 10000"
    ).strip()
    wait_until(lambda: cluster.job(number)["JobState"] == "RUNNING", cluster.logs)
    yield
    cluster.ask("scancel", number)
    wait_until(lambda: cluster.job(number)["JobState"] == "CANCELLED", cluster.logs)


def log(directory, number):
    return "".join(path.read_text() for path in directory.glob(f"runs/*/slurm-{number}.log"))


def wait_until_job(cluster, directory, number, reached, *ends):
    """Wait for ``reached(job)``; fail at once if the job ends in a state outside ``ends``."""

    def look():
        job = cluster.job(number)
        assert job["JobState"] in (*ends, *ACTIVE_STATES), (job, log(directory, number))
        return reached(job)

    wait_until(look, lambda: f"{cluster.job(number)}\n{log(directory, number)}\n{cluster.logs()}")
    return cluster.job(number)


def wait_for(cluster, directory, number, state):
    return wait_until_job(cluster, directory, number, lambda job: job["JobState"] == state, state)


def wait_for_checkpoint(cluster, directory, number, step):
    run = directory / "runs/run"
    wait_until_job(cluster, directory, number, lambda _: has_checkpoint(run, f"step_{step:06d}"))


def assert_same_numbers(directory, usual):
    """Assert that all steps have equal metrics, apart from clocks and counts of replaced workers."""
    assert [line["step"] for line in metrics(directory)] == [line["step"] for line in metrics(usual)]
    assert difference(metrics(directory), metrics(usual)) is None


@pytest.fixture(scope="module")
def usual(cluster, tmp_path_factory):
    """Return the directory and the job of a run without disturbance."""
    directory = tmp_path_factory.mktemp("usual")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        number = submit(directory)
    wait_for(cluster, directory, number, "COMPLETED")
    return directory, number


@pytest.mark.slow
def test_a_run_on_two_nodes_goes_to_its_end(usual, capsys):
    directory, number = usual
    output = log(directory, number)
    assert "2 of 2 nodes have joined" in output and "the run ended with exit code 0" in output
    assert [line["step"] for line in metrics(directory)] == list(range(STEPS + 1))
    code, status = command(capsys, "status", directory / "runs/run")
    assert code == 0 and "COMPLETED" in status, status
    assert output in command(capsys, "logs", directory / "runs/run")[1]


@pytest.mark.slow
def test_a_stopped_run_saves_its_step_and_another_job_continues_it(usual, cluster, place, capsys):
    number = submit(place)
    wait_for_checkpoint(cluster, place, number, 2)
    assert "RUNNING" in command(capsys, "status", place / "runs/run")[1]
    assert command(capsys, "stop", place / "runs/run")[0] == 0
    job = wait_for(cluster, place, number, "FAILED")  # a job whose exit code is not 0
    assert job["ExitCode"] == "75:0" and job["Restarts"] == "0"
    steps = [line["step"] for line in metrics(place)]
    assert has_checkpoint(place / "runs/run", f"step_{steps[-1]:06d}")
    second = submit(place)
    wait_for(cluster, place, second, "COMPLETED")
    assert f"step_{steps[-1]:06d}" in log(place, second)
    assert_same_numbers(place, usual[0])


@pytest.mark.slow
def test_before_its_time_limit_a_run_is_saved_requeued_and_resumed(usual, cluster, place, capsys):
    number = submit(place)
    wait_for_checkpoint(cluster, place, number, 2)
    # The signal is due 180 s before the limit, and the new limit is closer than that.
    elapsed = cluster.job(number)["RunTime"].split(":")
    minutes = int(elapsed[0]) * 60 + int(elapsed[1]) + 2
    cluster.ask("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
    wait_until_job(cluster, place, number, lambda job: int(job["Restarts"]) >= 1)
    cluster.ask("scontrol", "update", f"JobId={number}", "TimeLimit=UNLIMITED")
    wait_for(cluster, place, number, "COMPLETED")
    assert "USR1: ending after this step" in log(place, number)
    assert_same_numbers(place, usual[0])


@pytest.mark.slow
@pytest.mark.parametrize("node", NODES)
def test_a_node_that_is_lost_requeues_the_job_and_changes_no_number(usual, cluster, place, node):
    """The first node has Ray's head and the driver, the second node engines or ranks."""
    number = submit(place)
    wait_for_checkpoint(cluster, place, number, 2)
    cluster.lose_node(node)
    try:
        wait_until_job(cluster, place, number, lambda job: int(job["Restarts"]) >= 1)
    finally:
        cluster.start_node(node)
    wait_for(cluster, place, number, "COMPLETED")
    assert_same_numbers(place, usual[0])


@pytest.mark.slow
def test_a_cancelled_job_is_over_and_leaves_no_process(cluster, place, capsys):
    number = submit(place)
    wait_for_checkpoint(cluster, place, number, 1)
    cluster.ask("scancel", number)
    job = wait_for(cluster, place, number, "CANCELLED")
    assert job["Restarts"] == "0"
    assert "CANCELLED" in command(capsys, "status", place / "runs/run")[1]
    last = metrics(place)[-1]["step"]
    wait_until(lambda: not cluster.processes_of("n1") + cluster.processes_of("n2"), "processes are left")
    assert has_checkpoint(place / "runs/run", f"step_{last:06d}")  # KillWait sufficed


@pytest.mark.slow
def test_runs_with_own_names_share_the_nodes_and_one_begins_with_the_model_of_another(cluster, place, capsys):
    first = submit(place, name="first", steps=2, nodes=1)
    beside = submit(place, "seed=1", name="beside", steps=2, nodes=1)
    second = submit(place, "--after", "runs/first", "model.path=runs/first@latest", name="second", steps=1)
    wait_for(cluster, place, first, "RUNNING")
    wait_for(cluster, place, beside, "RUNNING")
    assert cluster.job(second)["Reason"] == "Dependency"
    for number in (first, beside, second):
        wait_for(cluster, place, number, "COMPLETED")
    assert cluster.job(first)["NodeList"] != cluster.job(beside)["NodeList"]
    assert cluster.job(second)["StartTime"] >= cluster.job(first)["EndTime"]
    assert len(metrics(place, "second")) == 2 and metrics(place, "first") != metrics(place, "beside")


def test_a_job_that_waits_is_shown_and_refused_a_twin_and_cancelled_by_stop(cluster, full, place, capsys):
    number = submit(place)
    wait_until(lambda: cluster.job(number)["Reason"] != "None", "the job does not wait")
    assert "PENDING" in command(capsys, "status", place / "runs/run")[1]
    code, output = command(
        capsys, "submit", place / "tiny.yaml", "--to", "slurm", "--gpus-per-node", "0", "--nodes", "2"
    )
    assert code == 2 and f"its job {number} is pending or running; end it with" in output
    assert command(capsys, "stop", place / "runs/run")[0] == 0
    wait_for(cluster, place, number, "CANCELLED")
    assert log(place, number) == ""


def test_a_job_after_one_that_is_cancelled_never_begins(cluster, full, place, capsys):
    first = submit(place, name="first")
    second = submit(place, "--after", "runs/first", name="second")
    wait_until(lambda: cluster.job(second)["Reason"] == "Dependency", "the job does not wait for the first")
    status = command(capsys, "status", place / "runs/second")[1]
    assert "PENDING" in status and "Dependency" in status
    cluster.ask("scancel", first)
    wait_for(cluster, place, second, "CANCELLED")
    assert log(place, second) == ""
