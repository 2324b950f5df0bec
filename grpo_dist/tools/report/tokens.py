"""Text and values per token, rounded to keep the page small.

Log-probs are rounded to 0.001 nats, log-ratios and KL to 0.0001, advantages to 0.001.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_dist.demo.tokenizer import character_decoder
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
_CHECKED = 20  # samples to check whether a tokenizer reproduces their text
_SPOILT = "\ufffd"  # decoded from incomplete characters


class TokenTexts:
    """Texts of tokens from a `tokenizer.json`, without running model code."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop a leading space, so every token is decoded after another one.
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._skip = len(self._decode([]))
        self._texts_by_id: dict[int, str] = {}

    def split(self, ids: np.ndarray, row_begins: Sequence[int] | np.ndarray = ()) -> list[str]:
        """Return a text per token; a multi-token character belongs to its first token.

        Characters do not cross ``row_begins``, increasing indices into ``ids``.
        """
        unique, places = np.unique(ids, return_inverse=True)
        unique_texts = [self._one(token) for token in unique.tolist()]
        texts = [unique_texts[place] for place in places.tolist()]
        spoilt = np.array([_SPOILT in text for text in unique_texts], bool)
        if spoilt.any():
            is_spoilt, is_first = spoilt[places], np.zeros(len(ids) + 1, bool)
            is_first[np.asarray(row_begins, int)] = True
            begins = is_spoilt & (is_first[:-1] | ~np.append(False, is_spoilt[:-1]))
            ends = is_spoilt & (is_first[1:] | ~np.append(is_spoilt[1:], False))
            for begin, last in zip(np.flatnonzero(begins), np.flatnonzero(ends), strict=True):
                whole = self._decode(ids[begin : last + 1].tolist())[self._skip :]
                texts[begin : last + 1] = [whole, *[""] * (last - begin)]
        return texts

    def gives_back(self, ids: np.ndarray, text: str) -> bool:
        """Return whether ``ids`` decode to ``text``."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True) == text

    def _one(self, token: int) -> str:
        if token not in self._texts_by_id:
            self._texts_by_id[token] = self._decode([token])[self._skip :]
        return self._texts_by_id[token]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([*self._before, *ids], skip_special_tokens=False)


def find_tokenizer(run: Path, config: dict[str, Any]) -> tuple[TokenTexts | None, str]:
    """Find a run's tokenizer on this machine; return it with its path, or None with the reason.

    The search covers the exported model, the checkpoints and the initial model.
    """
    from tokenizers import Tokenizer  # slow to import

    for path in _places(run, config):
        if path.is_file():
            try:
                return TokenTexts(Tokenizer.from_file(str(path))), str(path)
            except Exception as error:  # the library raises a bare Exception for unreadable files
                return None, f"{path} cannot be read ({error})"
    model = _section(config, "model").get("path")
    if model in ("sft", "demo:tiny", "demo:small", "demo:micro"):
        return TokenTexts(character_decoder()), "the demo's tokenizer"
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

        with suppress(HFValidationError):  # a path instead of a hub id, such as ./model
            cached = try_to_load_from_cache(first, "tokenizer.json", revision=model.get("revision"))
            files += [Path(cached)] if isinstance(cached, str) else []
    return files


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def fits(table: pa.Table, texts: TokenTexts) -> bool:
    """Return whether ``texts`` reproduces a sample; otherwise it is another tokenizer."""
    head = table.slice(0, _CHECKED)
    pairs = zip(episodes.read_tokens(head).last_actions(), texts_of(head, "completion"), strict=True)
    return any(text is not None and texts.gives_back(ids, text) for ids, text in pairs)


def values(table: pa.Table, texts: TokenTexts) -> dict[str, Any]:
    """Return {"vocabulary": [...], "tokens": [[index, ...]], "logprob": [[...]], ...}.

    Values are integers, multiplied by `SCALES`; null for a sample without values, a single number if all are
    equal. An episode's rows are consecutive: "rows" has the first token of each, "given" start and end of
    each given span, whose values are null.
    """
    read, indices = episodes.read_tokens(table), dict[str, int]()
    vocabulary = [indices.setdefault(text, len(indices)) for text in texts.split(read.ids, read.row_begins)]
    functions: dict[str, tuple[Callable[..., np.ndarray], tuple[str, ...]]] = {
        "logprob": (np.asarray, ("logprobs",)),
        "log_ratio": (np.subtract, ("trainer_logprobs", "logprobs")),
        "advantage": (np.asarray, ("advantages",)),
        "kl": (_k3, ("trainer_logprobs", "ref_logprobs")),
    }
    coarse = {
        name: _coarse(read, function(*(read.values[c] for c in columns)) * SCALES[name], columns)
        for name, (function, columns) in functions.items()
    }
    where = {"given": read.given_ranges(), "rows": read.row_starts()}
    tokens = [vocabulary[a:b] for a, b in pairwise(read.sample_begins.tolist())]
    return {"vocabulary": list(indices), "tokens": tokens, "scales": SCALES, **where, **coarse}


def _k3(logprobs: np.ndarray, ref_logprobs: np.ndarray) -> np.ndarray:
    difference = np.clip(ref_logprobs - logprobs, None, 80.0)  # avoids overflow
    return np.expm1(difference) - difference


def _coarse(
    tokens: episodes.Tokens, values: np.ndarray, columns: Sequence[str]
) -> list[list[int | None] | int | None]:
    """Round each sample's ``values``, of ``columns``; one number where all sampled tokens have the same."""
    whole = np.where(tokens.sampled, np.round(values), np.nan)
    begins = tokens.sample_begins
    sampled_before = np.append(0, np.cumsum(tokens.sampled))[begins]
    low, high = np.full((2, len(begins) - 1), np.nan)
    if (has_some := np.diff(sampled_before) > 0).any():
        trained, firsts = whole[tokens.sampled], sampled_before[:-1][has_some]
        low[has_some] = np.minimum.reduceat(trained, firsts)
        high[has_some] = np.maximum.reduceat(trained, firsts)
    is_recorded = np.logical_and.reduce([tokens.recorded[name] for name in columns])
    recorded = np.logical_or.reduceat(is_recorded, tokens.sample_rows[:-1])
    is_constant = np.isfinite(low) & (low == high)
    coarse: list[list[int | None] | int | None] = [None] * len(recorded)
    for i in np.flatnonzero(recorded & is_constant).tolist():
        coarse[i] = int(low[i])
    if len(differing := np.flatnonzero(recorded & ~is_constant)):
        is_finite = np.isfinite(whole)
        flat: list[int | None] = list(map(int, np.where(is_finite, whole, 0.0).tolist()))
        for token in np.flatnonzero(~is_finite).tolist():
            flat[token] = None
        for i in differing.tolist():
            coarse[i] = flat[begins[i] : begins[i + 1]]
    return coarse
