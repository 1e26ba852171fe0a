"""Checkpoints of every family against transformers' own MoE modules, in every form they come in."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from checkpoints import (
    DENSE,
    EXPERTS,
    FAMILY_CONFIGS,
    HIDDEN,
    LAYERS,
    SHARED,
    TOP_K,
    WIDTH,
    copy_checkpoint,
    fuse_experts,
    moe_block,
    update_config,
    write_checkpoint,
)
from moelet.layer.checkpoint import open_checkpoint
from moelet.layer.errors import CheckpointNotFoundError, ConfigurationError, LayerNotServedError
from moelet.layer.errors import UnsupportedCheckpointError as Unsupported
from moelet.layer.routing import route
from moelet.layer.spec import LayerSpec
from moelet.layer.weights import LayerWeights

Tensors = dict[str, Tensor]
EXPERT = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pristine qwen3_moe checkpoint: tests copy it before they spoil it."""
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint(directory, "qwen3_moe")
    return directory


@pytest.fixture
def edited(qwen3: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of the pristine checkpoint with config fields or tensors changed."""
    return partial(copy_checkpoint, qwen3, tmp_path / "edited")


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.double().T).chunk(2, dim=-1)
    return (silu(gate) * up) @ down.double().T


def plain_forward(x: Tensor, weights: LayerWeights, spec: LayerSpec) -> Tensor:
    """The layer in float64, token by token, expert by expert."""
    ids, scales = route(x @ weights.router.double().T, spec, weights.correction_bias)
    out = torch.zeros_like(x)
    for token, (chosen, scale) in enumerate(zip(ids.tolist(), scales, strict=True)):
        for slot, expert in enumerate(chosen):
            out[token] += scale[slot] * mlp(x[token], weights.gate_up[expert], weights.down[expert])
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        shared = mlp(x, weights.shared_gate_up, weights.shared_down)
        if weights.shared_gate is not None:
            shared = shared * (x @ weights.shared_gate.double().T).sigmoid()
        out += shared
    return out


@pytest.mark.parametrize("hub_names", [True, False], ids=["hub", "fused"])
@pytest.mark.parametrize("model_type", FAMILY_CONFIGS)
def test_every_moe_layer_computes_what_transformers_computes(model_type: str, hub_names: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, model_type, hub_names=hub_names)
    fused = any(key.endswith("experts.gate_up_proj") for key in load_file(tmp_path / "model.safetensors"))
    assert fused != hub_names
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.model.model_type == model_type
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().double()
    for index, spec in checkpoint.model.layers.items():
        weights = checkpoint.load_layer(index)
        with torch.no_grad():
            want = moe_block(model, index).double()(x[None])[0]
        error = (plain_forward(x, weights, spec) - want).norm() / want.norm()
        assert error < 2e-6
        assert checkpoint.layer_nbytes(index) == weights.nbytes


@pytest.mark.parametrize("model_type", FAMILY_CONFIGS)
def test_the_spec_says_what_the_config_said(model_type: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model_type)
    model = open_checkpoint(tmp_path, name="mine").model
    spec = model.layers[2]
    assert (model.name, model.path, model.num_hidden_layers) == ("mine", tmp_path, LAYERS)
    assert (spec.hidden_size, spec.intermediate_size, spec.num_experts, spec.top_k) == (HIDDEN, WIDTH, EXPERTS, TOP_K)
    shared = {"deepseek_v3": 2 * WIDTH, "glm4_moe": 2 * WIDTH, "qwen2_moe": SHARED}
    shared |= {"qwen3_next": SHARED, "qwen3_5_moe": SHARED}
    assert spec.shared_intermediate_size == shared.get(model_type, 0)
    assert spec.shared_gated == (spec.shared_intermediate_size == SHARED)
    dense = {"qwen2_moe": {1}, "deepseek_v3": {0}, "glm4_moe": {0}}.get(model_type, set())
    assert set(model.skipped) == dense
    assert set(model.layers) == set(range(LAYERS)) - dense
    renormalized = {"qwen2_moe": False, "olmoe": False}.get(model_type, True)
    assert spec.routing.renormalize is renormalized


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3")
    as_deepseek = open_checkpoint(tmp_path)
    update_config(tmp_path, model_type="kimi_k2", scoring_func="sigmoid", topk_method="noaux_tc")
    as_kimi = open_checkpoint(tmp_path)
    assert as_kimi.model.layers == as_deepseek.model.layers
    bias, stored = as_kimi.load_layer(1).correction_bias, load_file(tmp_path / "model.safetensors")
    assert bias is not None
    assert torch.equal(bias, stored["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert not torch.equal(bias, bias.bfloat16().float())


def test_the_text_part_of_a_composite_checkpoint_may_stand_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole", "qwen3_5_moe")
    whole = open_checkpoint(tmp_path / "whole")
    assert any("vision tower" in note for note in whole.notes)
    config = json.loads((tmp_path / "whole/config.json").read_text())["text_config"]
    stored = load_file(tmp_path / "whole/model.safetensors")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/config.json").write_text(json.dumps(config))
    text = {key.replace("model.language_model.", "model."): tensor for key, tensor in stored.items()}
    save_file(text, tmp_path / "text/model.safetensors")
    alone = open_checkpoint(tmp_path / "text")
    assert alone.model.model_type == "qwen3_5_moe_text"
    assert_same_weights(alone.load_layer(1), whole.load_layer(1))


def assert_same_weights(found: LayerWeights, wanted: LayerWeights) -> None:
    for name in LayerWeights.__slots__:
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs)), name


@pytest.mark.parametrize(
    ("step", "mlp_only", "dense"), [(1, [0, 2], {0, 2}), (2, [], {0, 2}), (3, None, {0, 1}), (2, [1], {0, 1, 2})]
)
def test_dense_layers_are_skipped_with_a_reason(
    step: int, mlp_only: list[int] | None, dense: set[int], tmp_path: Path
) -> None:
    settings = {"decoder_sparse_step": step, "mlp_only_layers": mlp_only}
    write_checkpoint(tmp_path, "qwen3_moe", **settings)
    if len(dense) == LAYERS:
        with pytest.raises(Unsupported, match="no MoE layer"):
            open_checkpoint(tmp_path)
        return
    model = open_checkpoint(tmp_path).model
    assert set(model.skipped) == dense
    assert set(model.layers) == set(range(LAYERS)) - dense
    with pytest.raises(LayerNotServedError, match=r"is dense \((listed in mlp_only|decoder_sparse)"):
        model.layer(min(dense))
    with pytest.raises(ConfigurationError, match=f"layer {min(dense)} cannot be served: it is dense"):
        open_checkpoint(tmp_path, layers=[min(dense)])


def test_moe_layer_freq_is_honoured(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "glm4_moe")
    update_config(tmp_path, moe_layer_freq=2)
    model = open_checkpoint(tmp_path).model
    assert set(model.layers) == {2}
    assert "moe_layer_freq is 2" in model.skipped[1]


def test_only_the_layers_asked_for_are_served(qwen3: Path) -> None:
    checkpoint = open_checkpoint(qwen3, layers=[2, 0])
    assert list(checkpoint.model.layers) == [0, 2]
    assert set(checkpoint.model.skipped) == {1}
    assert_same_weights(checkpoint.load_layer(2), open_checkpoint(qwen3).load_layer(2))
    for call in (checkpoint.load_layer, checkpoint.layer_nbytes):
        with pytest.raises(LayerNotServedError, match=r"layer 1 is not served: it was left out.* served are 0,2"):
            call(1)
    with pytest.raises(ConfigurationError, match=r"layer 3 cannot be served: there is no such layer, .* has 3"):
        open_checkpoint(qwen3, layers=[0, 3])
    with pytest.raises(ConfigurationError, match="no layer was chosen"):
        open_checkpoint(qwen3, layers=[])


@pytest.mark.parametrize("hub_names", [True, False], ids=["hub", "fused"])
@pytest.mark.parametrize("offset", [0, 3])
def test_an_expert_slice_holds_only_its_experts(offset: int, hub_names: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen2_moe", hub_names=hub_names)
    whole = open_checkpoint(tmp_path).load_layer(0)
    part = open_checkpoint(tmp_path, expert_slice=(offset, 2))
    weights, spec = part.load_layer(0), part.model.layers[0]
    assert (spec.local_expert_offset, spec.num_local_experts, spec.num_experts) == (offset, 2, EXPERTS)
    assert torch.equal(weights.gate_up, whole.gate_up[offset : offset + 2])
    assert torch.equal(weights.down, whole.down[offset : offset + 2])
    assert torch.equal(weights.router, whole.router)
    assert (weights.shared_gate_up is not None) == (weights.shared_gate is not None) == (offset == 0)
    assert part.layer_nbytes(0) == weights.nbytes


@pytest.mark.parametrize("bad", [(-1, 2), (0, 0), (0, -1), (7, 2), (8, 1)])
def test_an_impossible_expert_slice_is_an_error(bad: tuple[int, int], qwen3: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be held: layer 0 has 8 experts"):
        open_checkpoint(qwen3, expert_slice=bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_wider_weights_are_cast_with_a_note(dtype: torch.dtype, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen2_moe", dtype=dtype)
    stored = {key: tensor + tensor.abs() * 2**-10 for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    weights = checkpoint.load_layer(0)
    up, router = stored[f"{EXPERT}5.up_proj.weight"], stored["model.layers.0.mlp.gate.weight"]
    assert torch.equal(weights.gate_up[5, WIDTH:], up.bfloat16())
    assert not torch.equal(up, up.bfloat16().to(dtype))
    assert weights.router.dtype == torch.float32
    assert torch.equal(weights.router, router.float())
    name = str(dtype).removeprefix("torch.")
    assert f"56 tensors are stored as {name} and cast to bfloat16." in checkpoint.notes
    assert (f"2 tensors are stored as {name} and cast to float32." in checkpoint.notes) == (dtype == torch.float16)


def test_shards_are_read_only_where_they_are_needed(qwen3: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {name for key, name in index.items() if key.startswith("model.layers.1.mlp.")}
    assert len(needed) > 1
    wanted = open_checkpoint(qwen3).load_layer(1)
    assert_same_weights(open_checkpoint(tmp_path).load_layer(1), wanted)
    for path in tmp_path.glob("*.safetensors"):
        if path.name not in needed:
            path.unlink()
    assert_same_weights(open_checkpoint(tmp_path, layers=[1]).load_layer(1), wanted)
    with pytest.raises(CheckpointNotFoundError, match=r"model-000.*safetensors is not there"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", [WIDTH, HIDDEN // 2, HIDDEN], ids=["none square", "2I = H", "I = H"])
def test_both_orientations_of_fused_experts_are_told_apart(width: int, transposed: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", moe_intermediate_size=width)
    wanted = open_checkpoint(tmp_path).load_layer(0)
    stored = load_file(tmp_path / "model.safetensors")
    fuse_experts(stored, 0, transpose_gate_up=transposed, transpose_down=transposed)
    save_file(stored, tmp_path / "model.safetensors")
    assert_same_weights(open_checkpoint(tmp_path).load_layer(0), wanted)
    part = open_checkpoint(tmp_path, expert_slice=(2, 3)).load_layer(0)
    assert torch.equal(part.gate_up, wanted.gate_up[2:5])
    assert torch.equal(part.down, wanted.down[2:5])


def test_prediction_layers_beyond_the_last_are_ignored_with_a_note(edited: Callable[..., Path]) -> None:
    def add(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.startswith("model.layers.2.")]:
            tensors[key.replace("layers.2.", "layers.3.")] = tensors[key].clone()
            tensors["mtp." + key.removeprefix("model.").replace("layers.2.", "layers.0.")] = tensors[key].clone()

    checkpoint = open_checkpoint(edited(tensors=add))
    assert list(checkpoint.model.layers) == [0, 1, 2]
    assert checkpoint.notes == (
        "model.layers.3.* is ignored: it lies beyond the 3 layers (multi-token prediction).",
        "mtp.layers.* is ignored: it is not part of the language model's layers.",
    )


def test_a_backbone_saved_without_its_head_is_found(edited: Callable[..., Path], qwen3: Path) -> None:
    def strip(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    assert_same_weights(open_checkpoint(edited(tensors=strip)).load_layer(1), open_checkpoint(qwen3).load_layer(1))


def test_an_absent_norm_topk_prob_is_assumed_with_a_note(qwen3: Path, edited: Callable[..., Path]) -> None:
    assert open_checkpoint(qwen3).model.layers[0].routing.renormalize
    checkpoint = open_checkpoint(edited({"norm_topk_prob": None}))
    assert not checkpoint.model.layers[0].routing.renormalize
    assert checkpoint.notes == (
        "config.json has no norm_topk_prob: False is assumed, the default of this family in transformers.",
    )


def test_a_file_that_changes_after_opening_is_noticed(edited: Callable[..., Path]) -> None:
    directory = edited()
    checkpoint = open_checkpoint(directory)
    stored = load_file(directory / "model.safetensors")
    save_file(stored | {f"{EXPERT}0.up_proj.weight": torch.ones(1, 40)}, directory / "model.safetensors")
    with pytest.raises(Unsupported, match=r"experts.0.up_proj.weight changed on disk"):
        checkpoint.load_layer(0)


def test_fixture_sizes_all_differ() -> None:
    assert len({HIDDEN, WIDTH, 2 * WIDTH, SHARED, DENSE, EXPERTS, TOP_K}) == 7
