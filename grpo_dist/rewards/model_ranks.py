"""A reward model that does not fit one GPU: tensor parallel over processes of one node, one GPU each.

    rank 0, the worker itself         rank 1, 2 ...
      rows of token ids  --- pickle --->  the same rows
      its part of each layer  <-- all-reduce -->  its part of each layer
      scores                              the same scores, dropped

Transformers' plan of the architecture names the weights to split; heads are whole on every rank. If a rank
ends, rank 0 ends too, since it would wait in a collective; a supervisor replaces ended processes. The ranks
meet on loopback, and each proves that it knows the secret that rank 0 sends over the pipes.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_dist.config import RewardModelConfig
from grpo_dist.rewards.models import Classifier, ModelInput
from grpo_dist.runtime.hardware import collective_backend, device_type
from grpo_dist.runtime.processes import child_command, die_with
from grpo_dist.runtime.rendezvous import Rank, check_members, meeting_point

logger = logging.getLogger(__name__)

_COLLECTIVE_S = 1800.0  # deadline of a collective; ranks load a large model at different speeds
_HOST, _INTERFACE = "127.0.0.1", "lo"
_RANDOM_BYTES = 32  # length of secret and challenge


def load_classifier(settings: RewardModelConfig) -> Classifier:
    """Return the model on the device of this process, or split over this and new processes' devices."""
    return Classifier(settings) if settings.tensor_parallel_size == 1 else SplitClassifier(settings)


class SplitClassifier(Classifier):
    """A split `Classifier`: this process is rank 0 and starts the processes of the other ranks.

    Raises:
        ValueError: as `Classifier`.
        RuntimeError: another rank could not load its part.
        NotAMember: another program of this machine took the place of a rank.
    """

    def __init__(self, settings: RewardModelConfig) -> None:
        size = settings.tensor_parallel_size
        first, *others = _new_group(size)
        self._peers = [_Peer(settings, rank) for rank in others]
        try:
            _join(first)
            super().__init__(settings)
            for peer in self._peers:
                peer.wait_loaded()
        except BaseException:
            self.close()
            raise

    def scores(self, rows: Sequence[ModelInput]) -> list[np.ndarray]:
        """Score the rows on all ranks together. A failure leaves the other ranks inside a collective, so all
        ranks end.
        """
        try:
            for peer in self._peers:
                peer.send(rows)
            return super().scores(rows)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the other ranks."""
        for peer in self._peers:
            peer.close()


class _Peer:
    """The process of one rank above 0, seen from rank 0."""

    def __init__(self, settings: RewardModelConfig, rank: Rank) -> None:
        self._name = f"reward model {settings.name}: rank {rank.index}"
        self._connection, rank_end = Pipe()
        lifeline, self._lifeline = os.pipe()
        fds = (rank_end.fileno(), lifeline)
        self._process = subprocess.Popen(
            child_command(__name__, *fds), pass_fds=fds, start_new_session=True, stdin=subprocess.DEVNULL
        )
        rank_end.close()
        os.close(lifeline)
        self._closing = threading.Event()
        self.send((settings, rank))
        threading.Thread(target=self._watch, name=self._name, daemon=True).start()

    def send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise RuntimeError(f"{self._name} has ended") from error

    def wait_loaded(self) -> None:
        """Raise RuntimeError with the rank's error if it could not load its part."""
        if not self._connection.poll(_COLLECTIVE_S):
            raise RuntimeError(f"{self._name} has not loaded its part within {_COLLECTIVE_S:g} s")
        if problem := self._connection.recv():  # bounded: polled
            raise RuntimeError(f"{self._name}: {problem}")

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            os.close(self._lifeline)  # the kernel ends the process
            self._process.wait()  # bounded: it has been killed

    def _watch(self) -> None:
        status = self._process.wait()  # bounded: by the life of the process
        if not self._closing.is_set():
            logger.error("%s ended with status %d, so this process ends, too", self._name, status)
            logging.shutdown()
            os._exit(1)


def main() -> None:
    """Serve one rank: load its part, then score the rows that rank 0 scores."""
    channel, lifeline = (int(argument) for argument in sys.argv[1:3])
    die_with(lifeline)
    connection = Connection(channel)
    settings, rank = connection.recv()  # bounded: ends with rank 0
    model: Classifier | None = None
    problem = ""
    try:
        _join(rank)
        model = Classifier(settings)
    except Exception as error:  # rank 0 most likely fails in the same way, and reports it
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    with suppress(EOFError, OSError):
        connection.send(problem)
        while True:
            rows = connection.recv()  # bounded: ends with rank 0
            if model is not None:
                model.scores(rows)


def _new_group(size: int) -> list[Rank]:
    """Return the ranks of a new group with a new secret. Rank 0 holds a socket on loopback."""
    listening = socket.create_server((_HOST, 0))
    port, secret = listening.getsockname()[1], secrets.token_bytes(_RANDOM_BYTES)
    challenge = secrets.token_bytes(_RANDOM_BYTES)
    descriptors = [listening.detach(), *[None] * (size - 1)]
    return [
        Rank(index, size, _HOST, port, _COLLECTIVE_S, secret, challenge, listening=descriptor)
        for index, descriptor in enumerate(descriptors)
    ]


def _join(rank: Rank) -> None:
    """Enter the process group of the model, with this rank's device among the visible devices.

    Collective. Raises NotAMember for a process that does not know the group's secret.
    """
    index, size = rank.index, rank.world_size
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(size)}
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE  # else gloo listens on the address of the host's name
    if device_type() == "cuda":
        torch.cuda.set_device(index)
    dist.init_process_group(
        collective_backend(),
        store=meeting_point(rank),
        rank=index,
        world_size=size,
        timeout=timedelta(seconds=rank.timeout_s),
    )
    check_members(_gathered, rank.secret, rank.challenge, index)


def _gathered(tensor: Tensor) -> list[Tensor]:
    tensor = tensor.to(device_type())
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)  # bounded: the process group has a deadline
    return gathered
