"""The base class of all sections, and the number ranges of their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
DirectoryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
CodePaths = Annotated[tuple[str, ...], Field(exclude=True)]  # `code_paths` of the run, for its actors
# vLLM raises lower temperatures to this one, while the trainer's log-probs would use the lower one.
LOWEST_TEMPERATURE = 0.01
Temperature = Annotated[float, Field(ge=LOWEST_TEMPERATURE)]


def _greedy_or_warm(value: float) -> float:
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(
            f"{value:g} is below {LOWEST_TEMPERATURE:g}, and the engine would raise it; set 0 (greedy) "
            f"or at least {LOWEST_TEMPERATURE:g}"
        )
    return value


TopP = Annotated[float, Field(gt=0, le=1)]
TOP_P = "sample from the likeliest tokens with this total probability; 1: from all"
TopK = Annotated[int, Field(ge=-1), AfterValidator(lambda value: max(value, 0))]
TOP_K = "sample from this many likeliest tokens; 0 or -1: from all"
EvaluationTemperature = Annotated[float, Field(ge=0.0), AfterValidator(_greedy_or_warm)]

_WHOLE = 2**31 - 1
# Upper limits by the unit suffix of a key. Timers, process limits and sizes in bytes overflow above them.
_LARGEST = {"_s": 1e8, "_mb": 2**30, "_mib": 2**30, "_gib": 2**20}
_FLOAT = (1e-30, 1e30)  # range of magnitudes that float32 can compute with


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _bool_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans for numbers: pydantic converts true to 1."""
        if _takes_only_numbers(cls, str(info.field_name)):
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
                raise ValueError(f"{_format_number(item)} {problem}")
        return value

    @model_validator(mode="after")
    def _has_no_contradiction(self) -> Self:
        """Refuse the section with the first of its contradictions."""
        for message in self._contradictions():
            raise ValueError(message)
        return self

    def _contradictions(self) -> Iterator[str]:
        """Yield a message for keys of this section that contradict each other. Only the first is read, so
        later checks may rely on earlier ones.
        """
        yield from ()


@cache
def _takes_only_numbers(section: type[Section], name: str) -> bool:
    kinds = set(_kinds(section.model_fields[name].annotation))
    return bool(kinds & {int, float}) and bool not in kinds


USER_SUPPLIED = "user-supplied code"  # label of the member of a tagged union that takes other names


class Choice(Section):
    """A member of a tagged union. Its field ``tag`` is a Literal of the names that choose it. In the member
    for user-supplied code, that field takes any text.
    """

    tag: ClassVar[str] = "name"
    bare: ClassVar[str | None] = None  # the field that a bare text sets; None: `tag`

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names that choose this member, as written in a file; () for user-supplied code."""
        return tuple(map(_name, _literals(cls.model_fields[cls.tag].annotation)))

    @model_serializer(mode="wrap")
    def _add_name(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keep the name where unset or default values are excluded: the other keys depend on it."""
        return {self.tag: getattr(self, self.tag), **dump(self)}

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings of the member, without the tag and the `kwargs` of user-supplied code."""
        fields = type(self).model_fields
        return {name: getattr(self, name) for name in fields if name not in (self.tag, "kwargs")}


PLAIN = "a plain value"  # label of a value that is no member of its tagged union


class Tagged:
    """Annotates a union of `Choice`s: ``loss: Annotated[PPOClip | SAPO | UserLoss, Tagged()] = PPOClip()``.

    In a file ``loss: sapo`` is short for ``loss: {name: sapo}``. A mapping without a name gets the first
    member's first name, the default. `config.files` merges by the name. A union may also take a number:
    ``temperature: Annotated[float | Scheduled | Adaptive, Tagged()] = 1.0``.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        union = members(source)
        tag, labels = union[0].tag, dict[str, CoreSchema]()
        for member in union:
            labels |= dict.fromkeys(member.names() or (USER_SUPPLIED,), handler.generate_schema(member))
        plain = [part for part in get_args(source) if not _is_choice(part)]
        if plain:
            (number,) = plain
            labels[PLAIN] = handler.generate_schema(number)

        def label(value: Any) -> Any:
            if plain and not isinstance(value, str | Mapping | Choice):
                return PLAIN
            name = value.get(tag) if isinstance(value, Mapping) else getattr(value, tag, None)
            name = _name(name) if isinstance(name, bool) else name
            return name if name in labels or USER_SUPPLIED not in labels else USER_SUPPLIED

        def as_mapping(value: Any) -> Any:
            if is_bare(value, union):
                value = {union[0].bare or tag: value}
            if isinstance(value, Mapping):
                field = union[0].model_fields[tag]
                return value if field.is_required() else {tag: field.default, **value}
            if not isinstance(value, union) and not plain:
                raise PydanticCustomError("tagged_type", "Input should be a name or a mapping")
            return value

        return core_schema.no_info_before_validator_function(
            as_mapping, core_schema.tagged_union_schema(labels, discriminator=label)
        )


def members(annotation: Any) -> tuple[type[Choice], ...]:
    """Return the members of a tagged union, also if it is optional or takes a number; () for any other
    annotation.
    """
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not NoneType]
        if len(parts) == 1:
            return members(parts[0])
        return tuple(inner for part in parts for inner in (members(part) or (part,)) if _is_choice(inner))
    return ()


def _is_choice(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Choice)


def is_bare(value: Any, union: Sequence[type[Choice]]) -> bool:
    """Return whether ``value`` is short for a mapping: a name, or a switch's true or false."""
    if isinstance(value, bool):
        return any(value is choice for member in union for choice in choices(member, member.tag))
    return isinstance(value, str)


def member_called(union: Sequence[type[Choice]], name: str) -> type[Choice] | None:
    """Return the member of ``union`` that ``name`` chooses, else the member for user-supplied code; None:
    the union has no such member.
    """
    by_name = (member for member in union if name in member.names())
    return next(by_name, next((member for member in union if not member.names()), None))


def tagged_unions(section: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], tuple[type[Choice], ...]]]:
    """Yield path and members of every tagged union of ``section``, outer unions first; "*" stands for the
    entries of a list or mapping: (("rewards", "functions", "*"), members).
    """
    for name, field in section.model_fields.items():
        yield from _tagged_unions(field.annotation, (name,))


def _tagged_unions(
    annotation: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[type[Choice], ...]]]:
    if union := members(annotation):
        yield path, union
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from ((path + inner, union) for inner, union in tagged_unions(annotation))
    elif get_origin(annotation) in (tuple, list, dict):
        yield from _tagged_unions(
            get_args(annotation)[-1 if get_origin(annotation) is dict else 0], (*path, "*")
        )
    elif get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from _tagged_unions(part, path)


def choices(section: type[BaseModel], field: str) -> tuple[Any, ...]:
    """Return the built-in names of a field: the values of its Literal, or the names of the members of its
    tagged union.
    """
    annotation = section.model_fields[field].annotation
    if union := members(annotation):
        return tuple(name for member in union for name in member.names())
    return tuple(_literals(annotation))


def repeated(names: Sequence[str]) -> list[str]:
    """Return the names that occur more than once, in order."""
    return [name for name, count in Counter(names).items() if count > 1]


def _name(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _items(value: Any) -> Iterator[Any]:
    """Yield the single values of a nested list: [[0, 1.0], [5, 0.8]] -> 0, 1.0, 5, 0.8"""
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


def _format_number(number: float) -> str:
    return str(number) if isinstance(number, int) and abs(number) <= 10**12 else f"{number:g}"
