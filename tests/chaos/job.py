"""The run: one command, restarted until it succeeds, and its output with timestamps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import psutil

from .find import MARK, Family
from .nodes import Nodes

CONFIG = Path(__file__).with_name("job.yaml")
_ROOT = CONFIG.parents[2]
_STEP = re.compile(r"step +(\d+)  ")


@dataclass(frozen=True)
class Line:
    at: float  # seconds of the monotonic clock
    launch: int  # 0 is the first
    text: str


@dataclass(frozen=True)
class End:
    at: float
    code: int  # as in `subprocess`: -n for signal n


def python_path() -> str:
    """Return the PYTHONPATH of the job's processes."""
    return os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))


class Job:
    """One training run over all its launches.

    Args:
        directory: its `output_dir`.
        temporary: directory of Ray's sessions; a short path, because it holds sockets.
        log: file that receives all output.
        nodes: cluster to run on; None: a private Ray.
    """

    def __init__(
        self, directory: Path, temporary: Path, log: Path, overrides: Sequence[str],
        nodes: Nodes | None = None,
    ) -> None:  # fmt: skip
        self._temporary, self._log, self._overrides = temporary, log, list(overrides)
        self.disk = directory
        self.run_dir = directory / "run"
        self.lines: list[Line] = []
        self.begins: list[float] = []
        self.ends: list[End] = []
        self.nodes = nodes
        if nodes is not None:
            self._overrides += [f"cluster.address={nodes.address}"]
        mark = uuid.uuid4().hex if nodes is None else nodes.mark
        self._environment = os.environ | {
            MARK: mark,
            "RAY_TMPDIR": str(temporary),
            "PYTHONPATH": python_path(),
        }
        self.family = Family(mark) if nodes is None else nodes.family()

    def launch(self) -> None:
        command = [sys.executable, "-m", "grpo_dist.cli", "train", str(CONFIG), f"output_dir={self.disk}"]
        command += [f"code_paths=[{_ROOT / 'tests/support'}]", *self._overrides]
        self._process = subprocess.Popen(
            command, cwd=self._temporary, env=self._environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        self.begins.append(time.monotonic())
        # Processes of a killed driver may keep the pipe open, so nothing waits for this thread.
        Thread(target=self._listen, args=(self._process, len(self.ends)), daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the driver."""
        return self._process.pid

    @property
    def driver(self) -> psutil.Process:
        return psutil.Process(self.pid)

    @property
    def is_up(self) -> bool:
        return len(self.begins) > len(self.ends)

    def poll(self) -> End | None:
        """Return the end of this launch, once."""
        if not self.is_up or (code := self._process.poll()) is None:
            return None
        self.ends.append(End(time.monotonic(), code))
        return self.ends[-1]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the driver, which may be gone."""
        self._process.send_signal(number)

    def steps(self) -> list[tuple[float, int]]:
        """Return (time, step) of every finished step, over all launches."""
        matches = ((line.at, _STEP.match(line.text)) for line in list(self.lines))
        return [(at, int(match[1])) for at, match in matches if match]

    def last_step(self) -> int:
        """Return the last finished step of all launches."""
        return max((step for _, step in self.steps()), default=0)

    def is_warm(self) -> bool:
        """Return whether a launch is running and has finished a step."""
        return self.is_up and self.was_warm()

    def was_warm(self) -> bool:
        """Return whether the last launch, running or ended, finished a step."""
        return any(at > self.begins[-1] for at, _ in self.steps())

    def output(self, launch: int) -> str:
        """Return all output of one launch."""
        return "\n".join(line.text for line in list(self.lines) if line.launch == launch)

    def _listen(self, process: subprocess.Popen[str], launch: int) -> None:
        assert process.stdout is not None
        with self._log.open("a") as log:
            for text in process.stdout:
                self.lines.append(Line(time.monotonic(), launch, text.rstrip("\n")))
                print(f"{launch}: {text}", end="", file=log, flush=True)
