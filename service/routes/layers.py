"""What is served of the checkpoint, and the base and adapters as models."""

from fastapi import APIRouter
from starlette.requests import Request

from ..schemas import LayerList, ModelCard, ModelList
from .access import service_of

router = APIRouter(tags=["layers"])


@router.get("/v1/layers")
async def layers(request: Request) -> LayerList:
    """The layers served: shapes, routing, device, and which plan runs at which token count."""
    return LayerList.model_validate(service_of(request).describe())


@router.get("/v1/models")
async def models(request: Request) -> ModelList:
    """The base model and each adapter, as vLLM lists them."""
    service = service_of(request)
    base = service.model
    cards = [ModelCard(id=base.name, created=service.created, root=str(base.path), parent=None)]
    for version in service.adapters.table:
        root = str(version.adapter.path)
        cards.append(ModelCard(id=version.name, created=service.created, root=root, parent=base.name))
    return ModelList(data=cards)
