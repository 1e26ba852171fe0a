"""One forward as a client asked for it, whatever the protocol it came by."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layer.adapter_version import AdapterVersion
from ..layer.engine import LayerBatch
from ..layer.errors import RequestError
from .rows import Rows


class Call(NamedTuple):
    """A checked forward, its adapters still names.

    ``batch``        what to compute, its ``token_slots`` open
    ``names``        the adapters asked for, each once
    ``token_names``  int64 ``[T]``, which of ``names`` each token uses, -1 for none; None: all tokens use the only
                     one, or there is none
    """

    batch: LayerBatch
    names: tuple[str, ...] = ()
    token_names: Tensor | None = None


class Answer(NamedTuple):
    """What a forward came to: its rows, and the version of each adapter that took part."""

    layer: int
    rows: Rows
    adapter_versions: dict[str, int]

    @classmethod
    def of(cls, layer: int, rows: Rows, versions: Iterable[AdapterVersion]) -> "Answer":
        """The answer that ``versions`` took part in."""
        return cls(layer, rows, {version.name: version.version for version in versions})

    @property
    def hidden_states(self) -> Tensor:
        """bf16 ``[T, H]``."""
        return self.rows.tensor


def name_tokens(
    num_tokens: int, adapter: str | None, adapters: Sequence[str | None] | None
) -> tuple[tuple[str, ...], Tensor | None]:
    """``Call.names`` and ``Call.token_names`` from one name for all tokens, or from one for each.

    Raises ``RequestError`` when both are given or there is not one for each token.
    """
    if adapter is not None and adapters is not None:
        raise RequestError("send adapter for all tokens or adapters for each, not both", "adapters")
    if adapter is not None:
        return (adapter,), None
    if adapters is None:
        return (), None
    if len(adapters) != num_tokens:
        raise RequestError(f"adapters should name one for each of {num_tokens} tokens, got {len(adapters)}", "adapters")
    places = {name: i for i, name in enumerate(dict.fromkeys(name for name in adapters if name is not None))}
    if not places:
        return (), None
    return tuple(places), torch.tensor([-1 if name is None else places[name] for name in adapters])
