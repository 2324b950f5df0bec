"""Hides keys, tokens and passwords of a configuration in everything that others may read.

Run directories, checkpoints, `stage.json` and trackers contain the resolved configuration, which still loads,
with *** for secrets: secrets belong in the environment (`api_key_env` of a judge).

Names are compared word by word (`openAIKey` is `open`, `ai`, `key`), and the last word decides: `my_token`
holds a token, `token_values_every` and `tokenizer` do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from grpo_dist.config.differences import flat

HIDDEN = "***"
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_SECRET_WORDS = _set(
    "secret secrets password passwords passwd passwds passphrase passphrases pwd pwds credential credentials "
    "cookie cookies authorization authorisation jwt oauth auth auths bearer bearers userpass passcode "
    "passcodes cred creds hmac pat pats"
)
# Words written together: `apikey`, `userpassword`.
_SECRET_ENDS = tuple(
    _set("password passwd apikey accesskey secretkey privatekey apitoken authtoken accesstoken hftoken")
)
_KEY_OWNERS = _set("api access secret private")  # before `key`: a number under that name is a secret, too
# Words before `key`, `token`, `tokens` and `pass` that make them a column, a tokenizer's special token, a
# count, or a pass over data.
_NOT_BEFORE = {
    "key": _set(
        "answer answers by cache category chat chosen column columns completion config content context "
        "conversation data dataset dict document duplicate entry extra field file fn foreign full gold group "
        "hash id idx image images index input instruction item json label level list lookup map message "
        "messages meta metadata metric missing model name num order output parent partition primary problem "
        "prompt public query question rationale ref reference rejected response reward role row sample score "
        "solution sort source split state step system target task test text train type unexpected unknown "
        "user uid value word yaml"
    ),
    "token": _set(
        "answer audio begin bos cls eos end image mask next pad prompt reasoning sep separator special start "
        "stop think thinking thought unexpected unk video"
    ),
    "tokens": _set(
        "accepted added answer batch batched bos budget buffer cached chunk completion context count draft "
        "dropped end eos extra generated generation hidden image in input keep kv logprob lookahead max mean "
        "min ms n new num number of out output pad padded per prefill prompt queued reasoning response row "
        "sampled seq special speculative start step stop target text think thinking total train trained "
        "truncated unexpected used valid verdict vocab"
    ),
    "pass": _set("backward each first forward last multi one per second single two"),
}
_PLURAL = {"keys": "key", "passes": "pass"}
# Words that may follow the deciding word: `auth_header`, `api_key_2`.
_TAILS = _set("value header headers base hex")
# In https://user:password@host/; a path made from a URL has one slash.
_USER = re.compile(r"(?:(?<=://)|(?<=https:/)|(?<=http:/))(?!/)[^/?#\s]+(?=@)")
_PARAMETER = re.compile(r"(?<=[?&])([^?&=#\s]+)=([^?&#\s]+)")  # in https://host/?api_key=k&n=1
_SECRET_PARAMETER = frozenset({"key", "sig", "signature", "auth"})
_BEARER = re.compile(r"\b(bearer\s+)(?=[^\s'\"]*\d)[\w.~+/=-]{8,}", re.IGNORECASE)
_ASSIGNED = re.compile(r"""([\w.-]*\w)(['"`]?\s*[:=]\s*[\[({]*)""")
_ITEM = r"""(?=\S)[^,;}\])'"\n]*(?:'[^']*'|"[^"]*")?"""
_VALUE = re.compile(  # all items of a list or mapping
    rf"""(?<=[\[({{]){_ITEM}(?:\s*,\s*{_ITEM})*|(?:(?:bearer|basic)\s+)?(?:'[^']*'?|"[^"]*"?|[^\s,;}}\]'"]+)""",
    re.IGNORECASE,
)
_OPTION = re.compile(r"(?<!\S)(--[A-Za-z][\w-]*)(\s+)(?!-)([^\s,;}\])'\"]+)")  # an option and its value
_NEXT_SETTING = re.compile(r",(?=[A-Za-z_][\w.-]*=)")  # a comma elsewhere belongs to the value before it
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?[.:`)]*", re.IGNORECASE)  # and the end of a sentence
_SHORTEST = 4  # characters of a secret that is searched for in other text


def is_secret(name: str) -> bool:
    """Return whether a text under ``name`` is secret: ``api_key``, ``HF_TOKEN``, ``auth-header``."""
    words = _words(name)
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _SECRET_WORDS or last.rstrip("s").endswith(_SECRET_ENDS):
        return True
    singular = _PLURAL.get(last, last)
    if singular == "key" and last == "keys" and not before:
        return False  # a list of column names
    return singular in _NOT_BEFORE and before not in _NOT_BEFORE[singular]


def _words(name: str) -> list[str]:
    """Return the words of the last part of a dotted name, up to the deciding word."""
    parts = [part for part in name.split(".") if part and not part.isdigit()]
    words = [word.lower() for word in _WORDS.findall(parts[-1] if parts else "")]
    while len(words) > 1 and (words[-1] in _TAILS or _numbers(words)):
        words.pop()
    return words


def _numbers(words: list[str]) -> bool:
    """Return whether the last word numbers the one before it; in `pass@8` it does not."""
    return words[-1].isdigit() and words[-2] not in ("at", "pass")


def masked(value: Any) -> Any:
    """Return a copy of plain mappings and lists with *** for each secret.

    {"api_key": "k", "max_tokens": 8, "base_url": "http://me:pw@host/v1?token=t"}
        -> {"api_key": "***", "max_tokens": 8, "base_url": "http://***@host/v1?token=***"}
    """
    if isinstance(value, str):
        text = _PARAMETER.sub(_masked_parameter, _USER.sub(HIDDEN, value))
        return _BEARER.sub(rf"\1{HIDDEN}", text)
    if isinstance(value, dict):
        return {
            key: _hidden(str(key), inner) if is_secret(str(key)) else masked(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    return value


def masked_setting(argument: str) -> str:
    """Return a word of a command line with *** for a secret in it.

    judge.api_key=k -> judge.api_key=***, judge={api_key: k} -> judge={api_key: '***'},
    --env=HF_TOKEN=k -> --env=HF_TOKEN=***, --api-key=k -> --api-key=***
    """
    key, sign, value = argument.partition("=")
    if not sign:
        return masked_text(argument)
    if is_secret(key):
        return f"{key}={masked({key: value})[key]}"
    if key.startswith("-"):  # a value that is itself one or several settings: --export=ALL,HF_TOKEN=k
        parts = [value] if key == "--env" else _NEXT_SETTING.split(value)
        return f"{key}=" + ",".join(masked_setting(part) for part in parts)
    try:
        read = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):  # also refused as a setting
        read = None
        value = masked_text(value)
    if isinstance(read, dict | list) and masked(read) != read:
        return f"{key}={yaml.safe_dump(masked(read), default_flow_style=True, width=float('inf')).strip()}"
    return f"{key}={masked(value)}"


def masked_command(arguments: Iterable[str]) -> list[str]:
    """Return the words of a command line without secrets, including values in a separate word:
    ``--api-key k``, ``--env HF_TOKEN=k``.
    """
    words: list[str] = []
    hide_next = False
    for word in arguments:
        hide_this = hide_next and not word.startswith("-")
        words.append(HIDDEN if hide_this else masked_setting(word))
        hide_next = word.startswith("--") and "=" not in word and _takes_secret(word)
    return words


def _takes_secret(option: str) -> bool:
    """Return whether an option's value is a secret. `--secret` of grpo-dist takes the name of a Secret."""
    return is_secret(option) and option != "--secret"


def masked_text(text: str, *trees: Any) -> str:
    """Mask secrets in a message: values that it assigns to secret names, and every secret value in ``trees``
    (plain mappings and lists).
    """
    values = sorted({value for tree in trees for value in secret_values(tree)}, key=len, reverse=True)
    for value in values:
        text = text.replace(value, HIDDEN)
    return str(masked(_OPTION.sub(_masked_option, _mask_assigned(text))))


def shown_value(location: Iterable[Any], value: Any) -> str:
    """Return a refused value at ``location``, e.g. ``("kwargs", "api_key")``, as shown in messages. A number
    of ``tokens`` is shown.
    """
    secret = [str(part) for part in location if is_secret(str(part))]
    if secret and not (all(map(_counts, secret)) and isinstance(value, int | float)):
        return HIDDEN
    return repr(masked_text(value) if isinstance(value, str) else masked(value))


def shown_setting(name: str, value: Any) -> str:
    """Return ``value`` of the argument ``name`` as shown in messages: a text without quotes."""
    if isinstance(value, str) and not is_secret(name):
        return masked_text(value)
    return shown_value((name,), value)


def secret_values(tree: Any) -> Iterator[str]:
    """Yield texts of ``tree`` that `masked` hides and that are longer than a few characters."""
    yield from _changed(tree, masked(tree))


def secret_keys(tree: Any) -> list[str]:
    """Return the dotted keys of ``tree`` whose values `masked` hides, or has hidden."""
    # *** of a secret is hidden again, *** in other text is not. Bearer tokens have a digit.
    plain = json.loads(json.dumps(tree).replace(HIDDEN, "h1dden-value"))
    before, after = flat(plain), flat(masked(plain))
    return [key for key in before if before[key] != after[key]]


def hidden_keys(tree: Any) -> list[str]:
    """Return the dotted keys of ``tree`` in which `masked` has hidden a secret."""
    if HIDDEN not in str(tree):
        return []
    before, after = flat(tree), flat(masked(tree))
    return [key for key in secret_keys(tree) if before[key] == after[key]]


def _changed(value: Any, masked_value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key in value:
            yield from _changed(value[key], masked_value[key])
    elif isinstance(value, list):
        for one, other in zip(value, masked_value, strict=True):
            yield from _changed(one, other)
    elif value != masked_value and len(str(value)) >= _SHORTEST:
        yield str(value)
        if masked_value != HIDDEN:  # only a part of a URL or header is secret
            yield from (part for part in _parts(str(value)) if len(part) >= _SHORTEST)


def _parts(text: str) -> Iterator[str]:
    """Yield the secrets inside a longer text; for user:password also the password."""
    for user in _USER.findall(text):
        yield user
        yield user.partition(":")[2]
    for name, value in _PARAMETER.findall(text):
        if _is_secret_parameter(name):
            yield value
    for match in _BEARER.finditer(text):
        yield match[0][len(match[1]) :]


def _hidden(key: str, value: Any) -> Any:
    """Return ``value`` of a secret ``key`` with *** for everything in it except null, "", true and false. A
    number is secret as a password or API key; under `end_token` it is a token's id.
    """
    if isinstance(value, dict):
        return {inner: _hidden(key, inner_value) for inner, inner_value in value.items()}
    if isinstance(value, list):
        return [_hidden(key, inner_value) for inner_value in value]
    if value in (None, "") or isinstance(value, bool):
        return value
    return value if not isinstance(value, str) and not _holds_numbers(key) else HIDDEN


def _holds_numbers(key: str) -> bool:
    words = _words(key)
    last = _PLURAL.get(words[-1], words[-1])
    if last in ("token", "tokens"):
        return False
    return last != "key" or (len(words) > 1 and words[-2] in _KEY_OWNERS)


def _counts(name: str) -> bool:
    """Return whether a number under ``name`` is a count: ``rewards.overlong_buffer.tokens``."""
    return _words(name) == ["tokens"]


def _is_secret_parameter(name: str) -> bool:
    return is_secret(name) or _WORDS.findall(name.lower())[-1:] in [[word] for word in _SECRET_PARAMETER]


def _masked_option(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}{HIDDEN}" if _takes_secret(match[1]) else match[0]


def _masked_parameter(match: re.Match[str]) -> str:
    return f"{match[1]}={HIDDEN}" if _is_secret_parameter(match[1]) else match[0]


def _mask_assigned(text: str) -> str:
    """Mask assigned values: ``api_key: k, auth: [a, b], n: 3`` -> ``api_key: ***, auth: [***], n: 3``"""
    parts, end = [], 0
    for match in _ASSIGNED.finditer(text):
        value = _VALUE.match(text, match.end())
        if match.start() < end or value is None or not is_secret(match[1]):
            continue
        if _counts(match[1]) and _NUMBER.fullmatch(value[0]) and not set(match[2]) & set("[({"):
            continue  # a list is of tokens
        if value[0].strip("'\"") not in ("", "null", "true", "false", "value", HIDDEN):
            parts += [text[end : value.start()], HIDDEN]
            end = value.end()
    return "".join(parts) + text[end:]
