"""The HTTP contract as tests that any ``Engine`` must pass: subclass ``ServiceContract`` beside an ``open_engine``."""

from contract_adapters import AdapterContract
from contract_forwards import ForwardContract
from contract_operation import OperationContract
from contract_swaps import SwapContract
from contract_v2 import V2Contract


class ServiceContract(ForwardContract, AdapterContract, SwapContract, OperationContract, V2Contract):
    """What every engine's service does over HTTP; the subclass's module has a module-scoped fixture
    ``open_engine``, an ``OpenEngine``."""
