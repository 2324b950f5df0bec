"""Number and size of the nodes that a job requests."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from actors.placement.demands import Demand, Resources, describe, placement
from actors.placement.fitting import Node, bundles, fits
from grpo_dist.config import Config
from grpo_dist.errors import UserError
from grpo_dist.tools.submit.job import Job

_LEAST_CPUS, _CPUS_PER_GPU = 16, 8
_MOST = 100_000
# Least and greatest value of each option.
_BOUNDS = {
    "gpus_per_node": (0, 1024), "cpus_per_node": (1, _MOST), "nodes": (1, _MOST), "memory_gib": (1, _MOST),
    "head_cpus": (1, _MOST), "head_memory_gib": (1, _MOST), "retries": (0, _MOST),
}  # fmt: skip


@dataclass(frozen=True)
class NodeSizes:
    """Requested nodes. ``cpus_per_node`` None: 8 per GPU; ``nodes`` None: the fewest that fit."""

    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    nodes: int | None = None

    @property
    def cpus(self) -> int:
        """CPUs of a node."""
        return self.cpus_per_node or max(_LEAST_CPUS, _CPUS_PER_GPU * (self.gpus_per_node or 0))

    def nodes_for(self, config: Config, target: str) -> tuple[int, str]:
        """Return the number of nodes and a description of the placement. Raises UserError if ``nodes`` are
        too few.
        """
        count, demands, has = self._fitted(config, target)
        return count, describe(demands, has)

    def idle(self, job: Job, target: str) -> str | None:
        """Return a warning if the job would hold GPUs that no worker uses, else None."""
        count, demands, _ = self._fitted(job.config, target)
        per_node = self.gpus_per_node or 0
        available, used = count * per_node, sum(bundle.gpus for bundle in bundles(demands))
        if used >= available:
            return None
        advice = ""
        if count == 1:
            with suppress(UserError):
                if replace(self, gpus_per_node=used)._fitted(job.config, target)[0] == 1:
                    advice = f"give --gpus-per-node {used}, or "
        return (
            f"warning: the job asks for {available} GPU(s), {count} node(s) with {per_node} each, and the "
            f"run uses {used}: {available - used} would be idle; {advice}raise `rollout.num_workers` or "
            "`policy.num_workers`"
        )

    def _fitted(self, config: Config, target: str) -> tuple[int, dict[str, Demand], Resources]:
        """Return the number of nodes, the demand of each role and the resources. Raises as `nodes_for`."""
        if self.gpus_per_node is None:
            raise UserError(f"--to {target}: give --gpus-per-node, the GPUs of a node (0: train on CPUs)")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name, None)
            if value is not None and not least <= value <= most:
                raise UserError(f"{format_option(name)} {value}: expected {least} to {most}")
        gpus, cpus = self.gpus_per_node, self.cpus
        refused: UserError | None = None
        for count in [self.nodes] if self.nodes else range(1, 1 + _most_nodes(config)):
            has = Resources(count * cpus, count * gpus, node_cpus=cpus, shared=True)
            try:
                demands = placement(config, has, training=True)
            except UserError as error:
                refused = error
                continue
            there = [Node(f"node {i + 1}", cpus, gpus, cpus, gpus) for i in range(count)]
            if fits(bundles(demands), there):
                return count, demands, has
            each = f"{gpus} GPU(s) and {cpus} CPU(s)"
            refused = UserError(
                f"cluster: {count} node(s) with {each} each have no room for {describe(demands, has)}; a "
                "worker must fit on one node: use more or larger nodes, or lower "
                "`rollout.tensor_parallel_size`"
            )
        assert refused is not None
        raise refused


def format_option(field: str) -> str:
    """Return the command-line option of a target's field: ``gpus_per_node`` is --gpus-per-node."""
    return "--" + field.replace("_", "-")


def _most_nodes(config: Config) -> int:
    """Return the number of nodes at which each computing worker has its own; more cannot help."""
    models = sum(model.num_workers for model in config.rewards.models)
    models += sum(teacher.num_workers for teacher in config.distillation.teachers_with_workers)
    return config.rollout.num_workers + config.policy.num_workers + config.reference.num_workers + models
