"""The Ray cluster of a run: which one it is, what it has, and the connection to it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

from actors import private_ray
from actors.placement.demands import Resources
from actors.placement.fitting import Node
from grpo_dist.config import ClusterConfig
from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import available_cpus, usable_gpus

_LISTENS_S = 10.0  # until a port of a cluster that starts is open


def address_of(cluster: ClusterConfig) -> str:
    """Return the address of the Ray cluster to join; `local`: a private one on this machine."""
    return cluster.address or os.environ.get("RAY_ADDRESS") or "local"


def local_resources(cluster: ClusterConfig) -> Resources:
    """Return what this machine has. Raises UserError as `usable_gpus`."""
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
            "`cluster.grows_to` is set, and the run has a cluster of its own, which is this machine; set "
            "`cluster.address` (or RAY_ADDRESS) to the one that grows, or remove it"
        )


def is_this_machine() -> bool:
    """Return whether the cluster is this machine alone, so that a check here holds for every node."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return alive == {ray.get_runtime_context().get_node_id()}


def _check_answers(address: str) -> None:
    """Raise ConnectionError where no Ray answers at ``address`` within a minute; `ray.init` waits a quarter
    of an hour. Raises ValueError for an address of another kind.

    A port that nobody listens on is asked again for some seconds: its cluster may be starting. Ray's own
    client then tells a cluster from other servers, in the time that it is allowed (40 s).
    """
    if address.startswith("ray://"):
        return  # Ray's client has deadlines
    if "://" in address:
        raise ValueError("expected HOST:PORT, auto or local")
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
        raise ConnectionError(f"{bootstrap} answers no request of Ray {ray.__version__}: {error}") from error


def connect(cluster: ClusterConfig) -> bool:
    """Join the cluster, or start a private local one; return whether this call opened the connection.

    Raises UserError where none answers within a minute, or where CUDA does not start on the GPUs of a private
    one.
    """
    if ray.is_initialized():
        return False
    address = address_of(cluster)
    # Ray runs its workers at the lowest priority by default, where any other program of this machine starves
    # them. Ray reads this when a cluster starts; a running cluster keeps its own value.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A group that failed has two results, and its caller reads only the first.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    local: dict[str, Any] = {}
    if address == "local":
        check_grows_no_more(cluster)
        local = {"num_cpus": cluster.num_cpus, "include_dashboard": False}
    if local and not usable_gpus():
        local["num_gpus"] = 0  # Ray counts GPUs even with the CPU build of torch
    if local:
        private_ray.prepare_token()
    try:
        if local:
            private_ray.start(namespace=None, logging_level=logging.ERROR, **local)
        else:
            _check_answers(address)
            ray.init(address=address, namespace=None, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:  # Ray raises ValueError for an address of another kind
        key = "cluster.address" if cluster.address else "RAY_ADDRESS"
        raise UserError(
            f"{key} = {address}: no Ray cluster answers there ({error}); start one with `ray start "
            "--head`, or leave cluster.address and RAY_ADDRESS unset for a private local one"
        ) from error
    if local:
        private_ray.close_session(Path(ray._private.worker._global_node.get_session_dir_path()))
    return True
