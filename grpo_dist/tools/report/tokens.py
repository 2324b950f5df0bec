"""Text and values of each token, rounded to keep the page small.

Log-probs are rounded to 0.001 nats, log-ratios and KL to 0.0001, advantages to 0.001.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.errors import expanded
from grpo_dist.tools.report import episodes
from grpo_dist.tools.report.rollouts import texts_of

COLUMNS = (
    "uid",
    "sample",
    "completion",
    "completion_ids",
    "logprobs",
    "advantages",
    "trainer_logprobs",
    "ref_logprobs",
    *episodes.COLUMNS,
)
SCALES = {"logprob": 1e3, "log_ratio": 1e4, "advantage": 1e3, "kl": 1e4}
_CHECKED = 20  # samples whose text a tokenizer must reproduce
_SPOILT = "\ufffd"  # decoded from incomplete characters


class TokenTexts:
    """Texts of tokens by a `tokenizer.json`, without running code of a model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop a leading space, so every token is decoded after another one.
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._skip = len(self._decode([]))
        self._known: dict[int, str] = {}

    def of(self, ids: np.ndarray) -> list[str]:
        """Return a text per token; the first token of a multi-token character has the character."""
        texts = [self._one(int(token)) for token in ids]
        begin = 0
        while begin < len(texts):
            end = begin
            while end < len(texts) and _SPOILT in texts[end]:
                end += 1
            if end > begin:
                whole = self._decode([int(token) for token in ids[begin:end]])[self._skip :]
                texts[begin:end] = [whole, *[""] * (end - begin - 1)]
            begin = end + 1
        return texts

    def gives_back(self, ids: np.ndarray, text: str) -> bool:
        """Return True when ``ids`` decode to ``text``."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True) == text

    def _one(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])[self._skip :]
        return self._known[token]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([*self._before, *ids], skip_special_tokens=False)


def find_tokenizer(run: Path, config: dict[str, Any]) -> tuple[TokenTexts | None, str]:
    """Find the tokenizer of a run on this machine; return it with its path, or None with the reason.

    The search covers the exported model, the checkpoints and the initial model.
    """
    from tokenizers import Tokenizer  # slow to import

    for path in _places(run, config):
        if path.is_file():
            try:
                return TokenTexts(Tokenizer.from_file(str(path))), str(path)
            except Exception as error:  # the library raises a bare Exception for a file it cannot read
                return None, f"{path} cannot be read ({error})"
    model = _section(config, "model").get("path")
    if model in ("sft", "demo:tiny", "demo:small", "demo:micro"):
        return TokenTexts(character_tokenizer().backend_tokenizer), "the demo's tokenizer"
    return None, f"no tokenizer.json in {run} nor, on this machine, of model.path = {model}"


def _places(run: Path, config: dict[str, Any]) -> list[Path]:
    model = _section(config, "model")
    first = str(model.get("path") or "")
    sft = str(_section(config, "sft").get("model") or "") if first == "sft" else ""
    places = [run / "model", *sorted((run / "checkpoints").glob("*/policy"), reverse=True)]
    places += [expanded(name) for name in (first, sft) if name and ":" not in name]
    files = [place / "tokenizer.json" for place in places]
    if first.count("/") == 1:
        from huggingface_hub import try_to_load_from_cache  # slow to import
        from huggingface_hub.errors import HFValidationError

        with suppress(HFValidationError):  # a path that is no hub id, such as ./model
            cached = try_to_load_from_cache(first, "tokenizer.json", revision=model.get("revision"))
            files += [Path(cached)] if isinstance(cached, str) else []
    return files


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def fits(table: pa.Table, texts: TokenTexts) -> bool:
    """Return True when ``texts`` reproduces some sample: otherwise it is another tokenizer."""
    head = table.slice(0, _CHECKED)
    pairs = zip(episodes.token_rows(head), texts_of(head, "completion"), strict=True)
    return any(
        text is not None and texts.gives_back(episodes.last_action(rows), text) for rows, text in pairs
    )


def values(table: pa.Table, texts: TokenTexts) -> dict[str, Any]:
    """Return {"vocabulary": [...], "tokens": [[index, ...]], "logprob": [[...]], ...}.

    Values are integers, multiplied by `SCALES`; null for a sample without any, and a single number for a
    sample whose values are all equal. The rows of an episode follow each other: "rows" has the first token of
    each, "given" begin and end of each stretch that was put in, whose values are null.
    """
    indices: dict[str, int] = {}
    samples = episodes.token_rows(table)
    tokens = [
        [indices.setdefault(text, len(indices)) for row in rows for text in texts.of(row.ids)]
        for rows in samples
    ]
    numbers: dict[str, Callable[[episodes.TokenRow], np.ndarray | None]] = {
        "logprob": lambda row: row.logprobs,
        "log_ratio": lambda row: _both(row.trainer_logprobs, row.logprobs, np.subtract),
        "advantage": lambda row: row.advantages,
        "kl": lambda row: _both(row.trainer_logprobs, row.ref_logprobs, _k3),
    }
    coarse = {
        name: [_coarse([(row, of(row)) for row in rows], SCALES[name]) for rows in samples]
        for name, of in numbers.items()
    }
    where = {
        "given": [episodes.given_ranges(rows) for rows in samples],
        "rows": [episodes.row_starts(rows) for rows in samples],
    }
    return {"vocabulary": list(indices), "tokens": tokens, "scales": SCALES, **where, **coarse}


def count(table: pa.Table) -> int:
    return sum(length or 0 for length in episodes.lengths_of(table))


def _both(a: np.ndarray | None, b: np.ndarray | None, function: Any) -> np.ndarray | None:
    return None if a is None or b is None or len(a) != len(b) else function(a, b)


def _k3(logprobs: np.ndarray, ref_logprobs: np.ndarray) -> np.ndarray:
    difference = np.clip(ref_logprobs - logprobs, None, 80.0)  # avoids overflow
    return np.expm1(difference) - difference


def _coarse(
    rows: Sequence[tuple[episodes.TokenRow, np.ndarray | None]], scale: float
) -> list[int | None] | int | None:
    """Round the values of a sample's rows; one number where all sampled tokens have the same."""
    if all(values is None for _, values in rows):
        return None
    sampled = np.concatenate([row.is_sampled for row, _ in rows])
    filled = [np.full(len(row.ids), np.nan) if values is None else values for row, values in rows]
    whole = np.where(sampled, np.round(np.concatenate(filled) * scale), np.nan)
    trained = whole[sampled]
    if len(trained) and np.isfinite(trained).all() and (trained == trained[0]).all():
        return int(trained[0])
    return [int(value) if ok else None for value, ok in zip(whole, np.isfinite(whole), strict=True)]
