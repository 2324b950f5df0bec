"""What a device could do by its data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_dist.tools.plan.accelerators import ClusterShape


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks of a policy rank's device and of an engine's: a GPU, or the CPU threads of an actor.
    ``node``: devices that share a node. ``host``: bytes a second between a GPU and host memory. ``fp8``,
    ``float32``: operations in that type for each in half precision; of processors ``flops`` are in float32
    anyway. ``thread_flops``: of one CPU thread; None where there are
    GPUs.
    """

    flops: float
    engine_flops: float
    memory: float
    link: float
    network: float
    node: int
    host: float = 0.0
    fp8: float = 1.0
    float32: float = 1.0
    thread_flops: float | None = None

    @classmethod
    def of(cls, cluster: ClusterShape) -> Peaks:
        card = cluster.card
        assert card is not None  # a machine without GPUs needs a benchmark
        return cls(
            card.flops,
            card.flops,
            card.hbm,
            card.link,
            card.network,
            cluster.gpus_per_node,
            host=card.pcie,
            fp8=card.fp8,
            float32=card.float32 / card.flops,
        )
