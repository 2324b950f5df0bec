"""Answers the scheduler at once where the next token of a sequence goes into a block that it has.

For every token vLLM asks several managers of the cache how many blocks are missing, which to free, and which
are full and can be shared. Of 16 tokens (of 32 without a GPU) one needs a block, and one fills a block; for
the others all answers are none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.workers.replaced_methods import replace_method

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class HeldBlocks:
    """The blocks of the sequences in flight of one engine of vLLM. Of the engine's thread alone.

    ``cache``: the scheduler's manager, of one kind of cache, that of full attention.
    """

    def __init__(self, cache: Any) -> None:
        (manager,) = cache.coordinator.single_type_managers
        self._tables, self._shared = manager.req_to_blocks, manager.num_cached_block
        self._block, self._none = int(manager.block_size), cache.empty_kv_cache_blocks
        self._allocate = replace_method(cache, self.allocate_slots)
        self._share = replace_method(cache, self.cache_blocks)

    @classmethod
    def of(cls, scheduler: Any) -> HeldBlocks | None:
        """Return those of an engine; None where its cache has several kinds, drops tokens, or shares parts of
        blocks.
        """
        from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        cache = scheduler.kv_cache_manager
        if type(cache) is not KVCacheManager or type(cache.coordinator) is not UnitaryKVCacheCoordinator:
            return None
        (manager,) = cache.coordinator.single_type_managers
        fits = (
            type(manager) is FullAttentionManager
            and cache.enable_caching
            and manager.kv_cache_spec.prefix_cacheable
            and manager.block_size == manager.block_pool.hash_block_size
            and cache.coordinator.num_reprefillable_tokens == 0
        )
        return cls(cache) if fits else None

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Replace the manager's. An admitted sequence brings ``new_computed_blocks``, if only empty ones."""
        if new_computed_blocks is None and num_new_tokens > 0:
            shared = self._shared.get(request.request_id)  # None: no full block yet
            end = request.num_computed_tokens + num_new_tokens
            if (
                shared is not None
                and end + num_lookahead_tokens <= len(self._tables[request.request_id]) * self._block
                and min(end, request.num_tokens) < (shared + 1) * self._block
            ):
                return self._none
        allocated: KVCacheBlocks | None = self._allocate(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            num_external_computed_tokens,
            delay_cache_blocks,
            num_encoder_tokens,
            full_sequence_must_fit,
            reserved_blocks,
            has_scheduled_reqs,
            skip_zeroing_group_ids,
        )
        return allocated

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Replace the manager's, which an engine that schedules ahead also calls for every token."""
        if num_computed_tokens >= (self._shared.get(request.request_id, 0) + 1) * self._block:
            self._share(request, num_computed_tokens)
