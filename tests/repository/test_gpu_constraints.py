"""The GPU image installs the versions that torch, its CUDA libraries and vLLM require."""

import json
import re
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.wheel_metadata import FILE

ROOT = Path(__file__).resolve().parents[2]
PINNED = (ROOT / "docker/constraints-gpu.txt").read_text()
IMAGE = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux",
         "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}  # fmt: skip
WHEELS = json.loads(FILE.read_text())


def pins(text):
    pairs = (line.split("==") for line in text.splitlines() if line and line[0] != "#")
    return {canonicalize_name(name): version for name, version in pairs}


def required():
    """Yield the requirements of the wheels on the image, with the extras of cuda-toolkit that torch needs."""
    (toolkit,) = (
        r for line in WHEELS["torch"]["requires"] if (r := Requirement(line)).name == "cuda-toolkit"
    )
    extras = {"torch": {""}, "vllm": {""}, "cuda-toolkit": toolkit.extras | {""}}
    lines = chain.from_iterable(
        ((name, line) for line in wheel["requires"]) for name, wheel in WHEELS.items()
    )
    for name, line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate(IMAGE | {"extra": extra}) for extra in extras[name]):
            yield name, requirement


def contradictions(text):
    """Yield the requirements that ``text`` pins to a version that a wheel rejects, or does not pin."""
    pinned = pins(text)
    for name, requirement in required():
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield f"{name}: {requirement.name}{requirement.specifier}, not {version}"


def test_the_constraints_agree_with_what_the_wheels_require():
    assert len(set(required())) > 90 and list(contradictions(PINNED)) == []


@pytest.mark.parametrize(
    ("package", "version"),
    [("triton", "3.9.0"), ("nvidia-cuda-runtime", "13.5.37"), ("nvidia-cuda-nvrtc", "13.5.37"),
     ("setuptools", "84.2.1"), ("nvidia-cudnn-cu13", None)],
)  # fmt: skip
def test_a_resolution_for_the_cpu_build_of_torch_contradicts_them(package, version):
    pin = f"{package}=={version}\n" if version else ""
    (problem, *_) = contradictions(re.sub(rf"^{package}==.*\n", pin, PINNED, flags=re.MULTILINE))
    assert f"{package}" in problem and problem.endswith(f"not {version}")


def test_the_metadata_is_of_the_versions_in_use():
    extra = re.search(r"^gpu = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    for name in ("torch", "vllm"):
        assert f'"{name}=={WHEELS[name]["version"]}"' in extra
        assert pins(PINNED)[name] == WHEELS[name]["version"]
    assert pins(PINNED)["cuda-toolkit"] == WHEELS["cuda-toolkit"]["version"]


def test_the_constraints_are_resolved_for_the_python_of_the_image():
    base = re.search(r"^FROM \S+ubuntu(\S+)@", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)[1]
    assert base == "24.04"  # its python3 is 3.12
    assert f"--python-version {IMAGE['python_version']} --python-platform x86_64-" in PINNED
