"""Simulated hosts on one machine: network namespaces with an address each, on a switch in another namespace.
Each has its own 127.0.0.1, and its link can be cut.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from itertools import count

NETWORK = "10.77.0"


def refusal():
    """Return why this machine cannot create namespaces; None if it can."""
    if os.geteuid() != 0:
        return "only root can create network namespaces"
    name = f"grpo{os.getpid()}try"
    try:
        tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "the program ip (iproute2) is missing"
    if tried.returncode:
        return f"cannot create a network namespace here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class Hosts:
    """``add`` creates a host and returns its address."""

    def __init__(self):
        self._numbers, self._names = count(1), {}
        self._switch = f"grpo{os.getpid()}switch"
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")

    def add(self):
        number = next(self._numbers)
        name, address = f"grpo{os.getpid()}host{number}", f"{NETWORK}.{number}"
        _ip("netns", "add", name)
        _ip("-n", self._switch, "link", "add", f"port{number}", "type", "veth", "peer", "eth0", "netns", name)
        _ip("-n", self._switch, "link", "set", f"port{number}", "master", "bridge", "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            _ip("-n", name, "link", "set", link, "up")
        self._names[address] = name
        return address

    def command(self, address, *command):
        """Return ``command`` so that it runs on the host."""
        return ["ip", "netns", "exec", self._names[address], *command]

    def cut(self, address):
        """Drop all packets of the host, without an error on either side."""
        number = address.rpartition(".")[2]
        _ip("-n", self._switch, "link", "set", f"port{number}", "down")

    def remove(self):
        for name in (*self._names.values(), self._switch):
            _ip("netns", "del", name)


@contextmanager
def hosts():
    """Yield a switch without hosts; it and its hosts are removed after the block."""
    network = Hosts()
    try:
        yield network
    finally:
        network.remove()


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
