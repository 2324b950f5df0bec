"""Choose the Ray cluster of a run, connect to it, and check whether the run fits it.

A private cluster, which a run starts for itself, is closed to other users of the machine: Ray writes its
token with default file permissions, mostly readable by all, and makes its directories writable by all.

Ray is imported lazily: checking a run on this machine does not need it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from actors.placement.demands import Resources, describe, placement
from actors.placement.fitting import Node, bundles, too_large
from grpo_dist.config import ClusterConfig, Config
from grpo_dist.errors import UserError
from grpo_dist.policy.deepspeed_config import check_offload
from grpo_dist.runtime.hardware import available_cpus, usable_gpus
from grpo_dist.runtime.stage_log import print_line

logger = logging.getLogger("grpo_dist")
T = TypeVar("T")

_TRIES = 5
# Ray's processes read these when they start. They turn off what a private cluster does not need: dashboard
# statistics per process, and prestarted workers.
_NOT_COLLECTED = {
    "REPORTER_UPDATE_INTERVAL_MS": "86400000",
    # Every actor sets environment variables, so no actor uses a prestarted worker.
    "RAY_prestart_worker_first_driver": "0",
}
# A socket path has at most 107 bytes. Ray appends a slash and 63 to its temporary directory:
# /session_2026-11-28_13-46-32_123456_1234567/sockets/plasma_store. vLLM and multiprocessing append fewer.
_LONGEST = 107 - 63 - 1
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")
_ENGINES = "VLLM_RPC_BASE_PATH"  # vLLM's sockets; default: TMPDIR
_SPILLING = "RAY_object_spilling_directory"
_TOO_SLOW = "timed out during startup"  # in the message of a plain Exception


def start_private_ray(**options: Any) -> None:
    """Start a private Ray for this process, with ``options`` of `ray.init`. Removes variables from the
    environment that would let an actor see GPUs that it was not assigned; Ray's processes inherit it.
    """
    import ray

    from actors.placement.own_gpus import EMPTIED, NOT_SET

    for name, value in _NOT_COLLECTED.items():
        os.environ.setdefault(name, value)
    for name in (NOT_SET, EMPTIED):  # they change which GPUs an actor sees
        os.environ.pop(name, None)
    options = _short_paths() | options
    with _without_monitors():
        started_in_time(lambda: ray.init(address="local", log_to_driver=False, **options))


@contextmanager
def _without_monitors() -> Iterator[None]:
    """Keep Ray from starting the autoscaler, the log monitor and the dashboard. Ray starts the dashboard even
    without its pages, only for usage statistics, and waits 2.5 s for it.
    """
    from ray._private.node import Node

    names = ("start_monitor", "start_log_monitor", "start_api_server")
    methods = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, lambda _, **options: None)
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(Node, name, method)


def _short_paths() -> dict[str, str]:
    """Return `ray.init` options that keep the socket paths of Ray and engines short when TMPDIR is long, as
    under Slurm. Objects that do not fit into memory still spill to TMPDIR. Raises UserError if no directory
    with a short name is writable.
    """
    from ray._common.utils import get_default_ray_temp_dir

    default_dir = Path(get_default_ray_temp_dir())
    if len(os.fsencode(default_dir)) <= _LONGEST:
        return {}
    short = next((path for path in _SHORT if os.access(path, os.W_OK | os.X_OK)), None)
    if short is None:
        raise UserError(
            f"TMPDIR (or RAY_TMPDIR) = {default_dir.parent}: Ray's sockets are below it, and their paths are "
            f"longer than 107 bytes; set RAY_TMPDIR to a directory of at most {_LONGEST - len('/ray')} "
            "characters"
        )
    os.environ.setdefault(_ENGINES, short)
    print_line(f"Ray's sockets and logs are in {short}/ray: {default_dir.parent} is too long for sockets")
    options = {"_temp_dir": f"{short}/ray"}
    if _SPILLING not in os.environ:
        options["object_spilling_directory"] = str(default_dir)
    return options


def started_in_time(start_ray: Callable[[], T]) -> T:
    """Return ``start_ray()``; retry it when Ray's processes exceed their 30 s limit, as on a busy machine."""
    before = set(psutil.Process().children())
    for tries_left in reversed(range(_TRIES)):
        try:
            return start_ray()
        except Exception as error:
            if _TOO_SLOW not in str(error) or not tries_left:
                raise
        logger.warning("Ray's processes did not start within its limit; retrying")
        for process in set(psutil.Process().children()) - before:
            process.kill()
    raise AssertionError("the last try returns or raises")


def prepare_token() -> None:
    """Write Ray's token file, readable by this user alone; keep an existing one and make it private."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    if token_path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        _warn_if_open(Path(token_path))
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        _close_to_others(path, 0o600)
        return
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))


def close_session(session: Path) -> None:
    """Keep other users from entering a session directory, and from renaming it in the shared parent."""
    _close_to_others(session, 0o700)
    with suppress(OSError):
        shared = session.parent.stat()
        if shared.st_uid == os.getuid() and shared.st_mode & stat.S_IWOTH:
            session.parent.chmod(stat.S_IMODE(shared.st_mode) | stat.S_ISVTX)
        elif shared.st_uid not in (0, os.getuid()) and not shared.st_mode & stat.S_ISVTX:
            logger.warning(
                "%s belongs to another user, who can replace what Ray keeps there; set RAY_TMPDIR to a "
                "directory of your own",
                session.parent,
            )


def _close_to_others(path: Path, mode: int) -> None:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(mode)
    except OSError as error:
        logger.warning("%s can be read by others, and cannot be changed (%s); chmod it", path, error.strerror)


def _warn_if_open(path: Path) -> None:
    with suppress(OSError):
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            logger.warning("RAY_AUTH_TOKEN_PATH = %s can be read by others; chmod 600 it", path)


_NO_CLIENT = (
    "through Ray's client (ray://) a run cannot see the nodes of the cluster; start the run on one of the "
    "nodes, with the address HEAD:6379, or submit it there: `grpo-dist submit --to ray`"
)
_LISTENS_S = 10.0  # until a starting cluster opens its port


def address_of(cluster: ClusterConfig) -> str:
    """Return the address of the Ray cluster to join; `local`: a private one on this machine."""
    return cluster.address or os.environ.get("RAY_ADDRESS") or "local"


def local_resources(cluster: ClusterConfig) -> Resources:
    """Return this machine's resources. Raises UserError like `usable_gpus`."""
    return Resources(cluster.num_cpus or available_cpus(), usable_gpus())


def resources_of(has: Sequence[Node], *, shared: bool) -> Resources:
    """Add up all nodes of a cluster; ``shared``: see `Resources`."""
    cpus, gpus = int(sum(node.cpus for node in has)), int(sum(node.gpus for node in has))
    most = int(max(node.cpus for node in has))
    return Resources(max(cpus, 1), gpus, max(most, 1), shared)


def check_grows_no_more(cluster: ClusterConfig) -> None:
    """Raises UserError for a private cluster that is expected to grow."""
    if cluster.grows_to is not None:
        raise UserError(
            "`cluster.grows_to` is set, but the run starts a private cluster on this machine; set "
            "`cluster.address` (or RAY_ADDRESS) to the one that grows, or remove it"
        )


def is_this_machine() -> bool:
    """Return whether this machine is the whole cluster, so that a check here covers every node."""
    import ray

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return alive == {ray.get_runtime_context().get_node_id()}


def _check_answers(address: str) -> None:
    """Raise ConnectionError if no Ray answers at ``address`` within a minute; `ray.init` would wait 15
    minutes. Raises ValueError for a malformed address.

    Retries a closed port for 10 s: its cluster may be starting. Ray's client then tells a Ray cluster from
    other servers, within its limit of 40 s.
    """
    if "://" in address:
        raise ValueError("expected HOST:PORT, auto or local")
    from ray import __version__
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import RayError

    bootstrap = canonicalize_bootstrap_address(address)
    assert bootstrap is not None  # not `local`
    host, _, port = bootstrap.rpartition(":")
    end = time.monotonic() + _LISTENS_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENS_S).close()
            break
        except OSError as error:
            if time.monotonic() >= end:
                raise ConnectionError(f"nothing listens at {bootstrap}: {error}") from error
        time.sleep(0.5)
    try:
        GcsClient(address=bootstrap)
    except RayError as error:
        raise ConnectionError(f"{bootstrap} answers no request of Ray {__version__}: {error}") from error


def connect(cluster: ClusterConfig) -> bool:
    """Join the cluster, or start a private local one; return whether this call opened the connection.

    Raises UserError for a connection of Ray's client, if no cluster answers within a minute, or if CUDA does
    not start on a private one's GPUs.
    """
    import ray

    if ray.is_initialized():
        if ray.util.client.ray.is_connected():
            raise UserError(f"this process has called ray.init(): {_NO_CLIENT}")
        return False
    address, key = address_of(cluster), "cluster.address" if cluster.address else "RAY_ADDRESS"
    if address.startswith("ray://"):
        raise UserError(f"{key} = {address}: {_NO_CLIENT}")
    # By default Ray runs workers at the lowest priority, so other programs on this machine starve them. Ray
    # reads this when a cluster starts; a running cluster keeps its value.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A failed group has two results, and its caller reads only the first.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    local: dict[str, Any] = {}
    if address == "local":
        check_grows_no_more(cluster)
        local = {"num_cpus": cluster.num_cpus, "include_dashboard": False}
    if local and not usable_gpus():
        local["num_gpus"] = 0  # Ray counts GPUs even with the CPU build of torch
    if local:
        prepare_token()
    try:
        if local:
            start_private_ray(namespace=None, logging_level=logging.ERROR, **local)
        else:
            _check_answers(address)
            ray.init(address=address, namespace=None, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:  # Ray raises ValueError for a malformed address
        raise UserError(
            f"{key} = {address}: no Ray cluster answers there ({error}); start one with `ray start "
            "--head`, or leave cluster.address and RAY_ADDRESS unset for a private local one"
        ) from error
    if local:
        close_session(Path(ray._private.worker._global_node.get_session_dir_path()))
    return True


class Fit(NamedTuple):
    """``words``: description of a run's placement; ``gpus``: GPUs of the whole cluster."""

    words: str
    gpus: int


def fit(config: Config, *, training: bool = True) -> Fit:
    """Check that a training run, or an evaluation, fits the cluster, before starting anything.

    Raises UserError if it needs more than the cluster has.
    """
    is_connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if address_of(config.cluster) == "local" and not is_connected:
        check_grows_no_more(config.cluster)
        nodes, here, has = None, True, local_resources(config.cluster)
    else:
        import ray

        from actors.placement.reservation import expected

        owns = connect(config.cluster)
        nodes = expected(config.cluster)
        here, has = is_this_machine() and config.cluster.grows_to is None, resources_of(nodes, shared=True)
        if owns:
            ray.shutdown()
    if training and here:
        check_offload(config.policy)  # on another cluster, every rank checks its own machine
    demands = placement(config, has, training=training)
    if nodes is not None and (problem := too_large(bundles(demands), nodes)):
        raise UserError(f"cluster: {problem}")
    return Fit(describe(demands, has), has.gpus)
