"""A reward that a server of the user computes, over plain HTTP: one request for all completions of a problem.

POST url   {"problem": "1+1?", "answer": "2", "completions": ["2", "3"], "finish_reasons": ["stop", "stop"],
            "source": "gsm8k", "columns": {...}}
reply      {"scores": [1.0, null]}     or {"rewards": [...]}, or the list alone; null: could not be scored
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, PrivateAttr

from grpo_dist.config.secrets import masked
from grpo_dist.rewards.endpoint import Endpoint, NoReply, api_key
from grpo_dist.rewards.group import CompletionGroup, Verdicts
from grpo_dist.rewards.served import ServedReward

# Statuses by which a server refuses the sender or the URL, moves it (which is not followed), or says that
# nothing is behind it.
_NOT_ITS_PLACE = frozenset({301, 302, 303, 307, 308, 401, 403, 404, 405, 410, 502, 503, 504})


class Remote(ServedReward):
    """The score that the server at ``url`` gives each completion; NaN where it gives none."""

    url: str = Field(description="where groups are posted, e.g. http://scorer:8000/score")
    columns: tuple[str, ...] = Field((), description="columns of the data to send")
    send_token_ids: bool = Field(False, description="also send `token_ids`, those that the policy sampled")

    _server: Endpoint = PrivateAttr()

    @property
    def is_graded(self) -> bool:
        """Only its server knows, so nothing is refused."""
        return False

    @property
    def data_columns(self) -> tuple[str, ...]:
        return self.columns

    def check(self, *, max_new_tokens: int) -> None:
        """Post a trial group, so that an unreachable server is reported before the run starts. Its scores,
        and errors about its content, say nothing yet.
        """
        endpoint = self._connect(workers=1)
        trial = {"problem": "What is 1+1?", "answer": "2", "completions": ["2"], "finish_reasons": ["stop"]}
        try:
            endpoint.post("", trial | {"source": "check", "columns": dict.fromkeys(self.columns)})
        except NoReply as error:
            if error.status is None or error.status in _NOT_ITS_PLACE:
                raise ValueError(
                    f"kwargs.url = {masked(self.url)} does not reply ({error}); start the server, or check "
                    "url, headers and api_key_env"
                ) from error
        finally:
            endpoint.close()

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        body: dict[str, Any] = {
            "problem": group.columns.get("problem", ""),
            "answer": group.gold,
            "completions": list(group.completions),
            "finish_reasons": list(group.finish_reasons),
            "source": group.source,
            "columns": {name: group.columns.get(name) for name in self.columns},
        }
        if self.send_token_ids:
            body["token_ids"] = [ids.tolist() for ids in group.token_ids]
        return self._threads.submit(self._scores, body).result()  # bounded: by deadlines and retries

    def _connect(self, workers: int) -> Endpoint:
        return Endpoint(self.url, self.sending(workers), api_key=api_key(self.api_key_env))

    def _scores(self, body: Mapping[str, Any]) -> list[float]:
        size = len(body["completions"])
        try:
            return scores_of(self._server.post("", body), size)
        except NoReply as error:
            self._note(str(error))
            return [math.nan] * size


def scores_of(reply: Any, size: int) -> list[float]:
    """Read the scores of ``size`` completions; null is NaN. Raises NoReply for any other reply."""
    if isinstance(reply, Mapping):
        reply = reply.get("scores", reply.get("rewards"))
    if not isinstance(reply, Sequence) or isinstance(reply, str):
        raise NoReply('malformed reply (expected {"scores": [...]}, one number or null for each completion)')
    if len(reply) != size:
        raise NoReply(f"malformed reply ({len(reply)} scores for {size} completions)")
    for score in reply:
        if score is not None and not isinstance(score, int | float):
            raise NoReply(f"malformed reply (a score is {str(score)[:80]!r}, no number)")
    return [math.nan if score is None else _as_float(score) for score in reply]


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer of hundreds of digits; infinity is noted and not scored
        return math.inf
