"""A transformers model whose experts run in a service: attached to a loaded model, or loaded without them."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...layer.families import family_of, layer_specs
from ...layer.spec import LayerSpec, ranges
from .client import Client
from .errors import RemoteExpertsError

if TYPE_CHECKING:
    from torch import nn

    from .remote_modules import Calls

    LocalParts = list[tuple[nn.Module, dict[str, nn.Module]]]

_SIZES = ("hidden_size", "intermediate_size", "num_experts", "top_k", "shared_intermediate_size", "shared_gated")


class RemoteExperts:
    """The experts of ``model`` in a service; made by ``attach`` or ``load``, undone by ``detach`` or a ``with``.

    Routers stay in the model: they are small, and choose there with the precision that the model runs in. The
    service computes what the router chose, and the shared experts.

    A deep copy of ``model`` calls the same service by the same client, with the adapter of that moment; a deep copy of
    this has one, and sets its adapter by itself. Whoever closes the client ends both.

    ``model``   the model, changed in place
    ``client``  what calls the service
    ``layers``  the numbers of the layers whose experts are remote
    """

    def __init__(
        self, model: "nn.Module", layers: Iterable[int], calls: "Calls", local: "LocalParts", closing: ExitStack
    ) -> None:
        self.model: Any = model
        self.client = calls.client
        self.layers = tuple(layers)
        self._calls = calls
        self._local = local
        self._closing = closing

    @classmethod
    def attach(
        cls,
        model: "nn.Module",
        url: str | Client,
        adapter: str | None = None,
        layers: Iterable[int] | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float | None = None,
    ) -> "RemoteExperts":
        """Have the service at ``url`` compute the experts of ``model``, a loaded transformers model.

        ``url``        of the service, or a ``Client`` of it, which then stays open at the end
        ``adapter``    applied to every token; change it later through the attribute
        ``layers``     the layers to change, one at least, by default every MoE layer
        ``timeout_s``  of each call

        The local experts are held by what this returns, and by nothing else: ``release`` frees them. Raises
        ``RemoteExpertsError`` if the model and the service do not go together, ``UnsupportedCheckpointError`` for a
        family that is not served, ``ServiceError`` if the service does not answer; the model is then unchanged.
        """
        from .remote_modules import Calls, local_parts, make_remote

        wanted = _chosen(layers)
        with ExitStack() as closing:
            client = _client(url, api_key, closing)
            specs = model_specs(model.config)
            blocks = _wanted_blocks(model, wanted)
            check_served(blocks, specs, client.describe())
            calls = Calls(client, adapter, timeout_s)
            local = [(block, local_parts(block)) for block in blocks.values()]
            for layer, block in blocks.items():
                make_remote(block, layer, calls)
            return cls(model, blocks, calls, local, closing.pop_all())

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        url: str | Client,
        adapter: str | None = None,
        layers: Iterable[int] | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> "RemoteExperts":
        """Load the checkpoint at ``path`` without the experts that the service computes: they are never read.

        ``options`` go to transformers' ``from_pretrained``: ``dtype``, ``device_map`` and so on; the rest is as in
        ``attach``. The result's ``model`` is what ``from_pretrained`` would have given, but for its experts.
        """
        from .without_experts import load_without_experts

        wanted = _chosen(layers)
        with ExitStack() as closing:
            client = _client(url, api_key, closing)
            client.describe()
            model = load_without_experts(path, wanted, options)
            remote = cls.attach(model, client, adapter, wanted, timeout_s=timeout_s)
            remote.release()
            remote._closing = closing.pop_all()
            return remote

    @property
    def adapter(self) -> str | None:
        """The adapter that every token gets from the next forward on, None for the base model."""
        return self._calls.adapter

    @adapter.setter
    def adapter(self, name: str | None) -> None:
        self._calls.adapter = name

    @property
    def adapter_versions(self) -> Mapping[str, int]:
        """The version of the adapter that answered the latest call; empty where none was used."""
        return self._calls.versions

    def release(self) -> None:
        """Let go of the local experts, so that their memory is free; there is no ``detach`` after this."""
        self._local = []

    def detach(self) -> None:
        """Put the local experts back, as they were, and end. Raises ``RemoteExpertsError`` if they were let go."""
        if not self._local:
            raise RemoteExpertsError(
                "the local experts were released or never loaded: load the model again to have them"
            )
        self.close()

    def close(self) -> None:
        """End: put the local experts back if they are still held, and close a client that was made here."""
        for block, parts in self._local:
            for name, module in parts.items():
                setattr(block, name, module.train(block.training))
        self._local = []
        self._closing.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteExperts":
        model, calls = deepcopy(self.model, memo), deepcopy(self._calls, memo)
        return RemoteExperts(model, self.layers, calls, deepcopy(self._local, memo), ExitStack())

    def __enter__(self) -> "RemoteExperts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _client(url: str | Client, api_key: str | None, closing: ExitStack) -> Client:
    """The client that was given, or one made here, which ``closing`` then closes."""
    return url if isinstance(url, Client) else closing.enter_context(Client(url, api_key))


def model_specs(config: Any) -> dict[int, LayerSpec | str]:
    """By layer, what a transformers ``config`` says of its sizes, or why it is dense."""
    text = config.get_text_config().to_dict()
    return dict(enumerate(layer_specs(text, family_of(text))))


def check_served(layers: Iterable[int], specs: Mapping[int, LayerSpec | str], served: Mapping[str, Any]) -> None:
    """Raise ``RemoteExpertsError`` unless the service computes each of ``layers``, whole and of the same sizes.

    ``served`` is the answer of ``GET /v1/layers``.
    """
    cards = {card["layer"]: card for card in served["layers"]}
    for layer in layers:
        card = cards.get(layer)
        if card is None:
            why = served["skipped"].get(str(layer), "there is no such layer")
            raise RemoteExpertsError(
                f"layer {layer} of the model is not served: {why}; the layers served are {ranges(cards)}"
            )
        spec = specs.get(layer, "there is no such layer")
        wanted = {name: getattr(spec, name, spec) for name in _SIZES}
        found = {name: card[name] for name in _SIZES}
        if different := [name for name in _SIZES if wanted[name] != found[name]]:
            name = different[0]
            raise RemoteExpertsError(
                f"layer {layer} has {name} {wanted[name]} in the model, and {found[name]} in the service, "
                f"which serves {served['model']} ({served['model_type']})"
            )
        if card["num_local_experts"] != card["num_experts"]:
            raise RemoteExpertsError(
                f"the service holds {card['num_local_experts']} of the {card['num_experts']} experts of layer {layer}: "
                "its answers are parts of a sum"
            )


def _chosen(layers: Iterable[int] | None) -> set[int] | None:
    """``layers`` as a set. Raises ``RemoteExpertsError`` where there are none: that would be a model without any."""
    wanted = None if layers is None else set(layers)
    if wanted is not None and not wanted:
        raise RemoteExpertsError("layers is empty: name the layers to change, or leave it out for every MoE layer")
    return wanted


def _wanted_blocks(model: "nn.Module", layers: set[int] | None) -> "dict[int, nn.Module]":
    """The MoE blocks to change, by layer, each one that can be. Raises ``RemoteExpertsError``."""
    from torch import nn

    from .remote_modules import RemoteLayer, local_parts, moe_blocks

    found = dict(moe_blocks(model))
    wanted = found if layers is None else dict.fromkeys(layers)
    if missing := sorted(wanted.keys() - found.keys()):
        raise RemoteExpertsError(
            f"layer {missing[0]} of the model is no MoE layer; those are {ranges(found) or 'none'}"
        )
    if not wanted:
        raise RemoteExpertsError(
            f"{type(model).__name__} has no MoE layer with a gate and experts, as transformers 5 has"
        )
    for layer in wanted:
        experts = found[layer].experts
        if isinstance(experts, RemoteLayer):
            raise RemoteExpertsError(f"the experts of layer {layer} are remote already: detach first")
        if isinstance(experts, nn.ModuleList):
            raise RemoteExpertsError(
                f"the experts of layer {layer} are a list of modules: transformers 5, which has one for all, is needed"
            )
        names = (name for part in local_parts(found[layer]).values() for name, _ in part.named_parameters())
        if lora := next((name for name in names if "lora_" in name), None):
            raise RemoteExpertsError(
                f"the experts of layer {layer} carry a local adapter ({lora}), which the service would not apply: "
                "load it into the service, and attach to the model without it"
            )
    return {layer: found[layer] for layer in sorted(wanted)}
