"""Whole benchmarks over the fake driver: what they capture, send, read back and write, and how they end.

No kernel runs there, so that outputs are the NaN that memory was poisoned with, unless a test puts others there.
"""

# ruff: noqa: ARG001 (the fake driver must be there)

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import forwards, measurement, reading
from benchmarks.__main__ import main
from benchmarks.forwards import Forwards, WeightSet, forwards_per_graph
from benchmarks.rig import Rig
from benchmarks.shapes import SHAPES
from benchmarks.timing import Timing
from benchmarks.workload import Workload, random_batches
from torch import Tensor

from bench_driver import US, BenchDriver, exact
from moelet.graphs import plan_choice
from moelet.graphs.buffers import LAYER_ARGS, InputLayout, RoutingInput
from moelet.graphs.driver import driver
from moelet.graphs.geometry import Geometry
from moelet.graphs.program import Plan
from moelet.layer.spec import LayerSpec
from random_layers import SPEC

pytest.importorskip("cuda.bindings.driver")

NUMBERS = ["--num-experts", "6", "--top-k", "3", "--hidden-size", "72", "--intermediate-size", "40"]
SHAPE = "e6-k3-h72-i40"
FEW = ["--replays", "5", "--slots", "3", "--commit", "abc"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> BenchDriver:
    return BenchDriver().install(monkeypatch)


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "result.json"
    code = main([arguments[0], *NUMBERS, *FEW, *arguments[1:], "--json", str(path)])
    return code, json.loads(path.read_text())


def measured_forwards(
    spec: LayerSpec, workload: Workload, plan: Plan, count: int
) -> tuple[Rig, list[WeightSet], Forwards]:
    on = Rig()
    geometry = Geometry.of(spec, router_fp32=False, max_loras=2, max_lora_rank=8)
    sets = [WeightSet(on, spec, geometry, seed) for seed in range(2)]
    if workload.lora:
        for each in sets:
            each.install(2, workload.rank, shared_outer=False)
    return on, sets, Forwards(on, geometry, workload, plan, sets, random_batches(spec, workload, count, 2))


def test_each_forward_has_its_own_weights_inputs_and_memory(fake: BenchDriver) -> None:
    workload = Workload(num_tokens=5, rank=4, adapters=2)
    on, sets, made = measured_forwards(SPEC, workload, Plan.SINGLE_STREAM, 4)
    parts = [part for (part,) in made._parts]
    assert len({part.arena.pointer("input") for part in parts}) == 4
    geometry = sets[0].layer.geometry
    layout = InputLayout(geometry, 5, RoutingInput.TOPK)
    for index, part in enumerate(parts):
        block = part.arena.read("input").numpy()
        head = block[: LAYER_ARGS.itemsize].view(LAYER_ARGS)[0]
        assert head["num_tokens"] == 5
        assert head["gate_up"] == sets[index % 2].layer.args["gate_up"]
        assert head["lora_a_down"] == sets[index % 2].layer.args["lora_a_down"] != 0
        sent = {
            "topk_ids": part.batch.topk_ids,
            "topk_weights": part.batch.topk_weights,
            "token_slots": part.batch.token_slots,
        }
        for name, tensor in sent.items():
            assert tensor is not None
            offset = layout.fields[name].offset
            assert block[offset : offset + tensor.nbytes].tobytes() == tensor.numpy().tobytes()
        offset, stride = layout.fields["hidden_states"].offset, geometry.hidden_stride
        hidden = torch.from_numpy(block[offset : offset + 5 * stride * 2]).view(torch.bfloat16).view(5, stride)
        assert torch.equal(hidden[:, : SPEC.hidden_size], part.batch.hidden_states)
        assert torch.isnan(part.arena.read("output")).all()
    assert not torch.equal(parts[0].batch.hidden_states, parts[1].batch.hidden_states)
    made.capture()
    assert fake.graphs[-1] == sum(len(part.program.launches) for part in parts)
    made.capture(2)
    assert fake.graphs[-1] == 4 * 2
    assert all(torch.isnan(out).all() and out.shape == (5, SPEC.hidden_size) for out in made.outputs())
    made.close()
    on.close()


def test_a_batch_too_large_for_an_engine_is_run_in_parts(fake: BenchDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "MAX_EAGER_TOKENS", 4)
    on, _, made = measured_forwards(SPEC, Workload(num_tokens=10), Plan.SINGLE_STREAM, 2)
    assert [[part.batch.num_tokens for part in parts] for parts in made._parts] == [[4, 4, 2]] * 2
    for parts in made._parts:
        for index, part in enumerate(parts):
            stride = part.pool.geometry.output_stride
            part.arena.write("output", torch.full((part.batch.num_tokens, stride), float(index), dtype=torch.bfloat16))
    for out in made.outputs():
        assert out[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert made.count == 2
    made.close()
    on.close()


def test_forwards_of_a_graph_move_several_times_l2() -> None:
    q30, part = SHAPES["qwen3-30b-a3b"], SHAPES["qwen3-30b-a3b-ep4"]
    assert [forwards_per_graph(q30, tokens) for tokens in (1, 32, 64, 256, 2048)] == [8, 8, 4, 4, 2]
    assert [forwards_per_graph(part, tokens) for tokens in (1, 16, 256)] == [16, 8, 4]


def test_layer_rows(fake: BenchDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Forwards, "outputs", exact)
    code, written = run(
        tmp_path, "layer", "--tokens", "1,4", "--adapters", "1,2,all", "--plan", "all", "--shared-outer"
    )
    assert code == 0
    kinds = [
        (r["tokens"], r["rank"], r["adapters"], r["layout"]) for r in written["rows"] if r["plan"] == Plan(r["plan"])
    ]
    plans = len(Plan)
    for layout in ("per_expert", "shared_outer"):
        expected = [(1, 16, 1, layout), *[(4, 16, n, layout) for n in (1, 2, "all")]]
        assert [kind for kind in kinds if kind[3] == layout] == [kind for kind in expected for _ in range(plans)]
    assert kinds[:2] == [(1, 0, 0, None), (4, 0, 0, None)]
    bandwidth = (9 << 20) // (132 * reading.STAGE_BYTES) * 132 * reading.STAGE_BYTES / (US * 1e-6)
    for row in written["rows"]:
        assert row["us"] == pytest.approx(US / row["forwards"], abs=0.01)
        assert 0.0 < row["error"] < measurement.LARGEST_ERROR
        assert row["repeatable"]
        assert not row["wrong"]
        floor = (row["weight_bytes"] + row["lora_bytes"]) / bandwidth * 1e6
        assert row["floor_us"] == pytest.approx(floor, abs=0.01)
        assert row["fraction"] == pytest.approx(floor / row["us"], rel=0.01)
        assert (row["lora_bytes"] > 0) == (row["rank"] > 0)
        assert row["of_base"] == 1.0
    assert (written["kind"], written["commit"], written["gpu"]) == ("layer", "abc", "Fake H200")
    assert set(written["absent_peers"]) == {"torch grouped_mm", "vllm"}


def test_what_was_not_compared_is_not_called_right(fake: BenchDriver, tmp_path: Path) -> None:
    code, written = run(tmp_path, "layer", "--tokens", "2", "--ranks", "0", "--no-check")
    assert code == 0
    assert [(row["error"], row["repeatable"], row["wrong"]) for row in written["rows"]] == [(None, None, False)]


def test_a_wrong_output_fails_the_run(fake: BenchDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, written = run(tmp_path, "layer", "--tokens", "2", "--ranks", "0")
    assert code == 1
    assert [(row["wrong"], row["error"]) for row in written["rows"]] == [(True, None)]
    assert "wrong output: " in capsys.readouterr().err
    assert run(tmp_path, "layer", "--tokens", "2", "--ranks", "0", "--no-check")[0] == 0


def test_outputs_that_change_from_replay_to_replay_fail_the_run(
    fake: BenchDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def drifting(made: Forwards) -> list[Tensor]:
        calls.append(1)
        return [out * (1.0 + 2.0**-7 * (len(calls) - 1)) for out in exact(made)]

    monkeypatch.setattr(Forwards, "outputs", drifting)
    code, written = run(tmp_path, "layer", "--tokens", "2", "--ranks", "0")
    assert code == 1
    assert written["rows"][0]["error"] < measurement.LARGEST_ERROR
    assert "replays differ" in capsys.readouterr().err


def test_slower_than_before(fake: BenchDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["layer", "--tokens", "2,3", "--ranks", "0", "--no-check"]
    _, earlier = run(tmp_path, *arguments)
    same, better = tmp_path / "same.json", tmp_path / "better.json"
    same.write_text(json.dumps(earlier))
    earlier["rows"][1]["fraction"] *= 1.05
    better.write_text(json.dumps(earlier))
    assert run(tmp_path, *arguments, "--against", str(same))[0] == 0
    capsys.readouterr()
    assert run(tmp_path, *arguments, "--against", str(better))[0] == 1
    told = capsys.readouterr()
    assert told.err.startswith(f"slower: {SHAPE} T=3 uniform, base, fused: ")
    assert "2 of 2 rows compared" in told.out
    earlier |= {"rows": earlier["rows"][:1], "gpu": "another"}
    same.write_text(json.dumps(earlier))
    assert run(tmp_path, *arguments, "--against", str(same))[0] == 0
    told = capsys.readouterr()
    assert "1 of 2 rows compared" in told.out
    assert "of another GPU: another" in told.err
    assert f"not in the earlier result: {SHAPE} T=3 uniform, base, fused" in told.err


def test_a_result_is_not_compared_with_what_it_replaces(fake: BenchDriver, tmp_path: Path) -> None:
    arguments = ["layer", "--tokens", "2,2", "--ranks", "0", "--no-check"]
    _, earlier = run(tmp_path, *arguments)
    assert len(earlier["rows"]) == 1, "a token count is measured once"
    assert run(tmp_path, *arguments, "--against", str(tmp_path / "result.json")) == (2, earlier)


def test_nothing_measured_is_no_success(fake: BenchDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--tokens", "1", "--ranks", "8", "--adapters", "2", "--json", str(tmp_path / "result.json")]
    assert main(["layer", *NUMBERS, *FEW, *few]) == 2
    assert "nothing was measured" in capsys.readouterr().err


BASE_KERNELS = ["sort", "expert_mlp", "finalize"]
LORA_KERNELS = {
    Plan.FUSED: set(BASE_KERNELS),
    Plan.SINGLE_STREAM: {
        "sort",
        "gather",
        "gate_up_gemm",
        "activation",
        "down_gemm",
        "finalize",
        *(f"lora_{step} of {half}" for step in ("shrink", "expand") for half in ("gate_up", "down")),
    },
}


@pytest.mark.parametrize("plan", LORA_KERNELS)
def test_kernel_rows(fake: BenchDriver, tmp_path: Path, plan: Plan) -> None:
    chosen = [] if plan is Plan.FUSED else ["--plan", plan.value]  # it is the default
    code, written = run(tmp_path, "kernels", "--tokens", "4", "--ranks", "0,16", "--adapters", "2", *chosen)
    assert code == 0
    base = [row for row in written["rows"] if row["rank"] == 0]
    lora = [row for row in written["rows"] if row["rank"] == 16]
    assert [row["kernel"] for row in base] == BASE_KERNELS
    assert {row["kernel"] for row in lora} == LORA_KERNELS[plan]
    counts = fake.graphs[1:]  # after the graph that reads memory
    per_graph = forwards_per_graph(LayerSpec(index=0, hidden_size=72, intermediate_size=40, num_experts=6, top_k=3), 4)
    assert counts == [per_graph * n for rows in (base, lora) for n in range(1, len(rows) + 1)]
    read, weights = ({row["kernel"]: row["bytes"] for row in rows} for rows in (lora, base))
    if plan is Plan.FUSED:
        assert read["expert_mlp"] > weights["expert_mlp"] > 0
    else:
        assert read["gate_up_gemm"] == 2 * read["down_gemm"]
        assert read["gate_up_gemm"] + read["down_gemm"] == weights["expert_mlp"]
        shrunk = {half: read[f"lora_shrink of {half}"] for half in ("gate_up", "down")}
        assert shrunk["gate_up"] * 40 == shrunk["down"] * 2 * 72 > 0
        expanded = read["lora_expand of gate_up"] + read["lora_expand of down"]
        assert expanded == shrunk["gate_up"] // 2 + 2 * shrunk["down"], "B is read once"
    assert read["sort"] is None is read["finalize"]


def test_of_a_forward_whose_kernels_were_not_all_timed_there_are_no_rows(
    fake: BenchDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = [Timing(1.0, 1.0, 1.0)] * (len(BASE_KERNELS) + 2)
    monkeypatch.setattr(Rig, "time", lambda *_, **__: times.pop())
    with pytest.raises(IndexError):
        main(["kernels", *NUMBERS, *FEW, "--tokens", "4,5", "--ranks", "0", "--json", str(tmp_path / "result.json")])
    assert [row["tokens"] for row in json.loads((tmp_path / "result.json").read_text())["rows"]] == [4, 4, 4]


def test_kernels_of_two_streams_cannot_be_told_apart(fake: BenchDriver, tmp_path: Path) -> None:
    code, written = run(tmp_path, "kernels", "--plan", "two_stream", "--tokens", "4", "--adapters", "1")
    assert code == 2
    assert {row["rank"] for row in written["rows"]} == {0}, "without adapters there is one stream"


def test_host_rows(fake: BenchDriver, tmp_path: Path) -> None:
    code, written = run(tmp_path, "host", "--tokens", "1,4", "--ranks", "0,8", "--adapters", "1", "--calls", "5")
    assert code == 0
    kinds = [(row["tokens"], row["rank"], row["plan"], row["memory"]) for row in written["rows"]]
    plan = plan_choice.DEFAULT_PLAN.value
    made = [(1, 0, "fused"), (4, 0, "fused"), (1, 8, plan), (4, 8, plan)]
    assert kinds == [(*kind, memory) for kind in made for memory in ("pageable", "pinned")]
    for row in written["rows"]:
        assert row["p10_us"] <= row["us"] <= row["p90_us"]
        assert row["ahead_us"] > 0
        assert 0 < row["begin_us"] < row["p90_us"]
        assert row["beside_graph_us"] == pytest.approx(row["us"] - row["graph_us"], abs=0.02)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(driver, "cuInit", lambda _: (driver.CUresult.CUDA_ERROR_NO_DEVICE,), raising=False)
    assert main(["layer", *NUMBERS]) == 2
    told = capsys.readouterr().err
    assert "no GPU can be used" in told
    assert "--device" not in told, "no option of a benchmark"
