"""The recorded cases: what a peer was asked, and the numbers it gave."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

HERE = Path(__file__).parent
PEERS = ("verl", "trl", "openrlhf", "roll", "dr_grpo")
_WHOLE = ("mask", "groups", "targets")


@dataclass(frozen=True)
class Case:
    """``input``: name of the tensors it was computed from; None: its settings have all that it takes."""

    peer: str
    number: int
    kind: str
    call: str
    settings: dict
    input: str | None
    dtype: torch.dtype
    out: dict

    @property
    def id(self):
        return f"{self.peer}-{self.number}"

    def tensors(self):
        """Return the input's tensors: masks are bool, and ``now``, the trained log-probs, has a gradient."""
        x = {
            key: torch.tensor(v, dtype=torch.long if key in _WHOLE else self.dtype)
            for key, v in _inputs()[self.input].items()
        }
        if "mask" in x:
            x["mask"] = x["mask"].bool()
        return x

    def numbers(self):
        return {key: torch.tensor(value, dtype=torch.float64) for key, value in self.out.items()}


@cache
def _inputs():
    return json.loads((HERE / "inputs.json").read_text())


@cache
def recorded(peer):
    """Return the cases of ``peer``, and the head of its file: its name, commit and count."""
    head, *lines = (json.loads(line) for line in (HERE / f"{peer}.jsonl").read_text().splitlines())
    return tuple(
        Case(peer, number, **own | {"dtype": getattr(torch, own["dtype"])})
        for number, own in enumerate(lines)
    ), head
