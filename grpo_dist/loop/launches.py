"""Groups on their way, and which of those that are done first a step takes: for `first_come`.

A step may have thousands of groups, and the loop's thread learns of each that it is done. So counts are kept
by deadline, and a group that is done costs a comparison for each of them, of which there are few:

    by deadline     0    1    2       step 0, which takes 4 groups
    on their way    2    5    3       due by 0: 2, by 1: 7, of which step 1 has place for 4: 3 are needed now
    done            1    4    2       1 of 2 by deadline 0: step 0 waits, though 7 are done
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from grpo_dist.loop.groups import ScoredGroup
from grpo_dist.types import Prompt


@dataclass(frozen=True, slots=True)
class Launch:
    """A group on its way: its prompt, the order index of that, and the step that it was launched for."""

    prompt: Prompt
    index: int
    step: int


def is_complete(due: Mapping[int, int], done: Mapping[int, int], *, step: int, size: int) -> bool:
    """Return whether ``size`` groups are done for ``step``, with those that later steps have no place for.

    Args:
        due: groups on their way by the last step that may train them.
        done: those of them that are sampled and scored, likewise.
    """
    if sum(done.values()) < size:
        return False
    lacking = 0  # of those due so far
    for last in sorted(due):
        lacking += due[last] - done.get(last, 0)
        if lacking > size * (last - step):
            return False
    return True


def choice(deadlines: Mapping[str, int], done: Sequence[str], *, step: int, size: int) -> list[str] | None:
    """Choose the ``size`` groups of ``step`` among those ``done``; None while it must wait for others.

    Args:
        deadlines: last step that may train each group on its way, by uid. At most ``size`` * (d - step + 1)
            are due by any step d.
        done: uids that are sampled and scored, in the order of preference.

    Returns:
        Those that later steps have no place for, then the first of the others.

        deadlines {a: 0, b: 1, c: 1, d: 1}, step 0, size 2    done [d, c]: None, a is waited for
                                                              done [d, c, a]: [a, d]
    """
    due = Counter(deadlines.values())
    if not is_complete(due, Counter(deadlines[uid] for uid in done), step=step, size=size):
        return None
    chosen: dict[str, None] = {}
    so_far = 0
    for last in sorted(due):
        so_far += due[last]
        need = so_far - size * (last - step) - len(chosen)  # the chosen are due by ``last``, too
        if need > 0:
            ready = (uid for uid in done if deadlines[uid] <= last and uid not in chosen)
            chosen |= dict.fromkeys(islice(ready, need))
    rest = (uid for uid in done if uid not in chosen)
    return [*chosen, *islice(rest, size - len(chosen))]


class DeadlineCounts(Counter[int]):
    """Groups by deadline."""

    def take_off(self, deadline: int) -> None:
        """Take one off, and drop a count of 0, so that there are as many as deadlines of groups."""
        self[deadline] -= 1
        if not self[deadline]:
            del self[deadline]


class Launches:
    """Groups on their way by uid, in launch order; those that are done included.

    Args:
        size: groups that a step takes.
        max_staleness: steps that a group may wait for.
    """

    def __init__(self, size: int, max_staleness: int) -> None:
        self._size, self._max_staleness = size, max_staleness
        self._launches: dict[str, Launch] = {}
        self._done: dict[str, ScoredGroup] = {}  # first come first
        self._silent: set[str] = set()  # of those done
        self._due_by_deadline, self._done_by_deadline = DeadlineCounts(), DeadlineCounts()

    def __len__(self) -> int:
        return len(self._launches)

    def __contains__(self, uid: object) -> bool:
        return uid in self._launches

    @property
    def done(self) -> list[ScoredGroup]:
        """Groups that are sampled and scored, in the order of that."""
        return list(self._done.values())

    def add(self, own: Launch) -> None:
        """Begin to count a group as on its way."""
        self._launches[own.prompt.uid] = own
        self._due_by_deadline[self._deadline(own)] += 1

    def finish(self, uid: str, scored: ScoredGroup, *, silent: bool = False) -> None:
        """Note that a group is sampled and scored. ``silent``: it has no signal, so others are preferred."""
        self._done[uid] = scored
        self._done_by_deadline[self._deadline(self._launches[uid])] += 1
        if silent:
            self._silent.add(uid)

    def renew(self, scored: Iterable[ScoredGroup]) -> None:
        """Replace the groups that are `done`, in their order."""
        self._done = dict(zip(self._done, scored, strict=True))

    def remove(self, uid: str) -> Launch:
        """Stop to count a group as on its way, done or not."""
        own = self._launches.pop(uid)
        self._due_by_deadline.take_off(self._deadline(own))
        if self._done.pop(uid, None) is not None:
            self._done_by_deadline.take_off(self._deadline(own))
            self._silent.discard(uid)
        return own

    def take(self, uids: Collection[str]) -> list[tuple[Launch, ScoredGroup]]:
        """Remove the groups ``uids``, which are done, and return them in launch order."""
        taken = [(own, self._done[uid]) for uid, own in self._launches.items() if uid in uids]
        for own, _ in taken:
            self.remove(own.prompt.uid)
        return taken

    def is_complete(self, step: int) -> bool:
        """Return whether ``step`` has its groups, without a look at each."""
        if len(self._done) < self._size:
            return False
        return is_complete(self._due_by_deadline, self._done_by_deadline, step=step, size=self._size)

    def chosen(self, step: int) -> list[str]:
        """Return the uids of the groups that ``step`` takes; it `is_complete`."""
        deadlines = {uid: own.step + self._max_staleness for uid, own in self._launches.items()}
        done = sorted(self._done, key=lambda uid: uid in self._silent)
        found = choice(deadlines, done, step=step, size=self._size)
        assert found is not None, f"step {step} lacks groups"
        return found

    def _deadline(self, own: Launch) -> int:
        return own.step + self._max_staleness
