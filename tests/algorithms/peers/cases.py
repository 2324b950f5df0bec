"""The recorded cases: the inputs of a peer's function, and the numbers it returned."""

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
    """``input``: name of the input tensors; None: the settings hold all inputs."""

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
        """Return the input's tensors; masks are bool."""
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
    """Return the cases of ``peer``, and the header of its file: name, commit and count."""
    head, *lines = (json.loads(line) for line in (HERE / f"{peer}.jsonl").read_text().splitlines())
    return tuple(
        Case(peer, number, **line | {"dtype": getattr(torch, line["dtype"])})
        for number, line in enumerate(lines)
    ), head
