"""What rewards of a server have in common: settings, a connection, and the threads that use it."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, PrivateAttr

from grpo_dist.config import Count
from grpo_dist.rewards.builtin import Builtin, Note
from grpo_dist.rewards.chat_server import ChatServer, ChatSettings
from grpo_dist.rewards.endpoint import Endpoint, EndpointSettings, api_key


class ServedReward(Builtin):
    """A reward of a server; fields of the `kwargs` of `judge`, `remote` and `generative`. Groups that are
    scored at the same time share its threads, which bounds the requests.
    """

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

    _server: Endpoint | ChatServer = PrivateAttr()
    _threads: ThreadPoolExecutor = PrivateAttr()
    _note: Note = PrivateAttr()

    def start(self, *, workers: int, note: Note) -> None:
        self._server, self._note = self._connect(workers), note
        self._threads = ThreadPoolExecutor(self.max_concurrency, thread_name_prefix=type(self).__name__)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._server.close()

    @abstractmethod
    def _connect(self, workers: int) -> Endpoint | ChatServer:
        """Connect one of ``workers`` scorers."""

    def sending(self, workers: int) -> EndpointSettings:
        """Return how one of ``workers`` scorers sends, which share the rate limit."""
        return EndpointSettings(
            timeout_s=self.timeout_s,
            max_retries=self.max_retries,
            requests_per_minute=self.requests_per_minute and self.requests_per_minute / workers,
            break_after=self.break_after,
            break_s=self.break_s,
            headers=self.headers,
        )


class ChatReward(ServedReward):
    """A reward of a language model behind an OpenAI-compatible API."""

    base_url: str = Field(description="URL of the server, e.g. http://localhost:8000/v1")
    model: str = Field(description="name of the model on the server")
    max_tokens: PositiveInt = Field(512, description="longest reply")
    extra_body: dict[str, Any] = Field({}, description="further fields of each request")

    _server: ChatServer = PrivateAttr()

    def _connect(self, workers: int) -> ChatServer:
        settings = ChatSettings(max_tokens=self.max_tokens, extra_body=self.extra_body)
        key = api_key(self.api_key_env)
        return ChatServer(self.base_url, self.model, settings, self.sending(workers), api_key=key)
