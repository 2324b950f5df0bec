"""Registry of advantage estimators: what the configuration and the loop must know of each. Imports no torch.

`advantages.ADVANTAGES` has the function of each name, but for `process`, `turn` and `otb`, whose advantages
belong to tokens from the start: `grpo_dist.batch.credit_assignment` computes those.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimator:
    """What holds of one estimator.

    Attributes:
        inputs: keyword arguments of its function, which the caller provides: names of `_INPUTS` in
            `credit_assignment`. With ``std`` it divides by a deviation.
        needs_group: it compares the samples of a prompt, so one sample alone has advantage 0.
        learns_from_equal_rewards: a group of equal total rewards may have advantages, so a step of such
            groups is trained on.
        other_rewards: what it reads besides the total reward of each sample, for messages; None: nothing.
            `algorithm.reward_norm` and `rewards.shuffle` change only the total, so they are refused.
        clips_other_rewards: `algorithm.reward_clip` clips those, too.
        only_right_and_wrong: its total rewards must be 0 or 1.
        whitens: its baseline is the mean over the batch: whitened unless the configuration says otherwise.
        discounts: the reward belongs to the last token, so `algorithm.advantage.gamma` applies.
        reads_policy: it takes the score norms of the tokens under the weights before the update, one more
            forward pass of the policy's ranks.
    """

    inputs: tuple[str, ...] = ()
    needs_group: bool = True
    learns_from_equal_rewards: bool = False
    other_rewards: str | None = None
    clips_other_rewards: bool = False
    only_right_and_wrong: bool = False
    whitens: bool = False
    discounts: bool = False
    reads_policy: bool = False

    @property
    def learns_from_one_sample(self) -> bool:
        """Whether a single sample may have a signal: it is compared with something else than its siblings."""
        return not self.needs_group and self.other_rewards is not None


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(inputs=("std", "eps")),
    "dr_grpo": Estimator(),
    "rloo": Estimator(),
    "reinforce_pp": Estimator(
        needs_group=False, learns_from_equal_rewards=True, whitens=True, discounts=True
    ),
    "reinforce_pp_baseline": Estimator(whitens=True),
    "remax": Estimator(
        inputs=("baselines",),
        needs_group=False,
        learns_from_equal_rewards=True,
        other_rewards="the reward of the greedy answer as well",
        clips_other_rewards=True,
    ),
    "opo": Estimator(inputs=("lengths",)),
    "pass_at_k": Estimator(inputs=("k", "eps")),
    "gdpo": Estimator(
        inputs=("parts", "weights", "std", "eps"),
        learns_from_equal_rewards=True,
        other_rewards="each reward separately",
    ),
    "gpg": Estimator(),
    "maxrl": Estimator(only_right_and_wrong=True),
    "grpo_passk": Estimator(inputs=("std", "eps")),
    "process": Estimator(
        inputs=("std", "eps"),
        needs_group=False,
        learns_from_equal_rewards=True,
        other_rewards="the rewards of reasoning steps or turns",
    ),
    "turn": Estimator(
        inputs=("discount", "std", "eps"),
        learns_from_equal_rewards=True,
        other_rewards="the rewards of turns as well",
    ),
    # The end of a group's longest sample has no baseline, so equal rewards teach there.
    "otb": Estimator(learns_from_equal_rewards=True, reads_policy=True),
}
# Of a user's own function nothing is known, so nothing is refused or skipped that it could learn from.
OWN = Estimator(needs_group=False, learns_from_equal_rewards=True)


def estimator_of(name: str) -> Estimator:
    """Return what holds of a built-in estimator, or of a user's own: ``module:name`` or a package's name."""
    return ESTIMATORS.get(name, OWN)
