"""Find a model's logit transform after the LM head: soft-capping, scaling, or none.

    Gemma 2, 3n, 4        cap tanh(z / cap)
    Cohere, Granite       slope z

Measured by running the model's ``forward``, not read from its configuration: a key may have opposite meanings
(`logits_scaling` divides in Granite and multiplies in HyperCLOVA X).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Points where a transform is compared with the model's. The first gives the slope, the second a cap.
_POINTS = (2.0**-30, 2.0**60, -(2.0**60), 0.25, -1.0, 3.0, -8.0, 20.0, 40.0, -200.0, 1000.0, 0.0)


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Transforms the LM head's output z into logits: ``slope`` z, or with a ``cap``
    ``cap`` tanh(``slope`` z / ``cap``). Both are above 0.
    """

    slope: float = 1.0
    cap: float | None = None

    @property
    def is_identity(self) -> bool:
        return self.slope == 1.0 and self.cap is None

    def apply_(self, outputs: Tensor) -> Tensor:
        """Transform ``outputs`` of the LM head into logits, in place."""
        if self.cap is not None:
            return outputs.mul_(self.slope / self.cap).tanh_().mul_(self.cap)
        return outputs if self.is_identity else outputs.mul_(self.slope)

    def derivative(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of ``logits`` with respect to the head's outputs."""
        if self.cap is None:
            return self.slope
        return (logits / self.cap).square_().neg_().add_(1.0).mul_(self.slope)

    @classmethod
    def from_model(cls, model: Any) -> LogitTransform:
        """Find the transform of ``model`` (transformers, with or without weights). Runs it with stubs for
        decoder and head, which return known values.

        Raises ValueError if the logits are not a `LogitTransform` of hidden states @ weight.
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
        logits, scale = _run_with_stubs(model, head, hidden, outputs)
        if scale != 1.0 and getattr(head, "bias", None) is not None:
            raise ValueError("it scales hidden states before an LM head with a bias")
        transform = cls._fit(outputs, logits)
        return cls(transform.slope * scale, transform.cap)

    @classmethod
    def _fit(cls, outputs: Tensor, logits: Tensor) -> LogitTransform:
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
            raise ValueError("its transform after the LM head is neither scaling nor soft-capping")
        return transform


IDENTITY = LogitTransform()


class _DecoderOutput(dict[str, Any]):
    """A decoder's output with only ``hidden``."""

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


def _run_with_stubs(model: Any, head: nn.Module, hidden: Tensor, outputs: Tensor) -> tuple[Tensor, float]:
    """Return the logits [V] that ``model`` computes from ``outputs`` [V] of its head, and its scale of the
    decoder's ``hidden`` [D] before the head. Raises ValueError if it does anything else to them.
    """
    tokens = torch.ones(1, 1, dtype=torch.long, device=hidden.device)
    problem: Exception | None = None
    # A multimodal wrapper also computes around its decoder, on values that a stub may lack.
    for inner in (model.get_decoder(), model.base_model):
        if inner is model:
            continue
        decoder = _Stub(_DecoderOutput(hidden[None, None].clone()))
        projection = _Stub(outputs[None, None].clone())
        with _replace_forward(inner, decoder), _replace_forward(head, projection), torch.no_grad():
            try:
                logits = model(input_ids=tokens, use_cache=False).logits[0, -1]
            except Exception as error:  # any error of its code without a decoder
                problem = error
                continue
        if len(projection.inputs) == 1 and (scale := _find_scale(projection.inputs[0], hidden)):
            return logits, scale
        break
    raise ValueError("its logits are not hidden states @ the LM head's weight") from problem


class _Stub:
    """A forward pass that returns ``value`` and records its inputs."""

    def __init__(self, value: Any) -> None:
        self.value, self.inputs = value, list[Any]()

    def __call__(self, *inputs: Any, **_: Any) -> Any:
        self.inputs += inputs
        return self.value


def _find_scale(rows: Tensor, hidden: Tensor) -> float | None:
    """Return the factor above 0 by which ``rows`` [1, 1, D] is ``hidden`` [D]; None if there is none."""
    if rows.shape != (1, 1, len(hidden)) or rows.is_meta:
        return None
    scales = rows[0, 0].double() / hidden
    return float(scales[0]) if torch.allclose(scales, scales[0], rtol=1e-6) and scales[0] > 0 else None


@contextmanager
def _replace_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:  # this module's forward was already replaced
            module.forward = before
