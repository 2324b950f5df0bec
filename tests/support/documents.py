"""The fenced blocks of the project's documents, and what the tests are told about them.

Above a block may stand a comment that a reader does not see:

    <!-- docs: run -->                       it is run as a reader would run it
    <!-- docs: run with steps=2 -->          the same with these overrides, to be short
    <!-- docs: parsed: needs a cluster -->   it is parsed only, and why

Without one, YAML is loaded, Python is executed, and a block that begins with `# NAME` is a file of that name
for the blocks that come after it in the document.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("grpo-dist", "make", "pip", "python", "docker")
_MARK = re.compile(
    r"<!-- docs: (?P<mode>run|parsed)(?: with (?P<overrides>[^:]+?))?(?:: (?P<reason>.+?))? -->"
)
_FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml|jsonl))$")


@dataclass(frozen=True)
class Block:
    """``mode``: run, parsed or "" (not said)."""

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
        """The name that its first line gives it."""
        named = _FILE.match(self.text.partition("\n")[0])
        return named[1] if named else None

    @property
    def is_shell(self) -> bool:
        return self.language in ("sh", "bash") or (not self.language and self.text.startswith(COMMANDS))

    @property
    def commands(self) -> list[str]:
        """One a line, continued lines joined, without comments and what explains options."""
        joined = self.text.replace("\\\n", " ")
        lines = (line.partition("  #")[0].rstrip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith(("#", " "))]

    @property
    def explained(self) -> list[str]:
        """Options that indented lines below a command tell of."""
        told = re.findall(r"^ +((?:--[\w-]+,? ?)+)", self.text, re.MULTILINE)
        return [option.strip(" ,") for line in told for option in line.split()]


def documents() -> list[Path]:
    """All that git knows, or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in sorted(set(listed.stdout.split())) if (ROOT / name).is_file()]


def blocks(path: Path) -> list[Block]:
    return list(_blocks(path.read_text(), str(path.relative_to(ROOT))))


def inline_commands(path: Path) -> list[str]:
    """Commands in the midst of a text: `make test`."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(rf"`((?:{'|'.join(COMMANDS)}) [^`]+)`", text)
    return [" ".join(command.split()) for command in found]


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
            document,
            at + 1,
            lines[at].removeprefix("```").strip(),
            "\n".join(lines[at + 1 : end]) + "\n",
            mark["mode"] if mark else "",
            tuple((mark["overrides"] or "").split()) if mark else (),
            (mark["reason"] or "") if mark else "",
        )
        at = end + 1
