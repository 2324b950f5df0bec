"""The lengths of prompts and completions in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from grpo_dist.config import Config, FixedLengths, LengthsConfig, LognormalLengths, NaturalLengths
from grpo_dist.tools.bench.lengths import lengths_of

# Assumed without `bench.lengths` or a benchmark, for instruct models on mathematics.
_SHARE_OF_CAP = 1 / 3  # mean before the cap
_SIGMA = 0.7
_PROMPT_SHARE = 1 / 4  # share of `data.max_prompt_tokens`
_TURNS, _TOOL_S = 2, 0.2  # a tool call and an answer
_DRAWN = 4096  # sampled lengths, for the means


@dataclass(frozen=True, slots=True)
class Workload:
    """``prompt_tokens``: length of every prompt; all share the first ``shared_tokens``. Completion lengths
    are drawn from ``measured``, or else from ``lengths``, up to ``cap``. With environments each completion
    has ``turns`` of equal length, with ``tool_s`` seconds between turns. ``assumed``: descriptions of
    guesses.
    """

    prompt_tokens: int
    lengths: LengthsConfig
    cap: int
    measured: tuple[int, ...] = ()
    assumed: str = ""
    turns: int = 1
    tool_s: float = 0.0
    shared_tokens: int = 0

    def sample(self, uid: str, seeds: Sequence[int]) -> tuple[int, ...]:
        """Return the completion lengths for ``seeds`` of the prompt ``uid``."""
        if self.measured:
            return tuple([min(self.measured[seed % len(self.measured)], self.cap) for seed in seeds])
        lengths = lengths_of(seeds, self.lengths, cap=self.cap, uid=uid)
        assert lengths is not None  # natural lengths are measured or assumed
        # An evaluation's cap may be below fixed lengths.
        return lengths if max(lengths) <= self.cap else tuple(min(n, self.cap) for n in lengths)

    def known_lengths(self, uids: Sequence[str], samples: int) -> dict[str, float]:
        """Return the mean tokens of ``samples`` completions per prompt, by seeds that no run uses."""
        return {
            uid: float(np.mean(self.sample(uid, [-1 - n - samples * i for n in range(samples)])))
            for i, uid in enumerate(uids)
        }

    @property
    def mean(self) -> float:
        """Mean tokens of a completion."""
        return float(np.mean(_sample_workload(self)))

    def longest_of(self, count: int) -> float:
        """Return a length that the longest of ``count`` completions almost always reaches."""
        return float(np.quantile(_sample_workload(self), max(0.0, 1 - 2 / count)))


@lru_cache
def _sample_workload(workload: Workload) -> list[int]:
    if isinstance(workload.lengths, FixedLengths):
        return list(workload.sample("", [0]))
    return [workload.sample(str(seed), [seed])[0] for seed in range(len(workload.measured) or _DRAWN)]


def workload_of(
    config: Config,
    *,
    prompt_tokens: int | None = None,
    shared_tokens: int = 0,
    measured: Sequence[int] = (),
    turns: int | None = None,
    tool_s: float | None = None,
) -> Workload:
    """Take lengths from `bench.lengths`; natural lengths from ``measured``, or assumed if None. Without
    environments there is one turn.
    """
    cap, lengths = config.sampling.longest, config.bench.lengths
    assumed = []
    if prompt_tokens is None:
        prompt_tokens = max(1, round(config.data.max_prompt_tokens * _PROMPT_SHARE))
        assumed.append(
            f"prompts of {prompt_tokens} tokens, a quarter of data.max_prompt_tokens (--prompt-tokens)"
        )
    if isinstance(lengths, NaturalLengths) and not measured:
        lengths = LognormalLengths(mean=max(1.0, cap * _SHARE_OF_CAP), sigma=_SIGMA)
        assumed.append(
            f"completions log-normal with a mean of {lengths.mean:.0f} tokens, a third of "
            "sampling.max_new_tokens (bench.lengths)"
        )
    used = tuple(measured) if config.bench.lengths.kind == "natural" else ()
    if not config.has_environments:
        return Workload(prompt_tokens, lengths, cap, used, "; ".join(assumed), shared_tokens=shared_tokens)
    if turns is None or tool_s is None:
        instant = config.environment_names == ("calculator",)
        turns = turns or _TURNS
        tool_s = tool_s if tool_s is not None else 0.0 if instant else _TOOL_S
        assumed.append(f"episodes of {turns} turns, {tool_s:g} s between two (--turns, --tool-seconds)")
    if config.bench.lengths.kind != "natural":
        lengths = _scale_to_episodes(lengths, turns)
    return Workload(prompt_tokens, lengths, cap, used, "; ".join(assumed), turns, tool_s, shared_tokens)


def _scale_to_episodes(lengths: LengthsConfig, turns: int) -> LengthsConfig:
    """Return lengths per episode; ``lengths`` are per action."""
    if isinstance(lengths, FixedLengths) and lengths.tokens is not None:
        return lengths.model_copy(update={"tokens": lengths.tokens * turns})
    if isinstance(lengths, LognormalLengths):
        return lengths.model_copy(update={"mean": lengths.mean * turns})
    return lengths
