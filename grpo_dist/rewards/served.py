"""Rewards of a server: of one that the user wrote (`Remote`), and of language models (`ChatReward`).

POST url   {"problem": "1+1?", "answer": "2", "completions": ["2", "3"], "finish_reasons": ["stop", "stop"],
            "source": "gsm8k", "columns": {...}}
reply      {"scores": [1.0, null]}     or {"rewards": [...]}, or the list alone; null: could not be scored
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import Field, PositiveInt, PrivateAttr

from grpo_dist.config.secrets import masked
from grpo_dist.rewards.builtin import Builtin, Note
from grpo_dist.rewards.endpoint import Endpoint, EndpointSettings, NoReply
from grpo_dist.rewards.group import CompletionGroup, Verdicts

# Statuses by which a server refuses the sender or the URL, moves it (which is not followed), or says that
# nothing is behind it.
_WRONG_PLACE = frozenset({301, 302, 303, 307, 308, 401, 403, 404, 405, 410, 502, 503, 504})


class ServedReward(Builtin, EndpointSettings):
    """A reward of a server. Groups that are scored at the same time share its threads, which bounds the
    requests.
    """

    max_concurrency: PositiveInt = Field(8, description="concurrent requests of one reward worker")

    _server: Endpoint = PrivateAttr()
    _threads: ThreadPoolExecutor = PrivateAttr()
    _note: Note = PrivateAttr()

    @property
    def is_graded(self) -> bool:
        """Only its server knows, so nothing is refused."""
        return False

    def start(self, *, workers: int, note: Note) -> None:
        self._server, self._note = self._connect(workers), note
        self._threads = ThreadPoolExecutor(self.max_concurrency, thread_name_prefix=type(self).__name__)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._server.close()

    @abstractmethod
    def _connect(self, workers: int) -> Endpoint:
        """Connect one of ``workers`` scorers, which share the rate limit."""

    def _ask_group(self, ask: Callable[[], list[float]], size: int) -> list[float]:
        """Return the scores of a group by one request; NaN for all, with a note, where it fails."""

        def scores() -> list[float]:
            try:
                return ask()
            except NoReply as error:
                self._note(str(error))
                return [math.nan] * size

        return self._threads.submit(scores).result()  # bounded: by deadlines and retries

    def _ask_each(self, texts: Iterable[str], ask: Callable[[str], float]) -> dict[str, float]:
        """Return the score of each distinct text: samples often agree. NaN, with a note, where it fails."""

        def score(text: str) -> float:
            try:
                return ask(text)
            except NoReply as error:
                self._note(str(error))
                return math.nan

        distinct = list(dict.fromkeys(texts))
        return dict(zip(distinct, self._threads.map(score, distinct), strict=True))


class Remote(ServedReward):
    """The score that the server at ``url`` gives each completion; NaN where it gives none."""

    url: str = Field(description="where groups are posted, e.g. http://scorer:8000/score")
    columns: tuple[str, ...] = Field((), description="columns of the data to send")
    send_token_ids: bool = Field(False, description="also send `token_ids`, those that the policy sampled")

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
            if error.status is None or error.status in _WRONG_PLACE:
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
        size = len(group.completions)
        return self._ask_group(lambda: read_scores(self._server.post("", body), size), size)

    def _connect(self, workers: int) -> Endpoint:
        return Endpoint(self.url, self, workers=workers)


def read_scores(reply: Any, size: int) -> list[float]:
    """Read the scores of ``size`` completions; null is NaN. Raises NoReply for any other reply."""
    if isinstance(reply, Mapping):
        reply = reply.get("scores", reply.get("rewards"))
    if not isinstance(reply, Sequence) or isinstance(reply, str):
        raise NoReply('malformed reply (expected {"scores": [...]}, one number or null for each completion)')
    if len(reply) != size:
        raise NoReply(f"malformed reply ({len(reply)} scores for {size} completions)")
    scores = []
    for score in reply:
        if score is not None and not isinstance(score, int | float):
            raise NoReply(f"malformed reply (a score is {str(score)[:80]!r}, no number)")
        try:
            scores.append(math.nan if score is None else float(score))
        except OverflowError:  # an integer of hundreds of digits; infinity is noted and not scored
            scores.append(math.inf)
    return scores


class ChatReward(ServedReward):
    """A reward of a language model behind an OpenAI-compatible API."""

    base_url: str = Field(description="URL of the server, e.g. http://localhost:8000/v1")
    model: str = Field(description="name of the model on the server")
    max_tokens: PositiveInt = Field(512, description="longest reply")
    extra_body: dict[str, Any] = Field({}, description="further fields of each request")

    def _connect(self, workers: int) -> Endpoint:
        return Endpoint(self.base_url, self, workers=workers, extra_secrets=self.extra_body)

    def _reply(self, messages: Sequence[Mapping[str, str]], server: Endpoint | None = None) -> str:
        """Return the model's reply. Raises NoReply."""
        return (server or self._server).chat(self.model, messages, self.max_tokens, self.extra_body)

    def _check_reply(
        self, kind: str, messages: Sequence[Mapping[str, str]], read: Callable[[str], object], remedy: str
    ) -> None:
        """Ask a first question, so that an unreachable model is reported before the run starts.

        Args:
            kind: of this reward, for messages.
            read: raises NoReply for a reply that cannot be read.
            remedy: for such a reply.

        Raises ValueError where the model does not reply, or not as expected.
        """
        where = f"the {kind} {self.model} at kwargs.base_url = {masked(self.base_url)}"
        server = self._connect(workers=1)
        try:
            reply = self._reply(messages, server)
        except NoReply as error:
            raise ValueError(
                f"{where} does not reply ({error}); start it, or check base_url, model and api_key_env"
            ) from error
        finally:
            server.close()
        try:
            read(reply)
        except NoReply as error:
            raise ValueError(
                f"{where}: {error}; raise kwargs.max_tokens = {self.max_tokens}, {remedy}"
            ) from error


# Questions to language models. Any other use of braces, such as LaTeX's, stays as it is.
_NAMED = re.compile(r"\{([a-z_][a-z0-9_]*)\}|%\((expression[12])\)s")
# Braces of formulas: \boxed{x}, \sqrt [n] {x}, \frac{a}{b}, a^{n}, a_{n}, and all between dollars.
_LATEX = re.compile(
    r"\\[A-Za-z]+\s*(?:\[[^\]]*\])?(?:\s*\{[^{}]*\})+|(?<![A-Za-z0-9])\w?[_^]\{[^{}]*\}|\$[^$\n]*\$"
)
_SIMPLE_EVALS = {"expression1": "reference", "expression2": "candidate"}


def placeholders(template: str) -> set[str]:
    """Return the names in ``template``: "{a} %(expression1)s" -> {"a", "reference"}."""
    return {_name(match) for match in _NAMED.finditer(template)}


def required_names(template: str) -> set[str]:
    """Return the names in ``template`` that somebody must supply: `placeholders` but for arguments in LaTeX.

    "{rubric}: $\\frac{a}{b}$, \\boxed{x}" -> {"rubric"}
    """
    return placeholders(_LATEX.sub(" ", template))


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder of ``template`` that ``values`` has; others stay. In one pass, so that no text
    of a model can bring in another.

    "{problem}: {completion}", completion "{answer}" -> "1+1: {answer}"
    """
    return _NAMED.sub(lambda match: values.get(_name(match), match[0]), template)


def _name(match: re.Match[str]) -> str:
    return match[1] or _SIMPLE_EVALS[match[2]]
