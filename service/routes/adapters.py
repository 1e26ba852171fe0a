"""Loading, listing and unloading adapters, as vLLM spells it and as REST, whose ``PUT`` is in ``put_adapter.py``."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from ...layer.adapter_version import check_name
from ..adapters import UNLOAD_TIMEOUT_S
from ..errors import LOAD_REFUSALS
from ..schemas import AdapterList, AdapterRecord, LoadLoraAdapter, UnloadLoraAdapter
from .access import errors, read_body, service_of, takes

router = APIRouter(tags=["adapters"])

Timeout = Annotated[float, Query(ge=0, le=600, description="how long to wait for requests that hold the adapter")]


@router.post(
    "/v1/load_lora_adapter",
    response_class=PlainTextResponse,
    responses=errors(*LOAD_REFUSALS),
    openapi_extra=takes(LoadLoraAdapter),
)
async def load_lora_adapter(request: Request) -> PlainTextResponse:
    """Load an adapter; the next call sees its weights."""
    service = service_of(request)
    with service.metrics.adapter_load():
        body = await read_body(request, LoadLoraAdapter)
        with service.lifecycle.admit():
            await service.adapters.load(
                body.lora_name, body.lora_path, param="lora_path", pinned=body.pinned, replace=body.load_inplace
            )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    response_class=PlainTextResponse,
    responses=errors(400, 404, 409, 413, 415, 503),
    openapi_extra=takes(UnloadLoraAdapter),
)
async def unload_lora_adapter(request: Request) -> PlainTextResponse:
    """Unload an adapter once no request holds it."""
    service = service_of(request)
    body = await read_body(request, UnloadLoraAdapter)
    check_name(body.lora_name)
    with service.lifecycle.admit():
        await service.adapters.unload(body.lora_name, UNLOAD_TIMEOUT_S)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/v1/adapters")
async def list_adapters(request: Request) -> AdapterList:
    """Every loaded adapter, by name."""
    adapters = service_of(request).adapters
    return AdapterList.model_validate({"adapters": [adapters.record(version) for version in adapters.table]})


@router.get("/v1/adapters/{name}", responses=errors(404))
async def get_adapter(request: Request, name: str) -> AdapterRecord:
    """One loaded adapter."""
    adapters = service_of(request).adapters
    return AdapterRecord.model_validate(adapters.record(adapters.table.current(name)))


@router.delete("/v1/adapters/{name}", responses=errors(400, 404, 409, 503))
async def delete_adapter(request: Request, name: str, timeout_s: Timeout = UNLOAD_TIMEOUT_S) -> AdapterRecord:
    """Unload an adapter once no request holds it; 409 and nothing changed when that takes longer."""
    service = service_of(request)
    check_name(name, "name")
    with service.lifecycle.admit():
        return AdapterRecord.model_validate(await service.adapters.unload(name, timeout_s))
