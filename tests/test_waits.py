"""What `make lint` refuses: calls that block a thread for as long as another likes."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("check_waits", ROOT / "launch" / "check_waits.py")
check_waits = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_waits)


@pytest.mark.parametrize(
    "line",
    [
        "ray.get(ref)",
        "ray.get(ref, timeout=5)",
        "queue.get()",
        "thread.join()",
        "future.result()",
        "process.wait()",
        "process.communicate()",
        "subprocess.run(['ls'])",
        "dist.barrier()",
        "torch.distributed.all_gather_object(found, own)",
        "dist.all_to_all_single(out, x, timeout=5)",
        "dist.reduce_scatter_tensor(out, x)",
        "queue.get(True)",
        "queue.get(block=True)",
        "socket.accept()",
        "x = [future.result() for future in futures]",
    ],
)
def test_an_unbounded_wait_is_found_with_its_line(line):
    assert [number for number, _ in check_waits.unbounded(f"import x\n{line}\n")] == [2]
    assert not list(check_waits.unbounded(f"import x\n{line}  # bounded: it is done\n"))


@pytest.mark.parametrize(
    "line",
    [
        "queue.get(timeout=1)",
        "mapping.get('key')",
        "mapping.get('key', True)",
        "dist.get_rank()",
        "thread.join(5)",
        "', '.join(names)",
        "os.path.join(a, b)",
        "future.result(timeout=2)",
        "subprocess.run(['ls'], timeout=3)",
        "async def f():\n    await queue.get()",
    ],
)
def test_what_ends_by_itself_is_left_alone(line):
    assert not list(check_waits.unbounded(line))


def test_rays_waits_are_not_imported_by_name():
    assert list(check_waits.unbounded("import ray\nfrom ray import get, kill")) == [(2, "ray.get")]


def test_the_code_has_none(capsys):
    assert check_waits.main([str(ROOT / "grpo_dist"), str(ROOT / "actors")]) == 0, capsys.readouterr().out
