"""Seeds that depend on their purpose, never on when or where they are used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def request_seed(run_seed: int, step: int, uid: str, sample: int) -> int:
    """Return the seed of one sampling request, 0 <= seed < 2^63. ``step`` is -1 for evaluations and -2 for
    rejection sampling.

    The seed depends only on these four values, not on engine or batch, which makes a run repeatable.
    """
    return request_seeds(run_seed, step, uid, [sample])[0]


def request_seeds(run_seed: int, step: int, uid: str, samples: Iterable[int]) -> list[int]:
    """Return the `request_seed` of each of ``samples``; hashes their common part once."""
    shared = hashlib.blake2b(f"{run_seed}\x1f{step}\x1f{uid}\x1f".encode(), digest_size=8)
    seeds = []
    for sample in samples:
        digest = shared.copy()
        digest.update(str(sample).encode())
        seeds.append(int.from_bytes(digest.digest(), "big") >> 1)
    return seeds


def turn_seed(seed: int, number: int) -> int:
    """Return the seed of request ``number`` of the episode with request seed ``seed``, 0 <= seed < 2^63.

    Request 0 gets the episode's seed: its first turn equals the completion with this seed and no environment.
    """
    if number == 0:
        return seed
    key = f"\x1eturn {seed}\x1f{number}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def derived_seed(run_seed: int, purpose: str) -> int:
    """Return a seed for another generator of the same run, 0 <= seed < 2^63."""
    return request_seed(run_seed, 0, f"\x1epurpose {purpose}", 0)
