"""Whether a run trains on shorter completions than it launches: the bias of taking what is done first.

    launched for step 0    lengths 2 4 9        trained so far 2 4 9, and 1 3 of those of step 1
    launched for step 1    lengths 1 3 8        bias (2 + 4 + 9 + 1 + 3) / 5 / ((2 + 4 + 9) / 3) - 1 = -24 %

The mean length of all samples trained so far is compared with that of the launches of which no group is left
on its way: those had all their lengths trained. A run that carries slow groups over comes back to 0, and one
that drops them would not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from grpo_dist.types import Group

_TRAINED, _COMPLETE = "trained", "complete"
LengthSums = Mapping[str, tuple[int, int]]  # tokens and samples; of launches on their way by step


class LengthBias:
    """Sums of lengths. ``state``: those of a checkpoint."""

    def __init__(self, state: LengthSums) -> None:
        self._sums = {name: (int(tokens), int(samples)) for name, (tokens, samples) in state.items()}

    @property
    def state(self) -> LengthSums:
        return dict(self._sums)

    def trained(self, groups: Iterable[tuple[int, Group]]) -> None:
        """Count groups of a step, each with the step that it was launched for."""
        for launched, group in groups:
            found = sum([r.num_tokens for r in group.rollouts]), len(group.rollouts)
            self._add(_TRAINED, found)
            self._add(str(launched), found)

    def settle(self, on_their_way: Collection[int]) -> float | None:
        """Return the bias, as a share of the mean length of complete launches; None before there is one.

        ``on_their_way``: launches with groups that are not trained yet.
        """
        kept = {_TRAINED, _COMPLETE, *map(str, on_their_way)}
        for launch in [name for name in self._sums if name not in kept]:
            self._add(_COMPLETE, self._sums.pop(launch))
        trained, complete = self._sums.get(_TRAINED, (0, 0)), self._sums.get(_COMPLETE, (0, 0))
        if not complete[0] or not trained[1]:
            return None
        return (trained[0] / trained[1]) / (complete[0] / complete[1]) - 1.0

    def _add(self, name: str, found: tuple[int, int]) -> None:
        tokens, samples = self._sums.get(name, (0, 0))
        self._sums[name] = tokens + found[0], samples + found[1]
