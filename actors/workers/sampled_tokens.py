"""Keeps the tokens that an engine samples until their request ends, at less cost than vLLM's own way.

vLLM cuts three arrays out of the step's for each request, and appends a token to six lists, as if every step
were sent to somebody. Here a step's log-probs become one list, and a token between the first and the last of
its request is two appends:

    first token        vLLM: statistics of the prefill, weight version
    tokens between     token and log-prob into lists of the request
    last token         vLLM gets what was kept, and makes the output of the request

The host prepares the next step only after that: with short steps of a GPU, its time is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from actors.workers.replaced_methods import replace_method

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessorOutput, RequestState
    from vllm.v1.metrics.stats import IterationStats
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput


class _KeptTokens(NamedTuple):
    """Of one request. ``token_ids``: vLLM's own list. ``logprobs``: those that vLLM does not have yet."""

    state: RequestState
    token_ids: list[int]
    logprobs: list[float]

    def hand_over(self) -> None:
        """Give vLLM the log-probs, without the tokens' ranks, which nothing here reads."""
        processor, count = self.state.logprobs_processor, len(self.logprobs)
        flat: Any = processor.logprobs
        begin = len(flat.logprobs)
        flat.start_indices.extend(range(begin, begin + count))
        flat.end_indices.extend(range(begin + 1, begin + count + 1))
        flat.token_ids.extend(self.token_ids[len(self.token_ids) - count :])
        flat.logprobs.extend(self.logprobs)
        flat.ranks.extend([None] * count)
        flat.decoded_tokens.extend([None] * count)
        for logprob in self.logprobs:  # `sum` compensates roundings from Python 3.12 on, vLLM does not
            processor.cumulative_logprob += logprob
        self.logprobs.clear()


class SampledTokens:
    """The tokens of the requests in flight of one engine of vLLM. Of the engine's thread alone."""

    def __init__(self, engine: Any) -> None:
        processor, scheduler = engine.output_processor, engine.engine_core.engine_core.scheduler
        self._states: dict[str, RequestState] = processor.request_states
        self._kept: dict[str, _KeptTokens] = {}
        self._version: str | None = None  # of the weights that sampled the last token of each in `_kept`
        self._rows: dict[str, int] = {}
        self._logprobs: LogprobsLists | None = None  # of the step, as are `_rows`
        self._update = replace_method(scheduler, self.update_from_output)
        self._process = replace_method(processor, self.process_outputs)
        self._abort = replace_method(processor, self.abort_requests)

    @classmethod
    def of(cls, engine: Any) -> SampledTokens | None:
        """Return those of an engine; None where it returns more of a token than its log-prob."""
        processor, scheduler = engine.output_processor, engine.engine_core.engine_core.scheduler
        more = (
            processor.log_stats or processor.tracing_enabled or processor.stream_interval != 1,
            scheduler.aux_output_connector is not None or scheduler.return_sampling_mask,
        )
        return None if any(more) else cls(engine)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Replace the scheduler's: keep the log-probs of the step, which it would cut into requests'."""
        self._rows, self._logprobs = model_runner_output.req_id_to_index, model_runner_output.logprobs
        return self._update(scheduler_output, replace(model_runner_output, logprobs=None))

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        """Replace the output processor's, which gets what is left to it."""
        if engine_core_outputs and weight_version != self._version:
            self._hand_over()
            self._version = weight_version
        left = [self._completed(output) for output in self._keep(engine_core_outputs)]
        processed: OutputProcessorOutput = self._process(
            left, engine_core_timestamp, iteration_stats, weight_version
        )
        for output in left:
            state = self._states.get(output.request_id)  # None: it has ended
            if state is not None and _is_plain(state):
                token_ids = state.detokenizer.token_ids
                self._kept[output.request_id] = _KeptTokens(state, token_ids, [])
        self._logprobs = None
        return processed

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> Any:
        """Replace the output processor's: forget what it forgets."""
        self._hand_over()
        return self._abort(request_ids, internal)

    def _keep(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Keep the tokens of requests that go on, and return the other outputs."""
        if self._logprobs is None or not self._kept:
            return outputs
        kept, rows, starts = self._kept, self._rows, self._logprobs.cu_num_generated_tokens
        column: list[float] = self._logprobs.logprobs[:, 0].tolist()  # vLLM puts the sampled token first
        left = []
        for output in outputs:
            request_id = output.request_id
            own = kept.get(request_id)
            if own is None or output.finish_reason is not None:
                left.append(output)
                continue
            tokens, row = output.new_token_ids, rows[request_id]
            if starts is None:
                (token,) = tokens
                own.token_ids.append(token)
                own.logprobs.append(column[row])
            else:  # with drafts a step has several tokens of a request
                own.token_ids.extend(tokens)
                own.logprobs.extend(column[starts[row] : starts[row] + len(tokens)])
        return left

    def _completed(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Return ``output`` with its log-probs, and give vLLM what was kept of its request."""
        if own := self._kept.pop(output.request_id, None):
            own.hand_over()
        state, row = self._states.get(output.request_id), self._rows.get(output.request_id)
        processor = state.logprobs_processor if state else None
        if processor is None or processor.num_logprobs is None or row is None or self._logprobs is None:
            return output
        own_logprobs = self._logprobs.slice_request(row, len(output.new_token_ids))
        return structs.replace(output, new_logprobs=own_logprobs)

    def _hand_over(self) -> None:
        for own in self._kept.values():
            own.hand_over()
        self._kept.clear()


def _is_plain(state: RequestState) -> bool:
    """Return whether a token of this request is only kept until the last one: no text, no list of likely
    tokens, nothing of the prompt, no output before the end.
    """
    processor = state.logprobs_processor
    return (
        type(state.detokenizer) is IncrementalDetokenizer
        and state.output_kind == RequestOutputKind.FINAL_ONLY
        and state.queue is None
        and state.parent_req is None
        and not state.streaming_input
        and processor is not None
        and processor.num_logprobs == 0
        and processor.num_prompt_logprobs is None
        and isinstance(processor.logprobs, FlatLogprobs)
    )
