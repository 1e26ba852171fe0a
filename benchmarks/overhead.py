"""Times what the service adds to a forward: binary v2 requests over a null engine, against a bare echo of the bytes.

Both run in processes of their own on loopback, under the service's own server configuration, and take turns within
each round, so that a machine that slows down slows both. One kept-alive connection measures latency; many at a time
measure throughput.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from moelet.layer.errors import ConfigurationError
from moelet.service.http_config import http_config

from . import options, shapes
from .connection import Connection, post, throughput
from .null_service import MAX_BODY_BYTES, echo
from .report import ROOT, Results, Row, Table, host_circumstances

SERVERS = ("echo", "service")
TOKENS = (1, 64)
HEAD_BYTES = 1024
"""More than the JSON in front of a request's tensor."""
TABLE = Table("T:5 clients:7 what:8 p50:9 p90:9 calls/s:9 ratio:6")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = options.Parser(prog="moelet bench overhead", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--shape", choices=shapes.SHAPES, default=shapes.DEFAULT_SHAPE)
    made.add_argument("--tokens", type=options.counts, default=list(TOKENS), help="token counts (1,64)")
    made.add_argument(
        "--clients", type=options.number(0), default=64, help="of the throughput with one token each (64); 0 for none"
    )
    made.add_argument("--rounds", type=options.replays, default=15, help="in which both take turns (15)")
    made.add_argument("--calls", type=options.replays, default=200, help="of each in a round (200)")
    made.add_argument("--seconds", type=options.seconds, default=0.5, help="of throughput in a round (0.5)")
    made.add_argument("--json", type=options.result_file, metavar="PATH", help="where to write (by date and shape)")
    made.add_argument("--commit", help="what to record as the commit where this is no git checkout")
    return made


def check(chosen: argparse.Namespace) -> None:
    """Raise ``ConfigurationError`` for more tokens than a body that the server takes has room for."""
    most = (MAX_BODY_BYTES - HEAD_BYTES) // (2 * shapes.SHAPES[chosen.shape].hidden_size)
    if max(chosen.tokens) > most:
        raise ConfigurationError(
            f"--tokens {max(chosen.tokens)} does not fit into one request: "
            f"at most {most} of {chosen.shape} fit into {MAX_BODY_BYTES} bytes"
        )


@contextmanager
def server(kind: str, shape: str) -> Iterator[int]:
    """A server process of ``benchmarks.null_service``; the port it listens on."""
    command = [sys.executable, "-m", "benchmarks.null_service", kind, shape]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {kind} server did not start")
        yield int(line)
        process.communicate("")


def forward_request(shape: str, tokens: int) -> bytes:
    """A binary inference request as clients send it: bf16 hidden states in, bf16 hidden states out."""
    spec = shapes.SHAPES[shape]
    hidden = torch.randn(tokens, spec.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = hidden.view(torch.uint8).numpy().tobytes()
    tensor = {"name": "hidden_states", "shape": list(hidden.shape), "datatype": "BF16"}
    tensor["parameters"] = {"binary_data_size": len(values)}
    head = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [tensor]}).encode()
    path = f"/v2/models/layers.{spec.index}/infer"
    return post(path, head + values, Inference_Header_Content_Length=str(len(head)))


def latencies(ports: Mapping[str, int], request: bytes, rounds: int, calls: int) -> dict[str, list[list[float]]]:
    """Microseconds of every call to each server, by round; who begins changes with every round."""
    found: dict[str, list[list[float]]] = {kind: [] for kind in ports}
    connections = {kind: Connection(port) for kind, port in ports.items()}
    for kind, connection in connections.items():
        answer = connection.call(request)
        assert answer.endswith(request[-64:]), f"the {kind} server does not give back what it was sent"
        connection.times(request, calls)
    for number in range(rounds):
        for kind in in_turn(number):
            found[kind].append(connections[kind].times(request, calls))
    for connection in connections.values():
        connection.close()
    return found


def in_turn(number: int) -> Sequence[str]:
    """The servers, each first in every other round."""
    return SERVERS if number % 2 else SERVERS[::-1]


def latency_rows(tokens: int, found: Mapping[str, Sequence[Sequence[float]]]) -> list[Row]:
    """A row for each server; ``ratio`` is the median of the rounds' ratios of medians."""
    medians = {kind: [statistics.median(times) for times in by_round] for kind, by_round in found.items()}
    pairs = zip(medians["service"], medians["echo"], strict=True)
    of_echo = statistics.median(service / echo for service, echo in pairs)
    rows = []
    for kind, by_round in found.items():
        times = [each for round_times in by_round for each in round_times]
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        row = {"tokens": tokens, "clients": 1, "server": kind, "calls": len(times)}
        row |= {"us": round(deciles[4], 1), "p90_us": round(deciles[8], 1)}
        rows.append(row | ({"of_echo": round(of_echo, 3)} if kind == "service" else {}))
    return rows


async def rates(
    ports: Mapping[str, int], request: bytes, clients: int, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Answers a second of each server in each round, ``seconds`` long."""
    found: dict[str, list[float]] = {kind: [] for kind in ports}
    for number in range(-1, rounds):
        for kind in in_turn(number):
            rate = await throughput(ports[kind], request, clients, seconds)
            if number >= 0:
                found[kind].append(rate)
    return found


def rate_rows(clients: int, found: Mapping[str, Sequence[float]]) -> list[Row]:
    """A row for each server; ``of_echo`` is the median of the rounds' ratios."""
    pairs = zip(found["service"], found["echo"], strict=True)
    of_echo = statistics.median(service / echo for service, echo in pairs)
    return [
        {"tokens": 1, "clients": clients, "server": kind, "calls_s": round(statistics.median(each))}
        | ({"of_echo": round(of_echo, 3)} if kind == "service" else {})
        for kind, each in found.items()
    ]


def line(row: Row) -> str:
    """A row of the table on the terminal."""
    cells = [row["tokens"], row["clients"], row["server"]]
    return TABLE.line([*cells, *(row.get(name) for name in ("us", "p90_us", "calls_s", "of_echo"))])


def rows(chosen: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    with ExitStack() as servers:
        ports = {kind: servers.enter_context(server(kind, chosen.shape)) for kind in SERVERS}
        for tokens in chosen.tokens:
            request = forward_request(chosen.shape, tokens)
            yield from latency_rows(tokens, latencies(ports, request, chosen.rounds, chosen.calls))
        if chosen.clients:
            request = forward_request(chosen.shape, 1)
            with asyncio.Runner(loop_factory=http_config(echo).get_loop_factory()) as runner:
                found = runner.run(rates(ports, request, chosen.clients, chosen.rounds, chosen.seconds))
            yield from rate_rows(chosen.clients, found)


def main(arguments: Sequence[str]) -> int:
    """Measure; the exit code 0."""
    chosen = parser().parse_args(arguments)
    check(chosen)
    results = Results(host_circumstances("overhead", arguments, chosen.commit), chosen.json)
    results.start(chosen.shape)
    print(f"{chosen.shape}, one process each on loopback, times in us\n{TABLE.heading}", flush=True)
    for row in rows(chosen):
        results.add({"shape": chosen.shape, **row})
        print(line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(options.run(main, sys.argv[1:]))
