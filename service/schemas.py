"""The JSON bodies of the native endpoints, as pydantic checks them and OpenAPI describes them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Row = list[float | None]


class ForwardRequest(BaseModel):
    """Hidden states that reach one layer, how to route them, and which adapters to apply.

    With neither ``topk_ids`` and ``topk_weights`` nor ``router_logits`` the checkpoint's own gate routes.
    """

    model_config = ConfigDict(extra="forbid")

    hidden_states: list[list[float]] = Field(description="[T][H], read as bf16")
    topk_ids: list[list[int]] | None = Field(None, description="[T][top_k] expert ids, -1 for no expert")
    topk_weights: list[list[float]] | None = Field(None, description="[T][top_k], used as sent; with topk_ids")
    router_logits: list[list[float]] | None = Field(None, description="[T][E], routed by the checkpoint's method")
    adapter: str | None = Field(None, description="one adapter for all tokens")
    adapters: list[str | None] | None = Field(None, description="[T], one adapter or null for each token")


class ForwardAnswer(BaseModel):
    """The layer's output, and the version of each adapter that it was computed with."""

    hidden_states: list[Row] = Field(description="[T][H]; NaN and infinities are null")
    layer: int
    num_tokens: int
    adapter_versions: dict[str, int]


class LoadLoraAdapter(BaseModel):
    """Load an adapter, as vLLM spells it; fields that are not named here are ignored."""

    model_config = ConfigDict(strict=True)

    lora_name: str
    lora_path: str = Field(description="a folder below an adapter root, absolute or relative to a root")
    load_inplace: bool = Field(False, description="replace an adapter of this name")
    pinned: bool | None = Field(None, description="never evict it; when replacing, left out keeps what it was")


class UnloadLoraAdapter(BaseModel):
    """Unload an adapter, as vLLM spells it; fields that are not named here are ignored."""

    model_config = ConfigDict(strict=True)

    lora_name: str


class PutAdapter(BaseModel):
    """Load or replace the adapter of the name in the path."""

    model_config = ConfigDict(strict=True)

    path: str = Field(description="a folder below an adapter root, absolute or relative to a root")
    pinned: bool | None = Field(None, description="never evict it; when replacing, left out keeps what it was")


class AdapterRecord(BaseModel):
    """One loaded adapter."""

    name: str
    version: int = Field(description="1, 2, …: one more with each replacement")
    path: str
    rank: int
    lora_alpha: float
    scaling: float
    layout: Literal["per_expert", "shared_outer", "mixed"]
    layers: list[int]
    targets: list[str]
    bytes: int
    resident: Literal["gpu", "host"]
    slot: int | None
    in_flight: int = Field(description="requests that hold it")
    pinned: bool
    ignored_keys: list[str] = Field(description="tensor keys of modules that are not served")


class AdapterList(BaseModel):
    """Every loaded adapter, by name."""

    adapters: list[AdapterRecord]


class ModelCard(BaseModel):
    """The base model or one adapter, as vLLM lists them."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="seconds since 1970")
    owned_by: str = "moelet"
    root: str
    parent: str | None


class ModelList(BaseModel):
    """The base model, then the adapters."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class LayerCard(BaseModel):
    """One served layer: its sizes, how it routes, and which plan runs at which token count."""

    layer: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_local_experts: int
    local_expert_offset: int
    top_k: int
    shared_intermediate_size: int
    shared_gated: bool
    routing: dict[str, Any]
    plans: list[dict[str, Any]]


class LayerList(BaseModel):
    """What is served of the checkpoint, and why each other layer is not."""

    model: str
    model_type: str
    device: str
    max_loras: int
    max_lora_rank: int
    layers: list[LayerCard]
    skipped: dict[int, str]


class State(BaseModel):
    """Where the service is in its life."""

    status: Literal["starting", "ready", "draining", "failed"]


class ErrorDetail(BaseModel):
    """What was wrong, what was expected and what came."""

    message: str
    type: str
    param: str | None
    code: Annotated[int, Field(description="the HTTP status")]


class ErrorBody(BaseModel):
    """The body of every answer but 2xx."""

    error: ErrorDetail


BODIES: tuple[type[BaseModel], ...] = (ForwardRequest, LoadLoraAdapter, UnloadLoraAdapter, PutAdapter)
"""Bodies that handlers read themselves, for OpenAPI to list."""
