"""The HTTP contract over the CPU engine."""

from collections.abc import Mapping

import pytest

from contract import ServiceContract
from moelet.layer.engine import Engine
from moelet.layer.reference import ReferenceEngine
from moelet.layer.spec import ModelSpec
from moelet.layer.weights import LayerWeights
from running_service import OpenEngine


@pytest.fixture(scope="module")
def open_engine() -> OpenEngine:
    def opened(model: ModelSpec, weights: Mapping[int, LayerWeights], max_loras: int, max_lora_rank: int) -> Engine:
        return ReferenceEngine(model, weights, max_loras=max_loras, max_lora_rank=max_lora_rank)

    return opened


class TestReferenceEngine(ServiceContract):
    """The CPU engine keeps the contract."""
