"""Drafts for the samples of a batch that has drained, from texts that the engine has sampled before.

vLLM makes a `Drafter` by its name in ``speculative_config.model`` and asks it after every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actors.workers.draft_counts import DraftCounts
from actors.workers.draft_history import History

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METHOD, NAME = "custom_class", "actors.workers.drafter.Drafter"
# In vLLM's ``additional_config``.
MAX_SEQUENCES, HISTORY_TOKENS = "grpo_dist_speculation_max_sequences", "grpo_dist_speculation_history_tokens"
# A verified token costs part of a step: below this share of right drafts they are not worth it. It is then
# only looked at in every so many steps whether they have become so.
_WORTH, _TRIAL = 0.3, 16
_TOLD_BY = 4  # last tokens by which a row is taken to hold the text of the step before
_MEMORY = 0.9  # weight of what was before in the running share


class Drafter:
    """Drafts for at most so many sequences at once; a fuller batch keeps the cores busy without."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        use_exact_sampler()
        settings: Any = vllm_config.speculative_config
        self._tokens: int = settings.num_speculative_tokens
        self._most_sequences: int = vllm_config.additional_config[MAX_SEQUENCES]
        self._history = History(vllm_config.additional_config[HISTORY_TOKENS])
        self._texts = np.zeros((0, 0), dtype=np.int32)  # of each row, after the last step
        self._lengths = np.zeros(0, dtype=np.int64)
        self._pending = 0  # drafted tokens that the next step verifies
        self._share = 1.0  # of right drafts, lately
        self._skipped = 0

    def load_model(self, model: Any) -> None:
        """Do nothing: no model drafts. vLLM calls it of every drafter."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **_: Any,
    ) -> list[list[int]]:
        """Return the drafts of each row, [] for none. ``sampled_token_ids``: of the step that has ended;
        ``num_tokens_no_spec`` [rows], ``token_ids_cpu`` [rows, longest]: each row's text with them.
        """
        self._note_share(sampled_token_ids)
        rows = len(sampled_token_ids)
        sampled = np.fromiter(map(len, sampled_token_ids), np.int64, rows)
        self._remember(sampled, np.array(num_tokens_no_spec[:rows]), token_ids_cpu)
        drafts: list[list[int]] = [[] for _ in range(rows)]
        self._pending = 0
        if rows <= self._most_sequences and self._is_worth_it():
            for i in range(rows):
                if sampled_token_ids[i]:  # else its prompt is not finished
                    text = self._texts[i, : self._lengths[i]]
                    drafts[i] = self._history.continuation(text, self._tokens)
            self._pending = sum(map(len, drafts))
        return drafts

    def _note_share(self, sampled: list[list[int]]) -> None:
        if not self._pending:
            return
        right = min(sum(max(len(tokens) - 1, 0) for tokens in sampled), self._pending)
        self._share = _MEMORY * self._share + (1 - _MEMORY) * right / self._pending

    def _is_worth_it(self) -> bool:
        if self._share >= _WORTH:
            return True
        self._skipped = (self._skipped + 1) % _TRIAL
        return self._skipped == 0

    def _remember(
        self, sampled: NDArray[np.int64], lengths: NDArray[np.int64], texts: NDArray[np.int32]
    ) -> None:
        """Keep the texts of rows that have ended: those that hold another text now. Of one that has only
        moved a part is kept, which does no harm.

        This runs in every step, also where nothing is drafted: no Python for each row that goes on.
        """
        going = self._going(sampled, lengths, texts)
        for i in np.flatnonzero(~going[: len(self._lengths)]).tolist():
            self._history.add(self._texts[i, : self._lengths[i]])
        before = np.where(going[: len(sampled)], lengths - sampled, 0)
        self._grow(len(sampled), texts.shape[1])
        rows = np.flatnonzero(going[: len(sampled)])
        for token in range(int(sampled[rows].max(initial=0))):
            rows = rows[sampled[rows] > token]
            at = before[rows] + token
            self._texts[rows, at] = texts[rows, at]
        for i in np.flatnonzero(~going[: len(sampled)]).tolist():
            self._texts[i, : lengths[i]] = texts[i, : lengths[i]]
        self._lengths = lengths

    def _going(
        self, sampled: NDArray[np.int64], lengths: NDArray[np.int64], texts: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Return which rows, of those now and before, hold the text of the step before and what was sampled
        since.
        """
        rows = min(len(self._lengths), len(sampled))
        old, at = self._lengths[:rows], np.arange(rows)
        same = lengths[:rows] == old + sampled[:rows]
        for back in range(1, _TOLD_BY + 1):
            position = np.maximum(old - back, 0)
            same &= texts[at, position] == self._texts[at, position]
        going = np.zeros(max(len(self._lengths), len(sampled)), dtype=bool)
        going[:rows] = same
        return going

    def _grow(self, rows: int, width: int) -> None:
        have = self._texts.shape
        if rows > have[0] or width > have[1]:
            grown = np.zeros((max(rows, have[0]), max(width, have[1])), dtype=np.int32)
            grown[: have[0], : have[1]] = self._texts
            self._texts = grown


def use_exact_sampler() -> None:
    """Have vLLM's model runner verify drafts with `ExactSampler`. The runner makes its drafter first, and
    then its rejection sampler by the name that is set here.
    """
    from vllm.v1.worker import gpu_model_runner

    from actors.workers.exact_sampler import ExactSampler  # imports vLLM

    gpu_model_runner.RejectionSampler = ExactSampler


def require_exact_sampler(worker: Any) -> None:
    """Raise RuntimeError unless an engine's worker process verifies drafts with `ExactSampler`."""
    from actors.workers.exact_sampler import ExactSampler  # imports vLLM, as below

    runner = worker.model_runner
    found = getattr(runner, "rejection_sampler", None)
    if not isinstance(found, ExactSampler):
        raise RuntimeError(
            f"rollout.speculation: vLLM's {type(runner).__module__} verifies drafts with "
            f"{type(found).__name__}, under which samples would change; set rollout.speculation.tokens to 0"
        )


def take_counts(worker: Any) -> DraftCounts:
    """Return `ExactSampler.take_counts` of an engine's worker process."""
    counts: DraftCounts = worker.model_runner.rejection_sampler.take_counts()
    return counts
