"""The rank that sends to each colocated receiver: two ZeRO-3 ranks, two receivers."""

import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from actors.lifecycle.calls import PARALLEL
from actors.transfer.connections import Seat, new_secret
from actors.transfer.stream import receive
from actors.transfer.transport import open_transport
from actors.weight_sync import TransferGroup, TransferSpec
from actors.workers.policy import PolicyWorker
from grpo_dist.config import WeightSyncConfig
from grpo_dist.errors import TransferLost
from tests.support.patience import HANG_S
from tests.support.real_ranks import on_all, start

pytestmark = pytest.mark.machine


class Receiver:
    """A fake engine in a transfer, with a seat for each of its processes."""

    def open_transfer(self, backend, seats, timeout_s):
        self.seats = seats
        self.transports = [open_transport(backend, seat, timeout_s=timeout_s) for seat in seats]

    def receive(self, specs, bucket_bytes):
        """Return the tensors each process received, and the port of its group."""
        received = []
        for transport in self.transports:
            buckets = receive(transport, specs, bucket_bytes)
            received.append({name: t.clone() for bucket in buckets for name, t in bucket})
        return received, [seat.port for seat in self.seats]


async def exchange(model_dir, *, colocated_ranks):
    policy = start(model_dir, ranks=2, stage=3)
    actor = ray.remote(Receiver).options(num_cpus=0)
    receivers = [actor.remote() for _ in colocated_ranks]
    await policy.ready()
    group = await TransferGroup.open(
        "rollout", policy, receivers, TransferSpec(WeightSyncConfig(bucket_mb=1, backend="shared_memory")),
        colocated_ranks=colocated_ranks, timeout_s=HANG_S,
    )  # fmt: skip
    receiving = [receiver.receive.remote(group.parameters, group.bucket_bytes) for receiver in receivers]

    async def arrived(reference):
        return await reference

    arriving = [arrived(reference) for reference in receiving]
    metrics = await asyncio.wait_for(group.send(arriving), HANG_S)
    weights, _ = await on_all(policy, "weights")
    results = ray.get(receiving)
    await policy.shutdown()
    for receiver in receivers:
        ray.kill(receiver)
    assert metrics["sync/bytes"] == sum(t.numel() * 4 for t in weights.values())
    for copies, _ in results:
        for copy in copies:
            assert copy.keys() == weights.keys()
            assert all(torch.equal(copy[name], weights[name]) for name in weights)
    return [port for _, ports in results for port in ports]


@pytest.mark.slow
def test_every_process_gets_the_weights_from_the_rank_on_its_gpu(ray_cluster, tiny_model):
    ports = asyncio.run(exchange(tiny_model, colocated_ranks=[1, 0]))
    assert len(set(ports)) == len(ports) == 2  # separate groups


def test_a_rank_listens_from_the_answer_with_its_address_until_its_group_has_joined(monkeypatch):
    """A port that is free only for a moment may be another process's when the group opens."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    rank, secret = PolicyWorker(), new_secret()
    unused = rank.address()  # of a group that was never opened
    address = rank.address()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(address)
    joining = threading.Thread(
        target=rank.open_transfer, args=("rollout", "shared_memory", Seat(*address, 0, 2, secret), HANG_S)
    )
    joining.start()
    open_transport("shared_memory", Seat(*address, 1, 2, secret), timeout_s=HANG_S).close()
    joining.join(HANG_S)
    assert not joining.is_alive()
    rank.close_transfer("rollout")
    for left in (unused, address):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(left)


@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_does_not_wait_for_a_lost_member(monkeypatch, busy):
    """``busy``: it is in an update while the member is lost, and would join afterwards."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    rank, secret = PolicyWorker(), new_secret()
    address, errors = rank.address(), []

    def join():
        try:
            rank.open_transfer("rollout", "shared_memory", Seat(*address, 0, 3, secret), HANG_S)
        except TransferLost as error:
            errors.append(str(error))

    joining = threading.Thread(target=join)
    if not busy:
        joining.start()
        member = open_transport("shared_memory", Seat(*address, 1, 3, secret), timeout_s=HANG_S)
    rank.stop_joining(address[1] + 1)  # of an earlier group
    rank.stop_joining(address[1])
    if busy:
        joining.start()
    joining.join(HANG_S)
    assert errors == ["weight sync: a process of the transfer group is gone"]
    if not busy:
        with pytest.raises(TransferLost):
            member.agree(True)
        member.close()
    rank.stop_joining(address[1])  # nothing to stop


class Called:
    """Replaces an actor; records how long it may wait for the others."""

    def __init__(self):
        self.waits = []

    def __getattr__(self, method):
        async def call(*arguments):
            if method == "open_transfer":
                self.waits.append(arguments[-1])
            return {"address": ("127.0.0.1", 1), "parameter_specs": [], "__ray_call__": "node"}.get(method)

        return SimpleNamespace(remote=call)


def test_ranks_wait_less_for_an_engine_than_it_waits_for_them():
    """An engine that is lost meanwhile must not keep the ranks from their update."""
    rank, engine = Called(), Called()
    policy = SimpleNamespace(ranks=[rank], device="cpu")

    async def session():
        group = await TransferGroup.open(
            "rollout", policy, [engine], TransferSpec(WeightSyncConfig()), timeout_s=300
        )
        await group.reopen([engine], name="anew", timeout_s=300, ranks_busy_s=1800)

    asyncio.run(session())
    assert rank.waits == [300, 300] and engine.waits == [300, 2100]


@pytest.mark.parametrize("error", [RayActorError(), TimeoutError("it hangs")])
def test_ranks_stop_joining_when_an_engine_is_lost(error):
    class Rank(Called):
        def __init__(self):
            self.stopped = []

        def __getattr__(self, method):
            def options(*, concurrency_group):
                assert concurrency_group == PARALLEL  # else the call waits for `open_transfer`
                return SimpleNamespace(remote=self.stopped.append)

            if method == "open_transfer":
                return SimpleNamespace(remote=lambda *_: asyncio.Event().wait())
            if method == "stop_joining":
                return SimpleNamespace(options=options)
            return super().__getattr__(method)

    class Lost(Called):
        def __getattr__(self, method):
            async def call(*arguments):
                if method == "open_transfer":
                    raise error

            return SimpleNamespace(remote=call)

    policy, spec = SimpleNamespace(ranks=[Rank()], device="cpu"), TransferSpec(WeightSyncConfig())
    with pytest.raises(type(error)):
        asyncio.run(TransferGroup.open("rollout", policy, [Lost()], spec, timeout_s=300))
    assert policy.ranks[0].stopped == [1]  # the port of the group


@pytest.mark.parametrize(
    ("set_backend", "one_host", "expected"),
    [("shared_memory", True, "shared_memory"), ("shared_memory", False, "gloo"), ("gloo", False, "gloo")],
)
def test_an_engine_on_another_host_is_reached_whatever_backend_was_set(set_backend, one_host, expected):
    """It may join hours after the start, when all engines were on one host."""
    backends, nodes = [], ["node"] * 2

    class Engine(Called):
        def __getattr__(self, method):
            async def call(*arguments):
                if method == "open_transfer":
                    backends.append(arguments[0])
                return nodes[1] if method == "__ray_call__" else None

            return SimpleNamespace(remote=call)

    policy = SimpleNamespace(ranks=[Called()], device="cpu")

    async def session():
        spec = TransferSpec(WeightSyncConfig(backend=set_backend))
        group = await TransferGroup.open("rollout", policy, [Engine()], spec, timeout_s=300)
        nodes[1] = "node" if one_host else "another"
        await group.reopen([Engine()], name="joined", timeout_s=300)

    asyncio.run(session())
    assert backends[1] == expected
