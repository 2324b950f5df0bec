"""Programs of tests, for `ProcessHost`."""

import asyncio
import os
import subprocess
import sys
import time


class Attempt:
    """Runs code and reports whether it was refused."""

    def handle(self, kind, payload):
        try:
            exec(payload, {})
        except Exception as error:
            return f"refused {type(error).__name__}: {error}"
        return "reached"


class Counter:
    def __init__(self, begin: int = 0) -> None:
        if begin < 0:
            raise ValueError("begin is negative")
        self.value = begin

    def handle(self, kind, payload):
        return getattr(self, kind)(payload)

    def add(self, payload):
        self.value += payload
        return self.value

    async def add_later(self, payload):
        await asyncio.sleep(0.001)
        return self.add(payload)

    async def begins_to_count(self, payload):
        self.task = asyncio.create_task(self._count(payload))

    async def _count(self, path):
        for _ in range(3):
            await asyncio.sleep(0.01)
            self.add(1)
        with open(path, "w") as file:
            file.write("counted")
        raise SystemExit(3)

    def prints(self, payload):
        print(payload)
        os.write(2, b"error\n")
        subprocess.run(["echo", "child"], check=True)

    def repeat(self, payload):
        return "x" * payload

    def not_json(self, payload):
        return object()

    def fails(self, payload):
        raise KeyError(payload)

    def exits(self, payload):
        sys.exit(payload)

    def dies(self, payload):
        print("last words", flush=True)
        os._exit(payload)

    def forks(self, payload):
        """Leave a child behind; return the process."""
        if not os.fork():
            time.sleep(600)
        return os.getpid()

    def sleeps(self, payload):
        print("before", flush=True)
        time.sleep(payload)

    def burns(self, payload):
        9**9**9

    def hoards(self, payload):
        self.kept = bytearray(payload * 2**20)
        return len(self.kept)

    def forks_and_hoards(self, payload):
        for _ in range(4):
            if not os.fork():
                kept = bytearray(os.urandom(2**20) * payload)
                time.sleep(600)
                del kept
        time.sleep(600)

    def leaves_hoards(self, payload):
        """Leave children behind that take memory once this request is answered; return them."""
        pids = []
        for _ in range(4):
            if not (pid := os.fork()):
                time.sleep(0.05)
                kept = bytearray(os.urandom(2**20) * payload)
                time.sleep(600)
                del kept
            pids.append(pid)
        return pids

    def leaves_a_loop(self, payload):
        if not os.fork():
            while True:
                pass

    def leaves(self, payload):
        """Leave processes in new sessions, whose parents have ended."""
        for _ in range(2):
            if not (parent := os.fork()):
                os.setsid()
                if not os.fork():
                    time.sleep(600)
                os._exit(0)
            os.waitpid(parent, 0)
        return os.getpid()

    def environment(self, payload):
        return dict(os.environ)

    def directory(self, payload):
        return os.getcwd()

    def pid(self, payload):
        return os.getpid()
