"""Secrets of a configuration are written nowhere."""

import fakes
import pytest
from omegaconf import OmegaConf

from grpo_dist.config import Config
from grpo_dist.config_files import dump_config
from grpo_dist.recipe.config import Stage
from grpo_dist.recipe.record import begin, differences
from grpo_dist.secrets import masked


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
        "api_key",
        "API_KEY",
        "openai-api-key",
        "hf_token",
        "token",
        "client_secret",
        "password",
        "passwd",
        "aws_secret_access_key",
        "private_key",
        "credentials",
        "Authorization",
        "Proxy-Authorization",
        "api_keys",
        "apiKeys",
        "access_tokens",
        "HF_TOKENS",
        "client_secrets",
        "passwords",
        "pwd",
        "db_passwd",
        "passphrase",
        "credential",
        "Cookie",
        "Set-Cookie",
        "cookies",
    ],
)
def test_values_of_secret_keys_are_hidden(key):
    assert masked([{key: "abc"}]) == [{key: "***"}]
    assert masked({key: ["abc", "", ["d"]]}) == {key: ["***", "", ["***"]]}
    assert masked({key: {"host": "abc", "more": [None]}}) == {key: {"host": "***", "more": [None]}}


def test_a_password_may_be_a_number_and_a_token_s_number_is_none():
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
    ["api_key_env", "max_tokens", "buffer_tokens", "stop_tokens", "aggregation", "tokenizer", "secretary"],
)
def test_other_values_stay(key):
    assert masked({key: "abc", "url": "http://host:8000/v1?a=b@c"}) == {
        key: "abc",
        "url": "http://host:8000/v1?a=b@c",
    }


def test_null_and_empty_are_no_secrets():
    assert masked({"token": None, "secret": ""}) == {"token": None, "secret": ""}


def test_what_is_written_of_a_run_has_no_secrets_and_loads_again(tmp_path):
    text = dump_config(config("s3cret"))
    assert "s3cret" not in text and "https://***@host/v1" in text and "api_key_env: JUDGE_KEY" in text
    again = Config.model_validate(OmegaConf.to_container(OmegaConf.create(text)))
    assert again.rewards.functions[0].kwargs["extra_body"]["hf_token"] == "***"


def test_a_stage_s_record_has_none_and_tells_all_the_same_that_one_has_changed(tmp_path):
    """What looks like a secret may be a custom reward's `end_token`, which decides the result."""
    old, new = (
        begin(Stage("s", "grpo", tmp_path, c, c, ()), {}) for c in (config("s3cret"), config("another"))
    )
    assert "s3cret" not in str(old) and old.settings == new.settings
    assert differences(old, new) == ["what *** stands for has changed"]
    plain = fakes.config()
    assert begin(Stage("s", "grpo", tmp_path, plain, plain, ()), {}).inputs == {}
