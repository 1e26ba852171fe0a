"""Where a request's tensors lie: its JSON part checked against a layer, once for all requests that say the same."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

from ...layer.errors import RequestError
from ...layer.spec import LayerSpec
from ..json_arrays import load_object
from .header import BINARY_SIZE, OUTPUT, InferRequest, Input, read_header, shown
from .tensors import check_matrix_size

ADAPTER = "adapter"
DATATYPES: Mapping[str, tuple[str, ...]] = {
    OUTPUT: ("BF16", "FP16", "FP32"),
    "topk_ids": ("INT32", "INT64"),
    "topk_weights": ("FP32",),
    "router_logits": ("FP32",),
    ADAPTER: ("BYTES",),
}
"""The inputs of a layer with the datatypes that each may have, the usual one first."""

REMEMBERED = 64
"""Layouts of a layer that are kept."""

LONGEST_REMEMBERED = 1024
"""Bytes of a JSON part whose layout is kept: enough for every input as bytes, not for much data."""


class Place(NamedTuple):
    """An input, and bytes ``start .. stop`` behind the JSON that are its values; none where it brings JSON data."""

    given: Input
    start: int
    stop: int


class Layout(NamedTuple):
    """A request less the bytes behind its JSON part: ``size`` of them, divided over ``places`` by the inputs' names,
    which ``request`` has no more.

    ``needs_check``  how inputs go together, and what is in them, has still to be looked at
    """

    request: InferRequest
    num_tokens: int
    places: Mapping[str, Place]
    size: int
    needs_check: bool

    def check_size(self, found: int) -> None:
        """Raise ``RequestError`` unless ``found`` bytes lie behind the JSON."""
        if found == self.size:
            return
        for place in self.places.values():
            if place.stop > found:
                left = max(0, found - place.start)
                said = f"{place.given.name} has {BINARY_SIZE} {place.given.size}"
                raise RequestError(f"{said}, but only {left} bytes are left behind the JSON", place.given.name)
        raise RequestError(f"the inputs have {self.size} bytes by their {BINARY_SIZE}, but {found} lie behind the JSON")


LayoutReader = Callable[[bytes], Layout]
"""The layout of a JSON part, for one layer. Raises ``RequestError``."""


def remembering(spec: LayerSpec) -> LayoutReader:
    """A reader for ``spec`` that need not read what it has read lately: clients send the same JSON again and again."""
    remembered = lru_cache(REMEMBERED)(partial(read_layout, spec=spec))

    def read(head: bytes) -> Layout:
        return remembered(head) if len(head) <= LONGEST_REMEMBERED else read_layout(head, spec)

    return read


def read_layout(head: bytes, spec: LayerSpec) -> Layout:
    """The layout that the JSON part ``head`` describes, every input there once with a datatype and shape that fit
    ``spec``. Raises ``RequestError`` naming the field at fault."""
    request = read_header(load_object(head))
    places: dict[str, Place] = {}
    end = 0
    for given in request.inputs:
        _check(given, places)
        start, end = end, end + (given.size or 0)
        places[given.name] = Place(given, start, end)
    if OUTPUT not in places:
        raise RequestError(f"the input {OUTPUT} is required and was not sent", OUTPUT)
    shape = places[OUTPUT].given.shape
    num_tokens = shape[0] if shape else 0
    _check_shapes(request.inputs, num_tokens, widths_of(spec))
    if request.adapter is not None and ADAPTER in places:
        raise RequestError("send adapter as an input or as a parameter, not both", ADAPTER)
    request = request._replace(inputs=())  # which may be large, and are not needed while the request waits
    return Layout(request, num_tokens, places, end, not places.keys() <= {OUTPUT, ADAPTER})


def widths_of(spec: LayerSpec) -> dict[str, int]:
    """The second dimension of each input that has one."""
    return {
        OUTPUT: spec.hidden_size,
        "topk_ids": spec.top_k,
        "topk_weights": spec.top_k,
        "router_logits": spec.num_experts,
    }


def _check(given: Input, places: Mapping[str, Place]) -> None:
    if given.name not in DATATYPES:
        raise RequestError(f"unknown input {shown(given.name)}: the inputs are {', '.join(DATATYPES)}", "inputs")
    if given.name in places:
        raise RequestError(f"the input {given.name} is there twice", given.name)
    if given.datatype not in DATATYPES[given.name]:
        wanted = " or ".join(DATATYPES[given.name])
        raise RequestError(f"{given.name} should be {wanted}, got {shown(given.datatype)}", given.name)


def _check_shapes(inputs: Iterable[Input], num_tokens: int, widths: Mapping[str, int]) -> None:
    for given in inputs:
        fits = [(num_tokens,), (1,)] if given.name == ADAPTER else [(num_tokens, widths[given.name])]
        if given.shape not in fits:
            names = "[1]" if num_tokens == 1 else f"[{num_tokens}] or [1]"
            wanted = names if given.name == ADAPTER else f"[T, {widths[given.name]}]"
            where = "" if given.name == OUTPUT else f", with T = {num_tokens} as in {OUTPUT}"
            got = f"{list(given.shape[:8])}{' and more' if len(given.shape) > 8 else ''}"
            raise RequestError(f"{given.name} should have the shape {wanted}{where}, got {got}", given.name)
        if given.name != ADAPTER:
            check_matrix_size(given)
