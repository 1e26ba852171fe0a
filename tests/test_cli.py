"""The command line in this process: help, version, demo, inspect, and what ends with code 2 before a port opens."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
from typer.models import OptionInfo

import moelet
from moelet.layer.demo import DemoPaths, write_demo
from moelet.layer.errors import ConfigurationError
from moelet.service.cli import app, main
from moelet.service.listener import bound
from moelet.service.settings import Settings
from moelet.service.startup import sources

SOURCES = str(Path(moelet.__file__).parent.parent)


@pytest.fixture(autouse=True)
def _keep_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
    root.handlers[:], root.level = before


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    return write_demo(tmp_path_factory.mktemp("demo") / "moelet-demo")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moelet {moelet.__version__}\n"


@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_help_names_every_command(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([asked]) == 0
    told = capsys.readouterr().out
    assert all(command in told for command in ("serve", "demo", "inspect"))


def test_options_are_named_where_their_metavar_is_their_name() -> None:
    """Typer 0.27 takes a metavar for the name that differs from it in case alone: ``--DEVICE``."""
    told = {
        name: annotation.__metadata__[0]
        for command in app.registered_commands
        for name, annotation in get_type_hints(command.callback, include_extras=True).items()
        if hasattr(annotation, "__metadata__")
    }
    options = {name: each for name, each in told.items() if isinstance(each, OptionInfo)}
    assert {"device", "plan", "port", "base"} <= set(options)
    alike = {name: each for name, each in options.items() if str(each.metavar).lower() == name}
    assert {name: each.default for name, each in alike.items()} == {name: f"--{name}" for name in alike}, "as declared"


def test_no_command_shows_the_help_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "inspect" in captured.out + captured.err
    assert "moelet: " not in captured.err


def test_a_demo_that_cannot_be_written_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOELET_CACHE_DIR", "/proc/absent")
    assert main(["serve", "--demo", "--device", "cpu", "--port", "0", "--log-level", "error"]) == 2
    assert "MOELET_CACHE_DIR" in capsys.readouterr().err


def test_an_adapter_of_the_demo_may_be_named_before_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOELET_CACHE_DIR", str(tmp_path))
    wanted = tmp_path / "moelet-demo" / "demo-b"
    found = sources(Settings.read(demo=True, adapter=[f"again={wanted}"]))
    assert dict(found.adapters) == {"demo-a": wanted.with_name("demo-a"), "demo-b": wanted, "again": wanted}


def test_paths_need_not_be_utf8(demo: DemoPaths, tmp_path: Path) -> None:
    """Another process, as the encoding of its output is the point; safetensors itself opens no such file."""
    folder = os.fsdecode(bytes(tmp_path) + b"/\xff\xfe")
    for *arguments, code in (
        ("demo", folder, 0),
        ("inspect", f"{folder}/demo-a", "--base", str(demo.checkpoint), 0),
        ("inspect", f"{folder}/demo-a", "--base", str(demo.checkpoint), "--json", 0),
        ("inspect", folder, 2),
    ):
        environment = os.environ | {"PYTHONPATH": SOURCES}
        ran = subprocess.run(
            [sys.executable, "-m", "moelet", *arguments], env=environment, capture_output=True, text=True
        )
        assert (ran.returncode, ran.stderr.count("\n")) == (code, code // 2), ran.stderr
    assert "not UTF-8" in ran.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from moelet.service.cli import main; assert main(['serve', '--help']) == 0; "
        "heavy = {'torch', 'numpy', 'fastapi', 'pydantic_settings', 'uvicorn'}; "
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": SOURCES, "COLUMNS": "200"}, capture_output=True, text=True
    )
    assert ran.stderr == "[]\n"
    assert "--adapter-root" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], ("CHECKPOINT", "--demo")),
        (["serve", "absent"], ("absent",)),
        (["serve", "absent", "--port", "x"], ("--port", "x")),
        (["serve", "absent", "--port", "70000"], ("--port", "65535")),
        (["serve", "absent", "--nonsense"], ("--nonsense",)),
        (["serve", "absent", "--device", "cuda:99"], ("cuda:99", "--device cpu")),
        (["serve", "absent", "--device", "tpu"], ("--device", "auto, cpu, cuda or cuda:N", "tpu")),
        (["serve", "absent", "--adapter-root", "/absent"], ("--adapter-root", "/absent")),
        (["serve", "absent", "--adapter", "a b=/x"], ("'a b'",)),
        (["serve", "absent", "--adapter", "a=/nowhere"], ("the adapter a cannot be loaded from /nowhere",)),
        (["serve", "absent", "--host", "not an address"], ("--host", "not an address")),
        (["serve", "absent", "--uds", "/absent/socket"], ("--uds", "/absent/socket")),
        (["serve", "absent", "--host", "a..b"], ("--host", "a..b")),
        (["serve", "absent", "--host", "192.0.2.1"], ("--host 192.0.2.1 is no address of this machine",)),
        (["serve", "absent", "--host", "x" * 70], ("--host", "no name of a host")),
        (["serve", "x" * 300], ("xxx", "File name too long")),
        (["serve", ""], ("CHECKPOINT", "empty")),
        (["serve", "absent", "--uds", ""], ("--uds", "empty")),
        (["serve", "absent", "--adapter-root", ""], ("--adapter-root", "empty")),
        (["nonsense"], ("nonsense",)),
        (["inspect", "x" * 300], ("xxx", "File name too long")),
        (["inspect", "absent", "--base", ""], ("--base", "empty")),
        (["inspect", "absent", "--max-loras", "0"], ("--max-loras", "0")),
        (["inspect", "absent", "--max-lora-rank", "-5"], ("--max-lora-rank", "-5")),
        (["demo", "x" * 300], ("xxx", "File name too long")),
        (["demo", ""], ("DIR", "empty")),
        (["inspect", "absent"], ("absent",)),
        (["demo", "/proc/absent"], ("/proc/absent",)),
    ],
)
def test_what_is_wrong_is_one_sentence_and_code_2(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "serve":
        arguments = [*arguments, *([] if "--port" in arguments else ["--port", "0"])]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("moelet: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


def test_a_port_in_use(demo: DemoPaths, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(demo.checkpoint), "--device", "cpu", "--port", str(port)]) == 2
    assert f"port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "99"], ("99", "0-3")),
        (["--adapter", "a=/absent"], ("adapter a ", "/absent")),
        (["--max-lora-rank", "4", "--adapter", "a=DEMO/demo-a"], ("adapter a ", "DEMO/demo-a", "8", "4")),
        (
            ["--max-cpu-loras", "1", "--adapter", "a=DEMO/demo-a", "--adapter", "b=DEMO/demo-b"],
            ("--max-cpu-loras 1", "2 adapters"),
        ),
    ],
)
def test_what_cannot_be_served(
    demo: DemoPaths, options: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option.replace("DEMO", str(demo.checkpoint)) for option in options]
    fixed = ["--device", "cpu", "--port", "0", "--log-level", "error"]
    assert main(["serve", str(demo.checkpoint), *fixed, *options]) == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert all(word.replace("DEMO", str(demo.checkpoint)) in sentence for word in words), sentence


def test_a_unix_socket_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        assert main(["serve", "absent", "--uds", str(path)]) == 2
        assert "in use" in capsys.readouterr().err
        assert path.is_socket()
    assert main(["serve", "absent", "--uds", str(path)]) == 2
    assert "absent" in capsys.readouterr().err


def test_the_unix_socket_of_a_later_process_is_left_alone(tmp_path: Path) -> None:
    """Of another program, say, that asks for no lock."""
    settings = Settings.read(demo=True, uds=tmp_path / "socket")
    with bound(settings), socket.socket(socket.AF_UNIX) as later:
        (tmp_path / "socket").unlink()
        later.bind(str(tmp_path / "socket"))
    assert (tmp_path / "socket").is_socket()
    (tmp_path / "socket").unlink()
    with bound(settings):
        assert (tmp_path / "socket").is_socket()
    assert not (tmp_path / "socket").exists()


def test_a_unix_socket_is_one_process_s_from_before_it_loads(tmp_path: Path) -> None:
    settings = Settings.read(demo=True, uds=tmp_path / "socket")
    with bound(settings):
        first = (tmp_path / "socket").lstat()
        with pytest.raises(ConfigurationError, match="socket: another process does, or is about to"), bound(settings):
            pass
        assert (tmp_path / "socket").lstat().st_ino == first.st_ino
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_a_killed_process_left_is_taken(tmp_path: Path) -> None:
    (tmp_path / "socket.lock").touch()
    with bound(Settings.read(demo=True, uds=tmp_path / "socket")):
        assert (tmp_path / "socket").is_socket()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_no_link_to_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "socket.lock").symlink_to(tmp_path / "elsewhere")
    settings = Settings.read(demo=True, uds=tmp_path / "socket")
    with pytest.raises(ConfigurationError, match="cannot listen on --uds"), bound(settings):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_demo_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", str(tmp_path / "demo")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:-1] for line in lines] == [["checkpoint"], ["adapter", "demo-a"], ["adapter", "demo-b"]]
    assert (Path(lines[0][-1]) / "config.json").is_file()
    assert all((Path(line[-1]) / "adapter_config.json").is_file() for line in lines[1:])


def test_inspect_a_checkpoint(demo: DemoPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(demo.checkpoint), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [layer["index"] for layer in report["layers"]] == [0, 1, 2, 3]
    assert report["layers"][0]["hidden_size"] == 64
    assert report["weight_bytes"] == 4 * 2 * (8 * 3 * 64 * 48 + 8 * 64)
    assert main(["inspect", str(demo.checkpoint)]) == 0
    assert "qwen3_moe" in capsys.readouterr().out


def test_inspect_an_adapter(demo: DemoPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(demo.adapters["demo-a"]), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rank"], report["layout"], report["base"]) == (8, "per_expert", "moelet-demo")
    assert main(["inspect", str(demo.adapters["demo-b"])]) == 0
    assert "shared_outer" in capsys.readouterr().out
    assert main(["inspect", str(demo.adapters["demo-a"]), "--max-lora-rank", "4"]) == 2
    assert "8" in capsys.readouterr().err
    moved = (tmp_path / "moved").resolve()
    moved.mkdir()
    for file in demo.adapters["demo-a"].iterdir():
        (moved / file.name).symlink_to(file)
    assert main(["inspect", str(moved)]) == 2
    assert "--base" in capsys.readouterr().err
    assert main(["inspect", str(moved), "--base", str(demo.checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["base"] == "moelet-demo"
