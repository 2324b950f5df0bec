"""Transports of the weight sync between real processes, and the checksum of what they carry."""

import ctypes
import gc
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch

from actors.transfer import transport
from actors.transfer.connections import Connections, GroupStore, Seat, Unauthenticated, open_store
from actors.transfer.stream import receive, receive_changes, receive_whole, send, send_changes
from actors.transfer.transport import (
    Broadcasts,
    IpcTransport,
    NcclTransport,
    SharedMemoryTransport,
    _nccl_group,
    joined,
    open_transport,
)
from grpo_dist.errors import TransferLost, UserError
from grpo_dist.policy.ranks import join as join_ranks
from grpo_dist.policy.weight_buckets import Checksum, ParameterSpec, make_buckets, pack
from grpo_dist.policy.weight_deltas import HeldWeights, SentWeights
from grpo_dist.runtime.hardware import one_thread, transfer_backend
from grpo_dist.runtime.rendezvous import NotAMember, Rank, check_members, listen, meeting_point
from tests.support.patience import HANG_S, longer, wait_until
from tests.support.processes import free_port

SECRET = b"of the group in these tests"
CPU_KINDS = ["gloo", "shared_memory"]
# Forked from one process that has imported this file: an import in each would take longer than its test.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])
SPECS = [
    ParameterSpec("a", "float32", (300, 7)), ParameterSpec("b", "bfloat16", (3,)),
    ParameterSpec("c", "float32", (5,)), ParameterSpec("big", "float32", (9000,)),
    ParameterSpec("d", "float32", (1,)),
]  # fmt: skip
# More than a connection takes while nobody reads.
MANY = [ParameterSpec(str(i), "float32", (1 << 20,)) for i in range(12)]
BUCKET = 9000  # bytes: a and b | c | big | d and more


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator).to(s.torch_dtype) for s in SPECS}


def join(backend, port, rank, size, timeout_s=HANG_S, secret=SECRET):
    return open_transport(backend, Seat("127.0.0.1", port, rank, size, secret), timeout_s=timeout_s)


def receiver(backend, port, rank, size, rounds, out):
    transport = join(backend, port, rank, size)
    for _ in range(rounds):
        tensors = {n: t.clone() for bucket in receive(transport, SPECS, BUCKET) for n, t in bucket}
        out.put((rank, {n: t.float().numpy() for n, t in tensors.items()}))
    transport.close()


def receive_one_bucket_then(action, backend, port, up, reached):
    """Join and receive one bucket, then die or hang."""
    up.set()  # everything is imported
    transport = join(backend, port, 1, 2)
    next(receive(transport, MANY, 1))
    reached.set()
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG_S)


def start(target, *arguments):
    process = PROCESSES.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def in_threads(target, arguments):
    """Run ``target`` in one thread for each tuple of ``arguments``; wait for all of them."""
    threads = [threading.Thread(target=target, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)


def buckets_of(held):
    return [[(spec.name, held[spec.name]) for spec in bucket] for bucket in make_buckets(SPECS, BUCKET)]


@pytest.mark.parametrize("backend", CPU_KINDS)
def test_two_receivers_get_every_byte_round_after_round(backend):
    port, out = free_port("127.0.0.1"), PROCESSES.Queue()
    others = [start(receiver, backend, port, rank, 3, 2, out) for rank in (1, 2)]
    transport = join(backend, port, 0, 3)
    for seed in (1, 2):
        sent = weights(seed)
        metrics = send(transport, buckets_of(sent), SPECS, BUCKET)
        assert metrics["sync/bytes"] == sum(spec.num_bytes for spec in SPECS)
        for rank, received in [out.get(timeout=HANG_S) for _ in others]:
            assert rank in (1, 2)
            for name, tensor in sent.items():
                assert torch.equal(torch.from_numpy(received[name]), tensor.float())
    transport.close()
    for other in others:
        other.join(HANG_S)
        assert other.exitcode == 0


def reaches(host):
    try:
        listen(host).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("backend", CPU_KINDS)
@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not reaches("::1"), reason="no IPv6 here"))],
)
def test_rank_0_accepts_at_the_socket_whose_port_the_others_know(backend, host):
    """It opens no port a second time: this one is in use. The others may connect first."""
    listening, received = listen(host), {}
    seat = Seat(host, listening.getsockname()[1], 0, 2, SECRET)
    sent = weights(1)

    def receive_all():
        transport = open_transport(backend, replace(seat, rank=1), timeout_s=HANG_S)
        for bucket in receive(transport, SPECS, BUCKET):
            received.update({name: tensor.clone() for name, tensor in bucket})
        transport.close()

    other = threading.Thread(target=receive_all)
    other.start()
    transport = open_transport(backend, replace(seat, listening=listening.detach()), timeout_s=HANG_S)
    send(transport, buckets_of(sent), SPECS, BUCKET)
    other.join(HANG_S)
    transport.close()
    assert all(torch.equal(received[name], tensor) for name, tensor in sent.items())


def damaged(transport):
    """Return ``transport``, which flips a bit in what it receives next."""
    incoming = transport.incoming

    def flip(sizes):
        transport.incoming = incoming
        for flat in incoming(sizes):
            copy = flat.clone()
            copy[8] ^= 4  # the size of the first bucket, which stays a possible one
            yield copy

    transport.incoming = flip
    return transport


def receiver_of_changes(backend, port, rank, size, out):
    """Receive whole weights, changes, whole weights and changes; rank 1 gets a damaged table once."""
    transport, held = join(backend, port, rank, size), HeldWeights(SPECS, BUCKET)
    for i in range(4):
        if i % 2 == 0:
            arrived = len(list(receive_whole(transport, held))) > 0
        else:
            is_damaged = rank == 1 and i == 1
            arrived = receive_changes(damaged(transport) if is_damaged else transport, held)
        out.put((i, rank, arrived, held.checksum().value))
    transport.close()


@pytest.mark.parametrize("backend", CPU_KINDS)
def test_a_damaged_table_of_changes_ends_the_transfer_for_all_and_the_group_goes_on(backend):
    port, out = free_port("127.0.0.1"), PROCESSES.Queue()
    others = [start(receiver_of_changes, backend, port, rank, 3, out) for rank in (1, 2)]
    transport, source, device = join(backend, port, 0, 3), SentWeights(), torch.device("cpu")
    held = weights(1)
    for i in range(4):
        if i != 2:  # changes that could not be applied are sent whole
            held["c"] = held["c"] + 1
            changes = source.take(buckets_of(held), SPECS, BUCKET, device, str(i))
        if i % 2 == 0:
            send(transport, source.held.weights(), SPECS, BUCKET)
        else:
            count = send_changes(transport, changes, source.held)["sync/bytes"]
            assert (count == 16 * len(source.held) + 16) == (i == 1)
        for _ in others:
            at, rank, arrived, checksum = out.get(timeout=HANG_S)
            assert at == i and arrived == (i != 1), (i, rank)
            assert (checksum == source.held.checksum().value) == (i != 1)
    transport.close()
    for other in others:
        other.join(HANG_S)
        assert other.exitcode == 0


@pytest.mark.parametrize("backend", CPU_KINDS)
@pytest.mark.parametrize("action", ["die", "hang"])
def test_a_peer_that_dies_or_hangs_ends_the_sending_by_the_deadline(backend, action):
    many = [[(spec.name, torch.zeros(spec.shape))] for spec in MANY]
    for timeout_s in longer(10.0):
        port = free_port("127.0.0.1")
        up, reached = PROCESSES.Event(), PROCESSES.Event()
        other = start(receive_one_bucket_then, action, backend, port, up, reached)
        assert up.wait(HANG_S)
        with pytest.raises((RuntimeError, TimeoutError)):
            send(join(backend, port, 0, 2, timeout_s=timeout_s), many, MANY, 1)
        hung = other.is_alive()
        other.kill()
        other.join()
        if reached.is_set():
            break
    assert reached.is_set() and (action == "die" or hung)


def test_a_rank_that_can_no_longer_send_still_gathers_with_the_other_ranks():
    """Under ZeRO-3 the others wait for this rank in every remaining bucket."""

    class Broken:
        def outgoing(self, sizes):
            yield torch.empty(sizes[0], dtype=torch.uint8)
            raise RuntimeError("the other one is gone")

    gathered = []

    def buckets():
        for bucket in buckets_of(weights(1)):
            gathered.append([name for name, _ in bucket])
            yield bucket

    with pytest.raises(RuntimeError, match="is gone"):
        send(Broken(), buckets(), SPECS, BUCKET)
    assert gathered == [["a", "b", "c"], ["big"], ["d"]]


def test_missing_peers_are_reported_by_the_deadline():
    with pytest.raises(TimeoutError):
        join("shared_memory", free_port("127.0.0.1"), 0, 2, timeout_s=0.2)
    with pytest.raises(ConnectionRefusedError):
        join("shared_memory", free_port("127.0.0.1"), 1, 2, timeout_s=0.2)


@contextmanager
def intruders(port, *openings, count=1):
    """Send useless bytes to whatever listens; yield the connections."""
    sockets, stop = [], threading.Event()

    def intrude():
        for opening in openings * count:
            while not stop.is_set():
                try:
                    sockets.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                    sockets[-1].sendall(opening)
                    break
                except OSError:
                    time.sleep(0.005)

    thread = threading.Thread(target=intrude)
    thread.start()
    yield sockets
    stop.set()
    thread.join(HANG_S)
    for each in sockets:
        each.close()


def join_with_another_secret(port, refused, over):
    """Try to join until the transfer is ``over``; set ``refused`` once that has failed."""
    timeout_s = 1.0
    while not over.is_set():
        try:
            join("shared_memory", port, 1, 2, timeout_s=timeout_s, secret=b"of another group")
        except TimeoutError:  # the machine was busy
            timeout_s *= 2
        except ConnectionError:
            refused.set()


@pytest.mark.parametrize("count", [1, 50])
def test_a_process_without_the_secret_cannot_join_delay_or_end_a_transfer(count):
    """Intruders are silent, send noise or use another secret; 50 each exceed the pending limit. The member
    begins after them.
    """
    port, out = free_port("127.0.0.1"), PROCESSES.Queue()
    refused, over = PROCESSES.Event(), PROCESSES.Event()
    sent, begin = weights(1), time.monotonic()
    with intruders(port, b"", b"short", b"x" * 500, count=count) as sockets:
        others = [start(join_with_another_secret, port, refused, over)]

        def start_member():
            wait_until(lambda: len(sockets) == 3 * count and refused.is_set(), "some intruders have not come")
            others.append(start(receiver, "shared_memory", port, 1, 2, 1, out))

        threading.Thread(target=start_member).start()
        transport = join("shared_memory", port, 0, 2)
        send(transport, buckets_of(sent), SPECS, BUCKET)
        _, received = out.get(timeout=HANG_S)
        over.set()
        assert len(sockets) == 3 * count
        for intruder in sockets:
            assert len(read_all(intruder)) <= 32  # a challenge, and the end
    assert all(torch.equal(torch.from_numpy(received[name]), sent[name].float()) for name in sent)
    assert time.monotonic() - begin < HANG_S  # nobody's deadline was waited for
    transport.close()
    for other in others:
        other.join(HANG_S)
        assert other.exitcode == 0


def read_all(connection):
    data = b""
    with suppress(ConnectionError):
        while chunk := connection.recv(1000):
            data += chunk
    return data


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_another_secret_cannot_join_a_gloo_group(rank):
    """A rank that finds no member cannot either. Neither receives or sends weights."""
    results, secrets = {}, [SECRET, SECRET]
    secrets[rank] = b"of another group"

    def join_as(index, secret, port, timeout_s):
        try:
            results[index] = join("gloo", port, index, 2, timeout_s=timeout_s, secret=secret)
        except Exception as error:
            results[index] = error

    for timeout_s in longer(2.0):
        port = free_port("127.0.0.1")
        in_threads(join_as, [(index, secret, port, timeout_s) for index, secret in enumerate(secrets)])
        if not isinstance(results[1], TimeoutError):  # rank 1 is answered, and not left to its deadline
            break
    assert isinstance(results[0], TimeoutError) and isinstance(results[1], ConnectionError)


def test_an_intruder_in_the_gloo_store_is_refused_before_weights_are_sent(monkeypatch):
    """The port of the store is no secret: any process that finds it can take a rank's place."""
    listening = socket.create_server(("127.0.0.1", 0))
    port, refused = listening.getsockname()[1], []
    agreed = GroupStore(port, b"q" * 32, listening.detach())
    monkeypatch.setattr("actors.transfer.transport.agree_on_store", lambda seat, timeout_s: agreed)

    def rank_0():
        try:
            join("gloo", port, 0, 2)
        except NotAMember as error:
            refused.append(str(error))

    thread = threading.Thread(target=rank_0)
    thread.start()
    store = meeting_point(Rank(1, 2, "127.0.0.1", port, HANG_S))
    group = torch.distributed.ProcessGroupGloo(
        torch.distributed.PrefixStore("weights", store), 1, 2, timedelta(seconds=HANG_S)
    )
    gathered = [[torch.empty(32, dtype=torch.uint8) for _ in range(2)]]
    group.allgather(gathered, [torch.zeros(32, dtype=torch.uint8)]).wait()
    thread.join(HANG_S)
    assert len(refused) == 1 and "rank 1 of a process group does not know the secret" in refused[0]


def test_only_members_learn_where_the_policys_ranks_find_their_store(monkeypatch):
    """Rank 0 accepts them at a socket that is open already, or opens one."""
    opened, stores = listen("127.0.0.1"), {}
    port = opened.getsockname()[1]

    def meet_as(rank, secret, timeout_s, listening=None):
        own = Rank(rank, 2, "127.0.0.1", port, timeout_s, secret, listening=listening)
        try:
            stores[rank] = open_store(own)
        except Exception as error:
            stores[rank] = error

    in_threads(meet_as, [(0, SECRET, HANG_S, opened.detach()), (1, SECRET, HANG_S)])
    assert stores[0].port == stores[1].port != port and stores[0].challenge == stores[1].challenge
    os.close(stores[0].listening)
    assert SECRET.decode() not in repr(stores[0]) and stores[1].listening is None
    for timeout_s in longer(1.0):
        in_threads(meet_as, [(0, SECRET, timeout_s), (1, b"another", timeout_s)])
        if not isinstance(stores[1], TimeoutError):  # rank 1 is answered, and not left to its deadline
            break
    assert isinstance(stores[0], TimeoutError) and isinstance(stores[1], ConnectionError)


def rank_of_the_policy(port, rank, out):
    """Put the sum over all ranks, and the addresses at which this one listens."""
    join_ranks(open_store(Rank(rank, 2, "127.0.0.1", port, HANG_S, SECRET)))
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    out.put((float(total), {address.ip for address in listening()}))
    torch.distributed.barrier()


def test_ranks_with_the_secret_join_and_listen_only_at_their_meeting_address():
    port, out = free_port("127.0.0.1"), PROCESSES.Queue()
    ranks = [start(rank_of_the_policy, port, rank, out) for rank in range(2)]
    assert [out.get(timeout=HANG_S) for _ in ranks] == [(2.0, {"127.0.0.1"})] * 2
    for rank in ranks:
        rank.join(HANG_S)


def test_a_rank_without_the_secret_fails_the_membership_check_everywhere():
    proofs = []
    check_members(lambda proof: proofs.append(proof) or [proof], SECRET, b"q" * 32, 0)
    check_members(lambda proof: [proofs[0], proof], SECRET, b"q" * 32, 1)
    for others in ([torch.zeros_like(proofs[0])], [proofs[0].clone().fill_(1)]):
        with pytest.raises(NotAMember, match=r"rank 0 .* does not know the secret"):
            check_members(lambda proof, others=others: [*others, proof], SECRET, b"q" * 32, 1)
    with pytest.raises(NotAMember):  # a proof for another challenge
        check_members(lambda proof: [proofs[0], proof], SECRET, b"p" * 32, 1)


def test_an_impostor_of_rank_0_is_refused():
    """The ranks read none of its messages."""

    def impostor(server):
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                connection.sendall(b"q" * 32)
                connection.recv(64)
                connection.sendall(pickle.dumps(SimpleNamespace(), protocol=0).ljust(64))

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=impostor, args=(server,), daemon=True).start()
        for timeout_s in longer(3.0):
            with pytest.raises(OSError) as refused:
                join("shared_memory", server.getsockname()[1], 1, 2, timeout_s=timeout_s)
            if not isinstance(refused.value, TimeoutError):  # the impostor has answered
                break
    assert isinstance(refused.value, Unauthenticated)
    assert "the listening process does not belong" in str(refused.value)


def test_the_repr_of_a_seat_hides_the_secret():
    seat = Seat("127.0.0.1", 1, 0, 2, SECRET)
    assert "secret" not in repr(seat) and SECRET.decode() not in f"{seat} {[seat]}"
    assert pickle.loads(pickle.dumps(seat)).secret == SECRET


def listening():
    """Return the addresses at which this process listens; Ray adds its own when other tests started it."""
    return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_a_gloo_group_listens_only_at_the_given_address():
    port, out = free_port("127.0.0.1"), PROCESSES.Queue()
    before = listening()
    other = start(receiver, "gloo", port, 1, 2, 1, out)
    transport = join("gloo", port, 0, 2)
    addresses = {address.ip for address in listening() - before}
    send(transport, buckets_of(weights(1)), SPECS, BUCKET)
    transport.close()
    other.join(HANG_S)
    assert addresses == {"127.0.0.1"}


def test_shared_memory_leaves_no_named_segment_behind():
    before = set(os.listdir("/dev/shm"))
    port, out = free_port("127.0.0.1"), PROCESSES.Queue()
    other = start(receiver, "shared_memory", port, 1, 2, 2, out)
    transport = join("shared_memory", port, 0, 2)
    send(transport, buckets_of(weights(1)), SPECS, BUCKET)
    named = {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith("sem.")}
    assert "grpo-dist" not in " ".join(named)
    other.kill()
    other.join()
    with pytest.raises((RuntimeError, OSError)):
        send(transport, buckets_of(weights(2)), SPECS, BUCKET)
    transport.close()


def test_cuda_transport_sends_handles_instead_of_bytes(monkeypatch):
    """Stops short of CUDA: checks the offer, and what the other side rebuilds on its own GPU index."""
    tensors, rebuilt = [], []

    def reduce_tensor(tensor):
        tensors.append(tensor)
        shape = (torch.Tensor, tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage, torch.uint8, 0)
        memory = (b"memory-%d" % len(tensors), 512, 64 * len(tensors), False)
        return None, (*shape, *memory, b"counter", 3, b"\0event", True)

    gpu = SimpleNamespace(uuid="GPU-1")
    reductions = torch.multiprocessing.reductions
    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: rebuilt.append(arguments))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(transport, "Connections", lambda *a, **k: None)
    ends = [IpcTransport(Seat("", 0, rank, 2, SECRET), timeout_s=1) for rank in (0, 1)]
    assert ends[0].device == torch.device("cuda", 3)
    ends[0].device = torch.device("cpu")  # where the buffers of this test can lie
    offer = ends[0]._make(100)
    assert [len(buffer) for buffer in ends[0]._buffers] == [100, 100]
    ends[1]._map(offer)
    kind = (torch.Tensor, torch.Size([100]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 3)
    rest = (False, b"counter", 3, b"\0event", True)
    assert rebuilt == [(*kind, b"memory-%d" % n, 512, 64 * n, *rest) for n in (1, 2)]
    gpu.uuid = "GPU-2"
    with pytest.raises(RuntimeError, match="policy is on GPU-1, this process on GPU-2"):
        ends[1]._map(offer)
    assert json.loads(offer)["gpu"] == "GPU-1"


def test_buffers_of_a_cuda_transport_are_freed_on_both_sides_after_each_transfer(monkeypatch):
    """Stops short of CUDA: a buffer of the CPU is mapped by its number."""
    made = weakref.WeakValueDictionary()

    def handle(buffer):
        made[len(numbers)] = buffer.untyped_storage()
        numbers.append(len(numbers))
        return numbers[-1]

    numbers, sent = [], [weights(seed) for seed in (1, 2)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(transport, "_handle", handle)
    monkeypatch.setattr(
        transport, "_map_handle", lambda number, size, _: torch.empty(0, dtype=torch.uint8).set_(made[number])
    )
    port, ends, received = free_port("127.0.0.1"), {}, []

    def join_as(rank):
        ends[rank] = join("ipc", port, rank, 2)
        ends[rank].device = torch.device("cpu")

    def receive_all():
        for bucket in receive(ends[1], SPECS, BUCKET):
            received.extend((name, tensor.clone()) for name, tensor in bucket)

    in_threads(join_as, [(0,), (1,)])
    for each in sent:
        receiving = threading.Thread(target=receive_all)
        receiving.start()
        send(ends[0], buckets_of(each), SPECS, BUCKET)
        receiving.join(HANG_S)
        assert [dict(received[-len(SPECS) :])[name].equal(each[name]) for name in each] == [True] * len(SPECS)
        gc.collect()
        assert not made
    assert numbers == [0, 1, 2, 3]
    for end in ends.values():
        end.close()


class Runs:
    """A pickle that makes a directory when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_messages_of_a_group_member_are_never_executed(tmp_path):
    """Even a rank 0 that knows the secret can offer nothing but its buffers."""

    def rank_0(port, offer):
        connections = Connections(Seat("127.0.0.1", port, 0, 2, SECRET), HANG_S)
        connections.send(len(offer).to_bytes(4, "little") + offer)
        ended.wait(HANG_S)
        connections.close()

    valid = {"process": os.getpid(), "descriptor": 0, "bytes": 1}
    offers = [pickle.dumps(Runs(tmp_path / "run")), b"", b"[" * 60_000, b"[]", b"\xff"]
    changes = {"bytes": -1}, {"process": "../../x"}, {"x": 1}, {"descriptor": True}
    offers += [json.dumps(valid | change).encode() for change in changes] + [b"x" * 70_000]
    for offer in offers:
        port, ended = free_port("127.0.0.1"), threading.Event()
        thread = threading.Thread(target=rank_0, args=(port, offer))
        thread.start()
        transport = join("shared_memory", port, 1, 2)
        with pytest.raises(RuntimeError, match="the offer of shared buffers is malformed"):
            next(iter(transport.incoming([1])))
        ended.set()
        thread.join(HANG_S)
        transport.close()
    assert not (tmp_path / "run").exists()


class Communicator:
    """Replaces vLLM's communicator; its broadcasts finish when ``done`` returns True. ``error``: what the
    next broadcast raises.
    """

    error = None

    def __init__(self, done):
        self.done, self.sent, self.destroyed = done, [], 0

    def broadcast(self, flat, src, stream):
        if self.error is not None:
            raise self.error
        self.sent.append((len(flat), src))

    def destroy(self):
        self.destroyed += 1

    # methods of the stream and the event

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def query(self):
        return self.done()


@pytest.fixture
def nccl(monkeypatch):
    """Make the transport of a seat without calling CUDA or NCCL."""

    def make(seat, done=lambda: True):
        group = Communicator(done)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: group)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: group)
        monkeypatch.setattr("actors.transfer.transport._nccl_group", lambda *_: group)
        transport = NcclTransport(seat, timeout_s=HANG_S)
        assert transport.device == torch.device("cuda", 3)
        transport.device = torch.device("cpu")  # where the buffers of this test can lie
        return transport, group

    return make


def peer_outside_nccl(port, up):
    with suppress(TransferLost):
        connections = Connections(Seat("127.0.0.1", port, 1, 2, SECRET), HANG_S)
        up.set()
        connections.receive(1)


def test_a_dead_peer_does_not_leave_the_others_blocked_in_nccl(nccl):
    """The broadcast never finishes, since NCCL waits for the dead peer."""
    up, port = PROCESSES.Event(), free_port("127.0.0.1")
    peer = start(peer_outside_nccl, port, up)
    transport, group = nccl(Seat("127.0.0.1", port, 0, 2, SECRET), done=lambda: False)
    assert up.wait(HANG_S)
    sending = iter(transport.outgoing([100, 50]))
    next(sending)
    next(sending)
    assert group.sent == [(100, 0)] and not group.destroyed
    threading.Timer(0.3, peer.kill).start()
    with pytest.raises(TransferLost, match="a process of the transfer group is gone"):
        next(sending)
    assert group.destroyed == 1


def test_a_receiver_leaves_nccl_when_rank_0_does(nccl):
    port = free_port("127.0.0.1")
    first = threading.Thread(
        target=lambda: Connections(Seat("127.0.0.1", port, 0, 2, SECRET), HANG_S).close(), daemon=True
    )
    first.start()
    transport, group = nccl(Seat("127.0.0.1", port, 1, 2, SECRET), done=lambda: False)
    with pytest.raises(TransferLost):
        next(iter(transport.incoming([100])))
    assert group.destroyed == 1


def test_nccl_moves_both_buffers_and_has_a_deadline(nccl):
    port = free_port("127.0.0.1")
    up = threading.Event()
    other = threading.Thread(target=peer_outside_nccl, args=(port, up), daemon=True)
    other.start()
    done = True
    transport, group = nccl(Seat("127.0.0.1", port, 0, 2, SECRET), done=lambda: done)
    assert [len(buffer) for buffer in transport.outgoing([100, 50, 70])] == [100, 50, 70]
    assert group.sent == [(100, 0), (50, 0), (70, 0)] and not group.destroyed
    done, transport._timeout_s = False, 0.3
    with pytest.raises(TimeoutError, match=r"NCCL's broadcast took more than 0\.3 s"):
        list(transport.outgoing([100]))
    assert group.destroyed == 1
    other.join(HANG_S)  # it notices


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_nccl_counts_as_a_lost_transfer_and_the_others_notice(nccl, rank):
    """vLLM raises it where NCCL has noticed the dead peer first."""
    port, sides = free_port("127.0.0.1"), {}

    def join_as(each):
        seat = Seat("127.0.0.1", port, each, 2, SECRET)
        sides[each] = nccl(seat) if each == rank else Connections(seat, HANG_S)

    in_threads(join_as, [(0,), (1,)])
    (transport, group), other = sides[rank], sides[1 - rank]
    group.error = RuntimeError("NCCL error: remote process exited or there was a network error")
    with pytest.raises(TransferLost, match="NCCL's broadcast failed: NCCL error: remote process exited"):
        list(transport.incoming([100, 50]) if rank else transport.outgoing([100, 50]))
    assert group.destroyed == 1
    with pytest.raises(TransferLost, match="a process of the transfer group is gone"):
        other.receive(1)
    other.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_buffers_of_a_broadcast_are_freed_after_the_transfer(rank):
    """Policy and engines keep no memory for the largest tensor from one weight sync to the next."""

    class InPlace(Broadcasts):
        device = torch.device("cpu")

        def _start(self, flat):
            return lambda: None

        def _pair(self, size):
            pair = super()._pair(size)
            self.buffers = [weakref.ref(buffer) for buffer in pair]
            return pair

    transport, sizes = InPlace(), [100, 50, 70]
    lengths = [len(flat) for flat in (transport.incoming(sizes) if rank else transport.outgoing(sizes))]
    gc.collect()
    assert lengths == sizes and all(buffer() is None for buffer in transport.buffers)


class HangingJoin:
    """Joins a group of NCCL; waits for a process that is gone, and returns once ``let_go`` is set."""

    def __init__(self):
        self.let_go, self.group = threading.Event(), Communicator(lambda: True)

    def __call__(self):
        self.let_go.wait(HANG_S)
        return self.group


def test_a_process_lost_while_nccl_joins_does_not_leave_the_others_blocked(monkeypatch):
    up, port, join = PROCESSES.Event(), free_port("127.0.0.1"), HangingJoin()

    def group(seat, connections, device, timeout_s):
        return joined(join, connections, timeout_s)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr("actors.transfer.transport._nccl_group", group)
    peer = start(peer_outside_nccl, port, up)
    threading.Thread(target=lambda: up.wait(HANG_S) and peer.kill(), daemon=True).start()
    with pytest.raises(TransferLost, match="a process of the transfer group is gone"):
        NcclTransport(Seat("127.0.0.1", port, 0, 2, SECRET), timeout_s=HANG_S)
    assert not join.group.destroyed
    join.let_go.set()
    wait_until(lambda: join.group.destroyed == 1, "the unused communicator is not destroyed")


def test_joining_a_group_of_nccl_has_a_deadline_and_an_error():
    open_ended = SimpleNamespace(check=lambda: None)
    join = HangingJoin()
    with pytest.raises(TimeoutError, match=r"NCCL's processes did not join within 0\.1 s"):
        joined(join, open_ended, 0.1)
    join.let_go.set()
    assert joined(join, open_ended, HANG_S) is join.group

    def refused():
        raise RuntimeError("NCCL error: duplicate GPU")

    with pytest.raises(RuntimeError, match="duplicate GPU"):
        joined(refused, open_ended, HANG_S)


def test_only_members_receive_the_id_of_an_nccl_group(monkeypatch):
    """The id may contain zero bytes."""
    group_id = bytes(range(128))

    class Library:
        def ncclGetUniqueId(self):
            return SimpleNamespace(internal=(ctypes.c_byte * 128).from_buffer_copy(group_id))

    wrapper = SimpleNamespace(NCCL_UNIQUE_ID_BYTES=128, NCCLLibrary=Library)
    common = SimpleNamespace(
        uid_init_process_group=lambda *a: SimpleNamespace(arguments=a, disabled=disabled)
    )
    vllm = "vllm.distributed"
    monkeypatch.setitem(sys.modules, f"{vllm}.device_communicators.pynccl_wrapper", wrapper)
    monkeypatch.setitem(sys.modules, f"{vllm}.weight_transfer.nccl_common", common)
    port, groups, disabled = free_port("127.0.0.1"), {}, False

    def join_as(rank):
        seat = Seat("127.0.0.1", port, rank, 3, SECRET)
        try:
            group = _nccl_group(seat, Connections(seat, HANG_S), torch.device("cuda", rank + 4), HANG_S)
            groups[rank] = group.arguments
        except UserError as error:
            groups[rank] = str(error)

    in_threads(join_as, [(rank,) for rank in range(3)])
    assert groups == {rank: (group_id, rank, 3, rank + 4) for rank in range(3)}
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    disabled = True
    in_threads(join_as, [(rank,) for rank in range(3)])
    assert all("VLLM_DISABLE_PYNCCL=1 disables" in error for error in groups.values())


def test_the_backend_follows_from_devices_and_hosts_unless_it_is_set():
    assert transfer_backend("auto", "cpu", one_host=True) == "shared_memory"
    assert transfer_backend("auto", "cpu", one_host=False) == "gloo"
    assert transfer_backend("auto", "cuda", one_host=True) == "nccl"
    assert transfer_backend("gloo", "cpu", one_host=True) == "gloo"
    assert transfer_backend("auto", "cuda", one_host=False, colocated=True) == "ipc"
    assert transfer_backend("ipc", "cuda", one_host=False, colocated=True) == "ipc"
    with pytest.raises(UserError, match="backend = shared_memory needs policy and engines on one host"):
        transfer_backend("shared_memory", "cpu", one_host=False)
    with pytest.raises(UserError, match=r"backend = ipc needs .* on the same GPUs.*cluster\.placement"):
        transfer_backend("ipc", "cuda", one_host=True)
    with pytest.raises(UserError, match=r"backend = nccl cannot connect two processes on one GPU"):
        transfer_backend("nccl", "cuda", one_host=True, colocated=True)
    assert transfer_backend("nccl", "cuda", one_host=True) == "nccl"


def test_one_thread_is_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def checksum(*parts):
    sums = Checksum()
    for part in parts:
        sums.add(part)
    return sums.value


@pytest.mark.parametrize("count", [1, 3, 511, 512, 513, 5000])
def test_the_checksum_detects_damaged_bytes(count):
    generator = torch.Generator().manual_seed(count)
    flat = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    right = checksum(flat)
    assert right == checksum(flat.clone())
    for bit in range(8):
        for where in {0, count // 2, count - 1}:
            changed = flat.clone()
            changed[where] ^= 1 << bit
            assert checksum(changed) != right
    assert checksum(flat[:-1]) != right
    assert checksum(torch.cat([flat, flat[:1] * 0])) != right
    assert checksum(flat, flat) != right
    assert checksum(flat, flat[:0]) != right or count == 0
    for _ in range(100 if count > 1 else 0):
        i, j = torch.randint(0, count, (2,), generator=generator).tolist()
        swapped = flat.clone()
        swapped[i], swapped[j] = flat[j], flat[i]
        assert (checksum(swapped) == right) == bool(flat[i] == flat[j])


def test_the_checksum_detects_buckets_out_of_order():
    a, b = (torch.full((1000,), n, dtype=torch.uint8) for n in (1, 2))
    assert len({checksum(a, b), checksum(b, a), checksum(a, a), checksum(b, b), checksum(a)}) == 5


def test_the_checksum_is_the_same_on_devices_without_integer_matrix_products():
    words = torch.randint(-(2**31), 2**31, (40, 128)).to(torch.int32)
    weights_of_row = Checksum()._weights
    assert torch.equal(words.mv(weights_of_row), (words * weights_of_row).sum(1, dtype=torch.int32))


def test_a_bucket_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="the tensors have 12 bytes and their bucket 16"):
        pack([torch.zeros(3)], torch.empty(16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="more than the 8 bytes"):
        pack([torch.zeros(3)], torch.empty(8, dtype=torch.uint8))


def test_shared_memory_that_its_owner_has_closed_counts_as_a_lost_process():
    owner, reader = (SharedMemoryTransport.__new__(SharedMemoryTransport) for _ in range(2))
    offer = owner._make(64)
    assert len(reader._map(offer)) == 2
    os.close(owner._descriptor)
    with pytest.raises(TransferLost, match="is gone: its shared memory cannot be opened"):
        reader._map(offer)
