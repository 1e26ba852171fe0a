"""Calls a moelet service from Python: tensors over the binary protocol, adapters, and a model's experts from afar.

Importing this imports no torch; whoever sends numpy arrays never needs it.
"""

from .client import Client, ForwardAnswer
from .errors import RemoteExpertsError, ServiceError, ServiceTimeoutError, ServiceUnreachableError
from .remote_experts import RemoteExperts

__all__ = [
    "Client",
    "ForwardAnswer",
    "RemoteExperts",
    "RemoteExpertsError",
    "ServiceError",
    "ServiceTimeoutError",
    "ServiceUnreachableError",
]
