"""Fixtures that several test modules share."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from moelet.layer.engine import Engine
    from moelet.layer.spec import ModelSpec
    from moelet.layer.weights import LayerWeights
    from running_service import OpenEngine, RunningService

CONTRACT = ("terms", "forwards", "adapters", "swaps", "operation", "v2", "generation")
SHARED = ("fast_requests", "oracle", "running_service", "v2_requests", "v2_wire")
torch.set_num_threads(1)  # the tests' layers are small, and threads that spin for a busy core take minutes over them
pytest.register_assert_rewrite(*SHARED, *(f"contract_{part}" for part in CONTRACT))


@pytest.fixture(scope="module")
def open_engine() -> "OpenEngine":
    """The CPU's; a module that serves over another has its own."""
    from moelet.layer.reference import ReferenceEngine

    def opened(
        model: "ModelSpec", weights: "Mapping[int, LayerWeights]", max_loras: int, max_lora_rank: int
    ) -> "Engine":
        return ReferenceEngine(model, weights, max_loras=max_loras, max_lora_rank=max_lora_rank)

    return opened


@pytest.fixture(scope="module")
def adapter_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good and bad adapters below it."""
    from running_service import write_bad_adapters

    root = tmp_path_factory.mktemp("adapters") / "root"
    root.mkdir()
    write_bad_adapters(root)
    return root


@pytest.fixture(scope="module")
def running_service(open_engine: "OpenEngine", adapter_root: Path) -> Iterator["RunningService"]:
    """A service over the ``open_engine`` of the module, with good and bad adapters below its root."""
    from running_service import running

    with running(open_engine, adapter_root) as service:
        yield service
