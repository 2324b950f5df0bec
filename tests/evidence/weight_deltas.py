"""Bytes and seconds of a weight sync with and without deltas, between two processes of this machine.

    python -m tests.evidence.weight_deltas --parameters 100e6 --lr 1e-6 --dtype bfloat16

AdamW updates float32 weights (normal, standard deviation 0.02) with random gradients, and their copy in the
sent dtype is synced after each step: first the changes, then the same weights whole. The engine's loading and
packing of received weights is not included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.transfer.connections import Seat
from actors.transfer.stream import receive_changes, receive_whole, send, send_changes
from actors.transfer.transport import free_port, open_transport
from grpo_dist.policy.weight_buckets import ParameterSpec, make_buckets
from grpo_dist.policy.weight_deltas import HeldWeights, SentWeights
from grpo_dist.runtime.hardware import one_thread

_MATRIX = 1 << 20  # parameters
_BUCKET = 4 << 20  # bytes of `weight_sync.bucket_mb`
_TIMEOUT_S = 300.0
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DeltaBench:
    """Settings of both processes. ``backend``: shared_memory or gloo."""

    parameters: int
    dtype: str
    steps: int
    backend: Any
    seat: Seat

    @property
    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(f"w{i}", self.dtype, (_MATRIX,)) for i in range(-(-self.parameters // _MATRIX))]


def receiver(bench: DeltaBench, rank: int) -> None:
    """Receive what `measure` sends. Raises RuntimeError if the weights differ from the sender's."""
    seat = Seat(bench.seat.host, bench.seat.port, rank, bench.seat.world_size, bench.seat.secret)
    transport, held = (
        open_transport(bench.backend, seat, timeout_s=_TIMEOUT_S),
        HeldWeights(bench.specs, _BUCKET),
    )
    with one_thread():
        for _ in receive_whole(transport, held):
            pass
        for _ in range(bench.steps):
            if not receive_changes(transport, held):
                raise RuntimeError("the changes do not lead to the sender's weights")
            for _ in receive_whole(transport, held):
                pass


def measure(bench: DeltaBench, lr: float) -> Iterator[dict[str, float]]:
    """Yield a step's changed share, and bytes and seconds of both ways."""
    torch.manual_seed(0)
    specs = bench.specs
    weights = [torch.nn.Parameter(torch.randn(_MATRIX) * 0.02) for _ in specs]
    optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    transport, source = open_transport(bench.backend, bench.seat, timeout_s=_TIMEOUT_S), SentWeights()

    def buckets() -> Iterator[list[tuple[str, Tensor]]]:
        copies = {s.name: w.detach().to(s.torch_dtype) for s, w in zip(specs, weights, strict=True)}
        return ([(s.name, copies[s.name]) for s in bucket] for bucket in make_buckets(specs, _BUCKET))

    with one_thread():
        source.take(buckets(), specs, _BUCKET, _CPU, "first")
        assert source.held is not None
        send(transport, source.held.weights(), specs, _BUCKET)
        for step in range(bench.steps):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
            updated, begin = buckets(), time.perf_counter()
            changes = source.take(updated, specs, _BUCKET, _CPU, f"{step}")
            compared = time.perf_counter()
            sent = send_changes(transport, changes, source.held)
            after = time.perf_counter()
            whole = send(transport, source.held.weights(), specs, _BUCKET)
            yield {
                "changed share": changes.changed_share, "bytes of changes": sent["sync/bytes"],
                "bytes of whole weights": whole["sync/bytes"], "find changes, s": compared - begin,
                "send changes, s": after - compared, "send whole weights, s": time.perf_counter() - after,
            }  # fmt: skip
    transport.close()


def main() -> None:
    """Print a row a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=float, default=20e6)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", choices=("shared_memory", "gloo"), default="gloo")
    args = parser.parse_args()
    seat = Seat("127.0.0.1", free_port("127.0.0.1"), 0, 2, secrets.token_bytes(32))
    bench = DeltaBench(int(args.parameters), args.dtype, args.steps, args.backend, seat)
    other = multiprocessing.get_context("spawn").Process(target=receiver, args=(bench, 1), daemon=True)
    other.start()
    for row in measure(bench, args.lr):
        print("   ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    other.join(_TIMEOUT_S)


if __name__ == "__main__":
    main()
