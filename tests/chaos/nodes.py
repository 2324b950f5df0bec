"""A cluster of several nodes on this machine, for a job that loses or gains nodes.

    head        no CPU: Ray's processes, and workers that need no CPU
    node 1..3   one CPU each: an engine or a rank, and whatever else Ray places there

A node is a raylet with its processes. Losing a node kills all of them, as if the machine were switched off.
An empty node then joins, as from an autoscaler. An added node also has one CPU, for one more engine; its
removal is announced.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.patience import HANG_S

from .find import MARK, Family, is_of_ray

NODES = 3  # an engine and two ranks
OVERRIDES = (
    "cluster.placement=separate", "rollout.num_workers=1", "rollout.threads=1", "policy.threads=1",
    "rewards.num_workers=2",  # so that the head rarely has all of them
)  # fmt: skip
ELASTIC = (*(text for text in OVERRIDES if "rollout.num" not in text), "rollout.num_workers={min: 1, max: 2}")
NOTICE_S = 120
_STORE_BYTES = 128 * 2**20


class Nodes:
    """``temporary`` holds Ray's sessions; ``path`` is the PYTHONPATH of workers."""

    def __init__(self, temporary: Path, path: str) -> None:
        from tests.support.several_nodes import PatientCluster  # imports Ray, which the short form does not

        self.mark = uuid.uuid4().hex
        self._environment = {MARK: self.mark, "PYTHONPATH": path, "RAY_TMPDIR": str(temporary)}
        with self._variables():
            self._cluster = PatientCluster(
                initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": _STORE_BYTES}
            )
        for _ in range(NODES):
            self.give()

    @property
    def address(self) -> str:
        return self._cluster.address

    def family(self) -> Family:
        """Return the processes of a job on these nodes, without Ray's."""
        return Family(self.mark, spared=is_of_ray)

    def holds(self, worker: psutil.Process) -> bool:
        """Return whether ``worker`` runs on a node that can be lost."""
        return self._node_of(worker) is not None

    def lose(self, worker: psutil.Process) -> None:
        """Kill the node of ``worker`` and add another."""
        node = self._node_of(worker)
        assert node is not None
        self.take(node)
        self.give()

    def give(self):  # type: ignore[no-untyped-def]
        """Add a node and return it."""
        with self._variables():
            return self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)

    def announce(self, node) -> None:  # type: ignore[no-untyped-def]
        """Have Ray drain the node, which is removed in ``NOTICE_S`` seconds."""
        ray = str(Path(sys.executable).with_name("ray"))
        place = ["--address", self.address, "--node-id", node.node_id]
        why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "it is taken"]
        notice = ["--deadline-remaining-seconds", str(NOTICE_S)]
        subprocess.run([ray, "drain-node", *place, *why, *notice], check=True, timeout=HANG_S)

    def take(self, node) -> None:  # type: ignore[no-untyped-def]
        """Kill the node, as if the machine were switched off."""
        raylet = psutil.Process(_raylet(node))
        gone = [raylet, *raylet.children(recursive=True)]
        for process in gone:  # the raylet first, so that it restarts nothing
            with suppress(psutil.Error):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Kill all nodes with their processes."""
        Family(self.mark).kill()

    def _node_of(self, worker: psutil.Process):  # type: ignore[no-untyped-def]
        with suppress(psutil.Error):
            above = {parent.pid for parent in worker.parents()}
            return next((node for node in self._cluster.worker_nodes if _raylet(node) in above), None)
        return None

    @contextmanager
    def _variables(self) -> Iterator[None]:
        """Set the environment of processes started within."""
        before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _raylet(node) -> int:  # type: ignore[no-untyped-def]
    """Return the process id of the node's raylet."""
    return node.all_processes["raylet"][0].process.pid
