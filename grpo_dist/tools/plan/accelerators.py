"""The cluster of a plan, data sheets of accelerators, and the peak rates that they give.

8x8xH100      8 nodes of 8 H100
1x1xA100-40GB one card
1x0xCPU       a machine without GPUs, on which a benchmark was measured
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from grpo_dist.errors import UserError
from grpo_dist.tools.bench.flops import card_peak


@dataclass(frozen=True, slots=True)
class Accelerator:
    """``memory``: bytes reported by the driver. ``hbm``, ``link``, ``network``, ``pcie``: bytes per second of
    GPU memory, to a card of the same node, to another node, and to host memory, each way. ``host``: bytes of
    host memory per card (assumed). ``fp8``: speed in fp8 relative to half precision. ``float32``: operations
    per second in float32. ``price``: dollars per hour.
    """

    name: str
    memory: int
    flops: float
    hbm: float
    link: float
    network: float
    price: float
    pcie: float
    host: int
    fp8: float
    float32: float

    @property
    def kind(self) -> str:
        """The name without memory and bus, which drivers spell differently: a100"""
        return self.name.lower().partition("-")[0]


# Memory as `nvidia-smi` reports it; dense half-precision operations from `bench.flops`; from NVIDIA's data
# sheets operations in float32 (not in TF32, which torch leaves off), memory bandwidth, NVLink (half of the
# advertised two-way figure) or PCIe, 16 lanes of PCIe 4 or 5, and operations in fp8 (twice as many since Ada,
# none before). Network: the common equipment per card, 400 Gb/s for Hopper and newer, 200 Gb/s for A100,
# 100 Gb/s for L40S, 25 Gb/s below. Host memory: typical cloud nodes, 2 TiB for eight H100, 1.1 TiB for eight
# A100. Prices: rounded on-demand list prices of clouds in 2025; `--price` overrides them.
_SHEETS = """
card        memory  HBM     link  network  PCIe  host     price  float32     fp8
            MiB     GB/s    GB/s  GB/s     GB/s  GiB      $/h    1e12/s      for each in half precision
B200        183359  7700    900   50       64    256      5.5    75          2
H200        143771  4800    450   50       64    256      3.6    67          2
H100        81559   3350    450   50       64    256      3.0    67          2
H100-PCIe   81559   2000    64    25       64    192      2.4    51          2
H800        81559   3350    200   50       64    256      2.0    67          2
H20         97871   4000    450   50       64    256      1.8    44          2
A100-80GB   81920   2039    300   25       32    144      1.8    19.5        1
A100-40GB   40960   1555    300   25       32    144      1.3    19.5        1
L40S        46068   864     32    12.5     32    192      1.0    91.6        2
A10G        23028   600     32    3.1      32    96       1.0    31.2        1
L4          23034   300     32    3.1      32    96       0.7    30.3        2
RTX4090     24564   1008    32    3.1      32    64       0.4    82.6        2
RTX3090     24576   936     32    3.1      32    64       0.25   35.6        1
"""


def _card(row: str) -> Accelerator:
    """Read a row of `_SHEETS`."""
    name, *numbers = row.split()
    mib, hbm, link, network, pcie, host, price, float32, fp8 = map(float, numbers)
    flops = card_peak(name.replace("RTX", "RTX ").replace("-PCIe", " PCIe"))
    assert flops is not None, name
    gb, memory, kept = 1e9, round(mib) * 2**20, round(host) * 2**30
    return Accelerator(
        name, memory, flops, gb * hbm, gb * link, gb * network, price, gb * pcie, kept, fp8, 1e12 * float32
    )


_KNOWN = tuple(map(_card, _SHEETS.strip().splitlines()[2:]))
ACCELERATORS = {card.name.lower(): card for card in _KNOWN}
ACCELERATORS["a100"] = ACCELERATORS["a100-80gb"]
_BOUNDS = ((10_000, "nodes"), (1024, "GPUs in a node"))
_EXAMPLE = "NODESxGPUSxKIND, e.g. 8x8xH100, 1x4xA100-40GB or 1x0xCPU"


def card_called(name: str) -> Accelerator | None:
    """Return the card whose kind is a word of the driver's ``name``; the first of several variants; or None.

    `NVIDIA A100-SXM4-40GB` -> A100-80GB; `NVIDIA L40` -> None.
    """
    words = re.split(r"[^a-z0-9]+", re.sub(r"(rtx) (\d)", r"\1\2", name.lower()))
    return next((card for card in _KNOWN if card.kind in words), None)


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """``card`` None: no GPUs. ``is_measured``: the memory is that of a machine, not of the data sheets."""

    nodes: int
    gpus_per_node: int
    card: Accelerator | None
    is_measured: bool = False

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def price(self) -> float:
        """Dollars per hour of all cards."""
        return self.gpus * self.card.price if self.card else 0.0

    @property
    def host(self) -> int:
        """Bytes of host memory per node."""
        return self.gpus_per_node * self.card.host if self.card else 0

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus_per_node}x{self.card.name if self.card else 'CPU'}"


def parse_cluster(text: str, *, price: float | None = None) -> ClusterShape:
    """Parse ``text`` such as `8x8xH100`. ``price``: dollars per card and hour, overrides the table. Raises
    UserError.
    """
    match = re.fullmatch(r"(\d+)x(\d+)x([A-Za-z0-9][\w.-]*)", text.strip())
    if not match:
        what = f"--cluster {text}" if text.strip() else "--cluster is missing"
        raise UserError(f"{what}: expected {_EXAMPLE}")
    kind = match[3]
    for number, (most, what) in zip(match.groups(), _BOUNDS, strict=False):
        if len(number) > len(str(most)) or int(number) > most:
            raise UserError(f"--cluster {text[:40]}: expected at most {most} {what}, as in {_EXAMPLE}")
    nodes, gpus = int(match[1]), int(match[2])
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
        names = ", ".join(card.name for card in _KNOWN)
        raise UserError(f"--cluster {text}: no data sheet of {kind} is known; expected one of {names}{hint}")
    if not gpus:
        raise UserError(f"--cluster {text}: no GPU in a node; expected at least 1 in {_EXAMPLE}")
    card = ACCELERATORS[kind.lower()]
    return ClusterShape(nodes, gpus, card if price is None else replace(card, price=price))


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peak rates of a policy rank's and an engine's device: a GPU, or an actor's CPU threads.

    ``node``: devices per node. ``host``: bytes per second between a GPU and host memory. ``fp8``,
    ``float32``: speed in that type relative to half precision; on CPUs ``flops`` are float32 anyway.
    ``thread_flops``: per CPU thread; None with GPUs.
    """

    flops: float
    engine_flops: float
    memory: float
    link: float
    network: float
    node: int
    host: float = 0.0
    fp8: float = 1.0
    float32: float = 1.0
    thread_flops: float | None = None

    @classmethod
    def from_cluster(cls, cluster: ClusterShape) -> Peaks:
        card = cluster.card
        assert card is not None  # a machine without GPUs needs a benchmark
        return cls(
            card.flops,
            card.flops,
            card.hbm,
            card.link,
            card.network,
            cluster.gpus_per_node,
            host=card.pcie,
            fp8=card.fp8,
            float32=card.float32 / card.flops,
        )
