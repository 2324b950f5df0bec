"""The findings of one line of the check: figures by name, and claims with the bound of each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

YES = "yes"  # the bound of a claim without a number


@dataclass(frozen=True, slots=True)
class Claim:
    """``what`` was measured as ``value``; it must meet ``bound``. ``why``: the source of the bound."""

    what: str
    value: float
    bound: str
    why: str
    holds: bool

    def __str__(self) -> str:
        value = ("yes" if self.holds else "no") if self.bound == YES else f"{number(self.value)} {self.bound}"
        return f"{'' if self.holds else 'FAILS: '}{self.what}: {value} ({self.why})"


@dataclass(slots=True)
class Findings:
    """``figures``: rates per second, bytes, seconds, shares of 1. ``notes``: the telling ones, in words.
    ``bench``: a whole bench.json.
    """

    figures: dict[str, float] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bench: dict[str, Any] | None = None

    def at_most(self, what: str, value: float, bound: float, why: str) -> None:
        """Claim that ``value`` is at most ``bound``. NaN is not."""
        self.claims.append(Claim(what, float(value), f"<= {number(bound)}", why, bool(value <= bound)))

    def at_least(self, what: str, value: float, bound: float, why: str) -> None:
        """Claim that ``value`` is at least ``bound``. NaN is not."""
        self.claims.append(Claim(what, float(value), f">= {number(bound)}", why, bool(value >= bound)))

    def equal(self, what: str, value: float, expected: float, why: str) -> None:
        """Claim that ``value`` is exactly ``expected``."""
        bound = f"= {number(expected)}"
        self.claims.append(Claim(what, float(value), bound, why, bool(value == expected)))

    def true(self, what: str, holds: object, why: str) -> None:
        """Claim that ``what`` is true."""
        self.claims.append(Claim(what, float(bool(holds)), YES, why, bool(holds)))

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)

    def plain(self) -> dict[str, Any]:
        """Return the findings as JSON types."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Findings:
        """Make the findings from the output of `plain`."""
        return cls(**plain | {"claims": [Claim(**claim) for claim in plain["claims"]]})


def number(value: float) -> str:
    """``0.0001234`` -> ``0.000123``; ``494032768`` -> ``494,032,768``."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.3g}"
