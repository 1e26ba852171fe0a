"""The HTTP contract over the CPU engine."""

from contract import ServiceContract


class TestReferenceEngine(ServiceContract):
    """The CPU engine keeps the contract."""
