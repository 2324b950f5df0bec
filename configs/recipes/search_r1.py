"""Search-R1's environment: prompts of its data set, passages of its retrieval server or of a local index."""

import json
from typing import Any
from urllib.request import Request, urlopen

from search import Search, plain  # configs/examples

from grpo_dist.environments.base import Problem
from grpo_dist.environments.text_tags import TextTags
from grpo_dist.rewards.text import alternatives


class SearchR1(Search):
    """``url``: of Search-R1's retrieval server; None: BM25 over ``corpus``, a JSONL file with `contents` of a
    title, a line break and the text.
    """

    invalid = (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
        "</search>. If I want to give the final answer, I should put the answer between <answer> and "
        "</answer>. Let me try again.\n"
    )

    def __init__(self, url: str | None = None, corpus: str | None = None, top_k: int = 3) -> None:
        super().__init__(corpus, top_k)
        self._url = url

    @classmethod
    def preload(cls, url: str | None = None, corpus: str | None = None, top_k: int = 3) -> None:
        if url is None:
            super().preload(corpus, top_k)

    def start(self, problem: Problem) -> Any:
        return TextTags.start(self, problem)  # the data set's prompts say how to search

    def search(self, text: str) -> str:
        found = self.index.search(text, self._top_k) if self._url is None else self._ask(text)
        titled = (passage.partition("\n") for passage in found)
        return "".join(f"Doc {n}(Title: {title}) {text}\n" for n, (title, _, text) in enumerate(titled, 1))

    def _ask(self, text: str) -> list[str]:
        body = json.dumps({"queries": [text], "topk": self._top_k, "return_scores": True}).encode()
        request = Request(str(self._url), body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=30) as reply:
            return [passage["document"]["contents"] for passage in json.load(reply)["result"][0]]

    def answer(self, text: str) -> float:
        return float(any(plain(text) == plain(gold) for gold in alternatives(self.problem.answer)))
