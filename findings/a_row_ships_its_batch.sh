#!/usr/bin/env bash
# Ray 2.60.0, torch 2.13.0. A row of a tensor is put into the object store with the whole tensor behind it; a row of an array is not.
# One would guess that batch[i] costs a row. A tensor is pickled with its storage, so each of n rows carries all n.
# Seen: a row of 400 bytes arrives with a storage of 40 MB, from numpy with 400 bytes; tensor.clone() before it is put has a row's size.
# A driver that hands out a step's rows one by one fills the store with the square of the batch: 1,024 rows of 128 KiB are 128 GiB.
set -euo pipefail
packages=(torch==2.13.0 numpy==2.3.5 ray==2.60.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
venv/bin/python - <<'PYTHON'
import ray
import torch

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
batch = torch.zeros(100_000, 100)


@ray.remote
def received(row):
    import torch

    return row.untyped_storage().nbytes() if torch.is_tensor(row) else row.nbytes


rows = {"tensor": batch[:1], "clone": batch[:1].clone(), "array": batch.numpy()[:1]}
sizes = {name: ray.get(received.remote(ray.put(row))) for name, row in rows.items()}
print(sizes)
assert sizes["tensor"] == 40_000_000, "a row no longer carries its batch"
assert sizes["clone"] == sizes["array"] == 400
PYTHON
