"""What a server must not do for strangers: tried on a process that reports what it does, and on the sources."""

import ast
import base64
import importlib.metadata
import json
import re
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from moelet.layer.demo import DemoPaths, write_demo
from moelet.layer.errors import EngineError
from moelet.service.server import warn_of_openness
from moelet.service.settings import Settings
from running_service import RunningService, hidden_states
from served_process import served
from source_tree import ROOMS, ROOT, tree_files

REPORTING = """
import os, signal, sys
def report(event, arguments):
    first = str(arguments[0]) if arguments else ""
    if event == "open":
        flags = arguments[2]
        quiet = not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or first == os.devnull
    elif event == "import":
        quiet = first.split(".")[0] not in {"evil", "transformers", "peft", "pickle", "subprocess"}
    elif event == "exec":
        quiet = "/roots/" not in first
    else:
        quiet = not event.startswith(("os.", "socket.", "subprocess.", "shutil.", "ctypes.dlopen"))
        quiet = quiet or event in {"os.listdir", "os.scandir", "os.putenv", "socket.__new__"}
        quiet = quiet or event == "socket.sendmsg" and arguments[1] is None
    if not quiet:
        os.write(1, f"{event} {arguments!r}\\n".encode())
signal.signal(signal.SIGUSR1, lambda *_: sys.addaudithook(report))
"""
"""From SIGUSR1 on, writes to stdout what the process opens for writing, connects to, starts, deletes or imports."""

FAITHLESS = """
from {module} import {name} as read
def faithless(*arguments, **options):
    open({written!r}, "w").close()
    import subprocess
    subprocess.run(["true"])
    return read(*arguments, **options)
import {holder} as holder
holder.{name} = faithless
"""


def hostile_adapters(demo: DemoPaths, root: Path) -> None:
    """Adapters below ``root`` that ask for code to be run, beside the code."""
    source = demo.adapters["demo-a"]
    marker = root / "ran"
    for name, more in {
        "auto_map": {"auto_map": {"AutoModel": "evil.Evil"}},
        "auto_mapping": {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}},
        "trusting": {"trust_remote_code": True, "custom_code": "evil.py"},
    }.items():
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
        config = json.loads((source / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | more))
        for code in ("evil.py", "__init__.py", "sitecustomize.py"):
            (folder / code).write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")


def calls(client: httpx.Client, url: str, roots: Path) -> Iterator[tuple[str, httpx.Response]]:
    """Requests that name files, hosts and code in every way that other servers have followed."""
    paths = [f"{scheme}{url}/adapter" for scheme in ("http://", "https://", "s3://", "hf://", "ftp://", "//", "\\\\")]
    paths += ["file:///etc/passwd", "/etc", "/proc/self/cwd", "~", "$HOME", "`id`", "|id", "owner/repo", "a;id"]
    for path in paths:
        body = {"lora_name": "a", "lora_path": path, "base_model_name": url, "is_3d_lora_weight": True}
        yield path, client.post("/v1/load_lora_adapter", json=body)
        yield path, client.put("/v1/adapters/a", json={"path": path, "url": url, "callback": url})
        config = {"parameters": {"config": json.dumps({"lora_path": path})}}
        yield path, client.post("/v2/repository/models/a/load", json=config)
    code = base64.b64encode(b"open('/tmp/ran', 'w')").decode()
    for name in ("evil.py", "../evil.py", "/tmp/evil.py", "1/model.pt"):
        sent = {"parameters": {"config": json.dumps({"lora_path": "x"}), f"file:{name}": code}}
        yield name, client.post("/v2/repository/models/a/load", json=sent)
        yield name, client.put(f"/v1/adapters/{name.replace('/', '%2f')}", json={"path": "auto_map"})
    for name in ("auto_map", "trusting", "auto_mapping"):
        yield name, client.put("/v1/adapters/hostile", json={"path": str(roots / name)})
    yield "forward", client.post("/v1/layers/0/forward", json={"hidden_states": [[0.0] * 64]})


def test_clients_make_the_process_read_adapters_and_compute_and_nothing_else(tmp_path: Path) -> None:
    """No file is written or deleted, no host asked for, no process started, no code of theirs run."""
    roots = tmp_path / "roots"
    hostile_adapters(write_demo(tmp_path / "demo"), roots)
    with (
        served(tmp_path, "--adapter-root", str(roots), before=REPORTING) as it,
        socket.create_server(("127.0.0.1", 0)) as host,
    ):
        host.settimeout(0.2)
        it.report()
        answers = list(calls(it.client, f"127.0.0.1:{host.getsockname()[1]}", roots))
        statuses = {what: answer.status_code for what, answer in answers}
        assert {status for what, status in statuses.items() if what not in ("auto_mapping", "forward")} <= {
            400,
            403,
            404,
            501,
        }
        assert (statuses["auto_mapping"], statuses["forward"]) == (201, 200)
        with pytest.raises(TimeoutError):
            host.accept()
        assert it.client.get("/v1/adapters").status_code == 200
        assert it.said() == ""
    assert not (roots / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name", "holder"),
    [
        ("moelet.layer.adapter_version", "check_name", "moelet.service.adapters"),
        ("moelet.layer.adapter_loading", "load_adapter", "moelet.service.startup"),
    ],
)
def test_the_reports_are_made(tmp_path: Path, module: str, name: str, holder: str) -> None:
    """The test above can fail: in the service, and in the process that reads adapters."""
    before = FAITHLESS.format(module=module, name=name, holder=holder, written=str(tmp_path / "written"))
    with served(tmp_path, before=REPORTING + before) as it:
        it.report()
        assert it.client.put("/v1/adapters/a", json={"path": "moelet-demo/demo-a"}).status_code == 201
        said = it.said()
    assert all(event in said for event in ("open ", "subprocess.Popen "))


def test_the_process_listens_where_it_was_told_and_nowhere_else(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        sockets = {link for fd in Path(f"/proc/{it.process.pid}/fd").iterdir() if (link := fd_target(fd))}
        listening = []
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{it.process.pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if f"socket:[{fields[9]}]" in sockets and fields[3] in ("0A", "07"):
                    listening.append((table, fields[1]))
        assert listening == [("tcp", f"0100007F:{it.client.base_url.port:04X}")]


def fd_target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("host", "options", "told"),
    [
        ("0.0.0.0", {}, "may use this service: it has no --api-key"),
        ("0.0.0.0", {"adapter_root": ["/"]}, "may use this service and load adapters: it has no --api-key"),
        ("0.0.0.0", {"adapter_root": ["/"], "admin_api_key": "a"}, "may use this service: it has no --api-key"),
        ("0.0.0.0", {"api_key": ["k"]}, ""),
        ("127.0.0.1", {"adapter_root": ["/"]}, ""),
    ],
)
def test_serving_everybody_without_a_key_is_warned_of(
    host: str, options: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server((host, 0)) as listener:
        warn_of_openness(listener, Settings.read(checkpoint="absent", host=host, **options))
    assert told in caplog.text
    assert bool(caplog.records) == bool(told)


@pytest.mark.parametrize("error", [RuntimeError, EngineError, OSError])
def test_errors_tell_nothing_of_the_inside(running_service: RunningService, error: type[Exception]) -> None:
    inside = "tensor at 0x7f0012345678 in /srv/secret/weights of segment triton_shm_42"
    service = running_service
    sent: list[dict[str, Any]] = [{}, {"hidden_states": hidden_states(1).tolist()}, {"hidden_states": "\0" * 10}]
    with service.engine.failing(error(inside)):
        told = [service.client.post("/v1/layers/1/forward", json=body).text for body in sent]
        told.append(service.client.post("/v2/models/layers.1/infer", content=b"{").text)
    told += [service.load("a", path).text for path in ("narrow", "truncated", "empty", "dora", "linked_weights", "x")]
    assert len(told) == 10
    for text in told:
        assert '"error"' in text
        if error is not EngineError:  # whose sentences are written for those who read them
            assert not any(part in text for part in ("0x7f", "/srv/secret", "triton_shm"))
        assert str(service.root.parent) not in text
        assert "Traceback" not in text


def imports(path: Path) -> set[str]:
    """Every dotted name that a file imports."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_only_the_client_speaks_to_other_hosts_and_nothing_starts_programs() -> None:
    """The probe, a program of its own, asks the service on its own machine."""
    asking = re.compile(
        r"(httpx|requests|aiohttp|urllib\.request|http\.client|ftplib|smtplib|xmlrpc|grpc|zmq|subprocess)\b"
    )
    files = [path for path in tree_files() if path.suffix == ".py" and path.parts[0] in ROOMS]
    found = {str(path) for path in files if any(asking.match(name) for name in imports(path))}
    assert {path for path in found if not path.startswith("service/client/")} == {"service/probe.py"}


def test_neither_forms_nor_files_are_served() -> None:
    """What Starlette's advisories of denial of service and of stolen files were about."""
    files = [path for path in tree_files() if path.suffix == ".py" and path.parts[0] == "service"]
    risky = re.compile(r"\b(StaticFiles|FileResponse|UploadFile|Form|Jinja2Templates|MultiPartParser)$|\.form$")
    assert {str(path) for path in files if any(risky.search(name) for name in imports(path))} == set()
    assert not any(re.search(r"\.form\(|request\.url\b", (ROOT / path).read_text()) for path in files)
    assert "python-multipart" not in {requirement.name for requirement in runtime_requirements()}


def runtime_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["dependencies"]]


FLOORS = re.compile(r"^\| `([a-z0-9-]+)` \| ([0-9.]+) \|", re.MULTILINE)


def test_no_dependency_may_be_older_than_its_advisories_allow() -> None:
    """The floors that docs/security.md explains are those of pyproject.toml, and hold for what is installed."""
    floors = dict(FLOORS.findall((ROOT / "docs" / "security.md").read_text()))
    assert {"starlette", "uvicorn", "httptools", "h11", "orjson", "pydantic", "safetensors", "torch"} <= floors.keys()
    requirements = {requirement.name: requirement for requirement in runtime_requirements()}
    for name, floor in floors.items():
        below = Version(floor).release
        older = ".".join(map(str, (*below[:-1], below[-1] - 1, 99) if below[-1] else (below[0] - 1, 99)))
        assert not requirements[name].specifier.contains(older, prereleases=True), name
        assert requirements[name].specifier.contains(floor), name
        assert Version(importlib.metadata.version(name)) >= Version(floor), name


CITED = re.compile(r"`((?:test|contract)_\w+)\.py::(\w+)`")


def test_every_test_that_the_documentation_cites_is_there() -> None:
    cited = CITED.findall((ROOT / "docs" / "security.md").read_text())
    assert len(cited) > 50
    there = {file: functions(Path("tests", f"{file}.py")) for file in {file for file, _ in cited}}
    assert {f"{file}.py::{name}" for file, name in cited if name not in there[file]} == set()


def functions(path: Path) -> set[str]:
    """The names of the functions of a test file, methods included; none where there is no such file."""
    if not (ROOT / path).is_file():
        return set()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
