"""What is served of the checkpoint, and the base and adapters as models."""

from fastapi import APIRouter
from starlette.requests import Request

from ..schemas import LayerList, ModelCard, ModelList
from ..sent_text import utf8
from .access import service_of

router = APIRouter(tags=["layers"])


@router.get("/v1/layers")
async def layers(request: Request) -> LayerList:
    """The layers served: shapes, routing, device, and which plan runs at which token count."""
    return LayerList.model_validate(service_of(request).describe())


@router.get("/v1/models")
async def models(request: Request) -> ModelList:
    """The base model and each adapter that a forward may name now, as vLLM lists them."""
    service = service_of(request)
    base = utf8(service.model.name)
    cards = [ModelCard(id=base, created=service.created, root=utf8(str(service.model.path)), parent=None)]
    for version in service.adapters.table.all_available():
        root = utf8(str(version.adapter.facts.path))
        cards.append(ModelCard(id=version.name, created=service.created, root=root, parent=base))
    return ModelList(data=cards)
