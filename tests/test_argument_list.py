"""Keys in the arguments of a process: gone from what other users of the machine see, and nothing else changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import moelet
from moelet.service.argument_list import masked


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (b"moelet\0serve\0--api-key\0abc\0--port\00\0", b"moelet\0serve\0--api-key\0***\0--port\00\0"),
        (b"--api-key=abc\0--admin-api-key=xyz\0", b"--api-key=***\0--admin-api-key=***\0"),
        (b"/abc/abc\0abcabc\0a=abc\0--a=b=abc\0abc\0", b"/abc/abc\0abcabc\0a=abc\0--a=b=***\0***\0"),
        (b"", b""),
    ],
)
def test_whole_arguments_are_masked(arguments: bytes, expected: bytes) -> None:
    assert masked(arguments, ["abc", "xyz"]) == expected
    assert len(masked(arguments, ["abc", "xyz"])) == len(arguments)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="only Linux shows and lets us change it so")
def test_the_process_list_shows_no_key() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom moelet.service.argument_list import hide\n"
        "hide([f'secret-{i}' for i in (1, 2)])\nprint(Path('/proc/self/cmdline').read_bytes())\nprint(sys.argv)"
    )
    arguments = ["--api-key", "secret-1", "--admin-api-key=secret-2", "a b", ""]
    environment = os.environ | {"PYTHONPATH": str(Path(moelet.__file__).parent.parent)}
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    shown, known = ran.stdout.splitlines()
    assert not any(f"secret-{i}" in shown for i in (1, 2))
    assert shown[:-1].endswith(r"\x00--api-key\x00********\x00--admin-api-key=********\x00a b\x00\x00")
    assert known == str(["-c", *arguments])
