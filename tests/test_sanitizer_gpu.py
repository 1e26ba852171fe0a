"""compute-sanitizer over small forwards on a real GPU: no stray access, no race, no misused barrier, no unset read."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_engines import Gpu, gpu
from moelet.graphs.program import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_checker_finds_nothing(gpu: Gpu, tool: str) -> None:  # noqa: ARG001 (skips without one)
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    # Failed driver calls are exceptions already, and asking for one parameter too many is how a kernel's are counted.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    program = ["tests/sanitized_forward.py", *({"initcheck": ["each"], "racecheck": ["once"]}.get(tool, []))]
    result = subprocess.run(
        [checker, "--tool", tool, *quiet, "--error-exitcode", "9", sys.executable, *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    report = result.stdout + result.stderr
    if "Device not supported" in report:
        pytest.skip("compute-sanitizer cannot watch this device here")
    assert f"{12 * len(Plan) + (4 if tool == 'racecheck' else 8)} forwards" in result.stdout, report
    assert "ERROR SUMMARY: 0 errors" in report or "RACECHECK SUMMARY: 0 hazards" in report, report
    assert result.returncode == 0, report
