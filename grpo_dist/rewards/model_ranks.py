"""A reward model that does not fit one GPU: tensor parallel over processes of one node, a GPU each.

    rank 0, the worker itself         rank 1, 2 ...
      rows of token ids  --- pickle --->  the same rows
      its part of each layer  <-- all-reduce -->  its part of each layer
      scores                              the same scores, dropped

Transformers' plan of the architecture names the weights to split; heads are whole on every rank. A rank
that ends takes rank 0 with it: that waits for it in a collective, and a supervisor replaces what has ended.
"""

from __future__ import annotations

import logging
import os
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
from torch.distributed import TCPStore, init_process_group

from grpo_dist.config import RewardModelConfig
from grpo_dist.rewards.model_inputs import ModelInput
from grpo_dist.rewards.models import Classifier
from grpo_dist.runtime.child_python import child_command
from grpo_dist.runtime.guardian import die_with
from grpo_dist.runtime.hardware import device_type

logger = logging.getLogger(__name__)

_COLLECTIVE_S = 1800.0  # deadline of one; ranks read a large model from disk at different speeds
_HOST = "127.0.0.1"


def classifier_of(settings: RewardModelConfig) -> Classifier:
    """Return the model on the device of this process, or split over it and those of new processes."""
    return Classifier(settings) if settings.tensor_parallel_size == 1 else SplitClassifier(settings)


class SplitClassifier(Classifier):
    """A `Classifier` of which this process is rank 0, with the processes of the other ranks.

    Raises:
        ValueError: as `Classifier`.
        RuntimeError: another rank could not load its part.
    """

    def __init__(self, settings: RewardModelConfig) -> None:
        size = settings.tensor_parallel_size
        store = TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False)
        self._peers = [_Peer(settings, rank, store.port) for rank in range(1, size)]
        try:
            _join(0, size, store)
            super().__init__(settings)
            for peer in self._peers:
                peer.wait_loaded()
        except BaseException:
            self.close()
            raise

    def scores(self, rows: Sequence[ModelInput]) -> list[np.ndarray]:
        """Score the rows on all ranks together. A rank that fails here has left the others in the middle of a
        collective, so all end.
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

    def __init__(self, settings: RewardModelConfig, rank: int, port: int) -> None:
        self._name = f"reward model {settings.name}: rank {rank}"
        self._connection, given = Pipe()
        lifeline, self._lifeline = os.pipe()
        fds = (given.fileno(), lifeline)
        self._process = subprocess.Popen(
            child_command(__name__, *fds), pass_fds=fds, start_new_session=True, stdin=subprocess.DEVNULL
        )
        given.close()
        os.close(lifeline)
        self._closing = threading.Event()
        self.send((settings, rank, port))
        threading.Thread(target=self._watch, name=self._name, daemon=True).start()

    def send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise RuntimeError(f"{self._name} has ended") from error

    def wait_loaded(self) -> None:
        """Raise RuntimeError with the rank's own error where it could not load its part."""
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
    settings, rank, port = connection.recv()  # bounded: ends with rank 0
    model: Classifier | None = None
    problem = ""
    try:
        size = settings.tensor_parallel_size
        _join(rank, size, TCPStore(_HOST, port, size, is_master=False))
        model = Classifier(settings)
    except Exception as error:  # rank 0 most likely fails alike, and reports it
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    with suppress(EOFError, OSError):
        connection.send(problem)
        while True:
            rows = connection.recv()  # bounded: ends with rank 0
            if model is not None:
                model.scores(rows)


def _join(rank: int, size: int, store: TCPStore) -> None:
    """Enter the process group of the model, with the device of this rank among those that are visible."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    device = device_type()
    if device == "cuda":
        torch.cuda.set_device(rank)
    init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store, rank=rank, world_size=size, timeout=timedelta(seconds=_COLLECTIVE_S),
    )  # fmt: skip
