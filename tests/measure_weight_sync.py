"""How long a weight sync takes, stage by stage, beside a raw broadcast of the same bytes in the same run.

    python tests/measure_weight_sync.py MODEL_DIR [--backend gloo] [--threads 2] [--pushes 8]

One policy rank and one engine, each with the threads given; they take turns, as in a synchronous run.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time

import ray
import torch

from actors.policy import PolicyGroup
from actors.rollout import EngineSpec, RolloutPool
from actors.transport import free_port, open_transport
from actors.weight_sync import WeightSync
from grpo_dist.config import Algorithm, Model, Policy, Timeouts
from grpo_dist.config import Rollout as RolloutSettings
from grpo_dist.config import WeightSync as SyncSettings
from grpo_dist.hardware import thread_environment


def raw_broadcast(num_bytes, repeats=10):
    """Median seconds of a gloo broadcast between two processes, buffers there and touched."""
    context = multiprocessing.get_context("spawn")
    port, out = free_port("127.0.0.1"), context.Queue()
    ranks = [context.Process(target=_broadcast, args=(r, port, num_bytes, repeats, out)) for r in range(2)]
    for rank in ranks:
        rank.start()
    seconds, _ = [out.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
    return statistics.median(seconds[2:])


def _broadcast(rank, port, num_bytes, repeats, out):
    transport = open_transport("gloo", "127.0.0.1", port, rank=rank, world_size=2, timeout_s=60)
    flat, word = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats):
        transport._start(word)()  # both are there
        begin = time.perf_counter()
        transport._start(flat)()
        seconds.append(time.perf_counter() - begin)
    out.put(seconds)


async def pushes(model_dir, sync, threads, count):
    """Metrics of every push after the first two, with the seconds of the whole."""
    options = {"num_cpus": 0, "runtime_env": {"env_vars": thread_environment(threads)}}
    model = Model(path=model_dir, dtype="float32")
    settings = RolloutSettings(kv_cache_gib=0.25)
    spec = EngineSpec(settings, sync, model, model_dir, max_length=256, seed=0)
    rollouts = RolloutPool(spec, options=options)
    policy = PolicyGroup(
        Policy(zero_stage=0), model=model, model_dir=model_dir, algorithm=Algorithm(),
        temperature=1.0, micro_batch_tokens=1000, epochs=1, total_updates=1, timeouts=Timeouts(), seed=0,
        options=options,
    )  # fmt: skip
    await asyncio.gather(rollouts.ready(), policy.ready())
    connected = await WeightSync.connect(policy, rollouts, sync, timeout_s=60)
    taken = []
    for version in range(1, count + 3):
        begin = time.perf_counter()
        metrics = await connected.push(version)
        taken.append(metrics | {"time/sync_s": time.perf_counter() - begin})
    await rollouts.shutdown()
    await policy.shutdown()
    return taken[2:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--bucket-mb", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pushes", type=int, default=8)
    chosen = parser.parse_args()
    ray.init(address="local", log_to_driver=False, include_dashboard=False)
    sync = SyncSettings(backend=chosen.backend, bucket_mb=chosen.bucket_mb)
    taken = asyncio.run(pushes(chosen.model_dir, sync, chosen.threads, chosen.pushes))
    ray.shutdown()
    medians = {name: statistics.median(t[name] for t in taken) for name in taken[0]}
    raw = raw_broadcast(int(medians["sync/bytes"]))
    figures = medians | {"raw_broadcast_s": raw, "of_raw": raw / medians["time/sync_s"]}
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
