"""The page: HTML, styles, scripts and, unless served, all data in one file.

Data are embedded as base64 of compressed JSON, without HTML's special characters. So no model output can end
a script or start a tag; scripts insert it as text, never as markup.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Generator, Iterator, Sequence
from importlib.resources import files
from typing import Any

from grpo_dist.observe.catalogue import patterns
from grpo_dist.runtime import __version__
from grpo_dist.tools.report.source import ReportLimits, Source

_STYLES = ("vendor/uPlot.min.css", "vendor/tabulator.min.css", "report.css")
# Order of the charts; metrics of other namespaces follow.
_NAMESPACES = (
    "eval", "reward", "outcome", "group", "pool", "rollout", "episode", "policy", "loss", "ref", "mismatch",
    "probe", "correction", "time", "throughput", "memory", "health", "restarts",
)  # fmt: skip
_SCRIPTS = (
    "vendor/uPlot.min.js",
    "vendor/tabulator.min.js",
    "data.js",
    "widgets.js",
    "series.js",
    "curves.js",
    "timeline.js",
    "index.js",
    "rollouts.js",
    "tokens.js",
    "episode.js",
    "group.js",
    "about.js",
    "main.js",
)


def whole_page(sources: Sequence[Source], limits: ReportLimits) -> Iterator[str]:
    """Yield the page with its data, holding at most one part of a table in memory."""
    manifests, shown = [source.manifest() for source in sources], []
    yield _head(sources)
    for number, (source, manifest) in enumerate(zip(sources, manifests, strict=True)):
        for kind in ("metrics", "clock", "spans", "events"):
            for i, version in enumerate(manifest[kind]):
                if version is not None:
                    yield _embedded(f"{number}/{kind}/{i}", source.piece(f"{kind}/{i}"))
        most = limits.tokens // len(sources)
        room = _SAMPLES // len(sources) if limits.rollouts is None else None
        readable, rollouts, unreadable = yield from _samples(number, source, manifest["samples"], room)
        samples, without = yield from _token_values(number, source, readable, most)
        about = manifest["about"]
        left_out = about["left_out"] | {"rollouts": about["left_out"]["rollouts"] + rollouts}
        notices = [*about["notices"], *unreadable, *source.unread(), *without]
        about = about | {"token_limit": most, "notices": notices, "left_out": left_out}
        shown.append(manifest | {"samples": samples, "about": about})
    yield _tail({"live": False, "runs": shown})


def _catalogue() -> list[tuple[str, str, str, str]]:
    """Return (regular expression, unit, meaning, advice) of each metric, most specific first.

    Backticks, the only markdown in the catalogue, are removed.
    """
    return [
        (pattern.pattern, metric.unit, metric.meaning.replace("`", ""), metric.look_for.replace("`", ""))
        for pattern, metric in patterns()
    ]


def live_page(sources: Sequence[Source]) -> str:
    """Return the page without data; it fetches them from the server."""
    return _head(sources) + _tail({"live": True, "runs": []})


_SAMPLES = 20_000_000  # maximum bytes of samples in a page
_Table = list[dict[str, Any]]  # the manifest's entries for parts


def _samples(
    number: int, source: Source, entries: _Table, room: int | None
) -> Generator[str, None, tuple[_Table, int, list[str]]]:
    """Yield the samples, newest parts first. Return the entries of readable parts, the number of rollouts
    that did not fit into ``room`` bytes (None: all fit), and notices of unreadable parts.
    """
    readable, notices = _Table(), list[str]()
    left_out, size = 0, 0
    for entry in reversed(entries):
        part = source.parts[entry["key"]]
        if left_out:
            left_out += len(part.rows)
            continue
        try:
            pieces = source.pieces_of(part)
        except (OSError, ValueError) as error:  # includes pyarrow's errors
            notices.append(f"{part.key}: cannot be read ({error})")
            continue
        texts = [_embedded(f"{number}/{kind}/{part.key}", piece) for kind, piece in pieces.items()]
        size += sum(map(len, texts))
        if room is not None and size > room and readable:
            left_out += len(part.rows)
            continue
        readable.append(entry)
        yield from texts
    return readable[::-1], left_out, notices


def _token_values(
    number: int, source: Source, entries: _Table, most: int
) -> Generator[str, None, tuple[_Table, list[str]]]:
    """Yield token values. Return ``entries`` marked by whether they have values, and the reasons if not."""
    keys, valued, notices, left = {entry["key"] for entry in entries}, set(), [], most
    too_large: list[str] = []
    for part in source.select_with_values(most):
        if part.key not in keys or left <= 0:
            continue
        try:
            piece, left, ends_early = source.values(part, left, most)
        except (OSError, ValueError) as error:
            notices.append(f"no token values: {error}")
            continue
        too_large += [part.key] if ends_early else []
        if piece is not None:
            valued.add(part.key)
            yield _embedded(f"{number}/tokens/{part.key}", piece)
    if too_large:
        notices.append(
            f"no token values from a group with more than {most:,} tokens on, in {len(too_large)} table(s), "
            f"e.g. {too_large[0]}; raise --token-values"
        )
    return [entry | ({"tokens": True} if entry["key"] in valued else {}) for entry in entries], notices


def _embedded(name: str, piece: bytes) -> str:
    text = base64.b64encode(piece).decode()
    return f'<script type="application/octet-stream" data-piece="{html.escape(name)}">{text}</script>\n'


def _head(sources: Sequence[Source]) -> str:
    title = "grpo-dist: " + ", ".join(source.run.label for source in sources)
    styles = "\n".join(_static(name) for name in _STYLES)
    body = _static("page.html").replace("VERSION", html.escape(__version__))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{_plain(title)}</title>\n'
        f"<style>\n{styles}\n</style>\n</head>\n<body>\n{body}\n"
    )


def _tail(manifest: dict[str, Any]) -> str:
    begin = {"manifest": manifest, "namespaces": _NAMESPACES, "catalogue": _catalogue()}
    # Escapes "<", which could end the script.
    data = json.dumps(begin, allow_nan=False).replace("<", "\\u003c")
    scripts = "\n".join(f"<script>\n{_static(name)}\n</script>" for name in _SCRIPTS)
    return f'<script type="application/json" id="begin">{data}</script>\n{scripts}\n</body>\n</html>\n'


def _static(name: str) -> str:
    return files("grpo_dist.tools.report").joinpath("static", name).read_text(encoding="utf-8")


def _plain(text: str) -> str:
    """Escape for HTML, and replace characters that UTF-8 cannot encode, as in file names."""
    return html.escape(text.encode("utf-8", "replace").decode())
