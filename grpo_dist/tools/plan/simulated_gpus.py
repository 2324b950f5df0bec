"""The GPUs of a simulated run whose roles take turns: who has them, and what a change takes.

    engines sample | reward models, one after another | reference | policy: update, weight sync | engines ...

A role keeps the GPUs while it has calls; then the role whose call has waited longest gets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from grpo_dist.tools.plan.trace import SimulationTrace

ENGINES, POLICY = "rollout", "policy"


class SimulatedGpus:
    """``turn_s``: seconds until a role has the GPUs and its weights on them, by role; empty: each role has
    its own GPUs, and nothing waits. ``resend_s``: where engines get them back from others than the policy.
    """

    def __init__(self, trace: SimulationTrace, turn_s: Mapping[str, float], *, resend_s: float = 0.0) -> None:
        self._trace, self._turn_s, self._resend_s = trace, turn_s, resend_s
        self._holder, self._calls, self._is_changing = ENGINES, 0, False
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self, role: str) -> AsyncIterator[None]:
        """Run the block with the GPUs of ``role``."""
        if role not in self._turn_s:
            yield
            return
        while role != self._holder or self._is_changing:
            if self._calls or self._is_changing:
                self._waiting.append(asyncio.get_running_loop().create_future())
                await self._waiting[-1]
            else:
                await self._change(role)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._wake()

    async def return_to_engines(self) -> None:
        """Give the GPUs back to the engines, which have new weights. The policy calls it, between turns."""
        if self._turn_s and self._holder == POLICY:
            await self._change(ENGINES)

    async def _change(self, role: str) -> None:
        seconds = self._turn_s[role]
        if role == ENGINES and self._holder != POLICY:
            seconds = self._resend_s
        self._is_changing = True
        try:
            async with self._trace.span("policy", "turn"):
                await asyncio.sleep(seconds)
            self._holder = role
        finally:
            self._is_changing = False
            self._wake()

    def _wake(self) -> None:
        """Let all that wait look again, in the order in which they came."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
