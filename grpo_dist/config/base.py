"""The base class of all sections, and the number ranges of their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
DirectoryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
CodePaths = Annotated[tuple[str, ...], Field(description="the same list as `code_paths` at the top level")]
# vLLM raises lower temperatures to this one; the trainer would compute log-probs at another temperature.
LOWEST_TEMPERATURE = 0.01
Temperature = Annotated[float, Field(ge=LOWEST_TEMPERATURE)]


def _greedy_or_warm(value: float) -> float:
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(
            f"{value:g} is below {LOWEST_TEMPERATURE:g}, and the engine would raise it; set 0 (greedy) "
            f"or at least {LOWEST_TEMPERATURE:g}"
        )
    return value


EvaluationTemperature = Annotated[float, Field(ge=0.0), AfterValidator(_greedy_or_warm)]

_WHOLE = 2**31 - 1
# Upper limits by the unit suffix of a key. Timers, process limits and sizes in bytes overflow above them.
_LARGEST = {"_s": 1e8, "_mb": 2**30, "_mib": 2**30, "_gib": 2**20}
_FLOAT = (1e-30, 1e30)  # range of magnitudes that float32 can compute with


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _bool_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans for numbers: pydantic converts true to 1."""
        kinds = set(_kinds(cls.model_fields[str(info.field_name)].annotation))
        if kinds & {int, float} and bool not in kinds:
            for item in _items(value):
                if isinstance(item, bool):
                    raise ValueError(f"{str(item).lower()} is not a number; expected a number")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _number_fits(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        for item in _items(value):
            if isinstance(item, int | float) and (problem := _misfit(item, name)):
                raise ValueError(f"{_shown(item)} {problem}")
        return value

    @model_validator(mode="after")
    def _has_no_contradiction(self) -> Self:
        """Refuse the section with the first of its contradictions."""
        for message in self._contradictions():
            raise ValueError(message)
        return self

    def _contradictions(self) -> Iterator[str]:
        """Yield a message for keys of this section that contradict each other. Only the first is read, and
        checks behind one may rely on it.
        """
        yield from ()


def choices(section: type[BaseModel], field: str) -> tuple[Any, ...]:
    """Return the names that a field lists: those of its Literal, which are built in where it also takes
    others.
    """
    return tuple(_literals(section.model_fields[field].annotation))


def repeated(names: Sequence[str]) -> list[str]:
    """Return the names that stand more than once, in order."""
    return [name for name, count in Counter(names).items() if count > 1]


def _items(value: Any) -> Iterator[Any]:
    """Yield the single values of a list, also of lists in it: [[0, 1.0], [5, 0.8]] -> 0, 1.0, 5, 0.8"""
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _items(inner)
    else:
        yield value


def _literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    for inner in get_args(annotation):
        yield from _literals(inner)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types of single values that an annotation allows: tuple[int, ...] | None -> int, NoneType"""
    inner = get_args(annotation)
    if inner:
        for each in inner:
            yield from _kinds(each)
    elif isinstance(annotation, type):
        yield annotation


def _misfit(number: float, name: str) -> str | None:
    unit = next((unit for unit in _LARGEST if name.endswith(unit)), None)
    if unit is not None and abs(number) > _LARGEST[unit]:
        return f"is too large; expected at most {_LARGEST[unit]:.12g}"
    if isinstance(number, int):
        return f"is too large; expected at most {_WHOLE}" if abs(number) > _WHOLE else None
    least, most = _FLOAT
    if abs(number) > most:
        return f"is too large; expected at most {most:g}"
    return f"is too close to 0; expected 0 or at least {least:g}" if 0 < abs(number) < least else None


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) and abs(number) <= 10**12 else f"{number:g}"
