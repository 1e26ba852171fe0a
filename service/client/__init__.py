"""Calls a moelet service from Python: tensors over the binary protocol, adapters, and a model's experts from afar.

Importing this imports no torch; whoever sends numpy arrays never needs it.
"""

from ...layer.errors import ConfigurationError, RequestError
from .client import Client, ForwardAnswer
from .errors import RemoteExpertsError, ServiceError, ServiceTimeoutError, ServiceUnreachableError
from .remote_experts import RemoteExperts

__all__ = [
    "Client",
    "ConfigurationError",
    "ForwardAnswer",
    "RemoteExperts",
    "RemoteExpertsError",
    "RequestError",
    "ServiceError",
    "ServiceTimeoutError",
    "ServiceUnreachableError",
]
