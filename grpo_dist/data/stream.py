"""Order of prompts under dynamic sampling: a stream of concatenated epochs.

The rewards of a batch decide how many prompts it samples. So a batch takes as many as it may need when it is
launched, and returns those it did not sample when it is trained on:

    launched   takes 4 prompts and 12 spare ones: returned ones first, oldest first, then from the stream
    trained    returns the spare prompts that it did not sample

Every prompt of an epoch is sampled once, but for those that `data.drop_solved` leaves out: their turns are
passed over. With several batches in flight at the end of an epoch, one may start
the next epoch before another has returned prompts of this one. An order index is a position in the epochs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from grpo_dist.data.mixture import Mixture
from grpo_dist.data.order import OrderState, shuffled
from grpo_dist.data.solved import SolvedPrompts
from grpo_dist.types import Group, Prompt


class PromptStream:
    """Stream of order indices.

    All below ``position`` were taken or passed over, except those ``waiting``: returned or postponed, oldest
    first.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_batch: int,
        *,
        seed: int,
        state: OrderState,
        weights: Mapping[str, float] | None = None,
        solved: SolvedPrompts | None = None,
    ) -> None:
        """``per_batch`` is the number of prompts a batch takes, including spare ones. ``weights``: of each
        source, see `mixture.Mixture`; none: epochs of all prompts. ``solved``: those to leave out; None:
        those of ``state``, and no others.

        Raises ValueError if it exceeds the number of prompts.
        """
        if per_batch > (n := len(prompts)):
            raise ValueError(f"{per_batch} prompts a batch cannot be drawn from {n} without repetition")
        self._prompts, self._per_batch, self._seed = prompts, per_batch, seed
        self._position, self._waiting = state.position, deque(state.waiting)
        self._solved = solved or SolvedPrompts(prompts, state.left_out)
        sources = [prompt.source for prompt in prompts] if weights else []
        self._mixture = Mixture(sources, weights, seed=seed) if weights else None

    @property
    def state(self) -> OrderState:
        return OrderState(self._position, tuple(self._waiting), left_out=self._solved.passed)

    def take(self, batch: int) -> list[int]:
        """Return the next order indices; a repeated prompt is postponed to the next batch."""
        taken: dict[int, int] = {}  # order index by prompt
        postponed = []
        while len(taken) < self._per_batch:
            index = self._next_left(len(taken))
            if taken.setdefault(self.prompt(index), index) != index:
                postponed.append(index)
        self._waiting.extendleft(reversed(postponed))  # they are older than the rest
        return list(taken.values())

    def prompt(self, index: int) -> int:
        if self._mixture is not None:
            return self._mixture.prompt(index)
        epoch, at = divmod(index, len(self._prompts))
        return int(shuffled(len(self._prompts), self._seed, epoch)[at])

    def trained(self, indices: Sequence[int], sampled: Sequence[Group]) -> None:
        self._solved.observe(sampled)
        uids = {group.prompt.uid for group in sampled}
        if returned := [index for index in indices if self._uid(index) not in uids]:
            self._waiting = deque(sorted([*self._waiting, *returned]))

    def sampled(self, in_flight: Iterable[int] = ()) -> Counter[str]:
        """Count how often each uid was sampled, except by batches ``in_flight`` (order indices)."""
        pending = {*self._waiting, *in_flight}
        turns = Counter(self._uid(index) for index in range(self._position) if index not in pending)
        turns.subtract(self._solved.passed)
        return turns

    def _uid(self, index: int) -> str:
        return self._prompts[self.prompt(index)].uid

    def _next_left(self, taken: int) -> int:
        """As `_next`, without the prompts that are left out."""
        while self._solved.is_out[prompt := self.prompt(index := self._next(taken))]:
            self._solved.pass_over(prompt)
        return index

    def _next(self, taken: int) -> int:
        """Return the next order index of a batch that has ``taken`` prompts."""
        if self._waiting:
            return self._waiting.popleft()
        self._position += 1
        return self._position - 1
