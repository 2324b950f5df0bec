"""A causal language model that answers one question: the log-probs of given tokens. Policy and reference
share it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from grpo_dist.hardware import quiet_libraries
from grpo_dist.logprobs import token_logprobs


def load_causal_lm(
    model_dir: str,
    *,
    dtype: torch.dtype,
    attention: str,
    trust_remote_code: bool,
    gradient_checkpointing: bool = False,
) -> Any:
    """The transformers model in ``model_dir``. Raises ValueError for heads whose logits are not hidden @
    weight.
    """
    quiet_libraries()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=dtype,
        attn_implementation=None if attention == "auto" else attention,
        trust_remote_code=trust_remote_code,
    )
    text_config = model.config.get_text_config()
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(text_config, key, None) not in (None, 1, 1.0):
            raise ValueError(
                f"model {model_dir}: {key} = {getattr(text_config, key)} changes the logits after the LM "
                f"head, which the "
                "trainer's log-probs do not follow; use a model without it (Qwen, Llama, Mistral, OLMo and "
                "their like)"
            )
    model.config.use_cache = False
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class TokenLogprobs(nn.Module):
    """Wraps a transformers causal LM; ``forward`` returns per-token log-probs instead of logits."""

    def __init__(self, model: Any, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        # `model` is registered first, so that `named_parameters` names shared weights as the checkpoint does.
        self.model = model
        self.head = _Head(model.get_output_embeddings(), temperature, chunk_tokens)

    def forward(
        self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], with_entropy: bool = False
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"] | None]:
        """Log-probs in nats, float32, at the sampling temperature, 0 where ``mask`` is False; and entropies
        if asked.

        Rows are right-padded, so causal attention never looks at padding and no attention mask is needed.
        """
        hidden = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return self.head(hidden, tokens, mask, with_entropy)


class _Head(nn.Module):
    """Owns the LM head's weight as its own parameter: ZeRO-3 gathers the parameters of the module that is
    called.
    """

    def __init__(self, lm_head: Any, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.weight = lm_head.weight
        self.bias = getattr(lm_head, "bias", None)
        self._temperature, self._chunk_tokens = temperature, chunk_tokens

    def forward(
        self, hidden: Tensor, tokens: Tensor, mask: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return token_logprobs(
            hidden,
            self.weight,
            tokens,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            bias=self.bias,
            with_entropy=with_entropy,
            mask=mask,
        )
