"""The seconds of a tail by formula: steps of an engine until all samples of a training step are finished.

Lengths L are log-normal with mean m before a cap and deviation s of the log, of which the share r of the
variance is the prompt's: ln L = mu + s (sqrt(r) z_prompt + sqrt(1 - r) z_sample), F its distribution with the
cap. B prompts with G samples are decoded by c slots that never wait while a sample is queued; a token of a
sample takes one step of its slot, as where reading the weights bounds the engine.

    no tail          T0 = B G m / c                                            all slots full all the time
    all have a slot  T  = integral of 1 - (E_z F(x | z)^G)^B dx                expected longest of B G
    some are queued  T  = T0 - E[L^2] / (2 m) + integral of 1 - Fe(x)^c dx     Fe(x) = integral of (1 - F) / m

With a queue, the slots hold samples at a random point of their lives when the queue is empty: what is left
of each has the equilibrium distribution Fe of renewal theory (Feller, volume II, XI.4), with mean
E[L^2] / (2 m). The longest of c of them ends the step. Tail batching over W steps gives step j the prompts
with z between the quantiles j / W and (j + 1) / W: its steps are the mean over j of T with F(x | z in that
range). A run that carries unfinished groups over needs T0 at least.

Against Monte Carlo: 4 % where all samples have a slot or each slot has four; in between T is up to a sixth
too high, as the samples in the slots are younger than the equilibrium has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_POINTS = 2000  # of lengths
_PROMPTS = 400  # quantiles of z in a range
_NEVER = 1e-9  # share of the variance below which samples of a prompt are equal

_AT = np.linspace(-9.0, 9.0, 20_001)
_NORMAL = np.array([NormalDist().cdf(x) for x in _AT.tolist()])


@dataclass(frozen=True, slots=True)
class TailLengths:
    """``mean`` and ``sigma``: before the ``cap``, tokens. ``prompt_share``: r."""

    mean: float
    sigma: float
    cap: int
    prompt_share: float = 0.0

    def given_prompt(self, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
        """Return lengths, float64 [points], and F(x | z), float64 [prompts, points], for quantiles of z from
        ``low`` to ``high``, without the jump to 1 at the cap, which is the last length.
        """
        middle = math.log(self.mean) - self.sigma**2 / 2
        x = np.linspace(0.0, self.cap, _POINTS + 1)[1:]
        quantiles = low + (high - low) * (np.arange(_PROMPTS) + 0.5) / _PROMPTS
        z = np.array([NormalDist().inv_cdf(q) for q in quantiles.tolist()])
        own = self.sigma * math.sqrt(max(1.0 - self.prompt_share, _NEVER))
        shifted = np.log(x)[None] - middle - self.sigma * math.sqrt(self.prompt_share) * z[:, None]
        found = np.interp(shifted / own, _AT, _NORMAL)
        return x, found


def no_tail_steps(lengths: TailLengths, *, prompts: int, samples: int, slots: int) -> float:
    """Return T0, the steps with all slots full."""
    x, given = lengths.given_prompt(0.0, 1.0)
    return prompts * samples * _mean(x, given.mean(axis=0)) / slots


def tail_steps(lengths: TailLengths, *, prompts: int, samples: int, slots: int, window: int = 1) -> float:
    """Return T, the steps until the last sample is finished; with tail batching over a ``window`` of steps
    the mean over its steps.
    """
    ranges = [(j / window, (j + 1) / window) for j in range(window)]
    found = [_of_range(*lengths.given_prompt(*own), prompts, samples, slots) for own in ranges]
    return float(np.mean(found))


def _of_range(x: np.ndarray, given: np.ndarray, prompts: int, samples: int, slots: int) -> float:
    longest = float(np.sum(1.0 - _before((given**samples).mean(axis=0)) ** prompts) * x[0])
    if prompts * samples <= slots:
        return longest
    marginal = given.mean(axis=0)
    mean, survival = _mean(x, marginal), 1.0 - _before(marginal)
    left = np.cumsum(survival) * x[0] / mean  # Fe
    rest = float(np.sum(1.0 - np.minimum(left, 1.0) ** slots) * x[0])
    aged = float(np.sum(survival * (x - x[0] / 2)) * x[0]) / mean  # E[L^2] / (2 m)
    return max(longest, prompts * samples * mean / slots - aged + rest)


def _mean(x: np.ndarray, distribution: np.ndarray) -> float:
    return float(np.sum(1.0 - _before(distribution)) * x[0])


def _before(distribution: np.ndarray) -> np.ndarray:
    """Return the distribution in the middle of each interval of lengths, by its two ends."""
    return (np.concatenate([[0.0], distribution[:-1]]) + distribution) / 2
