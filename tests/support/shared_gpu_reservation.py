"""Reward models that share a GPU of a cluster; `test_reservation` runs it as a process."""

import asyncio
import os
from collections import Counter

import ray

from actors.placement.demands import Resources, placement
from tests.support.plans import reserved, shape

MODELS = [
    {"name": "small", "path": "x", "gpu_share": 0.25, "num_workers": 2},
    {"name": "large", "path": "y", "tensor_parallel_size": 2},
    {"name": "half", "path": "z", "gpu_share": 0.5},
]


@ray.remote(num_cpus=0)
class Holder:
    def gpus(self):
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


async def main():
    wanted = shape(1, 1, where="separate", rewards={"models": MODELS})
    demands = placement(wanted, Resources(8, 5, 8), training=True)
    reservation = await reserved(wanted, demands)
    held = [Holder.options(**place).remote() for place in reservation.options("reward_models")]
    small, again, large, half = ray.get([holder.gpus.remote() for holder in held], timeout=600)
    assert small == again == half and len(small) == 1, (small, again, half)
    assert len(large) == 2 and not set(large) & set(small), large
    assert Counter(ray.available_resources())["GPU"] == 0  # reserved as a whole
    reservation.release()
    print("shared", flush=True)


if __name__ == "__main__":
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray would count the GPUs that it leaves visible: none
    ray.init(address="local", num_cpus=8, num_gpus=5, include_dashboard=False, log_to_driver=False)
    asyncio.run(main())
