"""The model repository extension: layers and adapters listed, adapters loaded and unloaded as models."""

from typing import Any

from ...layer.adapter_version import check_name
from ...layer.errors import RequestError
from ..adapters import UNLOAD_TIMEOUT_S
from ..json_arrays import kind, load_object
from ..service import MoeService
from .bodies import read_body
from .codec import MODEL_VERSION
from .exchange import Incoming, Reply, json_reply
from .header import shown
from .models import Models

EXAMPLE = '{"parameters": {"config": "{\\"lora_path\\": \\"FOLDER\\"}"}}'
UNLOADING = "it is being unloaded"


class Repository:
    """Adapters as models that can be loaded; the layers are always there."""

    def __init__(self, service: MoeService, models: Models, max_body_bytes: int) -> None:
        self._service = service
        self._models = models
        self._max_body_bytes = max_body_bytes

    async def index(self, incoming: Incoming) -> Reply:
        """``POST /v2/repository/index``: all that is served, or only what is ready where the body asks for that."""
        ready = (await self._body(incoming)).get("ready", False)
        if not isinstance(ready, bool):
            raise RequestError(f"ready should be a boolean, got {kind(ready)}", "ready")
        listed = [_entry(name, MODEL_VERSION) for name in self._models.layers]
        listed += [
            _entry(version.name, str(version.version), UNLOADING if version.draining else "")
            for version in self._service.adapters.table
            if not (ready and version.draining)
        ]
        return json_reply(listed)

    async def load(self, incoming: Incoming) -> Reply:
        """``POST /v2/repository/models/{adapter}/load``: load, or replace by what is there now."""
        service = self._service
        [name] = incoming.names
        with service.metrics.adapter_load():
            self._check(name)
            path, pinned = _source(await self._parameters(incoming))
            with service.lifecycle.admit():
                version, _ = await service.adapters.load(name, path, param="lora_path", pinned=pinned, replace=True)
        return json_reply({"name": name, "version": str(version.version), "state": "READY"})

    async def unload(self, incoming: Incoming) -> Reply:
        """``POST /v2/repository/models/{adapter}/unload``, once no request holds it."""
        service = self._service
        [name] = incoming.names
        self._check(name)
        await self._parameters(incoming)
        with service.lifecycle.admit():
            record = await service.adapters.unload(name, UNLOAD_TIMEOUT_S)
        return json_reply({"name": name, "version": str(record["version"]), "state": "UNAVAILABLE"})

    def _check(self, name: str) -> None:
        """Raise for what no adapter is called; one that the native endpoints loaded under a layer's name is one."""
        if name in self._models.layers and self._service.adapters.find(name) is None:
            raise RequestError(f"{name} is a layer of the checkpoint: only adapters are loaded and unloaded", "model")
        check_name(name, "model")

    async def _body(self, incoming: Incoming) -> dict[str, Any]:
        """The body, which may be empty."""
        body = bytes(await read_body(incoming.headers, incoming.receive, 0, self._max_body_bytes))
        return load_object(body) if body else {}

    async def _parameters(self, incoming: Incoming) -> dict[str, Any]:
        """The ``parameters`` of the body, none where it has none."""
        parameters = (await self._body(incoming)).get("parameters")
        if parameters is None:
            return {}
        if not isinstance(parameters, dict):
            raise RequestError(f"parameters should be an object, got {kind(parameters)}", "parameters")
        return parameters


def _entry(name: str, version: str, reason: str = "") -> dict[str, str]:
    """A model in the index: ready, unless there is a ``reason`` why not."""
    return {"name": name, "version": version, "state": "UNAVAILABLE" if reason else "READY", "reason": reason}


def _source(parameters: dict[str, Any]) -> tuple[str, bool | None]:
    """Path and pin out of the parameter ``config``, which is JSON in a string."""
    if file := next((name for name in parameters if name.startswith("file:")), None):
        raise RequestError(f"{shown(file)}: files are not taken, only a config that names a folder", "parameters")
    config = parameters.get("config")
    if not isinstance(config, str):
        raise RequestError(f"the parameter config should be a string, as in {EXAMPLE}, got {kind(config)}", "config")
    try:
        sent = load_object(config.encode(), "the parameter config")
    except UnicodeEncodeError:
        raise RequestError("the parameter config is not Unicode: it has a lone surrogate", "config") from None
    path, pinned = sent.get("lora_path"), sent.get("pinned")
    if not isinstance(path, str):
        raise RequestError(f"lora_path should be a string in config, as in {EXAMPLE}, got {kind(path)}", "lora_path")
    if pinned is not None and not isinstance(pinned, bool):
        raise RequestError(f"pinned should be a boolean in config, got {kind(pinned)}", "pinned")
    return path, pinned
