"""How many nodes of which size a job asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpo_dist.config import Config
from grpo_dist.errors import UserError

if TYPE_CHECKING:
    from actors.placement.demands import Demand, Resources

_LEAST_CPUS, _CPUS_PER_GPU = 16, 8
# Of the options: least and most.
_BOUNDS = {"gpus_per_node": (0, 1024), "cpus_per_node": (1, 100_000), "nodes": (1, 100_000)}


@dataclass(frozen=True)
class NodeSizes:
    """``cpus_per_node`` None: enough; ``nodes`` None: the fewest that suffice."""

    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    nodes: int | None = None

    @property
    def cpus(self) -> int:
        """Of a node."""
        return self.cpus_per_node or max(_LEAST_CPUS, _CPUS_PER_GPU * (self.gpus_per_node or 0))

    def nodes_for(self, config: Config, target: str) -> tuple[int, str]:
        """How many the run takes, and its placement on them in words. Raises UserError when ``nodes`` do not
        suffice.
        """
        from actors.placement.demands import describe

        count, demands, has = self._fitted(config, target)
        return count, describe(demands, has)

    def idle(self, config: Config, target: str) -> str | None:
        """A warning where the job would hold GPUs that no worker of the run uses; None where it would not."""
        from actors.placement.fitting import bundles

        count, demands, _ = self._fitted(config, target)
        per_node = self.gpus_per_node or 0
        held, used = count * per_node, sum(bundle.gpus for bundle in bundles(demands))
        if used >= held:
            return None
        fewer = replace(self, gpus_per_node=used)
        advice = f"give --gpus-per-node {used}, or " if count == 1 and fewer._fits(config, target) else ""
        return (
            f"warning: the job asks for {held} GPU(s), {count} node(s) with {per_node} each, and the run "
            f"uses {used}: {held - used} would be idle; {advice}raise `rollout.num_workers` or "
            "`policy.num_workers`"
        )

    def _fits(self, config: Config, target: str) -> bool:
        try:
            return self._fitted(config, target)[0] == 1
        except UserError:
            return False

    def _fitted(self, config: Config, target: str) -> tuple[int, dict[str, Demand], Resources]:
        """Number of nodes, what every role takes of them, and what they have. Raises as `nodes_for`."""
        from actors.placement.demands import Resources, describe, placement
        from actors.placement.fitting import Node, bundles, fits

        if self.gpus_per_node is None:
            raise UserError(f"--to {target}: give --gpus-per-node, the GPUs of a node (0: train on CPUs)")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UserError(f"--{name.replace('_', '-')} {value}: expected {least} to {most}")
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
                "worker has what it takes on one node: use more or larger nodes, or lower "
                "`rollout.tensor_parallel_size`"
            )
        assert refused is not None
        raise refused


def _most_nodes(config: Config) -> int:
    """Beyond so many further ones cannot help: each worker that computes has a node of its own then."""
    models = sum(model.num_workers for model in config.rewards.models)
    return config.rollout.num_workers + config.policy.num_workers + config.reference.num_workers + models
