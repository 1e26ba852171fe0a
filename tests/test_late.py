"""Forwards of every kind over a driver that does everything as late as it may and fails anywhere: none meets another's.

A run is drawn at random and checked after each step: what a forward gives is what its own bytes do, as long as anybody
looks at it, whatever was begun, given back, failed or never waited for meanwhile.
"""

import ctypes
import random
import weakref
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from fake_engine import SPEC, Locked
from late_driver import LateDriver, expected, opened_late
from moelet.graphs import locked_blocks, staging
from moelet.graphs.engine import GraphEngine
from moelet.graphs.locked_blocks import Block
from moelet.layer.engine import Forward, LayerBatch
from moelet.layer.errors import EngineError
from random_layers import random_batch

STEPS = 150
TOKENS = (0, 1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 33)
SLOTS = (None, [0], [0, -1, 1], [-1])


class Free(deque[Block]):
    """Free blocks, each of which is there once, and holds nothing of what it was used for."""

    def append(self, block: Block) -> None:
        assert all(block.host != other.host for other in self), "a block is free twice"
        ctypes.memset(block.host, 0xEE, len(block.memory))
        super().append(block)


@dataclass
class Run:
    """One engine, and what was asked of it: forwards ``under_way`` with what they should give, and outputs ``kept``."""

    engine: GraphEngine
    driver: LateDriver
    chance: random.Random
    failing: float
    under_way: deque[tuple[Forward, Any]] = field(default_factory=deque)
    kept: list[tuple[torch.Tensor, Any]] = field(default_factory=list)
    in_place: int = 0
    failed: int = 0

    def step(self) -> None:
        """Begin a forward, wait for one, have the driver do something, or forget outputs."""
        act = self.chance.random()
        if act < 0.5 and len(self.under_way) < self.engine.depth:
            self.begin(self.placed(self.batch()))
        elif act < 0.85 and self.under_way:
            self.wait()
        elif act < 0.95:
            self.driver.step(self.chance)
        else:
            self.chance.shuffle(self.kept)
            del self.kept[len(self.kept) // 2 :]
        for output, wanted in self.kept:
            assert is_that(output, wanted), "an output changed while it was kept"

    def batch(self) -> LayerBatch:
        tokens = self.chance.choice(TOKENS)
        slots = self.chance.choice(SLOTS)
        batch = random_batch(self.engine.model.layer(0), tokens, seed=self.chance.randrange(1 << 30), slots=slots)
        match self.chance.randrange(3):
            case 0:
                return replace(batch, topk_ids=None, topk_weights=None)
            case 1:
                logits = torch.randn(tokens, SPEC.num_experts)
                return replace(batch, topk_ids=None, topk_weights=None, router_logits=logits)
        return batch

    def placed(self, batch: LayerBatch) -> LayerBatch:
        """``batch`` with hidden states in memory of the engine's, of the caller's, or in none that is page-locked."""
        hidden = batch.hidden_states
        where = self.chance.randrange(4)
        if where == 0 and len(hidden):
            locked = Locked(1 << 15)  # and no longer than anybody holds it
            weakref.finalize(locked.storage, self.driver.locked.pop, locked.address)
            return locked.holding(batch, self.chance.choice((0, 2, 16, 48)))
        lead = self.chance.choice((0, 0, 2, 16, 64))
        memory = self.engine.input_memory(lead + hidden.nbytes) if where > 1 and len(hidden) else None
        if memory is None:
            return batch
        there = torch.frombuffer(memory[lead:], dtype=torch.bfloat16).view(hidden.shape)
        return replace(batch, hidden_states=there.copy_(hidden))

    def begin(self, batch: LayerBatch) -> None:
        wanted = expected(batch)
        if self.chance.random() < self.failing:
            self.driver.fails_in, self.driver.works_first = self.chance.randrange(14), self.chance.random() < 0.5
        try:
            forward = self.engine.begin(batch)
        except EngineError:
            self.driver.fails_in = None
            self.failed += 1
            return
        self.under_way.append((forward, wanted))
        if getattr(forward, "reads", None) is not None:
            self.in_place += 1
        else:
            batch.hidden_states.fill_(7.0)  # it may be changed: it was copied

    def wait(self) -> None:
        forward, wanted = self.under_way.popleft()
        try:
            output = forward.result()
        except EngineError:
            self.failed += 1
        else:
            assert is_that(output, wanted)
            if len(self.kept) < 25 and self.chance.random() < 0.5:
                self.kept.append((output, wanted))
        self.driver.fails_in = None


def is_that(output: torch.Tensor, wanted: "np.ndarray") -> bool:
    return bool((output.contiguous().view(torch.int16).numpy() == wanted).all())


@pytest.mark.parametrize("failing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("width", [128, 96], ids=["whole rows", "padded rows"])
@pytest.mark.parametrize("fetched", [staging.FETCHED_BYTES, 1, 4096], ids=["fetched", "copied", "both"])
def test_every_forward_gives_what_its_own_bytes_do(
    fetched: int, width: int, failing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked_blocks, "deque", Free)
    monkeypatch.setattr(staging, "ASKED_BYTES", 1)
    monkeypatch.setattr(staging, "FETCHED_BYTES", fetched)
    with opened_late(monkeypatch, replace(SPEC, hidden_size=width)) as (engine, driver):
        run = Run(engine, driver, random.Random(f"{fetched} {width} {failing}"), failing)
        for _ in range(STEPS):
            run.step()
        driver.fails_in = None
        while run.under_way:
            run.wait()
        assert (run.in_place > 0) == (width == SPEC.hidden_size)
        assert (run.failed > 0) == (failing > 0)
