"""What can go wrong between a client and a service, as exceptions that carry what the service said.

::

    MoeletError
    ├── ServiceError                  the service answered with an error, or not as the protocol says
    │   ├── ServiceUnreachableError   no connection, or it broke before the answer was whole, or we closed it
    │   └── ServiceTimeoutError       no answer in time
    └── RemoteExpertsError            a model and a service do not go together
"""

from ...layer.errors import MoeletError


class ServiceError(MoeletError):
    """A call to the service failed.

    ``message``        the sentence of the service, or of what kept it from answering
    ``status``         the HTTP status, None where there was no answer
    ``request_id``     what the service's log calls the request
    ``retry_after_s``  when the service asks to be called again, None where it does not say
    """

    def __init__(
        self, message: str, *, status: int | None = None, request_id: str, retry_after_s: float | None = None
    ) -> None:
        answered = "" if status is None else f"status {status}, "
        super().__init__(f"{message} ({answered}request {request_id})")
        self.message = message
        self.status = status
        self.request_id = request_id
        self.retry_after_s = retry_after_s


class ServiceUnreachableError(ServiceError):
    """Nothing listens there, the connection broke before the answer was whole, or this client is closed."""


class ServiceTimeoutError(ServiceError):
    """No answer in time: the service gave up (``status`` 504), or the client stopped waiting (None)."""


class RemoteExpertsError(MoeletError):
    """A model's experts cannot be computed by this service, or cannot be put back."""
