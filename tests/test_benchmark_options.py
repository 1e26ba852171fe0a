"""The benchmarks' options: the layers that they name, and one sentence for whatever is wrong or out of bounds."""

import re
from pathlib import Path

import pytest
from benchmarks import options, reference_layer, shapes
from benchmarks.__main__ import main

from moelet.layer.errors import ConfigurationError
from moelet.service import cli


def test_layers_by_name_and_by_numbers() -> None:
    parser = options.Parser()
    options.shape_options(parser)
    numbers = ["--num-experts", "60", "--top-k", "4", "--hidden-size", "2048", "--intermediate-size", "1408"]
    chosen = options.chosen_shapes(parser.parse_args(["--shape", "qwen3.5-35b-a3b", *numbers]))
    assert list(chosen) == ["qwen3.5-35b-a3b", "e60-k4-h2048-i1408"]
    assert [spec.num_shared_chunks for spec in chosen.values()] == [0, 0]
    assert chosen["e60-k4-h2048-i1408"].intermediate_size == 1408
    shared = options.chosen_shapes(parser.parse_args(["--shape", "qwen3.5-35b-a3b", "--shared"]))
    assert shared["qwen3.5-35b-a3b-shared"].num_shared_chunks == 1
    assert list(options.chosen_shapes(parser.parse_args([]))) == ["qwen3-30b-a3b"]
    with pytest.raises(ConfigurationError, match="--num-experts"):
        options.chosen_shapes(parser.parse_args(numbers[:4]))
    for name, spec in chosen.items():
        assert shapes.called(name) == spec
    assert shapes.called("e60-k4-h2048") is None
    local = shapes.SHAPES["qwen3-30b-a3b-ep4"]
    assert (local.local_expert_offset, local.local_expert_end) == (32, 64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ("nonsense", "layer")),
        (["layer", "--tokens", "0"], ("--tokens", "'0'")),
        (["layer", "--tokens", "x"], ("--tokens", "'x'")),
        (["layer", "--shape", "nonsense"], ("--shape", "nonsense")),
        (["layer", "--adapters", "1,9"], ("--adapters 9", "--slots 8")),
        (["layer", "--ranks", "64", "--max-lora-rank", "16"], ("--ranks 64", "--max-lora-rank 16")),
        (["layer", "--sets", "0"], ("--sets",)),
        (["layer", "--replays", "1"], ("--replays", "'1'")),
        (["layer", "--top-k", "2"], ("--num-experts",)),
        (["layer", "--against", "/absent.json"], ("/absent.json",)),
        (["layer", "--js", "a"], ("--js",)),
        (["layer", "--replays", "3,99"], ("--replays", "'3,99'")),
        (["layer", "--json", "/"], ("--json", "'/'")),
        (["layer", "--json", ""], ("--json", "''")),
        (["layer", "--json", f"{__file__}/a.json"], ("--json", "test_benchmark_options.py/a.json")),
        (["kernels", "--plan", "nonsense"], ("--plan", "nonsense")),
        (["host", "--nonsense"], ("--nonsense",)),
        (["layer", "--tokens", "100000000000"], ("--tokens", "1048576", "'100000000000'")),
        (["layer", "--ranks", "5000"], ("--ranks", "4096", "'5000'")),
        (["layer", "--hidden-size", "-64"], ("--hidden-size", "'-64'")),
        (["layer", "--slots", "-1"], ("--slots", "'-1'")),
        (["kernels", "--gpu", "-1"], ("--gpu", "'-1'")),
        (["counters", "--limit-s", "nan"], ("--limit-s", "'nan'")),
        (["overhead", "--clients", "-1"], ("--clients", "'-1'")),
        (["overhead", "--seconds", "0"], ("--seconds", "'0'")),
        (["soak", "--adapters", "3"], ("--adapters", "from 4", "'3'")),
        (["soak", "--slots", "1,2"], ("--slots", "'1,2'")),
        (["soak", "--seconds", "inf"], ("--seconds", "'inf'")),
        (["soak", "--slots", "1025"], ("--slots", "from 1 to 1024", "'1025'")),
        (["soak", "--device", "../cpu"], ("--device", "cuda:N", "'../cpu'")),
        (["soak", "--device", "cuda:"], ("--device", "cuda:N", "'cuda:'")),
        (["overhead", "--tokens", "16384"], ("--tokens 16384", "at most 16383 of qwen3-30b-a3b")),
        (["counters", "--folder", __file__], ("--folder", "test_benchmark_options.py")),
        (["plot", "--out", f"{__file__}/a"], ("--out", "test_benchmark_options.py/a")),
        (["layer", *(f"--{name.replace('_', '-')}=1048576" for name in options.NUMBERED)], ("bytes of weights",)),
    ],
)
def test_what_is_wrong_is_one_sentence_and_code_2(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("moelet bench: ")
    assert all(word in captured.err for word in words), captured.err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--tokens", "100000000000"],
        ["--tokens", "0"],
        ["--adapters", "0,-1"],
        ["--rank", "0"],
        ["--repeats", "2"],
        ["--threads", "0"],
        ["--results", __file__],
    ],
)
def test_the_benchmark_of_the_cpu_engine_has_bounds_too(wrong: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=f"{wrong[0]}.*{re.escape(repr(wrong[1]))}"):
        reference_layer.main(["--shape", "small", *wrong])


def test_the_command_line_hands_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench"]) == 0
    assert "kernels" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "layer", "--help"])
    assert "--shared-outer" in capsys.readouterr().out
    assert cli.main(["bench", "layer", "--tokens", "1,x", "--plan", "all"]) == 2
    assert "'1,x'" in capsys.readouterr().err
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "moelet" / "service" / "cli.py"))
    assert cli.main(["bench", "layer"]) == 2
    assert capsys.readouterr().err.startswith("moelet: benchmarks come with a source checkout")
