"""What every answer of a soak has to be: many adapters of one checkpoint, and every token's output under each."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moelet.layer.adapter_loading import load_adapter
from moelet.layer.checkpoint import Checkpoint, open_checkpoint
from moelet.layer.demo import write_demo
from moelet.layer.engine import LayerBatch
from moelet.layer.oracle import layer_forward
from moelet.layer.reference import ReferenceEngine

from .report import ROOT

ROWS = 48
"""Different tokens; the last two have NaN and infinity."""
LAYERS = (0, 2)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tokens that requests choose from: bf16 ``[R, H]``, with top-k ids and weights ``[R, top_k]``."""

    hidden: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


Kind = tuple[int, bool]
"""A layer, and whether top-k is sent."""


class Truth:
    """The outputs of all tokens: of each kind bf16 ``[adapters + 1, R, H]``, the last for no adapter."""

    def __init__(self, folder: Path, adapters: int) -> None:
        self.checkpoint_folder = write_demo(folder / "demo").checkpoint
        checkpoint = open_checkpoint(self.checkpoint_folder)
        self.adapter_folders = write_adapters(folder, adapters)
        model = checkpoint.model
        self._adapters = [load_adapter(each, model, max_rank=64, root=folder) for each in self.adapter_folders]
        self._weights = {layer: checkpoint.load_layer(layer) for layer in LAYERS}
        self._model = model
        self.inputs = random_inputs(checkpoint)
        self.expected = {kind: self._compute(kind) for kind in self.kinds}

    @property
    def kinds(self) -> list[Kind]:
        """Every kind of request."""
        return [(layer, topk) for layer in LAYERS for topk in (False, True)]

    def batch(self, kind: Kind) -> LayerBatch:
        """Every token under every adapter, and under none."""
        layer, topk = kind
        count = len(self._adapters) + 1
        slots = torch.arange(count, dtype=torch.int32).repeat_interleave(ROWS)
        slots[slots == count - 1] = -1
        inputs = self.inputs
        return LayerBatch(
            layer=layer,
            hidden_states=inputs.hidden.repeat(count, 1),
            topk_ids=inputs.topk_ids.repeat(count, 1) if topk else None,
            topk_weights=inputs.topk_weights.repeat(count, 1) if topk else None,
            token_slots=slots,
        )

    def adopt(self, kind: Kind, quiet: Tensor) -> None:
        """Take what an engine that rounds otherwise answers to ``batch(kind)`` when nothing else runs as the truth,
        once it is as near to float64 as the tests' rule asks."""
        oracle, batch = tests_oracle(), self.batch(kind)
        spec, weights = self._model.layer(kind[0]), self._weights[kind[0]]
        flat = quiet.reshape(batch.hidden_states.shape)
        whole = batch.hidden_states.isfinite().all(dim=1)
        finite = _rows(batch, whole)  # the plain torch layer lets a NaN into other tokens
        truth = layer_forward(spec, weights, finite, self._adapters)
        baseline = oracle.torch_bf16_layer(spec, weights, finite, self._adapters)
        oracle.assert_close_to_truth(flat[whole], truth, baseline)
        assert not flat[~whole].isfinite().all(dim=1).any(), "a token that was not finite came out finite"
        self.expected[kind] = quiet

    def agrees(self, kind: Kind, rows: Sequence[int], variants: Sequence[int], output: Tensor) -> bool:
        """Whether ``output`` is, bit for bit, that of ``rows`` under the adapters ``variants``, -1 for none."""
        expected = self.expected[kind][list(variants), list(rows)]
        return bool(((output == expected) | (output.isnan() & expected.isnan())).all())

    def _compute(self, kind: Kind) -> Tensor:
        engine = ReferenceEngine(self._model, self._weights, max_loras=len(self._adapters))
        for slot, adapter in enumerate(self._adapters):
            engine.install_adapter(slot, adapter)
        return engine.forward(self.batch(kind)).reshape(len(self._adapters) + 1, ROWS, -1)


def _rows(batch: LayerBatch, rows: Tensor) -> LayerBatch:
    """The tokens ``rows`` of ``batch``, which has no router logits."""
    assert batch.token_slots is not None
    return LayerBatch(
        layer=batch.layer,
        hidden_states=batch.hidden_states[rows],
        topk_ids=None if batch.topk_ids is None else batch.topk_ids[rows],
        topk_weights=None if batch.topk_weights is None else batch.topk_weights[rows],
        token_slots=batch.token_slots[rows],
    )


def write_adapters(folder: Path, count: int) -> list[Path]:
    """Adapters that differ in every number, of the two layouts and ranks of the demo's."""
    random = torch.Generator().manual_seed(1)
    models = [folder / "demo" / name for name in ("demo-a", "demo-b")]
    written = []
    for number in range(count):
        model = models[number % 2]
        path = folder / f"variant-{number}"
        path.mkdir()
        (path / "adapter_config.json").write_text((model / "adapter_config.json").read_text())
        tensors = load_file(model / "adapter_model.safetensors")
        changed = {
            name: (torch.randn(tensor.shape, generator=random) * tensor.float().std()).bfloat16()
            for name, tensor in sorted(tensors.items())
        }
        save_file(changed, path / "adapter_model.safetensors")
        written.append(path)
    return written


def random_inputs(checkpoint: Checkpoint) -> Inputs:
    """Tokens, of which the last two are not finite."""
    random = torch.Generator().manual_seed(2)
    spec = checkpoint.model.layer(LAYERS[0])
    hidden = torch.randn(ROWS, spec.hidden_size, generator=random).bfloat16()
    hidden[-2, 3], hidden[-1, 5] = float("nan"), float("inf")
    ids = torch.rand(ROWS, spec.num_experts, generator=random).argsort(dim=1)[:, : spec.top_k].to(torch.int32)
    return Inputs(hidden, ids.contiguous(), torch.rand(ROWS, spec.top_k, generator=random))


def tests_oracle() -> ModuleType:
    """The tolerance rule of the tests, which come with the same checkout."""
    found = importlib.util.spec_from_file_location("oracle", ROOT / "tests" / "oracle.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
