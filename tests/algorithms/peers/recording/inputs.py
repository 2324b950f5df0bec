"""The inputs of all cases: log-probs, masks, rewards and advantages from fixed seeds, to six decimals.

name     rows x tokens  what is in it
plain    8 x 6          answers of several lengths, two groups, one advantage a row, ratios near 1
holes    8 x 7          tokens in the middle that an environment gave; advantages of tokens
short    4 x 5          answers of one and two tokens
far      8 x 6          ratios far from 1, most advantages negative
extreme  4 x 4          log-ratios beyond 20 nats, where peers cut
empty    6 x 5          a row without any token
equal    8 x 4          a group of equal rewards, advantages of 0
ragged   7 x 3          groups of 4, 2 and 1, interleaved; rewards 100 + small
binary   16 x 3         groups of 8, right and wrong
logits   6 x 7          scores of 7 tokens at 6 places, and the token that was taken
"""

import json

import numpy as np

_LEAST = 1e-4  # nats that a log-prob is below 0


def _lengths(lengths, tokens):
    return np.arange(tokens)[None, :] < np.asarray(lengths)[:, None]


def _below(values):
    return np.minimum(values, -_LEAST)


def _made(seed, mask, *, rewards, groups, per_token=False, spread=0.25, skew=0.0):
    """Draw log-probs of four policies: now, before the step (``old``), the engine's, the reference's."""
    rng, shape = np.random.default_rng(seed), mask.shape
    now = _below(-rng.gamma(1.2, 1.0, shape))
    moved = _below(now + spread * rng.standard_normal(shape))
    old = np.where(rng.random(shape) < 0.1, now, moved)  # some ratios are exactly 1
    return {
        "mask": mask.astype(int),
        "now": now,
        "old": old,
        "engine": _below(old + 0.6 * spread * rng.standard_normal(shape)),
        "reference": _below(now + 1.5 * spread * rng.standard_normal(shape)),
        "entropy": rng.gamma(2.0, 0.4, shape),
        "advantages": _advantages(rng, shape, per_token) + skew,
        "rewards": np.asarray(rewards, float),
        "groups": np.asarray(groups),
        "greedy": rng.random(len(set(groups)))[np.asarray(groups)],
        "parts": rng.integers(0, 3, (2, len(mask))) / 2,
    }


def _advantages(rng, shape, per_token):
    return (
        rng.standard_normal(shape)
        if per_token
        else np.repeat(rng.standard_normal((shape[0], 1)), shape[1], 1)
    )


def _extreme(seed):
    made = _made(
        seed, _lengths([4, 4, 3, 2], 4), rewards=[100.001, 100.0, 100.002, 99.5], groups=[0, 0, 1, 1],
        per_token=True,
    )  # fmt: skip
    jumps = np.array([[25, -24, 0.1, 8], [21, 3, -30, -0.2], [0.3, -6, 11, 0], [2, -1, 0, 0]], float)
    now = np.full(jumps.shape, -31.0)
    return made | {
        "now": now,
        "old": now - jumps,
        "engine": now - jumps / 2,
        "reference": now - jumps[::-1] * 0.6,
    }


def inputs():
    holes = _lengths([7, 6, 7, 4, 7, 5, 3, 7], 7)
    holes[0, 2:4] = holes[2, 0] = holes[2, 5] = holes[4, 1] = holes[4, 3] = holes[7, 4:6] = False
    two, by_four = [0, 0, 0, 0, 1, 1, 1, 1], [1, 0, 0, 1, 0, 1, 1, 1]
    made = {
        "plain": _made(11, _lengths([6, 4, 5, 3, 6, 6, 2, 5], 6), rewards=by_four, groups=two),
        "holes": _made(
            12, holes, rewards=[0.3, -1.2, 2.5, 0.1, 0.9, 0.8, -0.4, 0.2], groups=two, per_token=True
        ),
        "short": _made(
            13, _lengths([1, 1, 2, 5], 5), rewards=[1, 0, 0.5, 0.25], groups=[0, 0, 1, 1], per_token=True
        ),
        "far": _made(
            14, _lengths([6, 6, 4, 5, 6, 3, 6, 2], 6), rewards=[-3, -2.5, -7, -3.5, 4, 0, 1.5, -1],
            groups=two, per_token=True, spread=1.3, skew=-0.7,
        ),
        "extreme": _extreme(15),
        "empty": _made(
            16, _lengths([5, 3, 0, 4, 2, 5], 5), rewards=[1, 0, 1, 0.2, 0.4, 0.9], groups=[0, 0, 0, 1, 1, 1],
            spread=0.5,
        ),
        "equal": _made(
            17, _lengths([4, 2, 3, 4, 4, 1, 2, 4], 4), rewards=[0.7, 0.7, 0.7, 0.7, 0, 0, 1, 0], groups=two
        ),
        "ragged": _made(
            18, _lengths([3, 1, 2, 3, 2, 3, 3], 3),
            rewards=[100.001, 100.0, 100.3, 100.002, 99.0, 100.0005, 100.004], groups=[0, 1, 0, 2, 1, 0, 0],
        ),
        "binary": _made(
            19, _lengths([3, 2, 1, 3, 3, 2, 3, 1] * 2, 3),
            rewards=[1, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1], groups=[0] * 8 + [1] * 8,
        ),
    }  # fmt: skip
    made["equal"]["advantages"][:4] = 0.0
    made["logits"] = _logits(20)
    return {name: {key: np.round(v, 6).tolist() for key, v in own.items()} for name, own in made.items()}


def _logits(seed):
    rng = np.random.default_rng(seed)
    return {"logits": 3 * rng.standard_normal((6, 7)), "targets": rng.integers(0, 7, 6)}


def write(path):
    lines = [
        f"{json.dumps(name)}: {json.dumps(own, separators=(',', ':'))}" for name, own in inputs().items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
