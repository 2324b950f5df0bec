"""Steering the weight of the entropy bonus so that the policy's entropy stays near a target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EntropyControl:
    """Adaptive entropy control, Skywork-OR1 (He et al. 2025, arXiv:2505.22312), section 3.3.

    ``target``: nats per token. ``delta``: change of the coefficient with each update. ``low``, ``high``: its
    bounds.

        target 0.2, delta 0.005     entropy 0.15   0.15    0.25    0.18
        coefficient, from 0.01      0.01   0.015   0.02    0.015   0.02
        applied in the update       0      0.015   0.02    0       0.02
    """

    target: float
    delta: float
    low: float
    high: float

    def next_coef(self, coef: float, entropy: float) -> float:
        """Return the coefficient after an update whose tokens had this ``entropy``. NaN changes nothing."""
        if entropy != entropy:
            return coef
        moved = coef + self.delta if entropy <= self.target else coef - self.delta
        return min(max(moved, self.low), self.high)

    def applied(self, coef: float, entropy: float) -> float:
        """Return the weight of the bonus in the next update: ``coef``, or 0 if ``entropy``, that of the last
        update, was above the target.
        """
        return coef if entropy <= self.target else 0.0
