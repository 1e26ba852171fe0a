"""The demo: read by us, by transformers and by PEFT, the same bytes each time, and never over other files."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoints import moe_block
from moelet.layer.checkpoint import open_checkpoint
from moelet.layer.demo import DemoPaths, write_demo
from moelet.layer.errors import ConfigurationError


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    return write_demo(tmp_path_factory.mktemp("demo") / "there/is/no/such/folder/yet")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_checkpoint_is_served_whole(demo: DemoPaths) -> None:
    checkpoint = open_checkpoint(demo.checkpoint)
    assert list(checkpoint.model.layers) == [0, 1, 2, 3]
    assert checkpoint.notes == ()
    spec = checkpoint.model.layers[3]
    sizes = (spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size, spec.routing.renormalize)
    assert sizes == (8, 2, 64, 48, True)
    assert sum(len(data) for data in contents(demo.checkpoint).values()) < 5_000_000


def test_transformers_finds_every_tensor_and_the_same_values(demo: DemoPaths) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(
        demo.checkpoint, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values())
    weights = open_checkpoint(demo.checkpoint).load_layer(2)
    block = moe_block(model, 2)
    assert torch.equal(block.experts.gate_up_proj, weights.gate_up)
    assert torch.equal(block.experts.down_proj, weights.down)
    assert torch.equal(block.gate.weight, weights.router)
    logits = model(torch.arange(32)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.1


def test_experts_are_used_evenly_enough_to_see_them_all(demo: DemoPaths) -> None:
    router = open_checkpoint(demo.checkpoint).load_layer(0).router.float()
    hidden = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    chosen = (hidden @ router.T).topk(2).indices.unique(return_counts=True)
    assert chosen[0].tolist() == list(range(8))
    assert chosen[1].min() >= 20


# PEFT fuses the ranks of gate and up for transformers 5 and warns about the pattern it adds itself.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_peft_reads_the_per_expert_adapter(demo: DemoPaths) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo.checkpoint, dtype=torch.float32)
    before = moe_block(model, 1).experts.gate_up_proj.detach().clone()
    merged = PeftModel.from_pretrained(model, demo.adapters["demo-a"]).merge_and_unload()
    delta = moe_block(merged, 1).experts.gate_up_proj.detach()[5] - before[5]
    stored = load_file(demo.adapters["demo-a"] / "adapter_model.safetensors")
    module = "base_model.model.model.layers.1.mlp.experts.5."
    wanted = torch.cat(
        [
            2 * stored[f"{module}{name}.lora_B.weight"].float() @ stored[f"{module}{name}.lora_A.weight"].float()
            for name in ("gate_proj", "up_proj")
        ]
    )
    torch.testing.assert_close(delta, wanted, rtol=1e-4, atol=1e-5)


def test_the_shared_outer_adapter_shares_the_matrices_of_width_h(demo: DemoPaths) -> None:
    stored = load_file(demo.adapters["demo-b"] / "adapter_model.safetensors")
    config = json.loads((demo.adapters["demo-b"] / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    shapes = {key.split("experts.")[1]: tuple(t.shape) for key, t in stored.items() if "layers.3." in key}
    assert shapes == {
        "gate_proj.lora_A.weight": (1, 4, 64),
        "gate_proj.lora_B.weight": (8, 48, 4),
        "up_proj.lora_A.weight": (1, 4, 64),
        "up_proj.lora_B.weight": (8, 48, 4),
        "down_proj.lora_A.weight": (8, 4, 48),
        "down_proj.lora_B.weight": (1, 64, 4),
    }


@pytest.mark.parametrize("name", ["demo-a", "demo-b"])
def test_no_two_matrices_of_an_adapter_are_alike(name: str, demo: DemoPaths) -> None:
    stored = load_file(demo.adapters[name] / "adapter_model.safetensors")
    assert len({tensor.view(torch.int16).numpy().tobytes() for tensor in stored.values()}) == len(stored)
    assert all(tensor.abs().amax(dim=(-1, -2)).min() > 0 for tensor in stored.values())


def test_the_bytes_are_the_same_each_time(demo: DemoPaths, tmp_path: Path) -> None:
    write_demo(tmp_path)
    assert contents(tmp_path) == contents(demo.checkpoint)
    stored = load_file(tmp_path / "model.safetensors")
    # Of numpy's frozen RandomState: a change here changes everyone's demo.
    row = stored["model.layers.0.mlp.gate.weight"][0, :4]
    assert row.tolist() == [-0.021484375, 0.197265625, 0.1328125, -0.22265625]


def test_a_demo_that_is_there_is_left_alone(tmp_path: Path) -> None:
    write_demo(tmp_path)
    (tmp_path / "config.json").write_text("mine now")
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    write_demo(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == stamps


def test_what_is_missing_is_restored(tmp_path: Path) -> None:
    whole = contents(write_demo(tmp_path).checkpoint)
    (tmp_path / "demo-b/adapter_config.json").unlink()
    (tmp_path / "config.json").unlink()
    write_demo(tmp_path)
    assert contents(tmp_path) == whole


def test_other_files_are_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(ConfigurationError, match=r"config.json is there and is not the demo's"):
        write_demo(tmp_path)
    assert contents(tmp_path) == {"config.json": b"{}", "notes.txt": b"keep"}
    with pytest.raises(ConfigurationError, match=r"cannot be written to .*notes.txt.* name another folder"):
        write_demo(tmp_path / "notes.txt/demo")
    with pytest.raises(ConfigurationError, match=r"cannot be written to .* \(File name too long\)"):
        write_demo(tmp_path / ("x" * 300))
