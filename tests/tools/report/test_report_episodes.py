"""Episodes in the report: turns, tool calls and given tokens, in its data and in a real browser."""

import numpy as np
import pytest

from grpo_dist.batch.token_values import TokenValues
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.observe.samples import write_groups
from grpo_dist.tools.report import rollouts, tokens
from grpo_dist.tools.report.rollouts import AnswerReader
from tests.support.made_episodes import CALL, RESULT, end_of, episodes
from tests.support.reports import make_run
from tests.tools.report.test_report_page import column, filtered, opened, rows_shown


def make_values(group):
    """Make advantages and log-probs of every token; given tokens have 0, as in the records of a run."""
    values = {}
    for i, rollout in enumerate(group.rollouts):
        mask = np.ones(len(rollout.logprobs)) if rollout.sampled is None else rollout.sampled
        columns = (0.5 - i, rollout.logprobs - 0.1, rollout.logprobs + 0.1)
        columns = [(mask * column).astype(np.float32) for column in columns]
        sizes = [len(row.logprobs) for row in rollout.further_rows]
        further = tuple(TokenValues(9.0, np.full(size, 9, np.float32)) for size in sizes)
        values[group.prompt.uid, i] = TokenValues(0.5 - i, *columns, further)
    return values


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path, group = tmp_path_factory.mktemp("episodes") / "step_000001.parquet", episodes()
    write_groups(path, [group], make_values(group))
    return rollouts.read_rows(path, rollouts.cut(path)[0][0], [*tokens.COLUMNS, *rollouts.COLUMNS])


def test_the_table_of_rollouts_counts_turns_calls_and_given_tokens(table):
    with AnswerReader() as answers:
        rows = rollouts.rows(table, answers)
    outcomes = [rows["called"]["values"][i] for i in rows["called"]["index"]]
    assert outcomes == ["ok", "none", "none", "timeout"]
    assert (rows["turns"], rows["calls"]) == ([2, 1, 2, 2], [1, 0, 0, 1])
    given_tokens = [end_of(RESULT), 0, 0, end_of("```output\ntimed out\n```\n")]
    assert rows["given"] == given_tokens
    assert rows["length"] == [
        end_of(CALL, "\\boxed{20126}") + given_tokens[0],
        end_of("\\boxed{29406}"),
        end_of("higher or lower?", "\\boxed{7}"),
        end_of(CALL, "\\boxed{0}") + given_tokens[3],
    ]


def test_texts_have_every_turn_with_its_calls(table):
    first, _, third, fourth = rollouts.texts(table)["turns"]
    assert [turn["text"] for turn in first] == [CALL.rstrip(), "\\boxed{20126}"]
    call = {"name": "calculator", "arguments": "347*58", "result": "20126"}
    call |= {"outcome": "ok", "seconds": 0.0123}
    assert first[0]["calls"] == [call] and first[1]["calls"] == []
    assert first[0]["observation"] == ""  # the call has it
    turns = [(turn["row"], turn["observation"], turn["reward"]) for turn in third]
    assert turns == [(0, "lower", 0.25), (1, "", 0.75)]
    assert fourth[0]["calls"][0]["outcome"] == "timeout"


def test_given_tokens_have_a_place_and_no_value_and_rows_follow_each_other(table):
    texts = tokens.TokenTexts(character_tokenizer().backend_tokenizer)
    assert tokens.fits(table, texts)
    values = tokens.values(table, texts)

    def text(sample, begin=0, end=None):
        return "".join(values["vocabulary"][i] for i in values["tokens"][sample][begin:end])

    begin, end = values["given"][0]
    assert text(0, begin, end) == RESULT and text(0) == CALL + RESULT + "\\boxed{20126}"
    assert values["given"][1:3] == [[], []]
    assert values["rows"] == [[0], [0], [0, end_of("higher or lower?")], [0]]
    assert text(2) == "higher or lower?\\boxed{7}"
    assert values["logprob"][0][begin:end] == [None] * (end - begin)
    assert values["logprob"][0][0] == -10 and values["logprob"][0][end] == -10 * (end + 1)
    assert values["advantage"][0] == 500  # one number for all sampled tokens
    first = end_of("higher or lower?")
    assert values["advantage"][2] == [-1500] * first + [9000] * end_of("\\boxed{7}")
    assert values["log_ratio"][2][first:] == [None] * end_of("\\boxed{7}")  # not recorded for the second row


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("runs") / "run", steps=3)
    group = episodes()
    write_groups(run / "samples/step_000003.parquet", [group], make_values(group))
    return run


@pytest.mark.slow
def test_episodes_are_filtered_by_their_calls_and_how_they_ended(browser, run, tmp_path):
    page = opened(browser, [run], tmp_path, "rollouts")
    total = rows_shown(page)
    options = ["all", "with a call", "without a call", "a call: ok", "a call: timeout"]
    assert page.texts("#f-called option") == options
    filtered(page, "#f-called", "any", 2)
    assert column(page, "calls") == ["1", "1"] and column(page, "turns") == ["2", "2"]
    filtered(page, "#f-called", "timeout", 1)
    assert column(page, "finish") == ["turns"]
    filtered(page, "#f-called", "none", 2)
    filtered(page, "#f-called", "", total)
    filtered(page, "#f-finish", "turns", 1)
    page.click("#f-clear")
    filtered(page, "#f-text", "timed out", 1)  # found in the result of a call
    assert page.console() == []


@pytest.mark.slow
def test_an_episode_shows_who_wrote_what_and_shades_given_tokens(browser, run, tmp_path):
    page = opened(browser, [run], tmp_path, "rollouts")
    filtered(page, "#f-called", "ok", 1)
    page.click("#table .tabulator-row")
    page.until("document.querySelectorAll('.card').length === 4")
    first = ".card:nth-child(1) "
    assert page.texts(first + ".who") == ["turn 1 · policy", "tools", "turn 2 · policy"]
    assert page.text(first + ".call code") == "calculator(347*58)"
    assert page.texts(first + ".call .badge") == ["ok"] and page.text(first + ".call .hint") == "12.3 ms"
    assert page.text(first + ".call .result") == "→ 20126"
    assert page.text(first + ".environment .tokens").replace("↵", "") == RESULT
    count = f"document.querySelectorAll('{first}.token.given').length"
    assert page.get(count) == end_of(RESULT)
    assert page.get(f"document.querySelectorAll('{first}.environment .token:not(.given)').length") == 0
    spans = f"[...document.querySelectorAll('{first}.token')]"
    assert page.get(f"{spans}.filter((t) => t.style.background).length") == end_of(CALL, "\\boxed{20126}")
    facts = dict(zip(page.texts(first + "dt"), page.texts(first + "dd"), strict=True))
    length = end_of(CALL, RESULT, "\\boxed{20126}")
    assert facts["length"] == f"{length} tokens, {end_of(RESULT)} of them given"
    assert facts["turns"] == "2, tool calls: 1"
    page.run(
        "const t = document.querySelector('.token.given');"
        "t.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 200, clientY: 300}))"
    )
    assert "given: not sampled, and not trained" in page.text("#tip") and "log-prob" not in page.text("#tip")
    third = ".card:nth-child(3) "
    authors = ["turn 1 · policy · reward 0.25", "environment", "turn 2 · policy · reward 0.75"]
    assert page.texts(third + ".who") == authors
    assert page.text(third + ".rewritten") == "row 2: the chat template rewrote what came before"
    assert page.text(third + ".environment div:last-child") == "lower"
    assert page.text(".card:nth-child(4) .call .badge") == "timeout"
    assert page.console() == []
