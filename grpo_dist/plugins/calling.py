"""Calls a piece with those of its inputs that it names, as rewards are called, and its own `kwargs`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import fields
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

_PLAIN = {"int": int, "float": float, "str": str, "bool": bool}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call(piece: Callable[..., Any], inputs: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call ``piece`` with the fields of the dataclass ``inputs`` that it has parameters for."""
    accepted, takes_all = _parameters(piece)
    given = {f.name: getattr(inputs, f.name) for f in fields(inputs) if takes_all or f.name in accepted}
    return piece(**given, **kwargs)


def call_in_time(
    piece: Callable[[], T], limit_s: float, what: str, consequence: str = "correct it, or raise the deadline"
) -> T:
    """Return what ``piece`` returns, from a thread of its own.

    Raises what it raises, and TimeoutError after ``limit_s`` seconds; its thread is then left to itself.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(piece())
        except BaseException as error:  # sys.exit of a user's code, too: it is reported, not obeyed
            done.set_exception(error)

    Thread(target=run, name=what, daemon=True).start()
    try:
        return done.result(limit_s)
    except TimeoutError as error:
        if done.done():  # its own
            raise
        raise TimeoutError(
            f"{what} did not return within `cluster.timeouts.own_code_s` = {limit_s:g} s; {consequence}"
        ) from error


def check_signature(
    piece: Callable[..., Any], inputs: type[Any], kwargs: Mapping[str, Any], what: str, where: str
) -> None:
    """Raise ValueError where ``piece`` cannot be called with ``inputs`` and ``kwargs``.

    Args:
        inputs: dataclass with the inputs of its kind.
        what: the piece, for messages.
        where: key of ``kwargs`` in the configuration, for messages.
    """
    accepted, takes_all = _parameters(piece)
    known = [f.name for f in fields(inputs)]
    for name, parameter in accepted.items():
        if parameter.kind not in _BY_NAME:
            raise ValueError(f"{what}: argument `{name}` is positional only; expected one with a name")
        if name not in known and name not in kwargs and parameter.default is inspect.Parameter.empty:
            raise ValueError(
                f"{what} needs `{name}`, which is no input of its kind ({', '.join(known)}) and not in "
                f"`{where}`; set `{where}.{name}`, or give it a default"
            )
    own = [name for name in accepted if name not in known]
    for name, value in kwargs.items():
        if name in known:
            raise ValueError(f"`{where}.{name}`: the run gives {what} this input; remove it")
        if name not in own and not takes_all:
            raise ValueError(
                f"`{where}.{name}`: {what} has no such argument; it takes {', '.join(own) or 'none'}"
            )
        if name in accepted and (expected := _misfit(accepted[name], value)):
            # Without the value, which may be a secret.
            given = type(value).__name__
            raise ValueError(f"`{where}.{name}`: {what} expects {expected}, and {given} is given")


def _parameters(piece: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the named parameters, and whether there is a ``**kwargs``."""
    found = inspect.signature(piece).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: p for name, p in found.items() if p.kind not in several}, takes_all


def _misfit(parameter: inspect.Parameter, value: Any) -> str | None:
    """Return the name of the type that ``value`` should have, by the annotation or else the default; None
    where it fits, or the type is not one of int, float, str and bool.
    """
    annotation = parameter.annotation
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if annotation is inspect.Parameter.empty:
        name = type(parameter.default).__name__
        name = "float" if name == "int" else name  # a default of 1 may stand for 0.5, too
    if name not in _PLAIN:
        return None
    allowed = (int, float) if name == "float" else _PLAIN[name]
    fits = isinstance(value, allowed) and (name == "bool" or not isinstance(value, bool))
    return None if fits else name
