"""The HTTP contract over the GPU engine: the same tests as the CPU engine's."""

from collections.abc import Mapping

import pytest

from contract import ServiceContract
from moelet.graphs.engine import GraphEngine
from moelet.graphs.options import GraphOptions
from moelet.layer.engine import Engine
from moelet.layer.spec import ModelSpec
from moelet.layer.weights import LayerWeights
from running_service import OpenEngine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def open_engine() -> OpenEngine:
    def opened(model: ModelSpec, weights: Mapping[int, LayerWeights], max_loras: int, max_lora_rank: int) -> Engine:
        options = GraphOptions(
            max_loras=max_loras, max_lora_rank=max_lora_rank, max_decode_tokens=16, decode_shapes=(1, 4, 16)
        )
        engine = GraphEngine(model, options)
        for index in model.layers:
            engine.add_layer(index, weights[index])
        engine.start()
        return engine

    return opened


class TestGraphEngine(ServiceContract):
    """The GPU engine keeps the contract."""
