"""Several nodes of Ray on this machine, which may be busy: Ray gives each 30 s to start and 30 s to join."""

from __future__ import annotations

from typing import Any

from ray.cluster_utils import Cluster

from actors.connection import started_in_time
from tests.support.patience import HANG_S


class PatientCluster(Cluster):
    def add_node(self, wait: bool = True, **node_args: Any) -> Any:
        return started_in_time(lambda: Cluster.add_node(self, wait, **node_args))

    def _wait_for_node(self, node: Any, timeout: float = 30) -> None:
        super()._wait_for_node(node, HANG_S)
