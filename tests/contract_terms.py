"""What the parts of the HTTP contract share: the error shape, and a service left as it was found."""

from collections.abc import Iterator

import httpx
import pytest

from running_service import (
    RunningService,
)


def assert_error(answer: httpx.Response, status: int, *words: str, param: str | None = None) -> None:
    """The one error shape, with ``status`` and a message that has ``words``."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    types = {400: "BadRequestError", 403: "PermissionDeniedError", 404: "NotFoundError", 409: "ConflictError"}
    types |= {405: "MethodNotAllowedError", 413: "RequestTooLargeError", 415: "UnsupportedMediaTypeError"}
    types |= {500: "InternalServerError", 503: "ServiceUnavailableError", 504: "TimeoutError"}
    assert error["type"] == types[status]
    assert all(word in error["message"] for word in words), error["message"]
    if param is not None:
        assert error["param"] == param
    assert answer.headers["x-request-id"]


class ContractFixtures:
    """A service without adapters for each test, and a name of its own."""

    @pytest.fixture
    def service(self, running_service: RunningService) -> Iterator[RunningService]:
        yield running_service
        running_service.unload_all()
        assert running_service.service.lifecycle.in_flight == 0
        assert running_service.metric("moelet_requests_in_flight") == 0
        assert running_service.metric("moelet_queue_requests") == 0
        assert running_service.metric("moelet_queue_tokens") == 0

    @pytest.fixture
    def name(self, request: pytest.FixtureRequest) -> str:
        """A name that no other test uses, so that its versions begin at 1."""
        return request.node.name.replace("[", ".").replace("]", "")[:128]
