"""Settings that rewards of a server have in common."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_dist.config import Count, Section
from grpo_dist.rewards.endpoint import EndpointSettings


class ServedSection(Section):
    """How a server is asked; fields of the `kwargs` of `judge`, `remote` and `generative`."""

    api_key_env: str | None = Field(None, description="environment variable that holds the key")
    max_retries: Count = 3
    timeout_s: PositiveFloat = Field(30.0, description="of one attempt, from its start to the last byte")
    requests_per_minute: PositiveFloat | None = Field(None, description="of the whole run")
    max_concurrency: PositiveInt = Field(8, description="concurrent requests of one reward worker")
    break_after: PositiveInt = Field(
        5, description="failed requests in a row after which none is sent for `break_s`"
    )
    break_s: PositiveFloat = Field(10.0, description="first pause of a server that is gone; it doubles")
    headers: dict[str, str] = Field({}, description="of every request")

    def sending(self, workers: int) -> EndpointSettings:
        """Return how one of ``workers`` reward workers sends, which share the rate limit."""
        return EndpointSettings(
            timeout_s=self.timeout_s,
            max_retries=self.max_retries,
            requests_per_minute=self.requests_per_minute and self.requests_per_minute / workers,
            break_after=self.break_after,
            break_s=self.break_s,
            headers=self.headers,
        )
