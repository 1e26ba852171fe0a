"""Generation with the experts in a service over the GPU engine: the same tests as the CPU engine's."""

from collections.abc import Iterator

import pytest

from contract_generation import GenerationContract, GenerationService, generation_service

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerationService]:
    with generation_service(tmp_path_factory.mktemp("generation"), "cuda") as service:
        yield service


class TestGenerationOnTheGpu(GenerationContract):
    """The GPU engine's experts write the same."""
