"""The part of `PolicyGroup` that sends weights which its ranks have copied: `weight_sync.deltas`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayTaskError

from actors.workers.weight_sender import Taken
from grpo_dist.errors import TransferLost


class TakenWeights:
    """The base of `PolicyGroup`, which describes what it uses."""

    updates: int
    sent_after: int

    async def _all(self, method: str, *arguments: Any, group: str | None = None) -> list[Any]:
        raise NotImplementedError

    async def _cause(self, error: RayTaskError, what: str) -> Exception:
        raise NotImplementedError

    async def take_weights(self, bucket_bytes: int, senders: Sequence[int], token: str) -> Taken:
        """Have the ranks ``senders`` copy the weights as ``token``, and find what has changed in them since
        the last call; return what the first of them found.

        Raises StateLost when a rank is lost. The caller holds the deadline.
        """
        self.sent_after = self.updates
        try:
            found = [own for own in await self._all("take_weights", bucket_bytes, senders, token) if own]
        except RayTaskError as error:
            raise await self._cause(error, "weights gathered and compared") from error
        bases = {own.base for own in found}
        return replace(found[0], base=bases.pop() if len(bases) == 1 else None)

    async def send_taken(self, *, group: str, whole: bool) -> dict[str, float]:
        """Send what `take_weights` took, or what has changed in it; see `send_weights`."""
        try:
            sent: dict[str, float] = next(filter(None, await self._all("send_taken", group, whole)), {})
            return sent
        except RayTaskError as error:
            if isinstance(error.cause, TransferLost):  # the weight sync handles it
                raise
            raise await self._cause(error, "taken weights sent") from error
