"""What is served, in the protocol's terms: the server, and one model for each layer and for each adapter."""

from typing import Any

from ... import __version__
from ...layer.adapter_version import AdapterVersion
from ...layer.errors import LayerNotServedError
from ...layer.spec import LayerSpec, ranges
from ..service import MoeService
from .codec import MODEL_VERSION
from .exchange import Incoming, Reply, json_reply
from .header import OUTPUT
from .layout import ADAPTER, DATATYPES, widths_of

PREFIX = "layers."
EXTENSIONS = ["binary_tensor_data", "model_repository", "parameters"]


class Models:
    """Looks models up by name, and tells of them. The model of a layer is called ``layers.<number>``."""

    def __init__(self, service: MoeService) -> None:
        self._service = service
        self.layers = {f"{PREFIX}{index}": spec for index, spec in sorted(service.model.layers.items())}

    def layer(self, name: str, version: str = MODEL_VERSION) -> LayerSpec:
        """The layer that the model ``name`` is. Raises ``LayerNotServedError``, and ``AdapterNotLoadedError`` for an
        adapter that is being unloaded."""
        spec = self.layers.get(name)
        if spec is None:
            raise self._not_served(name)
        if version != MODEL_VERSION:
            raise LayerNotServedError(f"{name} has no version {version!r}, only {MODEL_VERSION}", "version")
        return spec

    async def server(self, _incoming: Incoming) -> Reply:
        """``GET /v2``."""
        return json_reply({"name": "moelet", "version": __version__, "extensions": EXTENSIONS})

    async def live(self, _incoming: Incoming) -> Reply:
        """``GET /v2/health/live``: 503 once the engine has failed for good."""
        self._service.lifecycle.check_alive()
        return json_reply({"live": True})

    async def ready(self, _incoming: Incoming) -> Reply:
        """``GET /v2/health/ready``: 503 unless work is taken."""
        self._service.lifecycle.check_admission()
        return json_reply({"ready": True})

    async def metadata(self, incoming: Incoming) -> Reply:
        """``GET /v2/models/{model}``: 404 for what is not there."""
        name = incoming.names[0]
        if (adapter := self._adapter(*incoming.names)) is not None:
            return json_reply(_metadata(name, str(adapter.version), [], []))
        spec = self.layer(*incoming.names)
        inputs = [_tensor(spec, field) for field in DATATYPES]
        return json_reply(_metadata(name, MODEL_VERSION, inputs, [_tensor(spec, OUTPUT)]))

    async def model_ready(self, incoming: Incoming) -> Reply:
        """``GET /v2/models/{model}/ready``: 404 for what is not there, which an adapter that is being unloaded is for
        requests, 503 unless work is taken."""
        if self._adapter(*incoming.names) is None:
            self.layer(*incoming.names)
        self._service.lifecycle.check_admission()
        return json_reply({"name": incoming.names[0], "ready": True})

    def _adapter(self, name: str, version: str | None = None) -> AdapterVersion | None:
        """The adapter of that name, unless a layer is called so too. Raises ``LayerNotServedError`` for
        a version that is not the current one, and ``AdapterNotLoadedError``, as a forward does that names it, while
        it is being unloaded."""
        if name in self.layers or self._service.adapters.find(name) is None:
            return None
        found = self._service.adapters.table.available(name)
        if version not in (None, str(found.version)):
            raise LayerNotServedError(f"{name} has no version {version!r}, only {found.version}", "version")
        return found

    def _not_served(self, name: str) -> LayerNotServedError:
        if name.startswith(PREFIX):
            try:
                self._service.layer(name.removeprefix(PREFIX))
            except LayerNotServedError as error:
                return error
        served = f"{PREFIX}N with N in {ranges(self._service.model.layers)}"
        if self._adapter(name) is not None:
            return LayerNotServedError(f"{name!r} is an adapter: send it as the parameter adapter to {served}", "model")
        return LayerNotServedError(f"there is no model {name!r}; those that compute are {served}", "model")


def _metadata(name: str, version: str, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    return {"name": name, "versions": [version], "platform": "moelet", "inputs": inputs, "outputs": outputs}


def _tensor(spec: LayerSpec, field: str) -> dict[str, Any]:
    shape = [-1] if field == ADAPTER else [-1, widths_of(spec)[field]]
    tensor: dict[str, Any] = {"name": field, "datatype": DATATYPES[field][0], "shape": shape}
    return tensor if field == OUTPUT else {**tensor, "optional": True}
