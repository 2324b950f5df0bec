"""Client for OpenAI-compatible chat servers, over an `Endpoint`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_dist.rewards.endpoint import Endpoint, EndpointSettings, NoReply

_SENDING = EndpointSettings()


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What each chat asks for.

    Attributes:
        max_tokens: longest reply, in tokens of the server's model.
        extra_body: further fields of every request, e.g. vLLM's ``structured_outputs``.
    """

    max_tokens: int = 8
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class ChatServer:
    """Client of ``model`` at ``base_url``; samples greedily (temperature 0).

    Args:
        api_key: None for a server without keys.
        sleep: replaces `time.sleep` between attempts in tests.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        settings: ChatSettings = ChatSettings(),
        sending: EndpointSettings = _SENDING,
        *,
        api_key: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model, self._settings = model, settings
        self.endpoint = Endpoint(
            base_url, sending, api_key=api_key, extra_secrets=dict(settings.extra_body), sleep=sleep
        )

    def reply(self, messages: list[dict[str, str]]) -> str:
        """Return the text of the first choice. Raises NoReply."""
        asked = {
            "model": self._model,
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": self._settings.max_tokens,
        }
        reply = self.endpoint.post("/chat/completions", asked | dict(self._settings.extra_body))
        try:
            content = reply["choices"][0]["message"]["content"]
        except (TypeError, LookupError):  # not the expected lists and mappings
            content = None
        if not isinstance(content, str):
            raise NoReply("malformed reply (no choice with a text)")
        return content

    def first_reply(self, messages: list[dict[str, str]], what: str) -> str:
        """Return the reply to the question that shows whether the server works, and close this client.

        Raises ValueError, which names the server by ``what``, where it does not reply.
        """
        try:
            return self.reply(messages)
        except NoReply as error:
            raise ValueError(
                f"{what} does not reply ({error}); start it, or check base_url, model and api_key_env"
            ) from error
        finally:
            self.close()

    def close(self) -> None:
        self.endpoint.close()
