"""The order of prompts under dynamic sampling: epochs, one after the other, and a position in them.

How many prompts a batch samples follows from its rewards. So it takes as many as it may come to need when it
is launched, and what it has not sampled when it is trained on goes to the batches after it:

    launched   takes 4 of its own and 12 further ones: of those given back, oldest first, then from the stream
    trained    gives back those of the 12 that it has not asked for

Every prompt of an epoch is sampled once. Where several batches are on their way at its end, one may begin the
next epoch before what another gives back of this one is sampled. A place is a position in the epochs.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence

from grpo_dist.data.order import OrderState, shuffled
from grpo_dist.types import Group, Prompt


class PromptStream:
    """``position``: places before it were taken once, but for those ``waiting``, which were given back or
    passed over, oldest first.
    """

    def __init__(self, prompts: Sequence[Prompt], per_batch: int, *, seed: int, state: OrderState) -> None:
        """``per_batch``: prompts a batch takes, with those it may not need. Raises ValueError where it
        exceeds their number.
        """
        if per_batch > (n := len(prompts)):
            raise ValueError(f"{per_batch} prompts a batch cannot be drawn from {n} without repetition")
        self._prompts, self._per_batch, self._seed = prompts, per_batch, seed
        self._position, self._waiting = state.position, list(state.waiting)

    @property
    def state(self) -> OrderState:
        return OrderState(self._position, tuple(self._waiting))

    def take(self, batch: int) -> list[int]:
        """The next places, but for those of a prompt that it has already, which wait for the next batch."""
        taken: dict[int, int] = {}  # place by prompt
        passed_over = []
        while len(taken) < self._per_batch:
            place = self._next()
            if taken.setdefault(self.prompt(place), place) != place:
                passed_over.append(place)
        self._waiting = passed_over + self._waiting  # they are older than those that were not come to
        return list(taken.values())

    def prompt(self, place: int) -> int:
        epoch, at = divmod(place, len(self._prompts))
        return int(shuffled(len(self._prompts), self._seed, epoch)[at])

    def trained(self, places: Sequence[int], sampled: Sequence[Group]) -> None:
        uids = {group.prompt.uid for group in sampled}
        for place in places:
            if self._uid(place) not in uids:
                insort(self._waiting, place)

    def sampled(self, on_the_way: Iterable[int] = ()) -> Counter[str]:
        """How often each uid was sampled, but for ``on_the_way``: places of batches not trained on yet."""
        not_yet = {*self._waiting, *on_the_way}
        return Counter(self._uid(place) for place in range(self._position) if place not in not_yet)

    def _uid(self, place: int) -> str:
        return self._prompts[self.prompt(place)].uid

    def _next(self) -> int:
        if self._waiting:
            return self._waiting.pop(0)
        self._position += 1
        return self._position - 1
