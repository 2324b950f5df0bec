"""One line for each case: what a peer was asked, and the numbers it gave."""

import json
from dataclasses import dataclass, field

import numpy as np
import torch

DIGITS = {torch.float64: 12, torch.float32: 8}
NAMES = {torch.float64: "float64", torch.float32: "float32"}


@dataclass
class Record:
    """Cases of one peer. ``inputs``: by name, as lists of numbers."""

    inputs: dict
    cases: list = field(default_factory=list)

    def of(self, name, dtype=torch.float64):
        """Return an input's tensors: integers for masks, groups and targets, ``dtype`` for all else."""
        whole = ("mask", "groups", "targets")
        return {
            key: torch.tensor(v, dtype=torch.long if key in whole else dtype)
            for key, v in self.inputs[name].items()
        }

    def add(self, kind, call, settings, name, out, dtype=torch.float64):
        numbers = {key: _rounded(value, DIGITS[dtype]) for key, value in out.items()}
        own = {"kind": kind, "call": call, "settings": settings, "input": name, "dtype": NAMES[dtype]}
        self.cases.append(own | {"out": numbers})

    def loss(self, call, settings, name, compute, dtype=torch.float64, kind="loss"):
        """Record value and gradient by the current log-probs of ``compute(tensors)``, which returns the loss
        or the loss and further numbers.
        """
        x = self.of(name, dtype)
        x["now"].requires_grad_()
        found = compute(x)
        loss, further = found if isinstance(found, tuple) else (found, {})
        loss.backward()
        self.add(kind, call, settings, name, {"loss": loss, "grad": x["now"].grad, **further}, dtype)

    def kl_control(self, controller, target, horizon, steps):
        """Record the coefficients of a ``controller`` whose updates see these KLs."""
        control, kls, values = controller(0.2, target, horizon), [0.01, 0.09, 0.1, 0.11, 0.5, 7.0, 0.0], []
        for kl in kls:
            control.update(kl, steps)
            values.append(control.value)
        settings = {"kl_coef": 0.2, "target_kl": target, "horizon": horizon, "n_steps": steps, "kl": kls}
        self.add("kl_control", "AdaptiveKLController", settings, None, {"coefs": values})

    def write(self, path, peer, commit):
        head = json.dumps({"peer": peer, "commit": commit, "cases": len(self.cases)})
        lines = [json.dumps(case, separators=(",", ":")) for case in self.cases]
        path.write_text("\n".join([head, *lines]) + "\n")


def _rounded(value, digits):
    if isinstance(value, torch.Tensor):
        value = value.detach().tolist()
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_rounded(own, digits) for own in value]
    if isinstance(value, bool | int):
        return int(value)
    number = float(f"{value:.{digits}g}")
    return int(number) if number == 0 else number
