"""Questions of two hops, and a search in a local index that answers them, in the tags of Search-R1."""

import json
import math
import random
import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from grpo_dist.environments.base import Problem
from grpo_dist.environments.text_tags import TextTags

ASK = (
    "Answer the question. First reason inside <think> and </think>. If you lack knowledge, call a search "
    "engine by <search> query </search>; it returns the best passages between <information> and "
    "</information>. Search as often as you want. Give the answer alone inside <answer> and </answer>. "
    "Question: "
)
NAMES = ["Ada", "Bo", "Cleo", "Dov", "Edda", "Finn", "Gita", "Hugo", "Ines", "Jory"]
FAMILIES = ["Brill", "Carno", "Dunst", "Erlan"]
TOWNS = ["Marrow", "Nettle", "Osk", "Pell", "Quay", "Rusk", "Sorn", "Tarn", "Ulm Hill", "Vade"]


class Index:
    """BM25 (Robertson and Zaragoza 2009) over passages, with Pyserini's k1 = 0.9 and b = 0.4."""

    def __init__(self, passages: Sequence[str], k1: float = 0.9, b: float = 0.4) -> None:
        self.passages = passages
        counts = [Counter(words(passage)) for passage in passages]
        lengths = np.array([count.total() for count in counts], np.float32)
        postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, count in enumerate(counts):
            for word, times in count.items():
                postings[word].append((number, times))
        self._weights = {}
        for word, found in postings.items():
            numbers, times = np.array(found, np.int32).T
            idf = math.log(1 + (len(passages) - len(found) + 0.5) / (len(found) + 0.5))
            norm = k1 * (1 - b + b * lengths[numbers] / lengths.mean())
            self._weights[word] = numbers, (idf * times * (k1 + 1) / (times + norm)).astype(np.float32)

    def search(self, query: str, count: int) -> list[str]:
        """Return the ``count`` best passages that share a word with ``query``; ties keep their order."""
        scores = np.zeros(len(self.passages), np.float32)
        for word in words(query):
            if word in self._weights:
                numbers, weights = self._weights[word]
                scores[numbers] += weights
        best = np.argsort(-scores, kind="stable")[:count]
        return [self.passages[number] for number in best if scores[number] > 0]


class Search(TextTags):
    """The policy searches and answers. ``corpus``: a JSONL file with `contents`; None: the made-up world."""

    results: ClassVar = {"search": "information"}

    def __init__(self, corpus: str | None = None, top_k: int = 3) -> None:
        self._top_k = top_k

    @classmethod
    def preload(cls, corpus: str | None = None, top_k: int = 3) -> None:
        """Build the index once, for all episodes of a worker."""
        cls.index = Index(read(corpus) if corpus else [passage for passage, *_ in world()])

    def start(self, problem: Problem) -> str:
        super().start(problem)
        return ASK + problem.text

    def search(self, text: str) -> str:
        found = self.index.search(text, self._top_k)
        return "\n".join(f"Doc {n}: {passage}" for n, passage in enumerate(found, 1)) or "nothing found"

    def answer(self, text: str) -> float:
        """Return the exact match up to case, articles and punctuation, as in Search-R1."""
        return float(plain(text) == plain(self.problem.answer))

    @classmethod
    def problems(cls, split: str, count: int | None, **_: object) -> Iterator[dict[str, str]]:
        """Yield questions; the split `test` has the last ten people."""
        rows = [{"problem": q, "answer": a} for _, q, a in world() if q]
        yield from (rows[-10:] if split == "test" else rows[:-10])[:count]


def world() -> Iterator[tuple[str, str, str]]:
    """Yield passages with a question and its answer ("" for towns)."""
    rng = random.Random(0)
    founders = {town: (f"{rng.choice(FAMILIES)}sen", str(rng.randrange(1200, 1900))) for town in TOWNS}
    for town, (founder, year) in founders.items():
        yield f"{town} is a town. It was founded by Olof {founder} in {year}.", "", ""
    people = [f"{name} {family}" for family in FAMILIES for name in NAMES]
    for person in rng.sample(people, len(people)):
        town = rng.choice(TOWNS)
        question = f"In which year was the town founded where {person} lives?"
        yield f"{person} is a painter. Home: {town}.", question, founders[town][1]


def read(corpus: str) -> list[str]:
    return [json.loads(line)["contents"] for line in Path(corpus).read_text().splitlines()]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def plain(text: str) -> list[str]:
    """Return the words without punctuation, also inside them, and without articles: "U.S." is "US"."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()
