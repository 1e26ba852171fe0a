"""Every endpoint held against what ``/openapi.json`` says of it, by requests that schemathesis draws from there."""

import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from running_service import RunningService

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import checks

    checks.load_all_checks()

POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
TRIED = [(method, POSITIVE) for method in ("delete", "get", "post", "put")]
TRIED += [(method, NEGATIVE) for method in ("delete", "post", "put")]  # a path alone cannot be told wrong
CHECKS = [
    checks.not_a_server_error,
    *checks.CHECKS.get_by_names(
        [
            "allow_header_conformance",
            "content_type_conformance",
            "response_headers_conformance",
            "response_schema_conformance",
            "status_code_conformance",
        ]
    ),
]
SERVED = {"model": "layers.1", "version": "1", "layer": "1", "name": "good", "adapter": "good"}
"""What variable parts of a path are in every other request, so that more is tried than how 404 looks."""


@pytest.fixture(scope="module")
def operations(running_service: RunningService) -> list[Any]:
    """Every operation described, over HTTP."""
    schema = schemathesis.openapi.from_url(f"{running_service.client.base_url}/openapi.json")
    return [result.ok() for result in schema.get_all_operations()]


@pytest.mark.parametrize(("method", "mode"), TRIED)
def test_answers_are_those_described(
    running_service: RunningService, operations: list[Any], method: str, mode: schemathesis.GenerationMode
) -> None:
    for operation in operations:
        if operation.method == method:
            running_service.load("good", "good", load_inplace=True)
            try_operation(operation, mode)


def try_operation(operation: Any, mode: schemathesis.GenerationMode) -> None:
    """A few requests, the same in every run."""

    @settings(max_examples=10, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode), served=st.booleans())
    def tried(case: Any, served: bool) -> None:
        if served:
            case.path_parameters = {name: SERVED[name] for name in case.path_parameters or {}}
        case.call_and_validate(checks=CHECKS)

    tried()


def test_every_route_is_tried(operations: list[Any]) -> None:
    assert {operation.method for operation in operations} == {method for method, _ in TRIED}
    paths = {operation.path for operation in operations}
    assert {"/v1/layers/{layer}/forward", "/v2/models/{model}/infer", "/metrics"} <= paths
