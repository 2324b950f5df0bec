"""The cluster of a plan, and the data sheets of its accelerators.

8x8xH100      8 nodes of 8 H100
1x1xA100-40GB one card
1x0xCPU       a machine without GPUs, the one that a benchmark was measured on
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from grpo_dist.errors import UserError
from grpo_dist.tools.bench.flops import card_peak


@dataclass(frozen=True, slots=True)
class Accelerator:
    """``memory``: bytes that the driver reports. ``hbm``, ``link``, ``network``: bytes a second of its
    memory, to another card of its node and to another node, each way. ``price``: dollars an hour.
    """

    name: str
    memory: int
    flops: float
    hbm: float
    link: float
    network: float
    price: float

    @property
    def kind(self) -> str:
        """The name without memory and bus, which drivers write in other ways: a100"""
        return self.name.lower().partition("-")[0]


def _card(
    name: str, mib: int, hbm_gb: float, link_gb: float, network_gb: float, price: float, sheet: str = ""
) -> Accelerator:
    flops = card_peak(sheet or name)
    assert flops is not None, name
    return Accelerator(name, mib * 2**20, flops, hbm_gb * 1e9, link_gb * 1e9, network_gb * 1e9, price)


# Memory as `nvidia-smi` reports it; dense half-precision operations from `bench.flops`; memory bandwidth and
# NVLink (half of what is advertised for both ways) or PCIe from NVIDIA's data sheets. The network is what
# such nodes are commonly built with, per card: 400 Gb/s for Hopper and newer, 200 Gb/s for A100, 100 Gb/s for
# L40S, 25 Gb/s below. Prices are round numbers of what clouds list on demand in 2025; `--price` is the user's
# own.
_KNOWN = (
    _card("B200", 183_359, 7_700, 900, 50, 5.5),
    _card("H200", 143_771, 4_800, 450, 50, 3.6),
    _card("H100", 81_559, 3_350, 450, 50, 3.0),
    _card("H100-PCIe", 81_559, 2_000, 64, 25, 2.4, sheet="H100 PCIe"),
    _card("H20", 97_871, 4_000, 450, 50, 1.8),
    _card("A100-80GB", 81_920, 2_039, 300, 25, 1.8),
    _card("A100-40GB", 40_960, 1_555, 300, 25, 1.3),
    _card("L40S", 46_068, 864, 32, 12.5, 1.0),
    _card("A10G", 23_028, 600, 32, 3.1, 1.0),
    _card("L4", 23_034, 300, 32, 3.1, 0.7),
    _card("RTX4090", 24_564, 1_008, 32, 3.1, 0.4, sheet="RTX 4090"),
    _card("RTX3090", 24_576, 936, 32, 3.1, 0.25, sheet="RTX 3090"),
)
ACCELERATORS = {card.name.lower(): card for card in _KNOWN} | {"a100": _KNOWN[5]}
_EXAMPLE = "NODESxGPUSxKIND, e.g. 8x8xH100, 1x4xA100-40GB or 1x0xCPU"


def card_called(name: str) -> Accelerator | None:
    """Return the card whose kind is a word of the driver's ``name``; the first of several variants; or None.

    `NVIDIA A100-SXM4-40GB` -> A100-80GB; `NVIDIA L40` -> None.
    """
    words = re.split(r"[^a-z0-9]+", re.sub(r"(rtx) (\d)", r"\1\2", name.lower()))
    return next((card for card in _KNOWN if card.kind in words), None)


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """``card`` None: no GPUs."""

    nodes: int
    gpus_per_node: int
    card: Accelerator | None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def price(self) -> float:
        """Dollars an hour of all cards."""
        return self.gpus * self.card.price if self.card else 0.0

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus_per_node}x{self.card.name if self.card else 'CPU'}"


def parse_cluster(text: str, *, price: float | None = None) -> ClusterShape:
    """Parse ``text`` such as `8x8xH100`. ``price``: dollars per card and hour, instead of the table's. Raises
    UserError.
    """
    found = re.fullmatch(r"(\d+)x(\d+)x([A-Za-z0-9][\w.-]*)", text.strip())
    if not found:
        raise UserError(f"--cluster {text}: expected {_EXAMPLE}")
    nodes, gpus, kind = int(found[1]), int(found[2]), found[3]
    if nodes < 1:
        raise UserError(f"--cluster {text}: {nodes} nodes; expected at least 1 in {_EXAMPLE}")
    if price is not None and not 0 <= price < float("inf"):
        raise UserError(f"--price {price:g}: expected dollars an hour of one GPU, 0 or more")
    if kind.upper() == "CPU":
        if nodes != 1 or gpus:
            raise UserError(f"--cluster {text}: machines without GPUs are planned one at a time; use 1x0xCPU")
        return ClusterShape(1, 0, None)
    if kind.lower() not in ACCELERATORS:
        near = difflib.get_close_matches(kind.lower(), ACCELERATORS, n=1)
        hint = f"; did you mean {ACCELERATORS[near[0]].name}?" if near else ""
        known = ", ".join(card.name for card in _KNOWN)
        raise UserError(f"--cluster {text}: no data sheet of {kind} is known; expected one of {known}{hint}")
    if not gpus:
        raise UserError(f"--cluster {text}: no GPU in a node; expected at least 1 in {_EXAMPLE}")
    card = ACCELERATORS[kind.lower()]
    return ClusterShape(nodes, gpus, card if price is None else replace(card, price=price))
