"""A client in a process of its own that replaces adapters and uses them, so that who is timed shares nothing with it.

``python -m benchmarks.soak_swapper PORT HIDDEN NAMES FOLDERS``, lists separated by ``:``. It says ``ready``, swaps from
its first line of input to its last, and then says how many loads there were.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from .inference import Caller, control, inference
from .report import ROOT

SEPARATOR = ":"


class Swapper:
    """The process, from who is timed: ``loads`` once it has ended."""

    def __init__(self) -> None:
        self.loads = 0


@asynccontextmanager
async def swapping(
    port: int, hidden_size: int, names: Sequence[str], folders: Sequence[Path]
) -> AsyncIterator[Swapper]:
    """Adapters are replaced and used inside of this. Raises ``AssertionError`` unless all went well."""
    lists = [SEPARATOR.join(map(str, each)) for each in (names, folders)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.soak_swapper", str(port), str(hidden_size), *lists),
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    swapper = Swapper()
    try:
        assert await process.stdout.readline() == b"ready\n", "the swapper did not start"
        process.stdin.write(b"go\n")
        yield swapper
        process.stdin.close()
        told = await process.stdout.read()
        assert await process.wait() == 0, "a swap failed"
        swapper.loads = int(told)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def swap(port: int, hidden_size: int, names: Sequence[str], folders: Sequence[str]) -> int:
    """Replace an adapter and use it, so that it is put into a slot, again and again; how many loads there were."""
    caller, hidden, loads = Caller(port), torch.zeros(1, hidden_size, dtype=torch.bfloat16), 0
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.readline)
    end = loop.run_in_executor(None, sys.stdin.readline)
    for name, folder in zip(itertools.cycle(names), itertools.cycle(folders)):
        for request in (
            control("PUT", f"/v1/adapters/{name}", path=folder),
            inference(0, {"hidden_states": hidden}, [name]),
        ):
            answer = await caller.call(request)
            assert answer.status in (200, 201), answer.text
        loads += 1
        if end.done():
            break
    caller.drop()
    return loads


def main(arguments: Sequence[str]) -> int:
    """Swap until the end of the input; the exit code."""
    port, hidden_size, names, folders = arguments
    print(asyncio.run(swap(int(port), int(hidden_size), names.split(SEPARATOR), folders.split(SEPARATOR))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
