"""verl#6392, "mask tool observations before default reward scoring": the reward decoded every token after
the prompt. A tool output with the answer then earned the reward, though the policy never said it.

The thread's example: tokens [assistant, final, TOOL_LEAK] with mask [1, 1, 0] were scored as
"assistant final TOOL_LEAK".
"""

from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.types import Prompt
from tests.support.made_episodes import CALL, called, direct, ids_of

GOLD = "20126"  # 347*58, which the tool says
PROMPT = Prompt("p", ids_of("347*58=?"), GOLD, "made", "347*58=?")
GAVE_UP, ANSWERED = called("I do not know.\n", sample=0), called("It is \\boxed{20126}.\n", sample=1)


def decoded(ids):
    return character_tokenizer().decode(ids, skip_special_tokens=True)


def test_the_bug_scores_what_the_tool_has_printed():
    everything, sampled = decoded(GAVE_UP.completion_ids), decoded(GAVE_UP.sampled_ids)
    assert GOLD in everything and GOLD not in sampled
    assert everything.startswith(CALL) and sampled.endswith("I do not know.\n")


def test_a_reward_gets_only_the_policys_text_and_tokens():
    group = CompletionGroup.from_rollouts(PROMPT, [GAVE_UP, ANSWERED], max_new_tokens=99)
    assert [GOLD in text for text in group.completions] == [False, True]
    assert [GOLD in decoded(ids) for ids in group.token_ids] == [False, True]
    # A reward can read the tool's output by name.
    assert group.turns[0][0]["observation"] == GOLD


def test_an_answer_that_only_the_tool_gave_is_no_answer():
    group = CompletionGroup.from_rollouts(PROMPT, [GAVE_UP, ANSWERED, direct("1\n")], max_new_tokens=99)
    with GraderPool(1) as pool:
        grades = pool.grade([(text, group.gold) for text in group.completions])
    assert [grade.outcome == "correct" for grade in grades] == [False, True, False]


def test_no_token_of_the_tool_is_trained():
    tool = [token for token, mask in zip(GAVE_UP.completion_ids, GAVE_UP.sampled, strict=True) if not mask]
    assert GOLD in decoded(tool)
    assert len(tool) + len(GAVE_UP.sampled_ids) == len(GAVE_UP.completion_ids)
