"""trl#5224, "Re-tokenization bug in GRPO multi-turn tool calling" (trl#5144), and ms-swift#10012, "Fix exact
token-in/token-out consistency": the sampled ids of a turn were decoded, and the text tokenised again.

The thread's example: "he", "llo" are sampled, their text "hello" is a single token. The log-probs of the
sample then belong to tokens that were never trained.
"""

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig
from grpo_dist.environments.dialogue import Dialogue, Renderer
from grpo_dist.environments.episode import Observed
from grpo_dist.types import Prompt, Task
from tests.support.made_episodes import generated

MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
VOCABULARY = ["<eos>", *"helo?\n", "he", "ll", "llo", "hello"]


def tokenizer():
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    bpe = Tokenizer(BPE(vocab=ids, merges=MERGES))
    bpe.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


def ids_of(*tokens):
    return [VOCABULARY.index(token) for token in tokens]


SAMPLED = ids_of("he", "llo")


def played():
    """Play an episode of two actions of two tokens each, with an observation between them."""
    data = DataConfig(train=(DataSourceConfig(path="demo:add3"),), chat_template="none")
    renderer = Renderer(tokenizer(), data, EnvironmentsConfig())
    prompt = Prompt("p", np.array(ids_of("?"), np.int32), "", "made", "?", task=Task("made"))
    dialogue, contexts = Dialogue(renderer, prompt), []
    for version, logprobs in ((3, [-0.5, -0.25]), (4, [-0.125, -2.0])):
        contexts.append(dialogue.context)
        action = dialogue.add_action(generated(SAMPLED, logprobs, version))
        assert action.text == "hello"
        dialogue.observe(Observed("ll") if version == 3 else Observed(done=True))
    return contexts, dialogue.rollout(0, "stop")


def test_the_bug_makes_one_token_of_the_two_that_were_sampled():
    bpe = tokenizer()
    again = bpe(bpe.decode(SAMPLED), add_special_tokens=False)["input_ids"]
    assert again == ids_of("hello") != SAMPLED


def test_the_next_turn_reads_the_tokens_that_were_sampled():
    (first, second), rollout = played()
    observed = ids_of("\n", "ll", "\n")
    assert first == ids_of("?") and second == [*first, *SAMPLED, *observed]
    assert rollout.completion_ids.tolist() == [*SAMPLED, *observed, *SAMPLED]


def test_log_probs_and_versions_stay_with_their_tokens():
    _, rollout = played()
    assert rollout.further_rows == ()
    assert rollout.sampled.tolist() == [True] * 2 + [False] * 3 + [True] * 2
    assert rollout.logprobs.tolist() == [-0.5, -0.25, 0, 0, 0, -0.125, -2.0]
    assert rollout.policy_versions.tolist() == [3, 3, -1, -1, -1, 4, 4]
