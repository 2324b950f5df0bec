"""The strongest isolation on this machine, found once for all tests of a process."""

import asyncio

from grpo_dist.environments.sandbox.trial import find_isolation

FOUND, NOTES = asyncio.run(find_isolation())
