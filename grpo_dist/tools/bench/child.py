"""A process that measures a limit: ``python -m grpo_dist.tools.bench.child DIRECTORY INDEX``."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import time
from pathlib import Path

from grpo_dist.runtime.stacks import listen


class Barrier:
    """Makes the processes of one limit wait for each other, so that they measure at the same time."""

    def __init__(self, directory: Path, index: int, count: int) -> None:
        self._directory, self._index, self._count, self._round = directory, index, count, 0

    def wait(self) -> None:
        """Return once all processes have called this as often."""
        if self._count == 1:
            return
        self._round += 1
        (self._directory / f"{self._round}-{self._index}.here").touch()
        others = [self._directory / f"{self._round}-{i}.here" for i in range(self._count)]
        while not all(other.exists() for other in others):
            if os.getppid() == 1:
                sys.exit("the benchmark has ended")
            time.sleep(0.0005)


def main() -> None:
    listen()
    directory, name = Path(sys.argv[1]), sys.argv[2]
    module, index, count, job = pickle.loads((directory / f"{name}.job").read_bytes())
    result = importlib.import_module(module).measure(Barrier(directory, index, count), **job)
    (directory / f"{name}.result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
