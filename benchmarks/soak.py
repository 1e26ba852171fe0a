"""Keeps a service busy for a time with everything at once, and holds every answer against what it has to be.

A ``moelet serve`` process on loopback has more adapters than slots, and more names than places for them. Clients ask
forwards of every size, leave, read slowly, hurry, and send what is not finite, while others load, replace and unload.
Each answer must be that of the versions it names: bit for bit that of the reference engine on the CPU; on a GPU bit
for bit what the same tokens gave when nothing else ran, which is held to float64 by the rule of the tests. In the end
every counter is zero. Then 16 tokens at a time are timed, first in quiet, then while a process of its own replaces
adapters and uses them.
"""

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from moelet.service.http_config import http_config

from . import options
from .inference import Caller, control, inference
from .null_service import echo
from .report import Results, Row, host_circumstances
from .served import Served, served
from .soak_clients import Asking, Changing, Findings, Registry
from .soak_swapper import swapping
from .soak_truth import ROWS, Truth

MOST_SLOTS = 1024
"""As of moelet serve."""
TIMED_TOKENS = 16
TIMED_CLIENTS, TIMED_ADAPTERS = 4, 4
SETTLE_S = 15.0
PATIENCE_S = 90.0
"""How long clients may take to end once they were told to."""
GAUGES = "moelet_requests_in_flight|moelet_queue_requests|moelet_queue_tokens|moelet_adapter_in_flight"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = options.Parser(prog="moelet bench soak", description=(__doc__ or "").split("\n")[0])
    made.add_argument(
        "--seconds", type=options.seconds, default=30.0, help="of load, and half as much again of timing (30)"
    )
    made.add_argument("--device", type=options.device, default="cpu", help="cpu, cuda or cuda:N (cpu)")
    made.add_argument("--clients", type=options.number(1), default=64, help="that ask at the same time (64)")
    made.add_argument(
        "--adapters", type=options.number(TIMED_ADAPTERS), default=32, help="names that are loaded and replaced (32)"
    )
    made.add_argument("--slots", type=options.number(1, MOST_SLOTS), default=8, help="adapter slots of the engine (8)")
    made.add_argument("--changers", type=options.number(1), default=4, help="clients that load and unload (4)")
    made.add_argument("--json", type=options.result_file, metavar="PATH", help="where to write (by date and device)")
    made.add_argument("--commit", help="what to record as the commit where this is no git checkout")
    return made


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def after(seconds: float) -> Callable[[], bool]:
    """Whether so many seconds have passed since."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


class Soak:
    """One run against one process."""

    def __init__(self, chosen: argparse.Namespace, server: Served, truth: Truth) -> None:
        self._chosen = chosen
        self._server = server
        self._truth = truth
        self._names = [f"adapter-{number}" for number in range(chosen.adapters)]
        self._registry = Registry(self._names)

    async def run(self) -> list[Row]:
        """All phases, a row each. Raises ``AssertionError`` for whatever is wrong."""
        findings = Findings()
        changers = self._changers(findings, self._names)
        for number, name in enumerate(self._names):
            await changers[number % len(changers)].load(name, number)
        if self._chosen.device != "cpu":
            await self._adopt()
        return [await self._soak(findings, changers), await self._timed("quiet"), await self._timed("swapping")]

    def _changers(self, findings: Findings, names: Sequence[str]) -> list[Changing]:
        count = self._chosen.changers
        make = partial(Changing, self._server.port, self._truth, self._registry, findings)
        return [make(names[number::count], seed=number) for number in range(count)]

    async def _adopt(self) -> None:
        """Ask for every token under every adapter, one adapter at a time, while nothing else runs."""
        caller = Caller(self._server.port)
        changer = self._changers(Findings(), self._names)[0]
        inputs = self._truth.inputs
        for kind in self._truth.kinds:
            outputs = []
            for variant in (*range(self._chosen.adapters), None):
                name = None if variant is None else f"adapter-{variant}"
                if variant is not None:
                    await changer.load(str(name), variant)
                tensors = {"hidden_states": inputs.hidden}
                if kind[1]:
                    tensors |= {"topk_ids": inputs.topk_ids, "topk_weights": inputs.topk_weights}
                answer = await caller.call(inference(kind[0], tensors, [name] * ROWS))
                assert answer.output is not None, answer.text
                outputs.append(answer.output)
            self._truth.adopt(kind, torch.stack(outputs))
        caller.drop()
        changer.close()

    async def _soak(self, findings: Findings, changers: Sequence[Changing]) -> Row:
        until = after(self._chosen.seconds)
        rss, files, start = self._server.rss_mb, self._server.open_files, time.perf_counter()
        clients = [
            Asking(self._server.port, self._truth, self._registry, findings, seed)
            for seed in range(self._chosen.clients)
        ]
        async with asyncio.timeout(self._chosen.seconds + PATIENCE_S):
            await asyncio.gather(*(each.run(until) for each in (*clients, *changers)))
        seconds = time.perf_counter() - start
        assert findings.wrongs == [], f"{len(findings.wrongs)} wrong, the first: " + " | ".join(findings.wrongs[:5])
        await self._counters_are_zero()
        gaps = [later - earlier for earlier, later in pairwise(sorted(findings.ended))]
        return {
            "phase": "soak",
            "seconds": round(seconds, 1),
            "requests": sum(n for what, n in findings.counts.items() if what.startswith("forward") or what == "left"),
            "tokens_s": round(findings.tokens / seconds),
            **latency(findings.seconds),
            "longest_stall_ms": round(1e3 * max(gaps), 1),
            "counts": dict(sorted(findings.counts.items())),
            "rss_mb": [round(rss), round(self._server.rss_mb)],
            "open_files": [files, self._server.open_files],
        }

    async def _counters_are_zero(self) -> None:
        """Raise unless what is in flight and waits comes to nothing once nobody asks."""
        caller, until = Caller(self._server.port), after(SETTLE_S)
        while True:
            text = (await caller.call(control("GET", "/metrics"))).text
            held = [line for line in text.splitlines() if re.match(GAUGES, line) and not line.endswith(" 0.0")]
            if not held:
                break
            assert not until(), f"counters did not return to zero: {held}"
            await asyncio.sleep(0.1)
        caller.drop()

    async def _timed(self, phase: str) -> Row:
        """Times of 16 tokens with the same few adapters, in quiet or while another process replaces and uses others."""
        findings, seconds = Findings(), list[float]()
        steady, swapped = self._names[:2], self._names[2:TIMED_ADAPTERS]
        changer = self._changers(findings, self._names)[0]
        for number, name in enumerate((*steady, *swapped)):
            await changer.load(name, number)
        changer.close()
        assert findings.wrongs == [], findings.wrongs[:5]
        loads = 0
        async with asyncio.timeout(self._chosen.seconds + PATIENCE_S):
            if phase == "quiet":
                await self._time_all(steady, seconds)
            else:
                hidden = self._truth.inputs.hidden.shape[1]
                async with swapping(self._server.port, hidden, swapped, self._truth.adapter_folders) as swapper:
                    await self._time_all(steady, seconds)
                loads = swapper.loads
        return {"phase": phase, "requests": len(seconds), "tokens": TIMED_TOKENS, "loads": loads, **latency(seconds)}

    async def _time_all(self, names: Sequence[str], seconds: list[float]) -> None:
        until = after(self._chosen.seconds / 4)
        await asyncio.gather(*(self._time(names, seconds, until) for _ in range(TIMED_CLIENTS)))

    async def _time(self, names: Sequence[str], seconds: list[float], until: Callable[[], bool]) -> None:
        caller, rows = Caller(self._server.port), list(range(TIMED_TOKENS))
        request = inference(0, {"hidden_states": self._truth.inputs.hidden[rows]}, [*names, None, None] * 4)
        while not until():
            began = time.perf_counter()
            answer = await caller.call(request)
            seconds.append(time.perf_counter() - began)
            assert answer.status == 200, answer.text
            assert self._truth.agrees((0, False), rows, [0, 1, -1, -1] * 4, answer.output)  # type: ignore[arg-type]
        caller.drop()


def latency(seconds: Sequence[float]) -> Row:
    """Milliseconds from request to answer."""
    assert seconds, "nothing was answered"
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
    times = {name: round(1e3 * percentile(seconds, share), 2) for name, share in shares.items()}
    return {"mean_ms": round(1e3 * statistics.fmean(seconds), 2), **times}


def rows(chosen: argparse.Namespace, folder: Path) -> list[Row]:
    """All rows; the process must drain and end with 0."""
    truth = Truth(folder, chosen.adapters)
    serving = [str(truth.checkpoint_folder), "--device", chosen.device, "--adapter-root", str(folder)]
    places = max(chosen.slots, chosen.adapters - 2, TIMED_ADAPTERS)
    serving += ["--max-loras", str(chosen.slots), "--max-cpu-loras", str(places)]
    with served(folder, *serving) as server:
        with asyncio.Runner(loop_factory=http_config(echo).get_loop_factory()) as runner:
            found = runner.run(Soak(chosen, server, truth).run())
        code = server.end()
        assert code == 0, f"the process ended with {code}"
    return found


def main(arguments: Sequence[str]) -> int:
    """Soak; the exit code 0, or 1 where anything was wrong."""
    chosen = parser().parse_args(arguments)
    results = Results(host_circumstances("soak", arguments, chosen.commit), chosen.json)
    results.start(chosen.device.replace(":", "-"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = rows(chosen, Path(folder).resolve())
    except AssertionError as error:
        print(f"moelet bench: the soak failed: {error}", file=sys.stderr)
        return 1
    for row in found:
        results.add({"device": chosen.device, **row})
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(options.run(main, sys.argv[1:]))
