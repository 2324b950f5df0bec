"""Prompts that the policy solves are left out of all later epochs: `data.drop_solved`.

    drop_solved 0.9, 4 samples of each prompt; right samples of its group
    epoch 0    a 4   b 3   c 1   d 0
    epoch 1          b 4   c 2   d 1     a is left out
    epoch 2                c 3   d 2     b, too

ScaleRL's no-positive resampling, arXiv:2510.13786: a policy mostly keeps solving what it has solved, so the
prompt never returns, but for steps that are on their way by then. The group of the latest epoch decides, and
not the mean over all epochs, which the first ones would hold down. A sample that could not be scored, or that
no engine gave (`batch.min_samples`), does not count as right: it is no reason to leave a prompt out for good.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from grpo_dist.types import Group, Prompt, correctness

logger = logging.getLogger("grpo_dist")


class SolvedPrompts:
    """Which of ``prompts`` are left out, and how often the turn of each was passed over.

    ``passed``: that count by uid, of a checkpoint; a prompt that is left out has one, 0 at first.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        passed: Mapping[str, int],
        *,
        share: float | None = None,
        keep: int = 1,
        samples: int = 1,
    ) -> None:
        """``share``: right samples of a group from which its prompt is left out; None: it never is.
        ``keep``: prompts that stay in any case, since the steps on their way hold so many. ``samples``: of a
        whole group.
        """
        self._prompts, self._share, self._keep, self._samples = prompts, share, keep, samples
        tracked = share is not None or passed
        self._index = {prompt.uid: i for i, prompt in enumerate(prompts)} if tracked else {}
        self.is_out = np.zeros(len(prompts), bool)
        self._passed: dict[str, int] = {}
        for uid, times in passed.items():
            self.is_out[self._index[uid]] = True
            self._passed[uid] = int(times)
        self._has_warned = False

    @property
    def passed(self) -> dict[str, int]:
        """How often the turn of each prompt that is left out was passed over, by uid."""
        return dict(self._passed)

    def observe(self, sampled: Sequence[Group]) -> None:
        """Leave out the prompts of the groups that reach the share, while more than ``keep`` are left."""
        if self._share is None:
            return
        for group in sampled:
            uid, index = group.prompt.uid, self._index[group.prompt.uid]
            if self.is_out[index] or right_share(group, self._samples) < self._share:
                continue
            if len(self._prompts) - len(self._passed) <= self._keep:
                self._warn()
                return
            self.is_out[index], self._passed[uid] = True, 0

    def pass_over(self, index: int) -> None:
        """Count that a turn of prompt ``index``, which is left out, was passed over."""
        self._passed[self._prompts[index].uid] += 1

    def _warn(self) -> None:
        """Warn once that solved prompts are sampled again."""
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "data.drop_solved = %g: %d of %d prompts are solved and left out; the other %d stay, solved or "
            "not, since the steps on their way hold %d. The run continues with them; end it, or start one "
            "with further prompts",
            self._share, len(self._passed), len(self._prompts), len(self._prompts) - len(self._passed),
            self._keep,
        )  # fmt: skip


def right_share(group: Group, samples: int = 1) -> float:
    """Return the right samples of a group as a share of all, of ``samples`` at least: those that could
    not be scored or had are not right.
    """
    right = correctness(group)
    return int(np.count_nonzero(right == 1.0)) / max(len(right), samples)
