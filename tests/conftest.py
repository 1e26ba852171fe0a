"""Fixtures that several test modules share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from running_service import OpenEngine, RunningService

CONTRACT = ("terms", "forwards", "adapters", "swaps", "operation", "v2", "generation")
SHARED = ("oracle", "running_service", "v2_requests", "v2_wire")
torch.set_num_threads(1)  # the tests' layers are small, and threads that spin for a busy core take minutes over them
pytest.register_assert_rewrite(*SHARED, *(f"contract_{part}" for part in CONTRACT))


@pytest.fixture(scope="module")
def running_service(open_engine: "OpenEngine", tmp_path_factory: pytest.TempPathFactory) -> Iterator["RunningService"]:
    """A service over the ``open_engine`` of the module, with good and bad adapters below its root."""
    from running_service import running, write_bad_adapters

    root = tmp_path_factory.mktemp("adapters") / "root"
    root.mkdir()
    write_bad_adapters(root)
    with running(open_engine, root) as service:
        yield service
