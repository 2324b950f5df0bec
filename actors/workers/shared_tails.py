"""Compute the end of a prompt once for all of its samples, on engines with large cache blocks.

vLLM shares full blocks of the key-value cache between requests. Without a GPU, a block has 32 tokens: each
sample of a 39-token prompt would compute the last 7, which is half of the work for short samples. Here a
prompt's first sample starts one pass earlier, and the others begin with a copy of its last block. The copy is
vLLM's copy-on-write, which it uses for models with several kinds of cache. The others compute only the
prompt's last token, whose logits they need.

    prompt of 39 tokens, 4 samples      first pass        second pass
    sample 0                            39 tokens         its 2nd completion token
    samples 1 to 3                      held              copy 6 tokens, compute the 39th

On GPUs, blocks have 16 tokens, and an extra pass costs as much as it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

Prompt = tuple[int, ...]
Add = Callable[[], bool]  # adds a request to the engine; False: the engine refused it


class SharedTails:
    """A vLLM engine's samples in flight, by prompt. Used only in the engine's thread.

    ``scheduler``: of an engine that has only a full-attention cache and runs its steps in sequence.
    """

    def __init__(self, scheduler: Any) -> None:
        self._cache, self._block = scheduler.kv_cache_manager, int(scheduler.block_size)
        self._original_lookup = self._cache.get_computed_blocks
        self._cache.get_computed_blocks = self._computed_blocks
        self._scheduled: dict[Prompt, list[Request]] = {}
        self._first: dict[Prompt, str] = {}  # samples whose prompt is not computed yet
        self._held: dict[Prompt, list[tuple[str, Add]]] = {}

    @classmethod
    def attach(cls, scheduler: Any) -> SharedTails | None:
        """Attach to an engine; None if it shares no blocks, has several cache kinds, or drops tokens."""
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        cache = scheduler.kv_cache_manager
        kinds = [type(manager) for manager in cache.coordinator.single_type_managers]
        return cls(scheduler) if cache.enable_caching and kinds == [FullAttentionManager] else None

    def add(self, request_id: str, token_ids: Sequence[int], add: Add) -> None:
        """Call ``add`` now, or in `release` if another request is about to compute the same prompt."""
        prompt = tuple(token_ids)
        if prompt in self._first:
            self._held.setdefault(prompt, []).append((request_id, add))
        elif add() and self._has_tail(len(prompt)) and self._tail(prompt) is None:
            self._first[prompt] = request_id

    def release(self, finished: Collection[str]) -> None:
        """Add the held requests whose prompt was computed by a step. ``finished``: requests ended in it."""
        for prompt, request_id in list(self._first.items()):
            computed = self._tail(prompt) is not None
            if computed or request_id in finished:  # the cache of a finished request is gone
                del self._first[prompt]
                for _, add in self._held.pop(prompt, ()):
                    add()
        if finished:
            self._scheduled = {
                prompt: running
                for prompt, requests in self._scheduled.items()
                if (running := [request for request in requests if not request.is_finished()])
            }

    def abandon(self) -> list[str]:
        """Forget all requests; return the ids of held ones."""
        waiting_ids = [request_id for waiting in self._held.values() for request_id, _ in waiting]
        self._first, self._held = {}, {}
        return waiting_ids

    def _computed_blocks(self, request: Request) -> tuple[Any, int, int]:
        """Replace `KVCacheManager.get_computed_blocks`, which the scheduler calls to admit ``request``."""
        blocks, count, boundary = self._original_lookup(request)
        length = request.num_prompt_tokens
        if not self._cache.prefix_cache_lookup_enabled(request) or not self._has_tail(length):
            return blocks, count, boundary
        prompt = tuple(request.prompt_token_ids or ())
        tail = self._tail(prompt)
        siblings = self._scheduled.setdefault(prompt, [])
        if request not in siblings:
            siblings.append(request)
        if tail is None or count != (length - 1) // self._block * self._block:
            return blocks, count, boundary
        return self._cache.create_kv_cache_blocks(([*blocks.blocks[0], tail],)), length - 1, boundary

    def _tail(self, prompt: Prompt) -> KVCacheBlock | None:
        """Return the block with the last tokens of ``prompt`` from a request that computed them in an earlier
        step and still has them.
        """
        tables = self._cache.coordinator.single_type_managers[0].req_to_blocks
        for request in self._scheduled.get(prompt, ()):
            table = tables.get(request.request_id, ())
            index = (len(prompt) - 1) // self._block
            if request.num_computed_tokens >= len(prompt) and index < len(table):
                return table[index]
        return None

    def _has_tail(self, length: int) -> bool:
        """Return whether a prompt, without its last token, ends within a block."""
        return (length - 1) % self._block > 0
