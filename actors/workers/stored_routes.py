"""Routes of samples in the object store, put there by engines and fetched by policy ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from grpo_dist.errors import SamplesLost
from grpo_dist.types import FurtherRow, HeldRoutes, Rollout

_FETCH_S = 120.0  # for the routes of one sample, megabytes, perhaps from another node


@dataclass(frozen=True, slots=True)
class StoredRoutes:
    """Routes that an engine has put into the object store; they are lost with that engine.

    ``digests``: `digest` by number of tokens: of the row's own prompt, and of the prompt that all rows of the
    sample share. With them ranks plan without fetching any routes.
    """

    reference: Any  # ray.ObjectRef
    digests: Mapping[int, bytes]

    def fetch(self) -> np.ndarray:
        """Fetch them. Raises SamplesLost when they are lost."""
        try:
            routes: np.ndarray = ray.get(self.reference, timeout=_FETCH_S)  # bounded: by its timeout
        except RayError as error:
            why = " ".join(str(error).split())[:200]
            raise SamplesLost(f"policy.router_replay: the routes of a sample are lost: {why}") from error
        return routes

    def digest(self, tokens: int) -> bytes:
        if tokens == 0:
            return b""
        if (known := self.digests.get(tokens)) is not None:
            return known
        return HeldRoutes(self.fetch()).digest(tokens)


def stored(rollout: Rollout) -> Rollout:
    """Return ``rollout`` with the routes of all its rows in the object store."""
    if rollout.routes is None:
        return rollout
    shared = _prompt_tokens(rollout)
    further = tuple(replace(row, routes=_put(row, shared)) for row in rollout.further_rows)
    return replace(rollout, routes=_put(rollout, shared), further_rows=further)


def _put(row: Rollout | FurtherRow, shared: int) -> StoredRoutes:
    """Store the routes of ``row``. ``shared``: tokens of the prompt of the sample's first row."""
    assert row.routes is not None
    held = HeldRoutes(row.routes.fetch())
    digests = {tokens: held.digest(tokens) for tokens in (_prompt_tokens(row), shared)}
    return StoredRoutes(ray.put(held.experts), digests)


def _prompt_tokens(row: Rollout | FurtherRow) -> int:
    """Return the tokens of the prompt: the last token of a completion has no route."""
    assert row.routes is not None
    return len(row.routes.fetch()) + 1 - len(row.completion_ids)
