"""Where the processes of a torch process group meet."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def meeting_point(host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """The store at ``host:port``, which rank 0 keeps: there and at no other address of its machine, which is
    where torch's own would listen.
    """
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=socket.create_server((host, port)).detach() if rank == 0 else None,
        use_libuv=False,
    )
