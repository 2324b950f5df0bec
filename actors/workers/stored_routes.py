"""Routes of samples in the object store, put there by engines and fetched by policy ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from grpo_dist.types import FurtherRow, HeldRoutes, Rollout

_FETCH_S = 120.0  # for the routes of one sample, megabytes, perhaps from another node


@dataclass(frozen=True, slots=True)
class StoredRoutes:
    """Routes that an engine has put into the object store; they are lost with that engine.

    ``prompt_digest``: `digest` of the ``prompt_tokens``, so that ranks can plan without fetching any.
    """

    reference: Any  # ray.ObjectRef
    prompt_tokens: int
    prompt_digest: bytes

    def fetch(self) -> np.ndarray:
        """Fetch them. Raises RuntimeError when they are lost."""
        try:
            routes: np.ndarray = ray.get(self.reference, timeout=_FETCH_S)  # bounded: by its timeout
        except RayError as error:
            why = " ".join(str(error).split())[:200]
            raise RuntimeError(f"policy.router_replay: the routes of a sample are lost: {why}") from error
        return routes

    def digest(self, tokens: int) -> bytes:
        if tokens == self.prompt_tokens:
            return self.prompt_digest
        return HeldRoutes(self.fetch()).digest(tokens)


def stored(rollout: Rollout) -> Rollout:
    """Return ``rollout`` with the routes of all its rows in the object store."""
    if rollout.routes is None:
        return rollout
    further = tuple(replace(row, routes=_put(row)) for row in rollout.further_rows)
    return replace(rollout, routes=_put(rollout), further_rows=further)


def _put(row: Rollout | FurtherRow) -> StoredRoutes:
    assert row.routes is not None
    experts = row.routes.fetch()
    prompt = len(experts) + 1 - len(row.completion_ids)
    return StoredRoutes(ray.put(experts), prompt, HeldRoutes(experts).digest(prompt))
