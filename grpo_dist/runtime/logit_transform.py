"""What a model does to its logits behind the LM head: soft-capping, scaling, or nothing.

    Gemma 2, 3n, 4        cap tanh(z / cap)
    Cohere, Granite       slope z

Read from what the model's own ``forward`` does, not from keys of its configuration: families give one key
opposite meanings (`logits_scaling` divides in Granite and multiplies in HyperCLOVA X).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Where a transform is compared with the model's. The first tells the slope, the second a cap.
_POINTS = (2.0**-30, 2.0**60, -(2.0**60), 0.25, -1.0, 3.0, -8.0, 20.0, 40.0, -200.0, 1000.0, 0.0)


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Turns the LM head's output z into the model's logits: ``slope`` z, or with a ``cap``
    ``cap`` tanh(``slope`` z / ``cap``). Both are above 0.
    """

    slope: float = 1.0
    cap: float | None = None

    @property
    def is_identity(self) -> bool:
        return self.slope == 1.0 and self.cap is None

    def apply_(self, outputs: Tensor) -> Tensor:
        """Turn ``outputs`` of the LM head into logits, in place."""
        if self.cap is not None:
            return outputs.mul_(self.slope / self.cap).tanh_().mul_(self.cap)
        return outputs if self.is_identity else outputs.mul_(self.slope)

    def derivative(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of ``logits`` by the head's outputs that they were made from."""
        if self.cap is None:
            return self.slope
        return (logits / self.cap).square_().neg_().add_(1.0).mul_(self.slope)

    @classmethod
    def from_model(cls, model: Any) -> LogitTransform:
        """Find the transform of ``model`` (transformers, with or without weights), which runs with neither
        decoder nor head: known values take the place of what they return.

        Raises ValueError where the logits are no such function of hidden states @ weight.
        """
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError("it has no LM head")
        weight = head.weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        outputs = torch.tensor(_POINTS, dtype=torch.float64, device=device)
        vocabulary, size = getattr(weight, "ds_shape", weight.shape)  # ranks of ZeRO-3 hold parts
        outputs = outputs.repeat(math.ceil(vocabulary / len(_POINTS)))[:vocabulary]
        hidden = 2.0 ** (torch.arange(size, dtype=torch.float64, device=device) % 8)
        logits, scale = _run_behind_decoder(model, head, hidden, outputs)
        if scale != 1.0 and getattr(head, "bias", None) is not None:
            raise ValueError("it scales hidden states before an LM head with a bias")
        transform = cls._fitted(outputs, logits)
        return cls(transform.slope * scale, transform.cap)

    @classmethod
    def _fitted(cls, outputs: Tensor, logits: Tensor) -> LogitTransform:
        if logits.shape != outputs.shape:
            raise ValueError(
                f"its LM head has {outputs.numel()} outputs, and it returns {logits.numel()} logits"
            )
        slope, largest = float(logits[0] / outputs[0]), float(logits[1])
        is_linear = math.isclose(largest, slope * float(outputs[1]), rel_tol=1e-5)
        transform = cls(slope, None if is_linear else largest)
        tolerance = 1e-12 if logits.dtype == torch.float64 else 1e-5
        is_usable = slope > 0 and largest > 0 and math.isfinite(largest)
        if not is_usable or not torch.allclose(
            transform.apply_(outputs.clone()), logits.double(), rtol=tolerance, atol=tolerance
        ):
            raise ValueError("what it does to logits behind the LM head is neither scaling nor soft-capping")
        return transform


IDENTITY = LogitTransform()


class _Decoded(dict[str, Any]):
    """Stands in for what a decoder returns: ``hidden`` and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return (self["last_hidden_state"],)[key]
        return self.get("last_hidden_state" if key == 0 else key)


def _run_behind_decoder(model: Any, head: nn.Module, hidden: Tensor, outputs: Tensor) -> tuple[Tensor, float]:
    """Return the logits [V] that ``model`` makes of ``outputs`` [V] of its head, and by how much it scales
    the decoder's ``hidden`` [D] before the head. Raises ValueError where it does anything else to them.
    """
    tokens = torch.ones(1, 1, dtype=torch.long, device=hidden.device)
    problem: Exception | None = None
    # A wrapper with further towers computes around its decoder, which needs values that it may not have.
    for inner in (model.get_decoder(), model.base_model):
        if inner is model:
            continue
        decoder = _Known(_Decoded(hidden[None, None].clone()))
        projection = _Known(outputs[None, None].clone())
        with _replaced(inner, decoder), _replaced(head, projection), torch.no_grad():
            try:
                logits = model(input_ids=tokens, use_cache=False).logits[0, -1]
            except Exception as error:  # whatever its code runs into without a decoder
                problem = error
                continue
        if len(projection.taken) == 1 and (scale := _scale(projection.taken[0], hidden)):
            return logits, scale
        break
    raise ValueError("its logits are not hidden states @ the LM head's weight") from problem


class _Known:
    """A forward pass that returns ``value``, and remembers what it was called with."""

    def __init__(self, value: Any) -> None:
        self.value, self.taken = value, list[Any]()

    def __call__(self, *inputs: Any, **_: Any) -> Any:
        self.taken += inputs
        return self.value


def _scale(rows: Tensor, hidden: Tensor) -> float | None:
    """Return the number that ``hidden`` [D] times is ``rows`` [1, 1, D], above 0; None if there is none."""
    if rows.shape != (1, 1, len(hidden)) or rows.is_meta:
        return None
    scales = rows[0, 0].double() / hidden
    return float(scales[0]) if torch.allclose(scales, scales[0], rtol=1e-6) and scales[0] > 0 else None


@contextmanager
def _replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:  # replaced before, for this module alone
            module.forward = before
