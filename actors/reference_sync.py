"""Policy to reference: the frozen model is refreshed every few steps, or follows as a moving average."""

from __future__ import annotations

from collections.abc import Sequence

from ray.exceptions import RayError

from actors.lifecycle.calls import result
from actors.lifecycle.watchdog import deadline_of
from actors.transfer_group import TransferGroup, TransferSpec
from actors.workers.policy_group import PolicyGroup
from actors.workers.reference import ReferencePool
from grpo_dist.config import WeightSyncConfig
from grpo_dist.runtime.concurrency import gather


class ReferenceSync:
    """Driver-side handle, made by `connect`: mixes the policy's weights into every reference."""

    def __init__(self, group: TransferGroup, reference: ReferencePool, mix: float, timeout_s: float) -> None:
        self._group, self._reference, self._mix, self._timeout_s = group, reference, mix, timeout_s

    @classmethod
    async def connect(
        cls,
        policy: PolicyGroup,
        reference: ReferencePool,
        settings: WeightSyncConfig,
        *,
        mix: float,
        colocated_ranks: Sequence[int] | None = None,
        timeout_s: float,
    ) -> ReferenceSync:
        """Join the policy and all reference workers in a transfer group of their own.

        ``colocated_ranks``: see `TransferGroup.open`.
        """
        both = policy.team.named() | reference.team.named()
        stage = "reference: policy and reference workers join the transfer group"
        async with deadline_of(both, timeout_s, stage):
            group = await TransferGroup.open(
                "reference",
                policy,
                reference.workers,
                TransferSpec(settings, as_held=True),
                colocated_ranks=colocated_ranks,
                timeout_s=timeout_s,
            )
        return cls(group, reference, mix, timeout_s)

    async def refresh(self) -> None:
        """Replace every reference worker's weights by (1 - mix) of its own and mix of the policy's.

        Raises StateLost when a reference worker or a policy rank is lost.
        """
        both = self._group.policy.team.named() | self._reference.team.named()
        try:
            async with deadline_of(both, self._timeout_s, "reference: the policy's weights travel"):
                arguments = self._group.parameters, self._group.bucket_bytes, self._mix
                await self._group.send(result(w.mix_in.remote(*arguments)) for w in self._reference.workers)
        except RayError:
            await gather([self._group.policy.team.ask_all(), self._reference.team.ask_all()])
            raise
