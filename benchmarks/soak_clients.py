"""The clients of a soak: they ask, leave, read slowly and change adapters, and hold every answer against the truth."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .inference import Answered, Caller, control, inference
from .soak_truth import ROWS, Kind, Truth

SIZES = (1, 1, 1, 1, 2, 4, 16, 40)
SIP_S = 0.002


@dataclass(slots=True)
class Findings:
    """What the clients saw.

    ``seconds``   from sending to the answer, of requests that were read at once and answered with 200
    ``ended``     when each of them was answered, by ``time.perf_counter``
    ``counts``    requests and changes by what they came to
    ``wrongs``    whatever should not have been
    """

    seconds: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)


class Registry:
    """Which adapter each version of each name is, as far as the answers to loads have told."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._variants: dict[tuple[str, int], int] = {}
        self._told = asyncio.Condition()

    async def tell(self, name: str, version: int, variant: int) -> None:
        """``version`` of ``name`` is ``variant``."""
        async with self._told:
            self._variants[name, version] = variant
            self._told.notify_all()

    async def variant(self, name: str, version: int) -> int:
        """What ``version`` of ``name`` is; waits where a forward was answered before the load that it met."""
        key = (name, version)
        if key not in self._variants:
            async with self._told, asyncio.timeout(30):
                await self._told.wait_for(lambda: key in self._variants)
        return self._variants[key]


class Asking:
    """A client that asks one random forward after the other."""

    def __init__(self, port: int, truth: Truth, registry: Registry, findings: Findings, seed: int) -> None:
        self._caller = Caller(port)
        self._truth = truth
        self._registry = registry
        self._findings = findings
        self._chance = random.Random(seed)

    async def run(self, until: Callable[[], bool]) -> None:
        """Ask until told to stop."""
        while not until():
            try:
                await self._ask()
            except (OSError, EOFError, TimeoutError) as error:
                self._findings.wrongs.append(f"a request ended with {type(error).__name__}: {error}")
                self._caller.drop()
        self._caller.drop()

    async def _ask(self) -> None:
        chance, findings = self._chance, self._findings
        kind, size = chance.choice(self._truth.kinds), chance.choice(SIZES)
        rows = [chance.randrange(ROWS) for _ in range(size)]
        names = self._names(size)
        manner = chance.choices(["stays", "leaves", "sips", "hurries"], [90, 4, 4, 2])[0]
        request = self._request(kind, rows, names, 2.0 if manner == "hurries" else None)
        if manner == "leaves":
            await self._caller.leave(request, chance.choice([0.0, 0.002, 0.1]))
            findings.counts["left"] += 1
            return
        began = time.perf_counter()
        answer = await self._caller.call(request, SIP_S if manner == "sips" else 0.0)
        ended = time.perf_counter()
        await self._judge(answer, kind, rows, names, hurried=manner == "hurries")
        if answer.status == 200 and manner == "stays":
            findings.seconds.append(ended - began)
            findings.ended.append(ended)

    def _names(self, size: int) -> list[str | None]:
        """No adapter, one, or many at once: more than there are slots, where the request is long enough."""
        names, way = self._registry.names, self._chance.random()
        if way < 0.3:
            return [None] * size
        if way < 0.8:
            return [self._chance.choice(names)] * size
        return [self._chance.choice([*names, None]) for _ in range(size)]

    def _request(self, kind: Kind, rows: list[int], names: list[str | None], timeout_ms: float | None) -> bytes:
        inputs = self._truth.inputs
        tensors = {"hidden_states": inputs.hidden[rows]}
        if kind[1]:
            tensors |= {"topk_ids": inputs.topk_ids[rows], "topk_weights": inputs.topk_weights[rows]}
        return inference(kind[0], tensors, names, timeout_ms)

    async def _judge(
        self, answer: Answered, kind: Kind, rows: list[int], names: list[str | None], *, hurried: bool
    ) -> None:
        findings = self._findings
        findings.counts[f"forward {answer.status}"] += 1
        if answer.status != 200:
            expected = (answer.status == 404 and any(names) and "not loaded" in answer.text) or (
                (answer.status == 504 and hurried) or (answer.status == 503 and "retry-after" in answer.headers)
            )
            if not expected and "is being unloaded" not in answer.text:
                findings.wrongs.append(f"{answer.status}: {answer.text[:300]}")
            return
        assert answer.output is not None
        assert answer.versions is not None
        findings.tokens += len(rows)
        used = {name: await self._registry.variant(name, answer.versions[name]) for name in names if name is not None}
        variants = [-1 if name is None else used[name] for name in names]
        if not self._truth.agrees(kind, rows, variants, answer.output):
            findings.wrongs.append(
                f"a wrong output of layer {kind[0]}: rows {rows}, adapters {names}, {answer.versions}"
            )


class Changing:
    """A client that loads, replaces and unloads adapters of ``names``, which no other client changes."""

    def __init__(
        self, port: int, truth: Truth, registry: Registry, findings: Findings, names: Sequence[str], seed: int
    ) -> None:
        self._caller = Caller(port)
        self._truth = truth
        self._registry = registry
        self._findings = findings
        self._names = names
        self._chance = random.Random(seed)

    async def run(self, until: Callable[[], bool]) -> None:
        """Change one after the other until told to stop."""
        while not until():
            name = self._chance.choice(self._names)
            if self._chance.random() < 0.1:
                await self.unload(name)
            else:
                await self.load(name, self._chance.randrange(len(self._truth.adapter_folders)))
            await asyncio.sleep(self._chance.random() * 0.02)
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._caller.drop()

    async def load(self, name: str, variant: int) -> None:
        """Load or replace."""
        path = str(self._truth.adapter_folders[variant])
        answer = await self._caller.call(control("PUT", f"/v1/adapters/{name}", path=path))
        self._findings.counts[f"load {answer.status}"] += 1
        if answer.status in (200, 201):
            await self._registry.tell(name, json.loads(answer.text)["version"], variant)
        elif answer.status != 409:
            self._findings.wrongs.append(f"load of {name}: {answer.status}: {answer.text[:300]}")

    async def unload(self, name: str) -> None:
        """Unload, whether it is there or was evicted."""
        answer = await self._caller.call(control("DELETE", f"/v1/adapters/{name}?timeout_s=5"))
        self._findings.counts[f"unload {answer.status}"] += 1
        if answer.status not in (200, 404, 409):
            self._findings.wrongs.append(f"unload of {name}: {answer.status}: {answer.text[:300]}")
