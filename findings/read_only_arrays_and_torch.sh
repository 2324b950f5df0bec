#!/usr/bin/env bash
# Ray 2.60.0, torch 2.13.0. A tensor made of a read-only array of the object store writes into the store, for every other process.
# ray.get gives arrays that refuse `array += 1`, so one would guess that no worker can spoil another's data. torch.from_numpy takes no
# notice of the flag (one warning in the life of a process), and an in-place operation of a task changes the object that all others hold.
# Seen: zeros put once; a task adds 1 through torch; the driver's array, held since before, and the next task read ones, then twos.
# Log-probs, masks or advantages shared by several ranks change under the other ranks' hands, and a retry computes on changed input.
set -euo pipefail
packages=(torch==2.13.0 numpy==2.3.5 ray==2.60.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
venv/bin/python - <<'PYTHON'
import numpy
import ray

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
reference = ray.put(numpy.zeros(1_000_000, numpy.float32))
held = ray.get(reference)


@ray.remote
def center(array):
    import torch

    return torch.from_numpy(array).add_(1.0).mean().item()


before = held.mean().item()
returned = [ray.get(center.remote(reference)) for _ in range(2)]
print(f"writable: {held.flags.writeable}; before {before}, tasks {returned}, after {held.mean().item()}")
assert not held.flags.writeable and before == 0.0, "arrays are no longer read-only"
assert returned == [1.0, 2.0] and held.mean().item() == 2.0, "the write does not reach the store"
PYTHON
