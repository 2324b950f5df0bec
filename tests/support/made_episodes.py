"""Groups of episodes with tool calls, as from the loop over turns."""

import numpy as np

from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.environments.episode import Generation
from grpo_dist.types import FurtherRow, Group, Prompt, Rollout, ToolCall, Turn

CALL, RESULT = "```calculator\n347*58\n```\n", "```output\n20126\n```\n"


def ids_of(text):
    return np.array(character_tokenizer()(text, add_special_tokens=False)["input_ids"], np.int32)


def row_of(*parts):
    """Return ids, log-probs, versions and mask of a row of (text, whether the policy sampled it)."""
    ids = [ids_of(text) for text, _ in parts]
    sampled = np.repeat([is_sampled for _, is_sampled in parts], [len(part) for part in ids])
    logprobs = np.where(sampled, -0.01 * np.arange(1, len(sampled) + 1), 0).astype(np.float32)
    return np.concatenate(ids), logprobs, np.where(sampled, 3, -1).astype(np.int32), sampled


def end_of(*texts):
    return sum(len(ids_of(text)) for text in texts)


def generated(ids, logprobs=0.0, version=0, routes=None):
    """Return an engine's output of these tokens. ``logprobs``: one value for all, or one each."""
    size = len(ids)
    values = np.full(size, logprobs, np.float32), np.full(size, version, np.int32)
    return Generation(list(map(int, ids)), *values, "stop", routes=routes)


def called(answer, *, outcome="ok", result=RESULT, sample=0, finish="stop", reward=None):
    """Return an episode of one call and the answer to its result. The tool's output is the observation."""
    ids, logprobs, versions, sampled = row_of((CALL, True), (result, False), (answer, True))
    output = result.split("\n")[1]
    tool = ToolCall("calculator", "347*58", output, outcome, 0.0123)
    turns = (Turn(0, end_of(CALL), CALL.rstrip(), output, (tool,)), Turn(0, len(ids), answer, "", (), reward))
    return Rollout("p", sample, ids, logprobs, finish, answer, versions, sampled, turns)


def direct(answer, *, sample=1):
    """Return an episode without a call."""
    ids, logprobs, versions, _ = row_of((answer, True))
    return Rollout("p", sample, ids, logprobs, "stop", answer, versions, None, (Turn(0, len(ids), answer),))


def rewritten(answer, *, sample=2):
    """Return an episode with an environment's message, whose second action is in a separate row."""
    first, second = row_of(("higher or lower?", True)), row_of((answer, True))
    context = ids_of("<|user|>p<|assistant|>short<|user|>lower<|assistant|>")
    further = FurtherRow(context, second[0], second[1], second[2], None)
    turns = (
        Turn(0, len(first[0]), "higher or lower?", "lower", (), 0.25),
        Turn(1, len(second[0]), answer, "", (), 0.75),
    )
    return Rollout("p", sample, *first[:2], "stop", answer, first[2], None, turns, (further,))


def episodes(uid="p", source="products"):
    """Return one group: a call with its result, a guess, an episode of two rows, and a timed-out call."""
    rollouts = (
        called("\\boxed{20126}"),
        direct("\\boxed{29406}"),
        rewritten("\\boxed{7}"),
        called(
            "\\boxed{0}", outcome="timeout", result="```output\ntimed out\n```\n", sample=3, finish="turns"
        ),
    )
    rewards = np.array([1, 0, 0, 0], np.float32)
    outcomes = ("correct", "wrong", "wrong", "wrong")
    prompt = Prompt(uid, ids_of("347*58="), "20126", source, "347*58=")
    return Group(prompt, rollouts, rewards, {"math": rewards}, outcomes)
