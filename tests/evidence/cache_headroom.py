"""Simulates an engine whose key-value cache is too small for the sequences in flight, with shares of it kept
free where a sequence is admitted (vLLM's argument `watermark`).

    python -m tests.evidence.cache_headroom

The scheduler is vLLM's rule: running sequences grow first, and where blocks are missing the last admitted
one gives up all of its own and waits at the head of the queue; in a step without that, sequences are
admitted while the blocks of what they have, and the share, are free. A step takes 6 ms, 5 us a sequence, 19
ns a token of context and 28 us a token that is prefilled: about a model of 7B parameters on an H100. For
each workload and share: time of the batch over that without a share, and tokens computed a second time, of
those sampled.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

SHARES = (0.0, 0.02, 0.05, 0.1, 0.2)
_BLOCK, _PROMPT, _MOST_SEQUENCES, _PREFILL = 16, 200, 256, 8192
_STEP_S, _SEQUENCE_S, _CONTEXT_S, _PREFILL_S = 6e-3, 5e-6, 19e-9, 28e-6


@dataclass(frozen=True, slots=True)
class Workload:
    """``samples`` of log-normal length, with mean and sigma before the cap; a cache of ``tokens``."""

    mean: int
    sigma: float
    cap: int
    tokens: int
    samples: int

    def lengths(self) -> list[int]:
        rng, mu = random.Random(1), math.log(self.mean) - self.sigma**2 / 2
        return [max(1, min(self.cap, int(rng.lognormvariate(mu, self.sigma)))) for _ in range(self.samples)]


WORKLOADS = (
    Workload(1500, 1.0, 8192, 100_000, 300),
    Workload(1500, 0.5, 8192, 100_000, 300),
    Workload(4000, 0.7, 16384, 60_000, 120),
    Workload(3000, 1.0, 16384, 600_000, 200),  # the cache suffices
)


class SimulatedEngine:
    """Steps an engine until all samples are finished. Lengths and tokens as in `Workload`."""

    def __init__(self, lengths: Sequence[int], tokens: int, share: float) -> None:
        self._lengths, self._made = lengths, [0] * len(lengths)
        self._waiting, self._running = deque(range(len(lengths))), list[int]()
        self._held: dict[int, int] = {}  # blocks
        self._free = tokens // _BLOCK
        self._kept = int(share * self._free)
        self.seconds, self.again = 0.0, 0

    def run(self) -> None:
        while self._waiting or self._running:
            prefilled = 0 if self._grow() else self._admit()
            context = sum(_PROMPT + self._made[own] for own in self._running)
            self.seconds += _STEP_S + _SEQUENCE_S * len(self._running)
            self.seconds += _CONTEXT_S * context + _PREFILL_S * prefilled
            for own in list(self._running):
                self._made[own] += 1
                if self._made[own] == self._lengths[own]:
                    self._running.remove(own)
                    self._free += self._held.pop(own)

    def _grow(self) -> bool:
        """Take blocks for a token of each that runs; return whether one gave up its own."""
        any_lost = False
        for own in list(self._running):
            while own in self._held and (need := self._blocks(own) - self._held[own]) > self._free:
                last = self._running.pop()
                self._free += self._held.pop(last)
                self._waiting.appendleft(last)
                self.again += _PROMPT + self._made[last]
                any_lost = True
            if own in self._held:
                self._held[own] += need
                self._free -= need
        return any_lost

    def _admit(self) -> int:
        """Admit what has room; return the tokens to prefill."""
        prefilled = 0
        while self._waiting and len(self._running) < _MOST_SEQUENCES:
            own = self._waiting[0]
            tokens, blocks = _PROMPT + self._made[own], self._blocks(own)
            if prefilled and prefilled + tokens > _PREFILL:
                break
            if blocks + (self._kept if self._running else 0) > self._free:
                break
            self._running.append(self._waiting.popleft())
            self._held[own] = blocks
            self._free -= blocks
            prefilled += tokens
        return prefilled

    def _blocks(self, own: int) -> int:
        """Return the blocks for what it has and the next token."""
        return -(-(_PROMPT + self._made[own] + 1) // _BLOCK)


def main() -> None:
    for workload in WORKLOADS:
        print(workload)
        lengths, first = workload.lengths(), 0.0
        for share in SHARES:
            engine = SimulatedEngine(lengths, workload.tokens, share)
            engine.run()
            first = first or engine.seconds
            again = engine.again / sum(lengths)
            ratio = engine.seconds / first
            print(f"  {share:5.0%} kept free: {ratio:.3f} of the time, {again:.0%} computed again")


if __name__ == "__main__":
    main()
