"""Check in a separate process, without an engine, whether vLLM accepts an engine's arguments.

{"own": {...}, "whole": {...} or null}   on standard input
["`rollout.engine.blok_size`: ..."]      the last line of standard output
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from pydantic import TypeAdapter, ValidationError

from actors.workers.engine_settings import set_environment
from grpo_dist.config.secrets import masked_text, shown_setting, shown_value


def argument_problems(arguments: Mapping[str, Any], argument_types: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem per wrong argument. ``arguments``: `rollout.engine`; ``argument_types``: vLLM's."""
    for name, value in arguments.items():
        prefix = f"`rollout.engine.{name}` = {shown_value((name,), value)}"
        if name not in argument_types:
            near = difflib.get_close_matches(name, argument_types, n=1)
            hint = f"did you mean `rollout.engine.{near[0]}`?" if near else "remove it"
            yield f"{prefix}: vLLM's engine has no such argument; {hint}"
        elif complaint := _type_problem(value, argument_types[name]):
            yield f"{prefix}: {complaint}"


def _type_problem(value: Any, annotation: Any) -> str | None:
    if isinstance(annotation, str):  # a type that only type checkers know
        return None
    try:
        read = TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "enum":  # vLLM looks these up by name
            return None
        where = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
        return f"{f'{where}: ' if where else ''}{first['msg'].lower()}"
    except Exception:  # pydantic has no schema for the type
        return None
    is_scalar = isinstance(value, bool | int | float | str) and not isinstance(read, Enum)
    if is_scalar and type(read) is not type(value) and not (isinstance(read, float) and type(value) is int):
        return f"input should be {type(read).__name__}, not {type(value).__name__}"
    return None


def whole_problem(arguments: Mapping[str, Any], user_arguments: Mapping[str, Any]) -> str | None:
    """Return why vLLM refuses the engine configuration of all ``arguments``; None: it accepts them."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(**arguments).create_engine_config()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        complaint = f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")
    except Exception as error:  # any error here would end the engine
        complaint = f"{type(error).__name__}: {error}"
    else:
        return None
    settings = ", ".join(f"{name}={shown_setting(name, value)}" for name, value in user_arguments.items())
    complaint = masked_text(" ".join(complaint.split()), dict(user_arguments))
    return f"`rollout.engine` ({settings}): vLLM refuses the engine: {complaint}"


def known_arguments() -> dict[str, Any]:
    """Return the types of the engine's arguments, without arguments of vLLM's server."""
    from vllm.engine.arg_utils import EngineArgs

    return {f.name: f.type for f in dataclasses.fields(EngineArgs) if not f.name.startswith("_")}


def main() -> None:
    request = json.load(sys.stdin)
    set_environment()
    problems = list(argument_problems(request["own"], known_arguments()))
    if not problems and request["whole"] is not None:
        problems = [problem for problem in [whole_problem(request["whole"], request["own"])] if problem]
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
