#!/usr/bin/env bash
# verl 0.9.1. The only sample of a group has its reward as advantage, in grpo, rloo, opo and gpg; in rloo_vectorized it has 0.
# One would guess 0, since nothing is there to compare with, and that a vectorized estimator has the numbers of the other.
# Seen: groups of one with rewards 1 and 0 get 1 and 0 from rloo, 0 and 0 from rloo_vectorized; with rewards 1 and -1 both are pushed.
# Groups of one remain where filters, timeouts or first-come batches take the others. Such a sample is trained without a baseline: of
# rewards 0 and 1 a lone right answer counts 1, where a full group of solve rate p gives 1 - p, and a lone wrong one 0, where it gives -p.
set -euo pipefail
packages=(torch==2.13.0 verl==0.9.1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
venv/bin/python - <<'PYTHON'
import numpy
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

groups = numpy.array(["pair", "pair", "right", "wrong"], dtype=object)


def alone(name):
    """Return the advantages of the two groups of one."""
    rewards = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    estimate = get_adv_estimator_fn(name)
    advantages, _ = estimate(
        token_level_rewards=rewards, response_mask=torch.ones(4, 1), index=groups, config=AlgoConfig()
    )
    return [round(value, 4) for value in advantages[2:, 0].tolist()]


seen = {name: alone(name) for name in ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg")}
print(seen)
assert all(seen[name] == [1.0, 0.0] for name in ("grpo", "grpo_vectorized", "rloo", "opo")), "groups of one have no advantage"
assert seen["gpg"][0] > 1.0 and seen["rloo_vectorized"] == [0.0, 0.0]
PYTHON
