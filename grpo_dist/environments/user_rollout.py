"""One sample by a user-supplied rollout function: which tokens the policy sampled and which were given.

function   generate ----------> put in -> generate ------>
sample     prompt a a a a a a   g g g     a a a a a        a: sampled and trained, g: given
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from grpo_dist.config import RolloutConfig
from grpo_dist.environments.dialogue import GrowingRow
from grpo_dist.environments.episode import Generation
from grpo_dist.plugins.inputs import RolloutInputs
from grpo_dist.plugins.user_code import ROLLOUT, call, load
from grpo_dist.runtime.seeds import turn_seed
from grpo_dist.types import Prompt, Rollout, Sampling

# Samples a continuation: (token ids, seed, sampling, max tokens, stop=texts).
Generate = Callable[..., Awaitable[Generation]]


@dataclass(frozen=True, slots=True)
class UserRollout:
    """A rollout function with its arguments. ``name``: for messages."""

    name: str
    function: Callable[..., Awaitable[Sequence[Any]]]
    kwargs: Mapping[str, Any]

    @classmethod
    def from_config(cls, rollout: RolloutConfig, code_paths: Sequence[str]) -> UserRollout | None:
        """Load the configured function; None if there is none. Raises ValueError as `load`."""
        if rollout.function is None:
            return None
        return cls(rollout.function, load(ROLLOUT, rollout.function, code_paths), rollout.function_kwargs)

    async def sample(
        self,
        prompt: Prompt,
        sample: int,
        seed: int,
        sampling: Sampling,
        generate: Generate,
        tokenizer: Any,
    ) -> Rollout:
        """Draw one sample. `sampling.stop` applies to generations without explicit stop texts.

        Raises ValueError unless the parts are the generations in order, with valid token ids between them.
        """
        start, numbers, max_new_tokens = prompt.token_ids.tolist(), 0, sampling.max_new_tokens
        generations: list[tuple[list[int], Generation]] = []

        async def generate_part(
            token_ids: Sequence[int], max_tokens: int | None = None, stop: str | Sequence[str] = sampling.stop
        ) -> Generation:
            nonlocal numbers
            left = max_new_tokens - (len(token_ids) - len(start))
            if left < 1 or (max_tokens is not None and max_tokens < 1):
                raise ValueError(
                    f"rollout function {self.name}: no token is left to generate after {len(token_ids)} "
                    f"tokens (max_tokens = {max_tokens}, {max_new_tokens} after the prompt)"
                )
            request_seed, numbers = turn_seed(seed, numbers), numbers + 1
            most = min(left, max_tokens or left)
            stop = (stop,) if isinstance(stop, str) else stop
            generation = await generate(list(token_ids), request_seed, sampling, most, stop=stop)
            generations.append((list(token_ids), generation))
            return generation

        inputs = RolloutInputs(start, generate_part, prompt, tokenizer, max_new_tokens)
        parts = await call(self.function, inputs, self.kwargs)
        self._check_parts(parts, len(tokenizer))
        return self._assemble(prompt, sample, parts, generations, tokenizer, max_new_tokens)

    def _assemble(
        self,
        prompt: Prompt,
        sample: int,
        parts: Sequence[Any],
        generations: Sequence[tuple[list[int], Generation]],
        tokenizer: Any,
        max_new_tokens: int,
    ) -> Rollout:
        row, reason = GrowingRow(prompt.token_ids.tolist()), ""
        for part in parts:
            if isinstance(part, Generation):
                self._check_context([*row.context, *row.ids], part, generations)
                row.add(part)
                reason = part.finish_reason
            else:
                row.give([int(token) for token in part])
        if not reason or len(row.ids) > max_new_tokens:
            what = f"{len(row.ids)} tokens" if reason else "no part that `generate` returned"
            raise ValueError(
                f"rollout function {self.name} returned {what}; expected at least one such part, and at most "
                f"{max_new_tokens} tokens"
            )
        row.masks.append((None, len(row.ids) - row.end))
        row.end, row.routes = len(row.ids), None
        text = tokenizer.decode(row.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Rollout(prompt_uid=prompt.uid, sample=sample, finish_reason=reason, text=text, **row.arrays())

    def _check_parts(self, parts: Any, vocabulary: int) -> None:
        """Raise ValueError unless ``parts`` is a list of generations and token ids below ``vocabulary``."""
        expected = f"a list of `generate`'s results and of lists of token ids from 0 to {vocabulary - 1}"
        if not isinstance(parts, list | tuple):
            raise ValueError(f"rollout function {self.name} returned {parts!r:.100}; expected {expected}")
        for number, part in enumerate(parts):
            if isinstance(part, Generation):
                continue
            if not _are_tokens(part, vocabulary):
                raise ValueError(
                    f"rollout function {self.name}: part {number} is {part!r:.100}; expected {expected}: "
                    "tokenize a text first"
                )

    def _check_context(
        self, context: list[int], part: Generation, generations: Sequence[tuple[list[int], Generation]]
    ) -> None:
        """Raise ValueError unless ``part`` was generated after ``context``, which its log-probs depend on."""
        if not any(generated is part and before == context for before, generated in generations):
            raise ValueError(
                f"rollout function {self.name}: a part was not generated after the prompt and the parts "
                "before it; pass exactly these tokens to `generate`, and return all of them in order"
            )


def _are_tokens(part: Any, vocabulary: int) -> bool:
    if isinstance(part, str | bytes):
        return False  # iterating them would yield numbers, or digits
    try:
        return all(not isinstance(token, bool) and 0 <= index(token) < vocabulary for token in part)
    except TypeError:
        return False
