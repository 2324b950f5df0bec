"""The records that flow through one step: Prompt -> Rollout -> Group -> TrainBatch.

Each is frozen and complete when made; no field is filled in later. They hold numpy until batching, because
Ray hands numpy arrays back read-only and without a copy, so no worker can spoil another's data.

Shape letters: P prompt tokens, C completion tokens, G samples per prompt; B rows, T tokens of a padded row,
K top-k tokens of a teacher. [B, T] and [B, T, K] tensors are indexed by the token they describe. ``None``
in an optional field means "not needed".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

if TYPE_CHECKING:  # torch takes seconds to import, and workers that only sample or score need none of it
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


@runtime_checkable
class Routes(Protocol):
    """A handle to the experts that the tokens of a row took in the engine."""

    def fetch(self) -> np.ndarray:
        """Return the experts, [T, L, k]. Raises SamplesLost when they are lost."""
        ...

    def digest(self, tokens: int) -> bytes:
        """Return a key that is equal where the first ``tokens`` of samples took the same experts."""
        ...


@dataclass(frozen=True, slots=True)
class HeldRoutes:
    """Routes in this process, or inside the message that holds them."""

    experts: np.ndarray

    def fetch(self) -> np.ndarray:
        return self.experts

    def digest(self, tokens: int) -> bytes:
        if tokens == 0:
            return b""
        return blake2b(self.experts[:tokens].tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Sampling masks: the tokens that top_p, top_k and min_p kept where each token of a row was sampled.

    Of a vocabulary of 80, sampled from 2 tokens, from all, and from 3:

        counts   2 0 3
        ids      7 19          3 tokens would take 12 bytes as a list: more than 80 bits
        bits     [the 80 bits of the last one]

    Attributes:
        counts: int32 [C], how many tokens were kept; 0: all, or the token was given.
        ids: int32, all lists concatenated.
        bits: uint8 [W, ceil(V / 8)], lowest bit first, of masks that are shorter as bits.
    """

    counts: np.ndarray
    ids: np.ndarray
    bits: np.ndarray

    @classmethod
    def from_lists(cls, kept: Sequence[Sequence[int]], vocabulary: int) -> KeptTokens:
        """Pack the kept tokens of each position. A list that is empty or has the whole ``vocabulary`` is no
        restriction.
        """
        width = -(-vocabulary // 8)
        lists = [np.asarray(ids if len(ids) < vocabulary else (), np.int32) for ids in kept]
        short = [ids for ids in lists if 4 * len(ids) <= width]
        bits = np.zeros((len(lists) - len(short), width), np.uint8)
        for row, ids in zip(bits, (ids for ids in lists if 4 * len(ids) > width), strict=True):
            is_kept = np.zeros(8 * width, bool)
            is_kept[ids] = True
            row[:] = np.packbits(is_kept, bitorder="little")
        counts = np.fromiter(map(len, lists), np.int32, len(lists))
        return cls(counts, np.concatenate([np.empty(0, np.int32), *short]), bits)

    @classmethod
    def join(cls, parts: Sequence[tuple[KeptTokens | None, int]]) -> KeptTokens | None:
        """Concatenate the masks of a row's parts, each passed with its number of tokens; None where no part
        has masks.
        """
        present = [tokens for tokens, _ in parts if tokens is not None]
        if not present:
            return None
        counts = [np.zeros(size, np.int32) if tokens is None else tokens.counts for tokens, size in parts]
        arrays = ([tokens.ids for tokens in present], [tokens.bits for tokens in present])
        return cls(np.concatenate(counts), *map(np.concatenate, arrays))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arrays as bytes, as `Prompt` does."""
        arrays = (self.counts, self.ids, self.bits)
        return self.from_bytes, (*(array.tobytes() for array in arrays), self.bits.shape[1])

    @classmethod
    def from_bytes(cls, counts: bytes, ids: bytes, bits: bytes, width: int) -> KeptTokens:
        bit_rows = np.frombuffer(bits, np.uint8).reshape(-1, width)
        return cls(np.frombuffer(counts, np.int32), np.frombuffer(ids, np.int32), bit_rows)

    @property
    def are_listed(self) -> np.ndarray:
        """Return which positions are stored as lists, bool [C]."""
        listed: np.ndarray = 4 * self.counts <= self.bits.shape[1]
        return listed

    def select(self, at: np.ndarray) -> KeptTokens:
        """Return the masks of the positions ``at``, int64."""
        listed = self.are_listed
        sizes = np.where(listed, self.counts, 0)
        begin, chosen = (np.cumsum(sizes) - sizes)[at], sizes[at]
        behind = np.cumsum(chosen) - chosen
        ids = self.ids[np.repeat(begin - behind, chosen) + np.arange(chosen.sum())]
        number = np.cumsum(~listed) - 1
        return KeptTokens(self.counts[at], ids, self.bits[number[at][~listed[at]]])

    def contain(self, tokens: np.ndarray) -> np.ndarray:
        """Return for each position whether its token of ``tokens`` [C] was kept, bool [C]."""
        listed, is_kept = self.are_listed, self.counts == 0
        owner = np.repeat(np.arange(len(tokens)), np.where(listed, self.counts, 0))
        is_kept[owner[self.ids == tokens[owner]]] = True
        in_bits = tokens[~listed]
        is_kept[~listed] = self.bits[np.arange(len(in_bits)), in_bits // 8] >> (in_bits % 8) & 1
        return is_kept


@dataclass(frozen=True, slots=True)
class Thought:
    """The tags around a thought, and which part of it the prompt holds: none, its opening tag ("opens"), or a
    complete empty thought or its closing tag ("closes").
    """

    opening: str = "<think>"
    closing: str = "</think>"
    prompt: Literal["", "opens", "closes"] = ""

    def advance(self, text: str) -> Thought:
        """Return the thought after ``text`` of the policy, whose last tag decides. Letter case is ignored.

        "<think>2+2"                  opens
        "2+2</think>So"               closes
        "2+2"                         as before
        """
        _, closed, rest = text.lower().rpartition(self.closing.lower())
        if self.opening.lower() in rest:
            return replace(self, prompt="opens")
        return replace(self, prompt="closes") if closed else self

    def advance_given(self, text: str) -> Thought:
        """Return the thought after ``text`` that the policy did not write: only a tag at its end counts."""
        end = text.rstrip()
        if end.endswith(self.opening):
            return replace(self, prompt="opens")
        return replace(self, prompt="closes") if end.endswith(self.closing) else self


NO_THOUGHT = Thought()  # the usual tags, none of them in the prompt


@dataclass(frozen=True, slots=True)
class Task:
    """What an episode needs in addition to the tokens of its prompt.

    Attributes:
        environment: as in `data.environment`, e.g. "python" or "my_module:Guess".
        kwargs: arguments of the environment's class.
        messages: the prompt as chat messages, which later turns are rendered after; () for plain text.
        tools: JSON schemas of the tools that the policy may call, as chat templates take them.
        batched: the environment answers the actions of many episodes at once (`step_batch`).
        stop: texts that end an action; a text answer of the environment follows in the same message.
        prefill: text with which every message of the policy begins, the first one at the end of the prompt.
    """

    environment: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    batched: bool = False
    stop: tuple[str, ...] = ()
    prefill: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, tokenised with its chat template."""

    uid: str  # the group key: stable across runs, never the text itself
    token_ids: np.ndarray  # int32 [P]
    answer: str  # gold answer, as text or LaTeX
    source: str  # name of the data set it came from
    text: str = ""  # the problem as the reader found it, for samples and rewards
    columns: Mapping[str, Any] = field(default_factory=dict)  # extra columns a reward may ask for
    thought: Thought = NO_THOUGHT  # as it stands in the prompt's text
    task: Task | None = None  # None: one completion and no environment
    # int32 [P] by teacher name: the tokens that it reads instead of ``token_ids``; no entry: the same
    teacher_ids: Mapping[str, np.ndarray] = field(default_factory=dict)
    # Chat messages of the row, with `data.template` filled, where they are more than ``text``.
    messages: tuple[Mapping[str, Any], ...] = ()
    # The end of the prompt, with which ``Rollout.text`` begins; in an episode each message of the policy.
    prefill: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the tokens as bytes: every call for a group carries a prompt, and an array costs the driver
        more than all other fields.
        """
        ids = self.token_ids.tobytes() if self.token_ids.dtype == np.int32 else self.token_ids
        thought = None if self.thought == NO_THOUGHT else self.thought
        return _prompt, (
            *(self.uid, ids, self.answer, self.source, self.text, self.columns),
            *(thought, self.task, self.teacher_ids, self.messages, self.prefill),
        )


def _prompt(uid: str, ids: Any, answer: str, source: str, text: str, columns: Any, *how: Any) -> Prompt:
    token_ids = np.frombuffer(ids, np.int32) if isinstance(ids, bytes) else ids
    thought, *others = how
    return Prompt(uid, token_ids, answer, source, text, columns, thought or NO_THOUGHT, *others)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled. ``temperature`` 0 is greedy; ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 mean
    the full distribution. ``lengths``: the exact number of tokens of each sample, which EOS and ``stop`` do
    not end; None: completions end by themselves. ``stop``: texts that end a completion, after the
    token that completes one. ``least``: samples that suffice for a group if the others fail; None: all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 512
    lengths: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    least: int | None = None
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are never drawn, with a softmax over the others."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def untruncated(self) -> Sampling:
        return replace(self, top_p=1.0, top_k=0, min_p=0.0)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a turn and its outcome."""

    name: str
    arguments: str  # as the policy wrote them
    result: str  # as the policy reads it, cut to `environments.max_tool_tokens`
    outcome: str  # ok | error | malformed | unknown | timeout | memory | died
    seconds: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One action of the policy, and the answer of the environment.

    Attributes:
        row: training row of the episode that holds the action: 0 for the first.
        end: index in that row's ``completion_ids`` after the last token of the action.
        text: the action, decoded without special tokens.
        observation: the text that the environment inserted after it; "" after the last turn.
        reward: reward that the environment gave for this turn; None: none.
        thought: part of a thought that stands before the action, as in `Thought.prompt` before the first one;
            None: unknown.
    """

    row: int
    end: int
    text: str
    observation: str = ""
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    thought: Literal["", "opens", "closes"] | None = None


@dataclass(frozen=True, slots=True)
class FurtherRow:
    """A further training row of an episode. It begins where the chat template rewrote what came before.

    No token of ``context_ids`` is trained; the actions in it are trained in earlier rows.
    """

    context_ids: np.ndarray  # int32 [P]
    completion_ids: np.ndarray  # int32 [C]
    logprobs: np.ndarray  # float32 [C], as in `Rollout`
    policy_versions: np.ndarray  # int32 [C], as in `Rollout`
    sampled: np.ndarray | None = None  # bool [C], as in `Rollout`
    routes: Routes | None = None  # as in `Rollout`
    kept: KeptTokens | None = None  # as in `Rollout`


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished sample of a prompt: a completion, or an episode with the turns of an environment.

    The tokens of an episode are one growing row: what the policy sampled, what the environment inserted, and
    so on. ``text`` is then the last action, which holds the answer.
    """

    prompt_uid: str
    sample: int  # index within its group, 0..G-1
    completion_ids: np.ndarray  # int32 [C], the EOS token included when the model produced it
    logprobs: np.ndarray  # float32 [C], nats, under the distribution sampled from (temperature applied)
    # "stop" (EOS, or the environment was done) or "length"; of an episode also "turns" or "tool_limit"
    finish_reason: str
    text: str  # completion decoded without special tokens
    policy_versions: np.ndarray  # int32 [C], version of the weights that produced each token; -1: given
    # bool [C]: which tokens the policy sampled; the others were given, with log-prob 0. None: all of them.
    sampled: np.ndarray | None = None
    turns: tuple[Turn, ...] = ()  # () without an environment
    further_rows: tuple[FurtherRow, ...] = ()
    # Its sampling settings; None: as in `sampling`.
    temperature: float | None = None
    max_new_tokens: int | None = None
    # Routes of the prompt and of the first row except its last token; None without `policy.router_replay`.
    routes: Routes | None = None
    kept: KeptTokens | None = None  # None: each token was sampled from the whole vocabulary
    # int32 [P], context of the first row where an agent wrote its own prompt; None: the prompt's tokens.
    context_ids: np.ndarray | None = None

    @classmethod
    def without_tokens(cls, prompt_uid: str, sample: int, **fields: Any) -> Rollout:
        """Return a sample of no tokens. Unless ``fields`` have others, it has no text and ends by "error"."""
        return cls(
            prompt_uid=prompt_uid,
            sample=sample,
            completion_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            policy_versions=np.empty(0, np.int32),
            **{"finish_reason": "error", "text": ""} | fields,
        )

    @property
    def rows(self) -> tuple[Rollout | FurtherRow, ...]:
        """Return the training rows of the sample in order, the first one being itself."""
        return (self, *self.further_rows)

    def without_routes(self) -> Rollout:
        """Return the sample without the routes of its rows."""
        if self.routes is None:
            return self
        further = tuple(replace(row, routes=None) for row in self.further_rows)
        return replace(self, routes=None, further_rows=further)

    @property
    def num_tokens(self) -> int:
        """Count the tokens after the prompt, sampled and given."""
        count = len(self.completion_ids)
        return (
            count + sum(len(row.completion_ids) for row in self.further_rows) if self.further_rows else count
        )

    @property
    def num_sampled(self) -> int:
        """Count the tokens that the policy sampled."""
        if self.sampled is None and not self.further_rows:
            return len(self.completion_ids)
        return len(self.sampled_ids)

    @property
    def sampled_ids(self) -> np.ndarray:
        """Return the tokens that the policy sampled, int32."""
        ids = [select_sampled(row, row.completion_ids) for row in self.rows]
        return ids[0] if len(ids) == 1 else np.concatenate(ids)


@dataclass(frozen=True, slots=True)
class TeacherLogprobs:
    """A teacher's log-probs for a row: of the sampled tokens, nats, 0 for given ones. With
    `distillation.kl` = top_k also the teacher's top-k tokens per position, with their log-probs.
    """

    sampled: np.ndarray  # float32 [C]
    top_ids: np.ndarray | None = None  # int32 [C, K]
    top: np.ndarray | None = None  # float32 [C, K]


def training_rows(samples: Sequence[Rollout]) -> Sequence[Rollout | FurtherRow]:
    """Return the training rows of all ``samples`` in order."""
    if not any(sample.further_rows for sample in samples):
        return samples
    return [row for sample in samples for row in sample.rows]


def select_sampled(row: Rollout | FurtherRow, values: np.ndarray) -> np.ndarray:
    """Return the ``values`` [C] of the sampled tokens of ``row``."""
    return values if row.sampled is None else values[row.sampled]


def sampled_logprobs(rows: Sequence[Rollout | FurtherRow]) -> np.ndarray:
    """Return the engine's log-probs of all sampled tokens of ``rows`` end to end, float32."""
    return np.concatenate([r.logprobs if r.sampled is None else r.logprobs[r.sampled] for r in rows])


def have_logprobs(samples: Sequence[Rollout], finite: np.ndarray) -> np.ndarray:
    """Return which samples have a finite log-prob of every sampled token, bool [samples]. ``finite``: bool,
    for the `sampled_logprobs` of all their rows.
    """
    if finite.all():
        return np.ones(len(samples), bool)
    owner = np.repeat(np.arange(len(samples)), [sample.num_sampled for sample in samples])
    return np.bincount(owner[~finite], minlength=len(samples)) == 0


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt with its G scored samples. A NaN reward means "could not be scored", which is not 0."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: np.ndarray  # float32 [G]
    reward_parts: Mapping[str, np.ndarray]  # reward name -> float32 [G], before weighting
    # [G] by the math grader, or by a judge: correct | wrong | no_answer | timeout | error; "" if none ran
    outcomes: tuple[str, ...]
    score_s: float = 0.0  # seconds that scoring this group took
    degenerate: int = 0  # samples for which `format.is_degenerate` is true
    baseline_reward: float | None = None  # reward of the greedy answer; None: not sampled
    # From a process reward model; None without one. [G] of float32 [S], the score of each step, and of int32
    # [S], the index in completion_ids of each step's last token, not decreasing.
    step_rewards: tuple[np.ndarray, ...] | None = None
    step_ends: tuple[np.ndarray, ...] | None = None
    failures: tuple[tuple[str, ...], ...] = ()  # [G] why each sample could not be scored; (): all were

    def scores(self) -> tuple[Any, ...]:
        """Return all but prompt and samples, for `from_scores`. Rewards are bytes, like a prompt's tokens."""
        parts = {name: part.tobytes() for name, part in self.reward_parts.items()}
        others = (getattr(self, f.name) for f in fields(self)[4:])
        return self.rewards.tobytes(), parts, *others

    @classmethod
    def from_scores(cls, prompt: Prompt, rollouts: tuple[Rollout, ...], scores: tuple[Any, ...]) -> Group:
        rewards, parts, *others = scores
        arrays = {name: np.frombuffer(part, np.float32) for name, part in parts.items()}
        return cls(prompt, rollouts, np.frombuffer(rewards, np.float32), arrays, *others)


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """The samples of many groups, to be sent: dozens of small arrays cost more than their bytes.

    Attributes:
        numbers: int32, for each sample its token ids, its versions and the bits of its log-probs.
        groups: for each group the start of its samples in ``numbers``, the lengths of their completions, and
            their other fields.
    """

    numbers: np.ndarray
    groups: list[tuple[int, list[int], list[tuple[Any, ...]]]]

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[Rollout]]) -> PackedSamples:
        packed: list[tuple[int, list[int], list[tuple[Any, ...]]]] = []
        arrays: list[np.ndarray] = []
        start = 0
        for rollouts in groups:
            lengths = [len(r.completion_ids) for r in rollouts]
            packed.append((start, lengths, [_others(r) for r in rollouts]))
            start += 3 * sum(lengths)
            for r in rollouts:
                arrays += (r.completion_ids, r.policy_versions, r.logprobs.view(np.int32))
        numbers = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
        assert len(numbers) == start, "ids, versions and log-probs of a sample differ in length"
        return cls(numbers, packed)

    def group(self, index: int) -> tuple[Rollout, ...]:
        """Return the samples of a group. Their arrays are read-only views of a copy of its numbers: keeping
        one group does not keep the numbers of all others.
        """
        begin, lengths, others = self.groups[index]
        numbers = self.numbers[begin : begin + 3 * sum(lengths)].copy()
        numbers.flags.writeable = False
        logprobs, start = numbers.view(np.float32), 0
        rollouts = []
        for length, (uid, sample, reason, text, how, episode, further) in zip(lengths, others, strict=True):
            versions, nats, end = start + length, start + 2 * length, start + 3 * length
            tokens, made_by, values = numbers[start:versions], numbers[versions:nats], logprobs[nats:end]
            mask, turns, rows = episode
            sampled = None if mask is None else np.frombuffer(mask, dtype=bool)
            rollouts.append(
                Rollout(
                    uid, sample, tokens, values, reason, text, made_by, sampled, turns, rows, *how, *further
                )
            )
            start = end
        return tuple(rollouts)


_NO_EPISODE = None, (), ()
_NOTHING = None, None, None


def _others(rollout: Rollout) -> tuple[Any, ...]:
    """Return all fields without a number per token. Fields of episodes, with the mask as bytes, form one
    tuple, fields that most samples lack another: samples without them share one object.
    """
    mask, turns, rows = rollout.sampled, rollout.turns, rollout.further_rows
    episode = (None if mask is None else mask.tobytes(), turns, rows)
    further = (rollout.routes, rollout.kept, rollout.context_ids)
    return (
        *(rollout.prompt_uid, rollout.sample, rollout.finish_reason, rollout.text),
        (rollout.temperature, rollout.max_new_tokens),
        _NO_EPISODE if mask is None and not turns and not rows else episode,
        further if any(part is not None for part in further) else _NOTHING,
    )


def has_signal(rewards: np.ndarray) -> bool:
    """Return whether samples differ in reward, so that not every group-relative advantage is 0."""
    scored = rewards[~np.isnan(rewards)]
    return len(scored) > 1 and bool(np.any(scored != scored[0]))


def count_signals(groups: Sequence[Group]) -> int:
    """Count the groups for which `has_signal` is true."""
    if not groups:
        return 0
    rewards = np.concatenate([group.rewards for group in groups])
    sizes = np.fromiter((len(group.rewards) for group in groups), np.int64, len(groups))
    starts = np.cumsum(sizes) - sizes
    least, most = (pick.reduceat(rewards, starts) for pick in (np.fmin, np.fmax))  # both ignore NaN
    return int(np.count_nonzero(least < most))


def correctness(group: Group) -> np.ndarray:
    """Return float32 [G]: 1 right, 0 wrong, NaN unscored."""
    if any(group.outcomes):
        scores = {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0}
        return np.array([scores.get(o, np.nan) for o in group.outcomes], dtype=np.float32)
    return np.where(np.isnan(group.rewards), np.nan, group.rewards > 0.5).astype(np.float32)


class TensorRecord:
    """A dataclass of tensors with rows as first dimension, nested TensorRecords and other values."""

    __slots__ = ()

    @classmethod
    def combine(cls, records: Sequence[Self], function: Callable[[list[Tensor]], Tensor]) -> Self:
        """Return the first record with each tensor replaced by ``function`` of that tensor in all."""
        import torch

        changes: dict[str, Any] = {}
        for f in fields(records[0]):  # type: ignore[arg-type]
            values = [getattr(record, f.name) for record in records]
            if isinstance(values[0], torch.Tensor):
                changes[f.name] = function(values)
            elif isinstance(values[0], TensorRecord):
                changes[f.name] = type(values[0]).combine(values, function)
        return replace(records[0], **changes)  # type: ignore[type-var]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the record with ``function`` applied to each tensor."""
        return self.combine([self], lambda values: function(values[0]))


@dataclass(frozen=True, slots=True)
class Rows(TensorRecord):
    """Token rows, right-padded.

    Attributes:
        lengths: prompt + completion tokens of each row.
        group_ids: rows of one group with the same ``prompt_lengths`` begin with the same tokens.
        prompt_lengths: 0: the row shares no tokens with others.
        temperatures: sampling temperature of each row; None: as in the trainer's settings.
        routes: [B], the experts that the tokens of each row took in the engine; None: the model chooses.
        kept: [B], the sampling masks of the last tokens of each row; None: no row has any.
    """

    tokens: Int[Tensor, "B T"]  # int64
    lengths: Int[Tensor, " B"]
    group_ids: Int[Tensor, " B"]  # int64
    prompt_lengths: Int[Tensor, " B"]  # int64
    temperatures: Float[Tensor, " B"] | None  # float64
    routes: tuple[Routes | None, ...] | None
    kept: tuple[KeptTokens | None, ...] | None


@dataclass(frozen=True, slots=True)
class PolicyStream(TensorRecord):
    """The policy loss.

    Attributes:
        mask: True on completion tokens that the policy sampled and that are trained.
        rollout_logprobs: nats, by the engine; 0 outside the mask.
        max_tokens: longest completion allowed: the constant of seq-mean-token-sum-norm.
        sequence_tokens: trained tokens in the sample of each row; None: each row is a sample.
        prompt_tokens: trained tokens in all samples of a row's prompt; None: each prompt has one sample.
        old_logprobs: nats, the denominators of the ratios, computed on a rank at the start of the step; None:
            the current log-probs.
        old_entropies: nats, with `algorithm.top_entropy_share`.
        loss_ids: loss of each row: 0: `algorithm.loss`, n: loss of the n-th source with its own algorithm;
            None: all 0.
        kl_weights: weight of each row's KL, as a share of `algorithm.kl.coef`; None: all 1.
    """

    mask: Bool[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]
    ref_logprobs: Float[Tensor, "B T"] | None
    max_tokens: int
    sequence_tokens: Int[Tensor, " B"] | None = None  # int64
    prompt_tokens: Int[Tensor, " B"] | None = None  # int64
    old_logprobs: Float[Tensor, "B T"] | None = None
    old_entropies: Float[Tensor, "B T"] | None = None
    loss_ids: Int[Tensor, " B"] | None = None  # int64
    kl_weights: Float[Tensor, " B"] | None = None  # float64


@dataclass(frozen=True, slots=True)
class TeacherStream(TensorRecord):
    """The divergence from a teacher as a loss, not as part of the advantages.

    Attributes:
        logprobs: mean of the log-probs of a sample's teachers, nats; 0 outside the mask.
        top_ids: the teacher's top-k tokens per taught position; None: the KL is over the sampled tokens.
        top_logprobs: log-probs of ``top_ids``, nats.
    """

    mask: Bool[Tensor, "B T"]
    logprobs: Float[Tensor, "B T"]
    top_ids: Int[Tensor, "B T K"] | None = None  # int32
    top_logprobs: Float[Tensor, "B T K"] | None = None  # float32


@dataclass(frozen=True, slots=True)
class TokenChoice(TensorRecord):
    """What a rank selects over all tokens of an update, before the loss.

    Attributes:
        kept: tokens of the policy loss, with `algorithm.top_entropy_share`; None: all of its mask.
        selected: tokens that policy losses clip_cov and kl_cov treat differently; None: no token.
        mean_weight: mean correction weight of the update, which divides each weight; 1: no division.
    """

    kept: Bool[Tensor, "B T"] | None = None
    selected: Bool[Tensor, "B T"] | None = None
    mean_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Denominators:
    """Sizes of a whole update (all ranks, all micro-batches), fixed before any split.

    Attributes:
        tokens: tokens of the policy loss.
        sequences: samples with a token of the policy loss; an episode counts once, whatever its rows.
        prompts: prompts with a token of the policy loss.
    """

    tokens: float
    sequences: float
    prompts: float = 0.0
    taught: float = 0.0
    demonstrated: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainBatch(Rows):
    """Rows of one optimiser update. A token may belong to several streams: the policy loss, the
    teacher loss, and the cross-entropy of demonstrations.

    Attributes:
        row_ids: index of each row within the step.
        demonstrated: demonstration tokens to learn; None: there are none.
    """

    row_ids: Int[Tensor, " B"]  # int64
    policy: PolicyStream
    denominators: Denominators
    teacher: TeacherStream | None = None
    demonstrated: Bool[Tensor, "B T"] | None = None
    choice: TokenChoice = TokenChoice()  # frozen

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def wanted(self) -> Bool[Tensor, "B T"]:
        """Return the tokens of all streams."""
        mask = self.policy.mask if self.teacher is None else self.policy.mask | self.teacher.mask
        return mask if self.demonstrated is None else mask | self.demonstrated

    def drop_candidates(self) -> Self:
        """Return the batch without the teacher's [B, T, K] tensors."""
        if self.teacher is None or self.teacher.top_ids is None:
            return self
        return replace(self, teacher=replace(self.teacher, top_ids=None, top_logprobs=None))

    def select(self, rows: list[int]) -> Self:
        """Return these rows, cut to the longest of them; the denominators stay."""
        import torch

        index = np.array(rows, dtype=np.int64)
        width = int(self.lengths.numpy()[index].max()) if rows else 1

        def select_rows(values: Tensor) -> Tensor:
            array = values.numpy()  # numpy takes rows several times faster
            return torch.from_numpy(array[index] if array.ndim == 1 else array[index, :width])

        def select_items(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
            return None if values is None else tuple(values[row] for row in rows)

        selected = self.map_tensors(select_rows)
        return replace(selected, routes=select_items(self.routes), kept=select_items(self.kept))


@dataclass(frozen=True, slots=True)
class SentRows:
    """Rows of a batch to send to another process, which gets the result of `TrainBatch.select`. Only tokens
    are sent and copied, no padding.
    """

    batch: TrainBatch
    rows: Sequence[int]

    def __reduce__(self) -> tuple[Any, ...]:
        rows = np.array(self.rows, np.int64)
        lengths = self.batch.lengths.numpy()[rows]
        return _receive_rows, (lengths, _pack(self.batch, rows, lengths.tolist()))


class _PackedRecord(NamedTuple):
    kind: type[TensorRecord]
    values: list[Any]


class _PackedTokens(NamedTuple):
    values: np.ndarray  # all rows concatenated; token ids as int32
    dtype: np.dtype


def _pack(value: Any, rows: np.ndarray, lengths: list[int]) -> Any:
    import torch

    if isinstance(value, TensorRecord):
        values = [_pack(getattr(value, f.name), rows, lengths) for f in fields(value)]  # type: ignore[arg-type]
        return _PackedRecord(type(value), values)
    if isinstance(value, tuple):
        return tuple(value[row] for row in rows)
    if not isinstance(value, torch.Tensor):
        return value
    array = value.numpy()
    if array.ndim == 1:
        return array[rows]
    parts = [array[row, :size] for row, size in zip(rows.tolist(), lengths, strict=True)]
    kind = np.int32 if array.dtype == np.int64 else array.dtype
    return _PackedTokens(np.concatenate([array[:0, 0], *parts], dtype=kind, casting="same_kind"), array.dtype)


def _receive_rows(lengths: np.ndarray, packed: _PackedRecord) -> TensorRecord:
    """Pad packed rows with zeros."""
    import torch

    is_token = np.arange(lengths.max(initial=1)) < lengths[:, None]

    def unpack(value: Any) -> Any:
        if isinstance(value, _PackedRecord):
            return value.kind(*map(unpack, value.values))
        if isinstance(value, _PackedTokens):
            padded = np.zeros((*is_token.shape, *value.values.shape[1:]), value.dtype)
            padded[is_token] = value.values
            return torch.from_numpy(padded)
        # Ray's arrays are read-only and lie in memory that others share; a tensor is neither.
        return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value

    record: TensorRecord = unpack(packed)
    return record


@dataclass(frozen=True, slots=True)
class EpochUpdate:
    """An optimiser update of a later epoch: the ids of its rows, int64, and its denominators."""

    row_ids: np.ndarray
    denominators: Denominators
