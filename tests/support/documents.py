"""Finds the fenced blocks of the project's documents, and how the tests use each.

A comment above a block, hidden from readers, selects it:

    <!-- docs: run -->                            the tests run it as a reader would
    <!-- docs: run with steps=2 -->               the same with these overrides, to be short
    <!-- docs: parsed: needs a cluster -->        the tests only parse it; the reason follows
    <!-- docs: quoted: grpo_dist/driver.py -->    this file has its lines; ... skips some

Without a comment the tests load YAML and execute Python. A block that begins with `# NAME` is the file NAME
for later blocks of the document.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("grpo-dist", "make", "pip", "python", "docker", "py-spy")
_MARK = re.compile(
    r"<!-- docs: (?P<mode>run|parsed|quoted)(?: with (?P<overrides>[^:]+?))?(?:: (?P<reason>.+?))? -->"
)
_FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml|jsonl))$")


@dataclass(frozen=True)
class Block:
    """One fenced block. ``mode``: run, parsed, quoted, or "" without a comment."""

    document: str
    line: int
    language: str
    text: str
    mode: str
    overrides: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def file(self) -> str | None:
        """Return the file name in its first line, or None."""
        named = _FILE.match(self.text.partition("\n")[0])
        return named[1] if named else None

    @property
    def is_shell(self) -> bool:
        return self.language in ("sh", "bash") or (not self.language and self.text.startswith(COMMANDS))

    @property
    def commands(self) -> list[str]:
        """Return one command per line: continued lines joined, comments and indented lines left out."""
        joined = self.text.replace("\\\n", " ")
        lines = (line.partition("  #")[0].rstrip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith(("#", " "))]

    @property
    def explained(self) -> list[str]:
        """Return the options that indented lines below a command explain."""
        lines = re.findall(r"^ +((?:--[\w-]+,? ?)+)", self.text, re.MULTILINE)
        return [option.strip(" ,") for line in lines for option in line.split()]


def documents() -> list[Path]:
    """Return every Markdown file that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in sorted(set(listed.stdout.split())) if (ROOT / name).is_file()]


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of one document."""
    return list(_blocks(path.read_text(), str(path.relative_to(ROOT))))


def inline_commands(path: Path) -> list[str]:
    """Return the commands within sentences, such as `make test`."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    matches = re.findall(rf"`((?:{'|'.join(COMMANDS)}) [^`]+)`", text)
    return [" ".join(command.split()) for command in matches]


def is_quoted(quote: str, source: str) -> bool:
    """Return whether ``source`` has the lines of ``quote`` in this order; ``...`` skips lines of the source.
    The quote may be indented less than the source.
    """
    wanted, lines = quote.splitlines(), source.splitlines()
    starts = [i for i, line in enumerate(lines) if line.strip() == wanted[0]]
    return any(_follows(wanted, lines[start:]) for start in starts)


def _follows(wanted: list[str], lines: list[str]) -> bool:
    indent = lines[0].removesuffix(lines[0].lstrip())
    at, may_skip = 0, False
    for line in wanted:
        if line.strip() == "...":
            may_skip = True
            continue
        index = next((i for i, source in enumerate(lines[at:], at) if source == indent + line), None)
        if index is None or (index != at and not may_skip):
            return False
        at, may_skip = index + 1, False
    return True


def _blocks(text: str, document: str) -> Iterator[Block]:
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].startswith("```"):
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("```"))
        above = next((line for line in reversed(lines[:at]) if line.strip()), "")
        mark = _MARK.fullmatch(above.strip())
        yield Block(
            document, at + 1, lines[at].removeprefix("```").strip(), "\n".join(lines[at + 1 : end]) + "\n",
            mark["mode"] if mark else "", tuple((mark["overrides"] or "").split()) if mark else (),
            (mark["reason"] or "") if mark else "",
        )  # fmt: skip
        at = end + 1
