"""No secret of a configuration is written anywhere."""

import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from actors.workers.engine_check import argument_problems, whole_problem
from grpo_dist.cli import main
from grpo_dist.config import Config
from grpo_dist.config.engine_arguments import engine_problems
from grpo_dist.config.files import ConfigError, dump_config, load_config
from grpo_dist.config.secrets import (
    HIDDEN,
    hidden_keys,
    masked,
    masked_command,
    masked_setting,
    masked_text,
    secret_keys,
    shown_value,
)
from grpo_dist.rewards.checks import check_rewards
from grpo_dist.tools.recipe.config import ResolvedStage
from grpo_dist.tools.recipe.record import begin, differences
from tests.support import fakes
from tests.support.services import StandIn


def config(key: str) -> Config:
    kwargs = {
        "base_url": f"https://me:{key}@host/v1",
        "api_key_env": "JUDGE_KEY",
        "max_tokens": 8,
        "extra_body": {"hf_token": key, "nested": [{"Authorization": f"Bearer {key}"}]},
    }
    return fakes.config(rewards={"functions": [{"function": "judge", "kwargs": kwargs}]})


@pytest.mark.parametrize(
    "key",
    [
        "api_key", "API_KEY", "openai-api-key", "hf_token", "token", "client_secret", "password", "passwd",
        "aws_secret_access_key", "private_key", "credentials", "Authorization", "Proxy-Authorization",
        "api_keys", "apiKeys", "access_tokens", "HF_TOKENS", "client_secrets", "passwords", "pwd",
        "db_passwd", "passphrase", "credential", "Cookie", "Set-Cookie", "cookies", "pass", "db_pass",
        "smtp.pass", "key", "openai_key", "ssh_keys", "signingKey", "auth", "basic_auth", "auth_header",
        "bearer", "tokens", "my_tokens", "api_key_2", "clientSecret", "userpassword", "judge.api.key",
        "join_token", "userpass", "passcode", "gcp_creds",
    ],
)  # fmt: skip
def test_values_of_secret_keys_are_hidden(key):
    assert masked([{key: "abc"}]) == [{key: "***"}]
    assert masked({key: ["abc", "", ["d"]]}) == {key: ["***", "", ["***"]]}
    assert masked({key: {"host": "abc", "more": [None]}}) == {key: {"host": "***", "more": [None]}}


def test_a_numeric_password_is_hidden_and_a_token_id_is_not():
    assert masked({"password": 12345678, "api_keys": [1]}) == {"password": "***", "api_keys": ["***"]}
    assert masked({"pad_token": 0, "end_token": [5]}) == {"pad_token": 0, "end_token": [5]}
    assert masked({"use_token": True}) == {"use_token": True}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h/v1?api_key=abc&token=d", "https://h/v1?api_key=***&token=***"),
        ("see https://h/?n=1&access-token=d#top, or not", "see https://h/?n=1&access-token=***#top, or not"),
        ("https://h/v1beta?key=abc&alt=sse", "https://h/v1beta?key=***&alt=sse"),
        ("/bucket?X-Amz-Signature=ab&X-Amz-Date=1", "/bucket?X-Amz-Signature=***&X-Amz-Date=1"),
        ("https://me:p@ss@host/v1?a=b", "https://***@host/v1?a=b"),
    ],
)
def test_secrets_in_urls_are_hidden(url, shown):
    assert masked({"base_url": url, "more": [url]}) == {"base_url": shown, "more": [shown]}


@pytest.mark.parametrize(
    "key",
    [
        "api_key_env", "max_tokens", "buffer_tokens", "stop_tokens", "aggregation", "tokenizer", "secretary",
        "max_new_tokens", "token_values_every", "tokens_per_second", "token_ids", "answer_key",
        "reward_fn_key", "key_columns", "keys", "pass_k", "pass_rate", "pass@8", "pass_at_1", "forward_pass",
        "auth_mode", "authors", "monkey", "eos_token", "end_token", "think_token", "mask_token",
        "truncated_tokens", "lookahead_tokens", "rationale_key", "ref_key",
    ],
)  # fmt: skip
def test_other_values_are_unchanged(key):
    assert masked({key: "abc", "url": "http://host:8000/v1?a=b@c"}) == {
        key: "abc",
        "url": "http://host:8000/v1?a=b@c",
    }


def test_keys_of_secrets_are_named_also_in_the_files_of_a_run_and_stars_in_other_text_are_none():
    plain = config("s3same-00").model_dump(mode="json")
    plain["data"]["instruction"] = f"{HIDDEN} answer in a box {HIDDEN}"
    kwargs = "rewards.functions.0.kwargs"
    keys = [f"{kwargs}.{key}" for key in (
        "base_url", "extra_body.hf_token", "extra_body.nested.0.Authorization"
    )]  # fmt: skip
    assert secret_keys(plain) == secret_keys(masked(plain)) == hidden_keys(masked(plain)) == keys
    assert hidden_keys(plain) == hidden_keys({"password": f"a{HIDDEN}b"}) == []


def test_no_key_of_the_configuration_counts_as_a_secret():
    plain = fakes.config().model_dump(mode="json")
    assert masked(plain) == plain


IN_A_COMMAND = [
    ("--env=HF_TOKEN=sesame", "--env=HF_TOKEN=***"),
    ("--sbatch=--export=ALL,HF_TOKEN=sesame", "--sbatch=--export=ALL,HF_TOKEN=***"),
    ("--env=DB_PASS=sesame,open", "--env=DB_PASS=***"),
    ("--env=DB_PASS=sesame,open=2", "--env=DB_PASS=***"),
    ("--sbatch=--export=ALL,HF_TOKEN=sesame,open,A=b", "--sbatch=--export=ALL,HF_TOKEN=***,A=b"),
    ("--env=GITHUB_PAT=sesame", "--env=GITHUB_PAT=***"),
    ("--api-key=sesame", "--api-key=***"),
    ("--header=Authorization: Bearer sesame", "--header=Authorization: ***"),
    ("a={function: judge, kwargs: {api_key: sesame}}", "a={function: judge, kwargs: {api_key: '***'}}"),
    ("a.kwargs.api_key={sesame: 1", "a.kwargs.api_key=***"),
    ('a={kwargs: {api_key: "sesame}}', "a={kwargs: {api_key: ***"),
    ("http://me:sesame@host/data", "http://***@host/data"),
    *((same, same) for same in ("steps=3", "a=[1, 2]", "a={b: [1,2]}", "--verbose", "+algorithm=dapo")),
    *((same, same) for same in ("a=b=c", "--env=A=b", "sampling.max_new_tokens=8", "algorithm.pass_k=2")),
]
IN_A_MESSAGE = [
    ("auth: [sesame, 'open 2'], steps: 4", "auth: [***], steps: 4"),
    ("api_keys=[sesame, open", "api_keys=[***"),
    ("auth: {user: sesame, pass: 'open'}; steps", "auth: {***}; steps"),
    ("cannot run: x --api-key sesame --steps 4", "cannot run: x --api-key *** --steps 4"),
    ("use --env NAME or --secret NAME", "use --env NAME or --secret NAME"),
]


@pytest.mark.parametrize(
    ("hide", "text", "shown"),
    [(masked_setting, *row) for row in IN_A_COMMAND] + [(masked_text, *row) for row in IN_A_MESSAGE],
)
def test_a_recorded_word_of_a_command_and_a_message_hide_every_value_of_a_secret_name(hide, text, shown):
    assert hide(text) == shown


def test_a_secret_in_the_next_word_of_a_command_is_hidden():
    words = ["submit", "--env", "HF_TOKEN=sesame", "--token", "sesame", "--prompt-tokens", "7", "-v"]
    assert masked_command(words) == [
        "submit", "--env", "HF_TOKEN=***", "--token", "***", "--prompt-tokens", "7", "-v",
    ]  # fmt: skip


def test_a_message_has_neither_values_of_secret_names_nor_known_secrets():
    tree = {"kwargs": {"api_key": "sesame-1", "base_url": "http://me:open-2@host/", "a": "Bearer abc12345"}}
    message = "401 for sesame-1 (me:open-2, abc12345); {'pass': 'x y', 'n': 1}, token=zz, steps: 4"
    assert masked_text(message, tree) == "401 for *** (***, ***); {'pass': ***, 'n': 1}, token=***, steps: 4"


def test_a_number_of_tokens_is_shown_and_a_token_is_not(tmp_path):
    (tmp_path / "a.yaml").write_text(BASE)
    with pytest.raises(
        ConfigError, match=r"`rewards\.overlong_buffer\.tokens` = -5: input should be greater"
    ):
        load_config(tmp_path / "a.yaml", ["rewards.overlong_buffer={tokens: -5, penalty: 1}"])
    assert (
        masked_text("`rollout.speculation.tokens` = 4 samples") == "`rollout.speculation.tokens` = 4 samples"
    )
    for secret in ("tokens: hf_123", "tokens: [12345678]", "my_tokens: 12345678", "token: 12345678"):
        assert "12" not in masked_text(secret)
    assert shown_value(("kwargs", "tokens"), "12345678") == shown_value(("token",), 12345678) == "***"


BASE = "model: {path: m}\ndata: {train: [{path: t}]}\n"
IN_A_FILE = [
    "rewards: {functions: {function: judge, kwargs: {api_key: SESAME}}}",
    "rewards: {functions: [[{api_key: SESAME}]]}",
    "rewards: {functions: [{function: judge, kwargs: 'api_key=SESAME'}]}",
    "rewards: {functions: [{function: judge, kwargs: [{api_keys: [SESAME, b]}]}]}",
    'rewards: {functions: [{function: judge, kwargs: {api_key: "${SESAME"}}]}',
    "a: {api_key: !SESAME x}",
    "tracking: {wandb: {api_key: SESAME}}",
    'tracking: {tensorboard: "http://me:SESAME@host/"}',
]
AS_OVERRIDES = [
    "rewards.functions.0.kwargs.api_key=SESAME", 'judge.api_key="SESAME', "steps.api_key=SESAME",
    'rewards={functions: [{function: judge, kwargs: {api_key: "SESAME}}]}',
    'rewards.functions=[{function: judge, kwargs: {api_key: "${SESAME"}}]',
    "rewards.functions=[{function: judge, weight: [{password: SESAME}]}]", "=judge.api_key=SESAME",
    "steps={auth: [open, SESAME]", "rewards.functions=[{tokens: [open, 'SESAME']}, ",
    "rewards.functions=['--api-key SESAME']", "+algorithm=SESAME", "+algorithm=hf_SESAME: x", "+model=SESAME",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "overrides"), [(line, []) for line in IN_A_FILE] + [("", [line]) for line in AS_OVERRIDES]
)
def test_no_error_of_a_configuration_shows_a_secret(tmp_path, text, overrides):
    path = tmp_path / "a.yaml"
    path.write_text(BASE + text)
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    assert "SESAME" not in str(refused.value)


def test_no_refusal_of_an_argument_of_vllm_shows_a_secret(monkeypatch):
    extra = {"speculative_config": {"hf_token": "SESAME"}, "hf_token": "SESAME"}
    config = fakes.config(rollout={"engine": extra})
    (message,) = engine_problems(config.rollout, config.algorithm, "cpu")
    assert "SESAME" not in message and "speculative_config` = {'hf_token': '***'}" in message
    (message,) = argument_problems({"hf_token": ["SESAME"]}, {"hf_token": bool | str})
    assert "SESAME" not in message and "`rollout.engine.hf_token` = ***" in message

    def refuses(**arguments):
        raise RuntimeError(f"401 for {arguments}")

    vllm = SimpleNamespace(EngineArgs=refuses)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(engine=None))
    monkeypatch.setitem(sys.modules, "vllm.engine", SimpleNamespace(arg_utils=vllm))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", vllm)
    message = whole_problem({"model": "m", "hf_token": "SESAME"}, {"hf_token": "SESAME"})
    assert message is not None and "SESAME" not in message and "(hf_token=***)" in message


@pytest.mark.parametrize(
    "kwargs",
    [
        {"extra_body": [{"api_key": "SESAME"}]},
        {"max_retries": {"password": "SESAME"}},
        {"base_url": "http://me:SESAME@127.0.0.1:9/v1?api_key=SESAME", "max_retries": 0},
    ],
)
def test_no_error_of_a_reward_shows_a_secret(kwargs):
    function = {"function": "judge", "kwargs": {"base_url": "http://127.0.0.1:9", "model": "m"} | kwargs}
    with pytest.raises(ValueError) as refused:
        check_rewards(fakes.config(rewards={"functions": [function]}).rewards, max_new_tokens=8)
    assert "SESAME" not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ["check", "a.yaml", "model.path=https://me:SESAME@host/x"],
        ["train", "a.yaml", "data.train=[{path: 'https://me:SESAME@host/x'}]"],
        ["train", "https://me:SESAME@host/a.yaml"],
        ["train", "a.yaml", "--api-key", "SESAME"],
        ["train", "a.yaml", "--password=SESAME"],
    ],
)
def test_no_error_of_a_command_shows_a_secret(tmp_path, monkeypatch, capfd, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(BASE)
    try:
        assert main(words) == 2
    except SystemExit as refused:
        assert refused.code == 2
    shown = capfd.readouterr()
    assert "***" in shown.err and "SESAME" not in shown.out + shown.err


def test_a_key_repeated_by_a_judge_is_hidden_in_messages(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "SESAME-OPEN")
    repeated = b'{"error": {"message": "Incorrect API key provided: SESAME-OPEN"}}'
    with StandIn(lambda body, number: (401, repeated, {})) as server:
        kwargs = {"base_url": server.base_url, "model": "m", "api_key_env": "JUDGE_KEY", "max_retries": 0}
        rewards = fakes.config(rewards={"functions": [{"function": "judge", "kwargs": kwargs}]}).rewards
        with pytest.raises(ValueError, match="HTTP 401") as refused:
            check_rewards(rewards, max_new_tokens=8)
    assert "SESAME" not in str(refused.value)


def test_null_and_empty_are_no_secrets():
    assert masked({"token": None, "secret": ""}) == {"token": None, "secret": ""}


def test_files_of_a_run_have_no_secrets_and_load_again(tmp_path):
    text = dump_config(config("s3cret"))
    assert "s3cret" not in text and "https://***@host/v1" in text and "api_key_env: JUDGE_KEY" in text
    again = Config.model_validate(OmegaConf.to_container(OmegaConf.create(text)))
    assert again.rewards.functions[0].kwargs["extra_body"]["hf_token"] == "***"


def test_a_stage_record_has_no_secret_and_still_detects_a_changed_one(tmp_path):
    """A value that looks like a secret may be an ordinary setting that changes the result."""
    old, new = (
        begin(ResolvedStage("s", "grpo", tmp_path, c, c, ()), {})
        for c in (config("s3cret"), config("another"))
    )
    assert "s3cret" not in str(old) and old.settings == new.settings
    assert differences(old, new, config("another")) == ["what *** stands for has changed"]
    plain = fakes.config()
    assert begin(ResolvedStage("s", "grpo", tmp_path, plain, plain, ()), {}).inputs == {}
