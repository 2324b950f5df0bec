"""Prompt pools: most samples go where the policy can learn now, chosen by Thompson sampling.

Prompts are divided by source or by a column. What a group of n samples teaches is proportional to the
variance of its rewards, s^2. Sources may differ in reward scale (`rewards.by_source`), so s^2 is normalised
by the rewards x of the group's source; c is the middle of their observed range:

    u = s^2 / mean((x - c)^2), at most 1

With two reward values the mean is a quarter of the squared range, the largest possible variance (Popoviciu
1935), and u = 4 p (1 - p) n / (n - 1) for the pass rate p: on average 1 where half of all samples would be
right, 0 where all would be right or all wrong. For unbounded rewards, such as logits of a reward model, u is
about the share of their variance that lies within groups.

    pool     theta ~ Beta(1 + useful, 1 + useless)     sums of u and of 1 - u over the pool's groups
             each place of a batch goes to the pool with the largest theta that has prompts left
    prompt   q ~ Beta(right + 2 m, wrong + 2 (1 - m))  its samples, and two at the pool's rate m
             the prompts of a pool with the largest q (1 - q) are admitted

All counts are halved every `half_life` steps, because the policy changes. The posterior of a pool or prompt
that is no longer drawn widens to its prior, so it is tried again. Outcomes arrive ``max_staleness`` batches
late, which a random choice tolerates.

Sources: fractional updates of the pools, Agrawal and Goyal 2012 (arXiv:1111.1797), section 2; the learning
signal as a pool's reward, self-evolving curriculum (arXiv:2505.14970); the variance of a group's rewards as
the signal, VCRL (arXiv:2509.19803); posteriors of single prompts with forgetting, MoPPS (arXiv:2507.04632).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from grpo_dist.config import DataConfig
from grpo_dist.data.columns import each, uids_of
from grpo_dist.data.order import OrderState
from grpo_dist.types import Group, Prompt, correctness

_BORROWED = 2.0  # pseudo-samples from the pool in the prior of a prompt
_FORGOTTEN = 1e-3  # counts below become 0, so a checkpoint holds recent ones only


class PoolOrder:
    """Draws prompts by pool and pass rate, deterministic in state, seed and batch.

    An order index is the index of a prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_batch: int,
        by: str,
        half_life: float,
        *,
        seed: int,
        state: OrderState,
    ) -> None:
        """``per_batch`` is the number of prompts a batch takes, including spare ones.

        Raises ValueError if it exceeds the number of prompts, or for a prompt without the pools' column.
        """
        if per_batch > len(prompts):
            raise ValueError(
                f"{per_batch} prompts a batch cannot be drawn from {len(prompts)} without repetition"
            )
        pool_names = each(prompts, lambda prompt: pool_of(prompt, by))
        self._names = sorted(set(pool_names))
        self._members = [np.flatnonzero(np.array(pool_names) == name) for name in self._names]
        self._uids = uids_of(prompts)
        self._pool = dict(zip(self._uids, map(self._names.index, pool_names), strict=True))
        self._index = {uid: i for i, uid in enumerate(self._uids)}
        self._per_batch, self._seed = per_batch, seed
        self._keep = 0.5 ** (1.0 / half_life)
        # one row per pool: useful, useless; one row per prompt: right, wrong
        self._pools = np.array([state.pools.get(name, (0.0, 0.0)) for name in self._names], np.float64)
        self._prompts = np.zeros((len(prompts), 2))
        self._scales = {source: RewardScale(*sums) for source, sums in state.reward_scales.items()}
        for uid, counts in state.outcomes.items():
            self._prompts[self._index[uid]] = counts

    @property
    def state(self) -> OrderState:
        sampled = np.flatnonzero(self._prompts.any(axis=1)).tolist()
        pools = dict(zip(self._names, _pairs(self._pools), strict=True))
        outcomes = dict(zip([self._uids[i] for i in sampled], _pairs(self._prompts[sampled]), strict=True))
        scales = {source: astuple(scale) for source, scale in self._scales.items()}
        return OrderState(pools=pools, outcomes=outcomes, reward_scales=scales)

    def prompt(self, index: int) -> int:
        return index

    def trained(self, indices: Sequence[int], sampled: Sequence[Group]) -> None:
        """Decay all counts, and add the outcomes of these groups."""
        self._pools *= self._keep
        self._prompts *= self._keep
        self._prompts[self._prompts < _FORGOTTEN] = 0.0
        self._scales = _scales(sampled, self._scales)
        for group in sampled:
            rewards = _scored_rewards(group)
            if not len(rewards):
                continue
            scale = self._scales[group.prompt.source]
            graded = correctness(group) if any(group.outcomes) else scale.shares(rewards)
            graded = graded[~np.isnan(graded)]
            correct = float(graded.sum())
            self._prompts[self._index[group.prompt.uid]] += correct, len(graded) - correct
            useful = scale.usefulness(rewards)
            self._pools[self._pool[group.prompt.uid]] += useful, 1.0 - useful

    def take(self, batch: int) -> list[int]:
        """Draw the prompts of ``batch``, none twice."""
        random = np.random.default_rng((self._seed, batch, 3))
        useful, useless = 1.0 + self._pools.T
        theta = random.beta(useful, useless, size=(self._per_batch, len(self._names)))
        ranked = [iter(self._ranked(pool, random)) for pool in range(len(self._names))]
        chosen: list[int] = []
        for place in theta:
            for pool in np.argsort(-place, kind="stable").tolist():
                index = next(ranked[pool], None)
                if index is not None:
                    chosen.append(index)
                    break
        return chosen

    def _ranked(self, pool: int, random: np.random.Generator) -> list[int]:
        """Draw a pass rate q for each prompt of a pool; return the prompts with the largest q (1 - q)."""
        members = self._members[pool]
        counts = self._prompts[members]
        total = counts.sum(axis=0)
        borrowed = _BORROWED * (total + 1.0) / (total.sum() + 2.0)
        right, wrong = (counts + borrowed).T
        rates = random.beta(right, wrong)
        order = np.argsort(-rates * (1.0 - rates), kind="stable")[: self._per_batch]
        ranked: list[int] = members[order].tolist()
        return ranked


def _pairs(counts: np.ndarray) -> list[tuple[float, float]]:
    return [(a, b) for a, b in counts.tolist()]


@dataclass(frozen=True, slots=True)
class RewardScale:
    """The rewards of a source: smallest, largest, and sums over all of them."""

    low: float = 0.0
    high: float = 0.0
    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add_rewards(self, rewards: np.ndarray) -> RewardScale:
        """Return the scale updated with ``rewards``, float64 [n], n at least 1."""
        low, high = float(rewards.min()), float(rewards.max())
        return RewardScale(
            min(low, self.low) if self.count else low,
            max(high, self.high) if self.count else high,
            self.count + len(rewards),
            self.total + float(rewards.sum()),
            self.squares + float((rewards**2).sum()),
        )

    def shares(self, rewards: np.ndarray) -> np.ndarray:
        """Return rewards as shares of the range; while the range is empty, as 1 (above 0.5) or 0."""
        if self.high > self.low:
            return (rewards - self.low) / (self.high - self.low)
        return (rewards > 0.5).astype(np.float64)

    def usefulness(self, rewards: np.ndarray) -> float:
        """Return u of a group of this source, see above. ``rewards``: float64 [n], included in the scale.

        8 samples, rewards 0 and 1   0 right -> 0   1 -> 0.5   2 -> 0.857   4 -> 1   8 -> 0
        """
        if len(rewards) < 2 or rewards.min() == rewards.max():
            return 0.0
        # The mean squared distance from the middle of the range, above 0 where rewards differ.
        middle, mean = (self.low + self.high) / 2, self.total / self.count
        largest = self.squares / self.count - 2 * middle * mean + middle**2
        return min(1.0, float(rewards.var(ddof=1)) / largest)


def _scored_rewards(group: Group) -> np.ndarray:
    """Return the rewards of the scored samples, float64."""
    return group.rewards[~np.isnan(group.rewards) & ~np.isnan(correctness(group))].astype(np.float64)


def _scales(groups: Sequence[Group], before: Mapping[str, RewardScale]) -> dict[str, RewardScale]:
    """Return the scales ``before``, by source, updated with the rewards of ``groups``."""
    scales = dict(before)
    for group in groups:
        if len(rewards := _scored_rewards(group)):
            source = group.prompt.source
            scales[source] = scales.get(source, RewardScale()).add_rewards(rewards)
    return scales


def check_pools(data: DataConfig, prompts: Sequence[Prompt], names: Sequence[str]) -> None:
    """Check the pools of `data.pools`. ``names``: the source names in `data.train`.

    Raises ValueError where a prompt has no pool, where two sources share a name and so a pool, and where
    `data.order: pools` has a single pool.
    """
    by = data.pools_by
    if by is None:
        return
    sizes = pool_sizes(prompts, by)
    if by == "source" and (twice := [name for name, times in Counter(names).items() if times > 1]):
        raise ValueError(
            f"data.train: several sources have the name {twice[0]}, so they would be one pool of "
            "`data.pools` = source; give each its own `name`"
        )
    if data.order.name == "pools" and len(sizes) < 2:
        raise ValueError(
            f"data.pools = {by}: all {len(prompts)} prompts are in the pool "
            f"{next(iter(sizes))}, but `data.order` = pools chooses among two or more; divide them by "
            "another column, or into sources of different `name`, or set data.order to epochs"
        )


def pool_of(prompt: Prompt, by: str) -> str:
    """Return the name of the pool of ``prompt``: its source, or its value in the column ``by``.

    Raises ValueError where the prompt lacks the column.
    """
    if by == "source":
        return prompt.source
    if by not in prompt.columns:
        has = ", ".join(prompt.columns) or "none"
        raise ValueError(
            f"data.pools = {by}: a prompt of source {prompt.source} has no such column; it has: {has}. "
            "Add the column to `columns` of every source in `data.train`, or set data.pools to source"
        )
    return str(prompt.columns[by]).replace("/", "_")


def pool_sizes(prompts: Sequence[Prompt], by: str) -> dict[str, int]:
    """Count the prompts of each pool. Raises ValueError as `pool_of` does."""
    return dict(sorted(Counter(each(prompts, lambda prompt: pool_of(prompt, by))).items()))


def pool_metrics(groups: Sequence[Group], by: str) -> Mapping[str, float]:
    """Return per pool: share of the step's groups, pass rate, mean usefulness and sampled tokens."""
    metrics: dict[str, float] = {}
    pools, scales = [pool_of(group.prompt, by) for group in groups], _scales(groups, {})
    for name in sorted(set(pools)):
        pool_groups = [group for group, pool in zip(groups, pools, strict=True) if pool == name]
        right = np.concatenate([correctness(group) for group in pool_groups])
        scored = right[~np.isnan(right)]
        useful = [
            scales.get(group.prompt.source, RewardScale()).usefulness(_scored_rewards(group))
            for group in pool_groups
        ]
        metrics[f"pool/{name}/share"] = len(pool_groups) / len(groups)
        metrics[f"pool/{name}/pass_rate"] = float(scored.mean()) if len(scored) else float("nan")
        metrics[f"pool/{name}/usefulness"] = float(np.mean(useful))
        metrics[f"pool/{name}/tokens"] = float(sum(r.num_sampled for g in pool_groups for r in g.rollouts))
    return metrics
