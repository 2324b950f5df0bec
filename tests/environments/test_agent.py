"""Guarantees: an agent that uses OpenAI's API is trained on exactly what the policy sampled for it; its
failures cost one sample.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tokenizers import AddedToken

from grpo_dist.batch.rows import make_batch
from grpo_dist.chat.template import ControlTokens
from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig
from grpo_dist.environments import agent as agent_module
from grpo_dist.environments.agent import Agents, chunks
from grpo_dist.environments.agent_rows import AgentRows, Refused, play_agent
from grpo_dist.environments.base import Problem
from grpo_dist.environments.dialogue import Budgets, Renderer
from grpo_dist.environments.episode import Action, Call, Generation, Observed
from grpo_dist.environments.runner import EnvironmentProbe, EpisodeRunner
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.types import Group, KeptTokens, PackedSamples, Prompt, Rollout, Sampling, Task
from tests.support.chat_templates import real_tokenizer
from tests.support.patience import HANG_S

_S, _U = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12*34?"}
_WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip


class _Hermes:
    openings = ("<tool_call>",)

    def __call__(self, text: str, tools: Any) -> list[Call]:
        _, opening, rest = text.partition("<tool_call>")
        call = json.loads(rest.partition("</tool_call>")[0]) if opening else None
        return [Call(call["name"], json.dumps(call["arguments"]))] if call else []


def _renderer(name: str = "qwen2.5", **data: Any) -> Renderer:
    settings = DataConfig(train=(DataSourceConfig(path="demo:add3"),), **data)
    return Renderer(real_tokenizer(name), settings, EnvironmentsConfig(call_format="hermes"), _Hermes())


def _rows(renderer: Renderer, *, tokens: int = 200, max_length: int = 1000, **kwargs: Any) -> AgentRows:
    task = Task("program:x", kwargs, messages=(_U,))
    ids = np.array(renderer.ids(renderer.prompt(task)), np.int32)
    prompt = Prompt("p", ids, "408", "s", "12*34", task=task)
    return AgentRows(renderer, prompt, Sampling(), max_length=max_length, tokens=tokens)


def _begin(name: str = "qwen2.5", **data: Any) -> tuple[Renderer, AgentRows]:
    renderer = _renderer(name, **data)
    return renderer, _rows(renderer)


def _generated(renderer: Renderer, text: str, *, end: bool = True, reason: str = "stop") -> Generation:
    ids = renderer.ids(text) + [next(iter(renderer.ends.ids))] * end
    size = len(ids)
    return Generation(ids, np.full(size, -0.5, np.float32), np.full(size, 3, np.int32), reason)


def _answer(rows: AgentRows, renderer: Renderer, text: str, messages: Any, **more: Any) -> dict[str, Any]:
    rows.ask({"messages": messages, **more})
    reply = rows.add_action(_generated(renderer, text)).reply
    assert reply is not None
    return dict(reply["choice"]["message"])


def _decoded(renderer: Renderer, ids: Any) -> str:
    return renderer._tokenizer.decode(list(map(int, ids)))


def _sampled(rollout: Rollout) -> list[int]:
    return rollout.sampled_ids.tolist()


def test_a_conversation_that_grows_is_one_row_with_the_ids_as_sampled() -> None:
    """The agent strips an answer, as many frameworks do; the row keeps the policy's tokens."""
    renderer, rows = _begin()
    _answer(rows, renderer, "  I guess 400. ", [_S, _U])
    stripped = {"role": "assistant", "content": "I guess 400."}
    more = [{"type": "text", "text": "Too "}, {"type": "text", "text": "low <|im_end|>."}]
    _answer(rows, renderer, "408", [_S, _U, stripped, {"role": "user", "content": more}])
    rollout = rows.rollout(0, "stop", reward=0.5)
    sampled = [*_generated(renderer, "  I guess 400. ").token_ids, *_generated(renderer, "408").token_ids]
    assert not rollout.further_rows and _sampled(rollout) == sampled
    assert rollout.context_ids is not None and rollout.sampled is not None
    conversation = [_S, _U, {"role": "assistant", "content": "  I guess 400. "},
                    {"role": "user", "content": "Too low < |im_end|>."}]  # fmt: skip
    text = renderer.prompt(Task("x", messages=tuple(conversation)))
    assert _decoded(renderer, [*rollout.context_ids, *rollout.completion_ids]) == f"{text}408<|im_end|>"
    assert (rollout.text, rollout.turns[-1].reward, rollout.turns[0].reward) == ("408", 0.5, None)
    assert np.array_equal(rollout.logprobs, np.where(rollout.sampled, np.float32(-0.5), np.float32(0)))
    assert set(rollout.policy_versions[~rollout.sampled].tolist()) == {-1}


def test_the_question_of_the_row_itself_shares_the_prompt_of_its_group() -> None:
    renderer, rows = _begin()
    _answer(rows, renderer, "408", [_U])
    rollout = rows.rollout(0, "stop")
    assert rollout.context_ids is None and rollout.sampled is None
    assert rollout.completion_ids.tolist() == _generated(renderer, "408").token_ids


@pytest.mark.parametrize("history", [
    [_S, {"role": "user", "content": "What is 12 * 34?"}, {"role": "assistant", "content": "400"}, _U],
    [_S, _U, {"role": "assistant", "content": "four hundred"}, _U],
    [_S, _U],  # as a parallel call asks, or one that wants a second sample
    [_U],
])  # fmt: skip
def test_a_history_that_the_agent_rewrote_begins_a_row(history: list[Any]) -> None:
    renderer, rows = _begin()
    _answer(rows, renderer, "400", [_S, _U])
    _answer(rows, renderer, "408", history)
    rollout = rows.rollout(2, "stop", reward=1.0)
    (row,) = rollout.further_rows
    assert _decoded(renderer, row.context_ids) == renderer.prompt(Task("x", messages=tuple(history)))
    turns = [(turn.row, turn.text, turn.reward) for turn in rollout.turns]
    assert turns == [(0, "400", None), (1, "408", 1.0)]
    assert _sampled(rollout) == _generated(renderer, "400").token_ids + _generated(renderer, "408").token_ids
    assert rollout.text == "408" and row.sampled is None


def test_two_conversations_that_alternate_each_have_their_row() -> None:
    renderer, rows = _begin()
    first = _answer(rows, renderer, "a", [_S, _U])
    other = _answer(rows, renderer, "b", [_U])
    _answer(rows, renderer, "c", [_S, _U, first, _U])
    _answer(rows, renderer, "d", [_U, other, _U])
    rollout = rows.rollout(0, "stop")
    assert [(turn.row, turn.text) for turn in rollout.turns] == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    assert len(rollout.further_rows) == 1 and rollout.turns[2].end == len(rollout.completion_ids)
    question = renderer.prompt(Task("x", messages=(_U,)))
    assert _decoded(renderer, rollout.further_rows[0].context_ids) == question


def test_each_sampled_token_has_the_mask_that_it_was_sampled_with() -> None:
    """With top_p: in a row that grows, and in a new row."""
    renderer, rows = _begin()
    expected: list[list[int]] = []
    for number, messages in enumerate(([_S, _U], [_U], [_S, _U, {"role": "assistant", "content": "t0"}, _U])):
        generation = _generated(renderer, f"t{number}")
        lists = [[token, number + 1] for token in generation.token_ids]
        expected += lists if number != 1 else []
        rows.ask({"messages": messages})
        rows.add_action(replace(generation, kept=KeptTokens.from_lists(lists, 200_000)))
    rollout = rows.rollout(0, "stop")
    assert len(rollout.rows) == 2
    for row in rollout.rows:
        assert row.kept is not None and row.kept.contain(row.completion_ids).all()
        is_sampled = np.ones(len(row.completion_ids), bool) if row.sampled is None else row.sampled
        assert np.array_equal(row.kept.counts, 2 * is_sampled)
    assert rollout.kept is not None and rollout.kept.ids.reshape(-1, 2).tolist() == expected


def test_a_tool_call_makes_a_round_trip() -> None:
    renderer, rows = _begin()
    text = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    message = _answer(rows, renderer, text, [_U], tools=[_WEATHER])
    (call,) = message["tool_calls"]
    assert message["content"] == "I look." and call["function"]["name"] == "weather"
    assert len(call["id"]) == 9 and call["id"].isalnum(), "what Mistral's chat templates take"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    # The agent writes the arguments in its own way, and leaves the content out.
    call["function"]["arguments"] = '{"city":"Oslo"}'
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    _answer(rows, renderer, "It rains.", [_U, message, result], tools=[_WEATHER])
    rollout = rows.rollout(0, "stop")
    assert not rollout.further_rows and rollout.context_ids is not None
    row = _decoded(renderer, [*rollout.context_ids, *rollout.completion_ids])
    assert text in row and "<tool_response>\nrain\n</tool_response>" in row and '"name": "weather"' in row
    sampled = _generated(renderer, text).token_ids + _generated(renderer, "It rains.").token_ids
    assert _sampled(rollout) == sampled
    # Without the tools the conversation renders differently: another row.
    _answer(rows, renderer, "Yes.", [_U, message, result])
    assert len(rows.rollout(0, "stop").further_rows) == 1


def test_a_template_that_drops_thoughts_begins_a_row_within_the_conversation() -> None:
    renderer, rows = _begin("qwen3")
    reply = _answer(rows, renderer, "<think>\nhm\n</think>\n\n400", [_U])
    _answer(rows, renderer, "408", [_U, reply, _U])
    _answer(rows, renderer, "b", [_S])
    rollout = rows.rollout(0, "stop")
    assert [turn.row for turn in rollout.turns] == [0, 1, 2] and len(rollout.further_rows) == 2
    assert "hm" not in _decoded(renderer, rollout.further_rows[0].context_ids)


def test_a_stop_text_is_kept_in_the_row_and_left_out_of_the_answer() -> None:
    renderer, rows = _begin()
    rows.ask({"messages": [_U], "stop": "</search>", "max_tokens": 9})
    assert (rows.stop, rows.room) == (("</search>",), 9)
    action = rows.add_action(_generated(renderer, "<search>a</search>\n", end=False))
    assert action.reply is not None
    message = action.reply["choice"]["message"]
    assert message["content"] == "<search>a"
    _answer(rows, renderer, "408", [_U, message, _S])
    rollout = rows.rollout(0, "stop")
    assert not rollout.further_rows
    assert _decoded(renderer, rollout.completion_ids).startswith("<search>a</search>\n<|im_end|>\n")


@pytest.mark.parametrize(("head", "read"), [("", ""), ("<|im_start|>", "< |im_start|>")])
def test_plain_completions_continue_their_text(head: str, read: str) -> None:
    """Control tokens in it are read as text."""
    renderer, rows = _begin(chat_template="none")
    texts = []
    for prompt, text, end in (("Q: 1+1\nA:", " 2\n", False), ("Q: 1+1\nA: 2\nQ: 2+2\nA:", " 4", True),
                              ("Q: 1+1\nA: 2\nQ: 2+2\nA: 4.", "?", True)):  # fmt: skip
        rows.ask({"prompt": head + prompt, "max_tokens": 16})
        reply = rows.add_action(_generated(renderer, text, end=end)).reply
        assert reply is not None and reply["choice"] == {"text": text, "finish_reason": "stop"}
        texts.append(_decoded(renderer, rows._threads[-1].dialogue.context))
    rollout = rows.rollout(0, "stop")
    assert texts[1].startswith(f"{read}Q: 1+1\nA: 2\nQ: 2+2\nA: 4") and len(rollout.further_rows) == 1
    with pytest.raises(Refused, match="use /v1/completions"):
        rows.ask({"messages": [_U]})


@pytest.mark.parametrize("is_special", [False, True])
def test_an_agents_answer_has_the_thought_of_its_own_text(is_special: bool) -> None:
    """A closing tag that is a special token is not in the answer, so no thought counts as open."""
    renderer, rows = _begin(chat_template="none")
    if is_special:
        renderer._tokenizer.add_tokens([AddedToken("</think>", special=True, normalized=False)])
        renderer.controls = ControlTokens(renderer._tokenizer)
    first, answer = "Q: 1+1\nA: <think>\n", "two</think> 2"
    rows.ask({"prompt": first})
    rows.add_action(_generated(renderer, answer, end=False))
    before = first + rows._threads[0].keys.removeprefix(first)
    rows.ask({"prompt": f"{before}\nQ: 2+2\nA:"})
    rows.add_action(_generated(renderer, " 4", end=True))
    thoughts = [turn.thought for turn in rows.rollout(0, "stop").turns]
    assert thoughts == (["", ""] if is_special else ["opens", "closes"])


@pytest.mark.parametrize(("more", "words"), [
    ({"n": 2}, ["n = 2", "expected several requests"]),
    ({"temperature": 0.2}, ["temperature = 0.2", "expected 1.0", "environment_kwargs.ignore"]),
    ({"top_p": 0.9}, ["top_p = 0.9"]), ({"min_p": 0.1}, ["min_p = 0.1"]),
    ({"logprobs": True}, ["logprobs = True"]), ({"logit_bias": {"5": 1}}, ["logit_bias"]),
    ({"response_format": {"type": "json_object"}}, ["response_format"]),
    ({"tool_choice": "required"}, ["tool_choice = 'required'"]),
    ({"guided_regex": "a"}, ["unsupported parameter 'guided_regex'"]),
    ({"max_tokens": 0}, ["`max_tokens` = 0"]), ({"stop": [""]}, ["`stop` must be"]),
    ({"tools": "weather"}, ["`tools` must be"]), ({"messages": []}, ["non-empty list"]),
    ({"messages": [{"role": "critic", "content": "x"}]}, ["messages.0.role", "critic"]),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["must be text"]),
    ({"messages": [_U, {"role": "assistant", "content": "The"}]}, ["prefilled"]),
    ({"messages": [{"role": "assistant", "tool_calls": [{"x": 1}]}, _U]}, ["must be function calls"]),
])  # fmt: skip
def test_what_changes_the_distribution_or_cannot_be_read_is_refused(more: Any, words: Sequence[str]) -> None:
    renderer, rows = _begin()
    with pytest.raises(Refused) as refused:
        rows.ask({"messages": [_U]} | more)
    assert all(word in str(refused.value) for word in words), refused.value
    assert refused.value.reply["status"] == 400 and refused.value.reply["error"]["message"]
    _answer(rows, renderer, "408", [_U], temperature=1, top_p=1.0, n=1, seed=5, tool_choice="auto", user="me")
    assert rows.rollout(0, "stop").text == "408", "the episode goes on"


@pytest.mark.parametrize("ignore", ["temperature", ["temperature", "top_p"], None])
def test_parameters_that_the_run_ignores_may_differ(ignore: Any) -> None:
    rows = _rows(_renderer(), ignore=ignore)
    with nullcontext() if ignore else pytest.raises(Refused, match=r"temperature = 0\.2"):
        rows.ask({"messages": [_U], "temperature": 0.2})


# The loop


class _Engine:
    """Answers with the texts in order, then repeats the last."""

    act: Any  # the environment's

    def __init__(self, renderer: Renderer, *texts: str) -> None:
        self._renderer, self.texts = renderer, list(texts)
        self.contexts: list[list[int]] = []

    async def generate(
        self, token_ids: list[int], seed: int, max_tokens: int, stop: Sequence[str] = ()
    ) -> Generation:
        self.contexts.append(token_ids)
        whole = _generated(self._renderer, self.texts.pop(0) if len(self.texts) > 1 else self.texts[0])
        if len(whole.token_ids) <= max_tokens:
            return whole
        cut = slice(max_tokens)
        return Generation(whole.token_ids[cut], whole.logprobs[cut], whole.versions[cut], "length")


_HEAD = """
import json, os, sys, time, threading, urllib.error, urllib.request
row = json.loads(sys.stdin.read())

def post(body, path="/chat/completions", timeout=60, **headers):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], **headers}
    url = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())

def ask(*texts, **more):
    status, answer = post({"messages": [{"role": "user", "content": text} for text in texts], **more})
    return answer["choices"][0]["message"]["content"] if status == 200 else answer["error"]["code"]
"""


def _play(
    directory: Path, code: str, *texts: str, budgets: Budgets | None = None, timeout_s: float = HANG_S,
    head: str = _HEAD, engine_type: type[_Engine] = _Engine, **kwargs: Any,
) -> tuple[Rollout, _Engine]:  # fmt: skip
    (directory / "my_agent.py").write_text(head + code)
    renderer = _renderer()
    engine = engine_type(renderer, *(texts or ("408",)))
    rows = _rows(renderer, tokens=(budgets or Budgets(200, 8)).tokens)
    settings = EnvironmentsConfig(code_paths=(str(directory),), timeout_s=timeout_s)
    task = Task("program:my_agent.py", kwargs)

    async def session() -> Rollout:
        runner = EpisodeRunner(settings)

        async def act(action: Action, turn: int) -> Observed:
            problem = Problem("12*34", "408", {"level": 3})
            return await runner.act("e", task, problem, action, turn=turn)

        engine.act = act
        try:
            return await play_agent(rows, engine, budgets or Budgets(200, 8), seed=0, sample=1)
        finally:
            await runner.end("e")
            await runner.close()

    return asyncio.run(asyncio.wait_for(session(), HANG_S)), engine


def test_a_program_asks_and_gives_its_reward(tmp_path: Path) -> None:
    code = """
first = ask(row["problem"])
second = ask("again", row["arguments"]["hint"])
print("log"); print(json.dumps({"reward": float(second == row["answer"]) + row["columns"]["level"]}))
"""
    rollout, engine = _play(tmp_path, code, "400", "408", hint="h")
    assert (rollout.finish_reason, rollout.text, rollout.sample) == ("stop", "408", 1)
    assert [turn.reward for turn in rollout.turns] == [None, 4.0]
    assert len(engine.contexts) == 2 and len(rollout.further_rows) == 1


@pytest.mark.parametrize(("name", "hosts"), [("NO_PROXY", "a.org,.b.org"), ("no_proxy", "*"), ("", "")])
def test_a_program_asks_past_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hosts: str
) -> None:
    """It keeps the hosts that the run's environment excepts."""
    for unset in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(unset, raising=False)
    if name:
        monkeypatch.setenv(name, hosts)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    code = """
both = {os.environ["no_proxy"], os.environ["NO_PROXY"]}
print(json.dumps({"reward": float(ask("x") == "408" and both == {row["arguments"]["expected"]})}))
"""
    expected = hosts if hosts == "*" else ",".join(filter(None, (hosts, "127.0.0.1", "localhost")))
    rollout, _ = _play(tmp_path, code, expected=expected)
    assert rollout.turns[-1].reward == 1.0, rollout.turns[-1].observation


@pytest.mark.parametrize(("code", "reason", "words"), [
    ("ask('x'); sys.exit(3)", "error", "exit code 3"),
    ("ask('x'); raise KeyError('lost')", "error", "KeyError: 'lost'"),
    ("ask('x'); os.kill(os.getpid(), 9)", "error", "signal 9"),
    ("ask('x'); time.sleep(1000)", "error", "neither asked nor ended within environments.timeout_s = 3"),
    ("while True: ask('x', n=2) if '408' == ask('x') else ask('x')", "turns", ""),
    ("print(ask('x'))", "stop", ""),  # no reward: other rewards may judge the answer
])  # fmt: skip
def test_the_faults_of_an_agent_cost_one_sample(tmp_path: Path, code: str, reason: str, words: str) -> None:
    rollout, _ = _play(tmp_path, code, timeout_s=3 if "sleep" in code else HANG_S)
    assert rollout.finish_reason == reason and words in rollout.turns[-1].observation
    assert rollout.turns[-1].reward is None and rollout.text == "408"


@pytest.mark.parametrize(("code", "words"), [
    ("", "it made no request that the run takes"), ("ask('x', n=3)", "it made no request that the run takes"),
    ("sys.exit('no corpus')", "exit code 1: no corpus"),
])  # fmt: skip
def test_an_agent_that_ends_before_an_answer_costs_one_sample(tmp_path: Path, code: str, words: str) -> None:
    rollout, _ = _play(tmp_path, f"{code}\nprint('{{\"reward\": 1}}')")
    (turn,) = rollout.turns
    assert (rollout.finish_reason, rollout.num_tokens, turn.reward) == ("error", 0, None)
    assert turn.observation.startswith("the agent got no answer from the policy: ")
    assert words in turn.observation
    renderer, rows = _begin()
    _answer(rows, renderer, "408", [_U])
    group = Group(rows._prompt, (rollout, rows.rollout(0, "stop")), np.ones(2, np.float32), {}, ("", ""))
    batch = make_batch([group], [np.ones(2, np.float32)], ref_logprobs=None, max_new_tokens=200)
    assert batch.policy.mask.sum(dim=1).tolist() == [0, len(group.rollouts[1].completion_ids)]


def test_calls_in_parallel_are_rows_of_one_sample(tmp_path: Path) -> None:
    code = """
answers = []
threads = [threading.Thread(target=lambda n=n: answers.append(ask(f"part {n}"))) for n in range(3)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(json.dumps({"reward": len(answers)}))
"""
    rollout, _ = _play(tmp_path, code)
    assert len(rollout.rows) == 3 and rollout.turns[-1].reward == 3.0


def test_a_retry_gets_the_first_answer_and_is_not_trained_twice(tmp_path: Path) -> None:
    """By the header of OpenAI's clients. The same request without it asks for another sample."""
    code = """
body = {"messages": [{"role": "user", "content": "x"}]}
answers = [post(body), post(body, **{"x-stainless-retry-count": "1"}), post(body)]
texts = [a["choices"][0]["message"]["content"] for _, a in answers]
print(json.dumps({"reward": float(texts == ["a", "a", "b"])}))
"""
    rollout, engine = _play(tmp_path, code, "a", "b")
    assert rollout.turns[-1].reward == 1.0 and len(engine.contexts) == len(rollout.turns) == 2


def test_a_client_that_hung_up_gets_its_answer_when_it_asks_again(tmp_path: Path) -> None:
    code = """
import socket
body = {"messages": [{"role": "user", "content": "x"}]}
try:
    post(body, timeout=0.3)
except Exception as error:
    print(type(error))
print(json.dumps({"reward": float(post(body)[1]["choices"][0]["message"]["content"] == "a")}))
"""

    class Slow(_Engine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            await asyncio.sleep(1.5)
            return await super().generate(*args, **kwargs)

    rollout, engine = _play(tmp_path, code, "a", "b", engine_type=Slow)
    assert rollout.turns[-1].reward == 1.0 and len(engine.contexts) == len(rollout.turns) == 1


@pytest.mark.parametrize(("budgets", "text", "reason"), [
    (Budgets(40, 2), "4", "turns"), (Budgets(6, 8), "a b c d e f g h", "length"),
])  # fmt: skip
def test_budgets_end_requests_as_the_api_does(
    tmp_path: Path, budgets: Budgets, text: str, reason: str
) -> None:
    code = "answers = [ask('x'), ask('y'), ask('z')]; print(json.dumps(answers), file=sys.stderr)\n"
    code += "print(json.dumps({'reward': answers.index(answers[-1])}))"
    rollout, _ = _play(tmp_path, code, text, budgets=budgets)
    assert rollout.finish_reason == reason
    if reason == "turns":
        assert [turn.text for turn in rollout.turns] == ["4", "4"] and rollout.turns[-1].reward == 2.0
    else:
        assert rollout.num_sampled == 6 and len(rollout.turns) == 1 and rollout.turns[-1].reward == 1.0


def test_an_answer_with_a_call_too_many_ends_the_episode(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    code = f"while True: post({{'messages': [{{'role': 'user', 'content': 'x'}}], 'tools': [{_WEATHER}]}})"
    rollout, _ = _play(tmp_path, code, call, budgets=Budgets(500, 8, tool_calls=2))
    assert rollout.finish_reason == "tool_limit" and len(rollout.turns) == 3


def test_pending_requests_fail_when_their_episode_ends(tmp_path: Path) -> None:
    """Also identical ones: a handler that kept waiting would delay the end of the worker."""
    (tmp_path / "my_agent.py").write_text("import time; time.sleep(1000)")
    settings = EnvironmentsConfig(code_paths=(str(tmp_path),))

    async def session() -> list[int]:
        agents = Agents(settings)
        await agents.begin("e", Task("program:my_agent.py"), Problem("x", "y", {}))
        (key,) = agents._by_key
        assert agents._server is not None
        host, port = agents._server.addresses[0][:2]
        url, headers = f"http://{host}:{port}/0/v1/chat/completions", {"Authorization": f"Bearer {key}"}

        async def post() -> int:
            async with client.post(url, json={"messages": [_U]}, headers=headers) as response:
                return response.status

        async with aiohttp.ClientSession() as client:
            posts = [asyncio.create_task(post()) for _ in range(3)]
            for action in Action(""), Action("408"):
                assert (await agents.act("e", action)).request is not None
            while len(agents._live["e"].unanswered) < 2:
                await asyncio.sleep(0.01)
            await agents.end("e")
            statuses = sorted([await each for each in posts])
        await agents.close()
        return statuses

    assert asyncio.run(asyncio.wait_for(session(), HANG_S)) == [200, 410, 410]


@pytest.mark.parametrize("when", ["it waits", "it starts"])
def test_an_agent_whose_episode_ends_before_it_runs_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Programs are started one after the other."""
    (tmp_path / "my_agent.py").write_text("import time; time.sleep(10_000)")
    agents = Agents(EnvironmentsConfig(code_paths=(str(tmp_path),)))
    start, processes = asyncio.create_subprocess_exec, []

    async def start_and_end(*command: Any, **how: Any) -> Any:
        processes.append(await start(*command, **how))
        await agents.end("e")
        return processes[0]

    async def session() -> None:
        beginning = agents.begin("e", Task("program:my_agent.py"), Problem("x", "y", {}))
        if when == "it waits":
            async with agents._starting:
                starting = asyncio.create_task(beginning)
                await asyncio.sleep(0)
                await agents.end("e")
            await starting
        else:
            await beginning
        assert not agents.has("e")
        await agents.close()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_end)
    asyncio.run(asyncio.wait_for(session(), HANG_S))
    assert [process.returncode for process in processes] == ([] if when == "it waits" else [-signal.SIGKILL])


def test_a_start_may_take_longer_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All agents of a step start at once, and import what they use."""
    (tmp_path / "my_agent.py").write_text(_HEAD + "ask(row['problem']); time.sleep(1000)")
    (tmp_path / "silent.py").write_text("import time; time.sleep(1000)")
    agents = Agents(EnvironmentsConfig(code_paths=(str(tmp_path),), timeout_s=0.01))

    async def session() -> list[Observed]:
        observed = []
        for program, actions in (("my_agent.py", 2), ("silent.py", 1)):
            await agents.begin(program, Task(f"program:{program}"), Problem("x", "y", {}))
            observed += [await agents.act(program, Action("")) for _ in range(actions)]
            monkeypatch.setattr(agent_module, "START_S", 0.02)
        await agents.close()
        return observed

    asked, step, start = asyncio.run(asyncio.wait_for(session(), HANG_S))
    assert asked.request is not None
    assert step.failed == "the agent neither asked nor ended within environments.timeout_s = 0.01"
    assert "ended within 0.02 s of its start; raise environments.timeout_s above that" in start.failed


def test_no_key_no_answer(tmp_path: Path) -> None:
    code = """
statuses = [post({"messages": []}, Authorization=key)[0] for key in ("", "Bearer x", "Bearer ")]
statuses += [post({"no": 1})[0], post({}, "/completions")[0], post([])[0]]
print(json.dumps({"reward": float(ask("x") == "408" and statuses == [401, 401, 401, 400, 400, 400])}))
"""
    rollout, _ = _play(tmp_path, code)
    assert rollout.turns[-1].reward == 1.0


def test_nothing_of_an_agent_is_left_behind(tmp_path: Path) -> None:
    """No process that it started, also in another session, and none that ignores the end of its output."""
    import subprocess
    import time

    code = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
open({str(tmp_path / "child")!r}, "w").write(str(child.pid)); ask("x"); print('{{"reward": 1}}')
"""
    rollout, _ = _play(tmp_path, code)
    assert rollout.turns[-1].reward == 1.0
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        state = subprocess.run(["ps", "-o", "stat=", (tmp_path / "child").read_text()], capture_output=True)
        if not state.stdout or state.stdout.startswith(b"Z"):
            return
        time.sleep(0.05)
    pytest.fail("the child of the agent goes on")


_ARGUMENTS = json.dumps({"city": "Oslo", "days": [1, 2, 3]})
_CALLS = [{"id": f"call_1_{number}", "type": "function", "function": {"name": "weather", "arguments": text}}
          for number, text in enumerate((_ARGUMENTS, "{}"))]  # fmt: skip


@pytest.mark.parametrize("content", ["  Rain,\nthen sun. ", "", None])
def test_a_stream_has_the_parts_of_an_answer_and_no_other(content: str | None) -> None:
    calls = [] if content else _CALLS
    reason = "tool_calls" if calls else "stop"
    message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    choice = {"message": message, "finish_reason": reason}
    parts = list(chunks({}, {"choice": choice, "usage": {"total_tokens": 5}}, chat=True))
    assert len({(part["id"], part["object"], part["model"]) for part in parts}) == 1
    assert all("usage" not in part for part in parts)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert (deltas[0]["role"], deltas[-1]) == ("assistant", {}) and not any("role" in d for d in deltas[1:])
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * (len(parts) - 1) + [reason]
    assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
    assert [call for delta in deltas for call in delta.get("tool_calls", ())] == [
        {**call, "index": index} for index, call in enumerate(calls)
    ]


def test_a_program_that_is_not_there_is_reported_before_a_run(tmp_path: Path) -> None:
    settings = EnvironmentsConfig(code_paths=(str(tmp_path),))
    with pytest.raises(ValueError, match=r"program absent\.py is neither .* file in code_paths"):
        EnvironmentProbe("program:absent.py", {}, settings).describe()
    (tmp_path / "there.py").write_text("")
    described = EnvironmentProbe("program:there.py --fast", {}, settings).describe()
    assert not described.stateless and not described.asks and not described.tools


@pytest.mark.parametrize(("environment", "name"), [
    ({"program": "my_agent.py --fast"}, "program:my_agent.py --fast"), ("program:a", "program:a"),
])  # fmt: skip
def test_the_configuration_names_a_program(environment: Any, name: str) -> None:
    sources = (DataSourceConfig(path="demo:add3", environment=environment),)
    data = DataConfig(train=sources, environment=environment)
    assert data.environment == data.train[0].environment == name
    with pytest.raises(ValueError, match="environment"):
        DataConfig(train=(DataSourceConfig(path="demo:add3"),), environment={"program": 1})


def test_rows_with_a_context_of_their_own_reach_the_batch_and_its_table(tmp_path: Path) -> None:
    renderer, rows = _begin()
    _answer(rows, renderer, "408", [_S, _U])
    rollout = rows.rollout(0, "stop", reward=1.0)
    (copy,) = PackedSamples.from_groups([[rollout]]).group(0)
    rewards = np.ones(1, np.float32)
    group = Group(rows._prompt, (copy,), rewards, {"environment": rewards}, ("",))
    write_groups(tmp_path / "step_000001.parquet", [group])
    (read,) = read_groups(tmp_path / "step_000001.parquet", {"p": rows._prompt})
    assert rollout.context_ids is not None
    whole = [*rollout.context_ids.tolist(), *rollout.completion_ids.tolist()]
    for one in (group, read):
        batch = make_batch([one], [rewards], ref_logprobs=None, max_new_tokens=200)
        assert batch.tokens[0].tolist() == whole and batch.prompt_lengths.tolist() == [0]
        assert batch.policy.mask[0].tolist() == [i >= len(rollout.context_ids) for i in range(len(whole))]


_OPENAI = """
import json, sys
from openai import BadRequestError, OpenAI

row, client = json.loads(sys.stdin.read()), OpenAI()
tool = json.loads(%r)
messages = [{"role": "user", "content": row["problem"]}]
first = client.chat.completions.create(model=client.models.list().data[0].id, messages=messages, tools=[tool])
assert first.choices[0].finish_reason == "tool_calls" and first.usage.completion_tokens > 5
messages.append(first.choices[0].message)
(call,) = first.choices[0].message.tool_calls
assert json.loads(call.function.arguments) == {"city": "Oslo"}
messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
stream = client.chat.completions.create(
    model="policy", messages=messages, tools=[tool], stream=True, stream_options={"include_usage": True})
chunks = list(stream)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert chunks[-1].usage.total_tokens and chunks[-2].choices[0].finish_reason == "stop" and len(chunks) == 4
try:
    client.chat.completions.create(model="policy", messages=messages, n=2)
except BadRequestError as error:
    assert "expected several requests" in str(error)
done = client.completions.create(model="policy", prompt="Say", max_tokens=8)
with client.chat.completions.stream(model="policy", messages=messages[:1], tools=[tool]) as stream:
    (call,) = stream.get_final_completion().choices[0].message.tool_calls
assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Oslo"}
print(json.dumps({"reward": float(text == "It rains." and done.choices[0].text == "yes")}))
"""


@pytest.mark.slow
def test_an_unmodified_openai_client_calls_tools_and_reads_streams(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    code, texts = _OPENAI % json.dumps(_WEATHER), (call, "It rains.", "yes", call)
    rollout, _ = _play(tmp_path, code, *texts, head="", budgets=Budgets(500, 8))
    assert rollout.turns[-1].reward == 1.0, rollout.turns[-1].observation
    assert [turn.row for turn in rollout.turns] == [0, 0, 1, 2]
