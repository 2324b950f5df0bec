"""Tagged unions: the short form, merging by name, and messages about keys of another member."""

from typing import Annotated, Literal

import pytest
from omegaconf import OmegaConf
from pydantic import Field

from grpo_dist.config import files
from grpo_dist.config.base import Choice, Section, Tagged, tagged_unions
from grpo_dist.config.files import ConfigError, checked


class Clip(Choice):
    name: Literal["clip", "clip2"] = "clip"
    low: float = 0.2
    high: float = 0.3


class Soft(Choice):
    name: Literal["soft"] = "soft"
    tau: float = 1.0
    high: float = 2.0


class Plain(Choice):
    name: Literal["plain"] = "plain"


class User(Choice):
    name: str
    kwargs: dict[str, int] = Field({})


class First(Choice):
    tag = "function"
    function: Literal["first"]
    weight: float = 1.0


class Second(Choice):
    tag = "function"
    function: Literal["second"]


class Line(Choice):
    name: Literal["line"] = "line"
    points: int


class Curve(Choice):
    name: Literal["curve"] = "curve"
    start: float
    end: float = 1.0


class Root(Section):
    loss: Annotated[Clip | Soft | Plain | User, Tagged()] = Clip()
    more: Annotated[Clip | Soft, Tagged()] | None = None
    entries: tuple[Annotated[First | Second, Tagged()], ...] = ()
    shape: Annotated[float | Line | Curve, Tagged()] = 1.0
    by_source: dict[str, Annotated[Clip | Soft, Tagged()]] = Field({})


@pytest.fixture(autouse=True)
def unions(monkeypatch):
    monkeypatch.setattr(files, "_tagged_unions", lambda: list(tagged_unions(Root)))


def read(text, *overrides):
    return checked(OmegaConf.to_container(tree(text, *overrides), resolve=True), "c.yaml", Root)


def tree(text, *overrides):
    root = OmegaConf.create(text)
    for override in overrides:
        files.set_from_text(root, override)
    return root


def test_a_bare_name_is_short_for_a_mapping_and_a_mapping_without_a_name_has_the_default():
    root = read("{loss: soft, entries: [first, {function: second}], by_source: {a: {low: 1}, b: soft}}")
    assert root.loss == Soft() and root.entries == (First(function="first"), Second(function="second"))
    assert root.by_source == {"a": Clip(low=1), "b": Soft()}
    assert read("{loss: {low: 0.5}, more: {high: 2}}") == Root(loss=Clip(low=0.5), more=Clip(high=2))
    assert read("loss: {name: 'mine:f', kwargs: {k: 1}}").loss == User(name="mine:f", kwargs={"k": 1})
    assert Soft(tau=3).arguments == {"tau": 3, "high": 2.0}


@pytest.mark.parametrize("how", [{}, {"exclude_defaults": True}, {"exclude_unset": True}, {"mode": "json"}])
def test_what_is_written_is_read_again(how):
    root = Root(loss="soft", more={"name": "clip2", "low": 1}, entries=["second"], by_source={"x": "soft"})
    assert Root.model_validate(root.model_dump(**how)) == root


MERGED = [
    # the base; a mapping merged over it, by file and by override; the result
    ("loss: soft", "{loss: {tau: 2}}", Soft(tau=2)),
    ("loss: {name: soft, high: 3}", "{loss: {tau: 2}}", Soft(tau=2, high=3)),
    ("loss: {name: soft, high: 3}", "{loss: {name: soft, tau: 2}}", Soft(tau=2, high=3)),
    ("loss: {name: soft, tau: 3}", "{loss: soft}", Soft(tau=3)),
    ("loss: {name: soft, tau: 3}", "{loss: {name: clip, high: 1}}", Clip(high=1)),
    ("loss: {name: soft, tau: 3}", "{loss: plain}", Plain()),
    ("loss: {low: 1, high: 1}", "{loss: {name: soft}}", Soft()),
    ("loss: {low: 0}", "{loss: {name: clip, high: 1}}", Clip(low=0, high=1)),
    ("loss: {low: 0}", "{loss: {name: clip2, high: 1}}", Clip(name="clip2", high=1)),
    ("{}", "{loss: {high: 1}}", Clip(high=1)),
    ("loss: 'mine:f'", "{loss: {kwargs: {k: 1}}}", User(name="mine:f", kwargs={"k": 1})),
    ("loss: {name: 'mine:f', kwargs: {k: 1}}", "{loss: 'mine:g'}", User(name="mine:g")),
]


@pytest.mark.parametrize(("base", "over", "expected"), MERGED)
def test_a_mapping_with_another_name_replaces_and_one_with_the_same_or_none_merges(base, over, expected):
    first, second = OmegaConf.create(base), OmegaConf.create(over)
    before = OmegaConf.to_container(first), OmegaConf.to_container(second)
    assert checked(OmegaConf.to_container(files.merge(first, second)), "c.yaml", Root).loss == expected
    assert (OmegaConf.to_container(first), OmegaConf.to_container(second)) == before
    value = OmegaConf.create(over).loss
    text = value if isinstance(value, str) else OmegaConf.to_yaml(value, resolve=True)
    flow = text if isinstance(value, str) else str(OmegaConf.to_container(value)).replace("'", "")
    assert read(base, f"loss={flow}").loss == expected


@pytest.mark.parametrize(
    ("base", "overrides", "expected"),
    [
        ("{}", ["loss.high=0.28"], {"loss": Clip(high=0.28)}),
        ("loss: soft", ["loss.high=0.28"], {"loss": Soft(high=0.28)}),
        ("loss: {name: soft, tau: 3}", ["loss.name=clip"], {"loss": Clip()}),
        ("loss: {name: soft, tau: 3}", ["loss.name=soft"], {"loss": Soft(tau=3)}),
        ("{}", ["more.high=1"], {"more": Clip(high=1)}),
        ("more: null", ["more.name=soft", "more.tau=2"], {"more": Soft(tau=2)}),
        ("entries: [first]", ["entries.0.weight=2"], {"entries": (First(function="first", weight=2),)}),
        ("entries: [{function: first, weight: 2}]", ["entries.0=second"], {"entries": ("second",)}),
        ("entries: [first, first]", ["entries=[second]"], {"entries": ("second",)}),
        ("by_source: {a: soft}", ["by_source.a.tau=2"], {"by_source": {"a": Soft(tau=2)}}),
        ("by_source: {a: {low: 2}}", ["by_source={a: soft}"], {"by_source": {"a": Soft()}}),
        ("{more: '${loss}', loss: soft}", ["loss.tau=2"], {"loss": Soft(tau=2), "more": Soft(tau=2)}),
    ],
)
def test_overrides_merge_by_name_at_the_key_that_they_set(base, overrides, expected):
    assert read(base, *overrides) == Root(**expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loss: {tau: 1}", "`loss.tau` is no setting of loss clip; it takes low, high; soft has it"),
        ("loss: {name: soft, low: 1}", "no setting of loss soft; it takes tau, high; clip,"),
        ("loss: {name: plain, other: 1}", "`loss.other` is no setting of loss plain; it takes none"),
        ("loss: {hihg: 1}", "unknown key `loss.hihg`; did you mean `loss.high`?"),
        ("more: hard", "`more` = 'hard': input should be 'clip', 'clip2' or 'soft'"),
        ("more: {name: hard}", "`more` = 'hard': input should be 'clip', 'clip2' or 'soft'"),
        ("more: {name: hard, tau: 1}", "`more.name` = 'hard': input should be 'clip', 'clip2' or 'soft'"),
        ("shape: {name: hard, end: 1}", "`shape.name` = 'hard': input should be 'line' or 'curve'"),
        ("shape: {strat: 1}", "`shape.points` is missing: it has no default\n  `shape.strat` is no setting"),
        ("more: 3", "`more` = 3: input should be one of 'clip', 'clip2', 'soft', or a mapping with `name`"),
        ("entries: [{weight: 1}]", "`entries.0.function` is missing"),
        ("entries: [{function: second, weight: 1}]", "no setting of entries second; it takes none; first"),
        ("loss: {name: soft, tau: x}", "`loss.tau` = 'x': input should be a valid number"),
    ],
)  # fmt: skip
def test_a_message_names_the_key_the_chosen_name_and_who_takes_the_key(text, words):
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert words in str(refused.value)


def test_settings_of_another_member_name_it_in_one_line():
    with pytest.raises(ConfigError) as refused:
        read("shape: {start: 1, end: 2}")
    write = "write `shape: {name: curve, start: ..., end: ...}`"
    assert str(refused.value) == f"c.yaml: `shape` has start, end of name curve; {write}"
    with pytest.raises(ConfigError, match=r"`shape` has end of name curve.*\n.*`shape.ned` is no setting of"):
        read("shape: {end: 2, ned: 3}")
