"""One process per episode: state, deadlines, limits and ends; nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from grpo_dist.environments.sandbox import host as host_module
from grpo_dist.environments.sandbox import keeper
from grpo_dist.environments.sandbox.host import ProcessFailure, ProcessHost
from grpo_dist.environments.sandbox.isolation import Limits
from grpo_dist.runtime.processes import descendants
from tests.support.patience import HANG_S, wait_until
from tests.support.processes import alive, wait_until_gone

LIMITS = Limits(memory_mb=256, output_kb=4)
LONG = HANG_S


@asynccontextmanager
async def host(limits=LIMITS, program="programs:Counter", **arguments):
    process_host = ProcessHost(
        program, arguments, limits=limits, isolation=None, code_paths=[str(Path(__file__).parent)]
    )
    try:
        yield process_host
    finally:
        await process_host.close()


async def failure(request) -> ProcessFailure:
    with pytest.raises(ProcessFailure) as caught:
        await request
    return caught.value


def run(test):
    """Run an asynchronous test; then none of its processes may be alive."""

    def wrapped(*arguments, **keywords):
        asyncio.run(test(*arguments, **keywords))
        wait_until(lambda: not zygotes(), lambda: f"left: {zygotes()}")

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


def zygotes() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if "sandbox.zygote" in command(pid) and alive(pid)}


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@run
async def test_an_episode_keeps_its_state_and_episodes_share_none():
    async with host(begin=10) as it:
        assert await it.ask("a", "add", 1, timeout_s=LONG) == 11
        assert await it.ask("b", "add", 5, timeout_s=LONG) == 15
        assert await it.ask("a", "add_later", 1, timeout_s=LONG) == 12
        await it.end("a")
        await it.end("never seen")
        assert await it.ask("a", "add", 1, timeout_s=LONG) == 11
        assert it.is_live("a") and it.is_live("b")


@run
async def test_tasks_of_an_asynchronous_program_run_between_requests():
    with TemporaryDirectory() as directory:
        marker = Path(directory) / "counted"
        async with host() as it:
            await it.ask("a", "begins_to_count", str(marker), timeout_s=LONG)
            wait_until(marker.exists, "the task stood still between requests")
            assert await it.ask("a", "add", 1, timeout_s=LONG) == 4, "its SystemExit ended the process"


@run
async def test_requests_of_an_episode_run_one_after_the_other_and_of_several_at_once():
    async with host() as it:
        requests = [it.ask(str(i % 8), "add_later", 1, timeout_s=LONG) for i in range(64)]
        assert sorted(await asyncio.gather(*requests)) == sorted(list(range(1, 9)) * 8)


@run
async def test_what_is_printed_is_returned_with_its_middle_cut():
    async with host() as it:
        reply = await it.call("a", "prints", "first", timeout_s=LONG)
        assert sorted(reply.output.split()) == ["child", "error", "first"]
        reply = await it.call("a", "prints", "x" * 10_000_000, timeout_s=LONG)
        assert len(reply.output) < 5000 and "bytes of output cut" in reply.output


@run
async def test_errors_of_a_program_reach_the_caller_and_the_process_stays():
    async with host() as it:
        await it.ask("a", "add", 1, timeout_s=LONG)
        for kind, words in (("fails", "KeyError: 3"), ("exits", "SystemExit: 3"), ("not_json", "TypeError")):
            error = await failure(it.ask("a", kind, 3, timeout_s=LONG))
            assert (error.outcome, error.lost) == ("error", False) and words in error.detail
        assert await it.ask("a", "add", 1, timeout_s=LONG) == 2


@run
async def test_a_program_that_cannot_be_imported_or_made_is_an_error_that_gives_the_reason():
    async with host(program="programs:Counter", begin=-1) as it:
        error = await failure(it.ask("a", "add", 1, timeout_s=LONG))
        assert error.outcome == "error" and "begin is negative" in error.detail
    async with host(program="no_such_module:Counter") as it:
        error = await failure(it.start())
        assert error.outcome == "error" and "no_such_module" in error.detail


@run
async def test_an_import_has_as_long_as_is_configured_and_the_message_names_the_key():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_module, "START_S", 0.01)
        paths = [str(Path(__file__).parent)]
        for start_s in (0.0, LONG):
            it = ProcessHost(
                "programs:Counter", {}, limits=LIMITS, isolation=None, code_paths=paths, start_s=start_s
            )
            if start_s:
                await it.start()
            else:
                error = await failure(it.start())
                assert "preloaded within 0.01 s; raise `environments.timeout_s` above that" in error.detail
            await it.close()


@run
async def test_a_request_over_its_deadline_ends_its_process_alone():
    async with host() as it:
        await it.ask("b", "add", 1, timeout_s=LONG)
        for kind in ("sleeps", "burns"):
            await it.ask("a", "add", 1, timeout_s=LONG)
            error = await failure(it.ask("a", kind, 600, timeout_s=0.5))
            assert (error.outcome, error.lost) == ("timeout", True)
        assert await it.ask("a", "add", 1, timeout_s=LONG) == 1
        assert await it.ask("b", "add", 1, timeout_s=LONG) == 2


@run
async def test_what_was_printed_before_the_end_is_kept():
    async with host() as it:
        assert (await failure(it.ask("a", "dies", 3, timeout_s=LONG))).output == "last words\n"
        await it.ask("a", "add", 1, timeout_s=LONG)
        assert (await failure(it.ask("a", "sleeps", 600, timeout_s=1.0))).output in ("before\n", "")


@run
async def test_a_process_that_dies_is_an_outcome_and_the_next_request_begins_again():
    async with host() as it:
        await it.ask("a", "add", 1, timeout_s=LONG)
        error = await failure(it.ask("a", "dies", 3, timeout_s=LONG))
        assert (error.outcome, error.detail) == ("died", "the process ended with exit status 3")
        assert not error.infrastructure
        assert await it.ask("a", "add", 1, timeout_s=LONG) == 1
        os.kill(await it.ask("a", "pid", None, timeout_s=LONG), signal.SIGKILL)
        assert (await failure(it.ask("a", "add", 1, timeout_s=LONG))).outcome == "died"
        assert await it.ask("a", "add", 1, timeout_s=LONG) == 1


@run
async def test_a_process_that_died_between_requests_is_not_replaced_in_silence():
    async with host() as it:
        os.kill(await it.ask("a", "forks", None, timeout_s=LONG), signal.SIGKILL)
        while descendants(it._child.pid):
            await asyncio.sleep(0.01)
        assert (await failure(it.ask("a", "add", 1, timeout_s=LONG))).outcome == "died"
        assert await it.ask("a", "add", 1, timeout_s=LONG) == 1


@run
async def test_memory_over_the_limit_is_an_outcome_for_one_process_and_for_several():
    async with host(Limits(memory_mb=128)) as it:
        assert (await failure(it.ask("a", "hoards", 200, timeout_s=LONG))).outcome == "memory"
        assert await it.ask("a", "hoards", 50, timeout_s=LONG) == 50 * 2**20
        error = await failure(it.ask("b", "forks_and_hoards", 60, timeout_s=LONG))
        assert (error.outcome, error.lost) == ("memory", True)


@run
async def test_memory_that_is_taken_after_a_request_is_an_outcome_of_the_next_one():
    async with host(Limits(memory_mb=64)) as it:
        pids = await it.ask("a", "leaves_hoards", 24, timeout_s=LONG)
        assert not wait_until_gone(pids)
        error = await failure(it.ask("a", "add", 1, timeout_s=LONG))
        assert (error.outcome, error.lost) == ("died", True)
        assert error.detail == "after the last request: more than 64 MiB of memory, all processes together"
        assert await it.ask("a", "add", 1, timeout_s=LONG) == 1


@run
async def test_requests_that_are_shorter_than_the_time_between_two_measurements_are_measured():
    async def many(it):
        while True:
            await it.ask("a", "add", 1, timeout_s=LONG)

    async with host(Limits(memory_mb=128, cpu_s=0.5)) as it, asyncio.timeout(LONG):
        await it.ask("a", "leaves_a_loop", None, timeout_s=LONG)
        assert "more than 0.5 s of CPU time" in (await failure(many(it))).detail


@pytest.mark.slow
@run
async def test_cpu_time_over_the_limit_is_a_timeout():
    async with host(Limits(memory_mb=128, cpu_s=1.0)) as it:
        error = await failure(it.ask("a", "burns", None, timeout_s=LONG))
        assert error.outcome == "timeout" and "CPU time" in error.detail


@run
async def test_a_reply_that_is_too_large_is_refused():
    async with host(Limits(memory_mb=128, reply_kb=16)) as it:
        assert len(await it.ask("a", "repeat", 10_000, timeout_s=LONG)) == 10_000
        error = await failure(it.ask("a", "repeat", 20_000, timeout_s=LONG))
        assert error.outcome == "died" and "16 KiB" in error.detail
    async with host() as it:
        assert len(await it.ask("a", "repeat", 10_000_000, timeout_s=LONG)) == 10_000_000


@run
async def test_a_cancelled_request_ends_its_process_and_its_reply_meets_no_other_request():
    async with host() as it:
        await it.ask("a", "add", 1, timeout_s=LONG)
        request = asyncio.ensure_future(it.ask("a", "sleeps", 600, timeout_s=LONG))
        await asyncio.sleep(0.1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert await it.ask("a", "add", 1, timeout_s=LONG) == 1


@run
async def test_the_end_of_an_episode_is_the_end_of_all_it_started():
    async with host() as it:
        await it.ask("a", "leaves", None, timeout_s=LONG)
        below = set(filter(alive, descendants(it._child.pid)))
        assert len(below) == 4
        await it.end("a")
        assert wait_until_gone(sorted(below)) == []


@run
async def test_an_episode_that_is_ended_during_a_request_fails_that_request():
    async with host() as it:
        request = asyncio.ensure_future(it.ask("a", "sleeps", 600, timeout_s=LONG))
        while not it.is_live("a"):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await it.end("a")
        assert (await failure(request)).outcome == "died"


@run
async def test_a_killed_keeper_and_a_killed_zygote_leave_nothing_and_the_host_continues():
    async with host() as it:
        await it.ask("a", "leaves", None, timeout_s=LONG)
        zygote = it._child.pid
        below = descendants(zygote)
        parent = next(p for p in below if descendants(p))
        os.kill(parent, signal.SIGKILL)
        assert (await failure(it.ask("a", "add", 1, timeout_s=LONG))).outcome == "died"
        assert wait_until_gone(sorted(below)) == []
        await it.ask("a", "leaves", None, timeout_s=LONG)
        below = descendants(zygote)
        os.kill(zygote, signal.SIGKILL)
        assert wait_until_gone(sorted(below)) == []
        error = await failure(it.ask("a", "add", 1, timeout_s=LONG))
        assert error.outcome == "died" and error.infrastructure
        assert await it.ask("a", "add", 1, timeout_s=LONG) == 1


@run
async def test_a_zygote_that_dies_between_two_requests_is_reported_to_each_of_its_episodes_once():
    async with host() as it:
        for episode in ("a", "b", "ended"):
            assert await it.ask(episode, "add", 1, timeout_s=LONG) == 1
        os.kill(it._child.pid, signal.SIGKILL)
        while it._child is not None:
            await asyncio.sleep(0.01)
        assert await it.ask("new", "add", 1, timeout_s=LONG) == 1
        await it.end("ended")
        for episode, is_reported in (("a", True), ("b", True), ("ended", False)):
            assert it.is_live(episode) == is_reported
            if is_reported:
                error = await failure(it.ask(episode, "add", 1, timeout_s=LONG))
                assert (error.outcome, error.lost, error.infrastructure) == ("died", True, False)
            assert await it.ask(episode, "add", 1, timeout_s=LONG) == 1
        assert await it.ask("new", "add", 1, timeout_s=LONG) == 2


@asynccontextmanager
async def importing():
    """Yield a host that imports until the file ``gate`` exists, after a cancelled request, and ``gate``."""
    with tempfile.TemporaryDirectory() as directory:
        gate = Path(directory) / "gate"
        code = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        (Path(directory) / "gated.py").write_text(code + "from programs import Counter\n")
        paths = [directory, str(Path(__file__).parent)]
        it = ProcessHost("gated:Counter", {}, limits=LIMITS, isolation=None, code_paths=paths)
        request = asyncio.ensure_future(it.ask("a", "add", 1, timeout_s=LONG))
        while it._child is None:
            await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        try:
            yield it, gate
        finally:
            await it.close()


@run
async def test_a_first_request_that_is_cancelled_during_the_import_does_not_harm_later_ones():
    async with importing() as (it, gate):
        gate.touch()
        assert await it.ask("b", "add", 1, timeout_s=LONG) == 1
        await it.end("b")
        assert it._by_number == {}  # it has read the report of the zygote that nothing is left


@run
async def test_a_host_that_is_closed_during_the_import_does_not_wait_for_it():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_module, "START_S", 2 * HANG_S)
        async with importing() as (it, _):
            await it.close()
            assert it._child is None and it._start.done()


@run
async def test_a_zygote_that_hangs_is_replaced_and_its_episodes_fail_for_the_machine():
    async with host() as it:
        for full in (False, True):
            await it.ask("a", "add", 1, timeout_s=LONG)
            zygote = it._child.pid
            os.kill(zygote, signal.SIGSTOP)
            with suppress(BlockingIOError):
                while full:
                    it._control.send(b'{"do": "end", "episode": 0}')
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(host_module, "START_S", 0.5)
                error = await failure(it.ask("b", "add", 1, timeout_s=0.5))
            assert error.infrastructure and "did not answer within 0.5 s" in error.detail
            assert not alive(zygote)
            assert (await failure(it.ask("a", "add", 1, timeout_s=LONG))).outcome == "died"
            assert await it.ask("b", "add", 1, timeout_s=LONG) == 1
            await it.end("b")


OWNER = """
import asyncio, os, sys
from grpo_dist.environments.sandbox import keeper
from grpo_dist.environments.sandbox.host import ProcessHost
from grpo_dist.environments.sandbox.isolation import Limits

async def main():
    limits = Limits(memory_mb=128)
    host = ProcessHost("programs:Counter", {}, limits=limits, isolation=None, code_paths=[sys.argv[1]])
    await host.ask("a", "leaves", None, timeout_s=1000)
    print(host._child.pid, flush=True)
    await host.ask("b", "burns", None, timeout_s=1000)

asyncio.run(main())
"""


def test_all_processes_end_with_the_owner_that_is_killed():
    command = [sys.executable, "-c", OWNER, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            zygote = int(owner.stdout.readline())
            wait_until(lambda: sum(map(alive, descendants(zygote))) == 6, "the second episode did not start")
            below = sorted({zygote, *descendants(zygote)})
        finally:
            owner.kill()
    assert wait_until_gone(below) == []


def test_a_time_that_has_passed_is_no_wait_without_a_limit():
    assert keeper._milliseconds(0.25) == 251.0
    assert keeper._milliseconds(-0.25) == 1.0  # poll(-249) would wait forever


def test_a_code_path_that_is_no_directory_is_refused_by_name():
    with pytest.raises(ValueError, match=r"code_paths: '/no/such' is not a directory"):
        ProcessHost("a:B", {}, limits=LIMITS, isolation=None, code_paths=["/no/such"])
