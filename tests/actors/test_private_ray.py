"""A cluster that a run starts is for its user alone, and a busy machine delays its start."""

import os
import socket
import stat
import subprocess
import sys

import pytest
import ray
from ray._private.node import Node
from ray._private.utils import validate_socket_filepath
from ray.exceptions import RpcError

from actors import connection
from actors.connection import close_session, prepare_token
from grpo_dist.config import ClusterConfig
from grpo_dist.errors import UserError


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def test_only_its_user_can_read_the_token(home):
    prepare_token()
    token = home / ".ray/auth_token"
    text = token.read_text()
    assert mode(token) == 0o600 and mode(token.parent) == 0o700 and len(text) == 64
    token.chmod(0o644)  # as Ray itself writes it
    prepare_token()
    assert mode(token) == 0o600 and token.read_text() == text


@pytest.mark.parametrize(("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "x" * 64)])
def test_no_token_is_written_where_none_is_read(home, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    prepare_token()
    assert not (home / ".ray").exists()


def test_a_token_somewhere_else_is_left_as_it_is_with_a_warning(home, monkeypatch, caplog):
    other = home / "token"
    other.write_text("x" * 64)
    other.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    prepare_token()
    assert mode(other) == 0o644 and "can be read by others; chmod 600 it" in caplog.text


def test_other_users_can_neither_enter_nor_rename_a_session(tmp_path):
    shared = tmp_path / "ray"
    (shared / "session_1").mkdir(parents=True)
    for path in (shared, shared / "session_1"):
        path.chmod(0o777)  # as Ray does
    close_session(shared / "session_1")
    assert mode(shared / "session_1") == 0o700 and mode(shared) == 0o1777


def test_ray_reads_no_logs_scales_nothing_and_measures_no_processes_for_nobody(monkeypatch):
    started, intervals, name = [], [], "REPORTER_UPDATE_INTERVAL_MS"
    for method in ("start_monitor", "start_log_monitor", "start_api_server"):
        monkeypatch.setattr(Node, method, lambda node, **_: started.append(node))

    def init(**_):
        node = Node.__new__(Node)
        node.start_monitor(), node.start_log_monitor(), node.start_api_server(include_dashboard=False)
        intervals.append(os.environ[name])

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv(name, "")  # so that it is removed again
    monkeypatch.delenv(name)
    connection.start_private_ray(include_dashboard=False)
    monkeypatch.setenv(name, "5000")  # set by the user
    connection.start_private_ray(include_dashboard=False)
    assert started == [] and intervals == ["86400000", "5000"]
    Node.start_monitor(None)  # the monitor of another cluster
    assert started == [None]


def failing(monkeypatch, message, times):
    """Let `ray.init` fail ``times`` times, each time after starting a process; return the processes."""
    processes = []

    def init(**options):
        assert options == {"address": "local", "log_to_driver": False, "include_dashboard": False}
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        if len(processes) <= times:
            raise Exception(message)

    monkeypatch.setattr(ray, "init", init)
    return processes


def test_a_cluster_that_is_too_slow_for_ray_is_started_again(monkeypatch, caplog):
    unrelated = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    processes = failing(monkeypatch, "The current node timed out during startup. This could happen", 2)
    try:
        connection.start_private_ray(include_dashboard=False)
        assert [process.wait() for process in processes[:2]] == [-9, -9]
        assert len(processes) == 3 and processes[2].poll() is unrelated.poll() is None
        assert [record.name for record in caplog.records].count("grpo_dist") == 2
    finally:
        for process in (unrelated, *processes):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("message", "times", "tries"), [("timed out during startup", 9, 5), ("no space left on device", 1, 1)]
)
def test_other_errors_and_the_last_are_raised(monkeypatch, message, times, tries):
    processes = failing(monkeypatch, message, times)
    with pytest.raises(Exception, match=message):
        connection.start_private_ray(include_dashboard=False)
    assert len(processes) == tries
    for process in processes:
        process.kill()
        process.wait()


LONGEST_SESSION = "session_2026-11-28_13-46-32_123456_4194304"


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize("length", [39, 40, 60, 200])
def test_paths_of_sockets_stay_within_the_limit_of_the_kernel(monkeypatch, variable, length):
    """Slurm sets TMPDIR to a directory of the job. Objects are still spilled to it."""
    options, directory = {}, "/" + "j" * (length - 1)
    monkeypatch.setattr(ray, "init", lambda **settings: options.update(settings))
    for name in ("RAY_TMPDIR", "VLLM_RPC_BASE_PATH", "RAY_object_spilling_directory"):
        monkeypatch.setenv(name, "")  # so that it is removed again
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, directory)
    connection.start_private_ray()
    sockets = options.get("_temp_dir", f"{directory}/ray")
    validate_socket_filepath(f"{sockets}/{LONGEST_SESSION}/sockets/plasma_store")
    if length > 39:
        assert sockets == "/tmp/ray" and options["object_spilling_directory"] == f"{directory}/ray"
        assert os.environ["VLLM_RPC_BASE_PATH"] == "/tmp"
    else:
        assert "_temp_dir" not in options and "VLLM_RPC_BASE_PATH" not in os.environ


def test_without_a_directory_with_a_short_name_the_error_names_tmpdir(monkeypatch, tmp_path):
    monkeypatch.setattr(connection, "_SHORT", (str(tmp_path / "none"),))
    monkeypatch.setenv("RAY_TMPDIR", "/" + "j" * 50)
    with pytest.raises(UserError, match=r"TMPDIR .* set RAY_TMPDIR to a directory of at most 39 characters"):
        connection.start_private_ray()


@pytest.fixture
def not_connected(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("no Ray was found"))
    monkeypatch.setattr(connection, "_LISTENS_S", 0.0)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nosuch.invalid:6379", "http://127.0.0.1:8265"])
def test_an_address_at_which_nobody_listens_is_refused_by_its_name(not_connected, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=f"^RAY_ADDRESS = {address}: no Ray cluster answers there"):
        connection.connect(ClusterConfig())
    with pytest.raises(UserError, match=f"^cluster.address = {address}: no Ray cluster answers there"):
        connection.connect(ClusterConfig(address=address))


def test_rays_client_is_refused_with_what_to_use(not_connected, monkeypatch):
    """It does not see the cluster's nodes."""
    advice = r"\(ray://\) .* with the address HEAD:6379, or submit it there: `grpo-dist submit --to ray`"
    with pytest.raises(UserError, match=f"^cluster.address = ray://head:10001: .*{advice}"):
        connection.connect(ClusterConfig(address="ray://head:10001"))
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(UserError, match=f"^RAY_ADDRESS = ray://head:10001: .*{advice}"):
        connection.connect(ClusterConfig())
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert connection.connect(ClusterConfig()) is False
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(UserError, match=advice):
        connection.connect(ClusterConfig())


def test_a_server_that_is_no_ray_is_refused_within_the_deadline_of_its_client(not_connected, monkeypatch):
    def silent(*, address):
        raise RpcError("Timed out while waiting for GCS to become available.")

    monkeypatch.setattr("ray._raylet.GcsClient", silent)
    monkeypatch.setattr(connection, "_LISTENS_S", 1.0)
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=r"no Ray cluster answers there .* answers no request of Ray"):
            connection.connect(ClusterConfig(address=address))
