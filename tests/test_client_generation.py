"""Generation with the experts in a service over the CPU engine."""

from collections.abc import Iterator

import pytest

from contract_generation import GenerationContract, GenerationService, generation_service


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerationService]:
    with generation_service(tmp_path_factory.mktemp("generation"), "cpu") as service:
        yield service


class TestGenerationOnTheCpu(GenerationContract):
    """The CPU engine's experts write the same."""
