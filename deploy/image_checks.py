"""What an image of the service must be and do: each check is one function that says what it saw, or raises."""

import hashlib
import json
import os
import re
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from image_store import Store
from served_image import PORT, Served

HOME = "opt/moelet"
OWNER_ID, USER_ID = 0, 10001
FEWEST_FILES = 1000
BUILD_TOOLS = {
    "cc",
    "gcc",
    "g++",
    "clang",
    "ld",
    "as",
    "make",
    "cmake",
    "git",
    "nvcc",
    "cargo",
    "rustc",
    "curl",
    "wget",
}
SECRET = re.compile(r"(^|/)(\.git|\.netrc|\.pypirc|\.env|pip\.conf|\.docker|\.ssh|id_[a-z0-9]+|[^/]*\.key)(/|$)")
SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PIP_|PROXY", re.IGNORECASE)
LISTENING = "0A"  # TCP_LISTEN, as /proc/net/tcp writes it
FORWARD = "/v1/layers/0/forward"
TOKENS, WIDTH = 2000, 64
CALLS = 16
DRAIN_S = 60


class CheckError(Exception):
    """The image is not as it should be; its text says what was expected and what was found."""


def require(true: bool, sentence: str) -> None:
    """Raise ``CheckError`` with ``sentence`` unless ``true``."""
    if not true:
        raise CheckError(sentence)


def files_below(root: Path) -> dict[str, os.stat_result]:
    """Every path below ``root`` that is no folder, with what it is."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            found[str(path.relative_to(root))] = path.lstat()
    return found


def configuration(image: dict[str, Any]) -> str:
    """User, entry, port, health check and variables, as the image's record has them."""
    config = image["Config"]
    require(config["User"] == f"{USER_ID}:{USER_ID}", f"the user should be {USER_ID}, is {config['User']!r}")
    require(config["Entrypoint"] == ["moelet"], f"the entry point should be exec form, is {config['Entrypoint']}")
    require(list(config["ExposedPorts"]) == [f"{PORT}/tcp"], f"the port should be {PORT}: {config['ExposedPorts']}")
    health = (config.get("Healthcheck") or image.get("Healthcheck") or {}).get("Test") or ["none"]
    require(health[0] == "CMD", f"the health check should be there, and in exec form: {health}")
    names = [variable.partition("=")[0] for variable in config["Env"]]
    secret = [name for name in names if SECRET_VARIABLE.search(name)]
    require(not secret, f"no variable should look like a secret or a build's option: {secret}")
    return f"user {USER_ID}, exec entry point, port {PORT}, {len(names)} variables"


def contents(store: Store, image: str, base: str) -> str:
    """All that was added lies in one folder, belongs to root, and holds no build tool, cache or secret."""
    with store.mounted(image) as folder:
        inside = files_below(folder)
    with store.mounted(base) as folder:
        before = files_below(folder)
    added = {path: inside[path] for path in inside.keys() - before.keys()}
    strays = sorted(path for path in added if not path.startswith(HOME + "/"))
    require(not strays, f"everything should be below /{HOME}, found {strays[:5]}")
    require(len(added) > FEWEST_FILES, f"the image should hold the service, found {len(added)} files")
    writable = [path for path, file in added.items() if not stat.S_ISLNK(file.st_mode) and is_open(file)]
    require(not writable, f"nothing should be writable but by root, found {writable[:5]}")
    leftovers = [path for path in added if path.endswith((".whl", ".o")) or "/pip/" in path or "/.cache/" in path]
    require(not leftovers, f"no wheel, object file, pip or cache should be left, found {leftovers[:5]}")
    tools = [path for path in inside if "/bin/" in f"/{path}" and Path(path).name in BUILD_TOOLS]
    require(not tools, f"no build tool should be in the image, found {tools[:5]}")
    secrets = [path for path in added if SECRET.search(path)]
    require(not secrets, f"no file should look like a secret, found {secrets[:5]}")
    return f"{len(added)} files, all below /{HOME}, {sum(file.st_size for file in added.values()) / 1e6:.0f} MB"


def same_files(store: Store, image: str, again: str) -> str:
    """Two builds hold the same files, byte for byte."""
    first, second = digests(store, image), digests(store, again)
    changed = sorted(path for path in first.keys() | second.keys() if first.get(path) != second.get(path))
    require(not changed, f"{len(changed)} of {len(first)} files differ between two builds: {changed[:5]}")
    return f"{len(first)} files, the same bytes in a second build from nothing"


def digests(store: Store, image: str) -> dict[str, str]:
    """A hash of every file that an image adds, or where it links to."""
    with store.mounted(image) as folder:
        found = {}
        for path in (path for path in (folder / HOME).rglob("*") if path.is_symlink() or path.is_file()):
            value = str(path.readlink()) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = value
        return found


def is_open(file: os.stat_result) -> bool:
    """Whether anyone but its owner root can write a file, or whoever runs it becomes somebody else."""
    return file.st_uid != OWNER_ID or bool(file.st_mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_ISUID | stat.S_ISGID))


def kernels(store: Store, image: str) -> str:
    """The kernels are in the image, compiled."""
    with store.mounted(image) as folder:
        cubins = {path.name: path.read_bytes()[:4] for path in (folder / HOME / "cubins").glob("*.cubin")}
    require(len(cubins) > 10, f"there should be a cubin for each kernel, found {len(cubins)}")
    broken = [name for name, beginning in cubins.items() if beginning != b"\x7fELF"]
    require(not broken, f"cubins should be ELF files, these are not: {broken[:3]}")
    return f"{len(cubins)} cubins"


def rights(container: Served) -> str:
    """The process runs as nobody of the host, with no capability, a filter on its calls, and one open port."""
    status = dict(re.findall(r"^(\w+):\s*(.*)$", Path(f"/proc/{container.pid}/status").read_text(), re.MULTILINE))
    ids = {*status["Uid"].split(), *status["Gid"].split()}
    require(ids == {str(USER_ID)}, f"the process should run as {USER_ID}, runs as {sorted(ids)}")
    require(int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0, f"it holds capabilities: {status['CapEff']}")
    require(status["NoNewPrivs"] == "1", "it should not be able to gain rights")
    require(status["Seccomp"] == "2", f"its system calls should be filtered, seccomp is {status['Seccomp']}")
    sockets = [Path(f"/proc/{container.pid}/net/{kind}").read_text().splitlines()[1:] for kind in ("tcp", "tcp6")]
    listening = [line.split() for line in [*sockets[0], *sockets[1]] if line.split()[3] == LISTENING]
    ports = [int(fields[1].rpartition(":")[2], 16) for fields in listening]
    require(ports == [PORT], f"only port {PORT} should be open, found {ports}")
    return f"uid {USER_ID}, no capability, seccomp, only port {PORT}"


def read_only(container: Served) -> str:
    """Nothing outside the given temporary folder can be written, and nothing was."""
    for path in ("/x", f"/{HOME}/x", "/var/tmp/x", "/home/x"):
        code, said = container.execute("touch", path)
        require(code != 0 and "Read-only" in said, f"{path} should not be writable, touch said {said!r}")
    lines = Path(f"/proc/{container.pid}/mounts").read_text().splitlines()
    mounts = [line.split()[1] for line in lines if line.split()[1] != "/"]
    changed = [line[2:] for line in container.store.run("podman", "diff", container.name).stdout.splitlines()]
    written = [
        path for path in changed if not any(mount.startswith(path) or path.startswith(mount) for mount in mounts)
    ]
    require(not written, f"nothing should have changed in the image's files: {written[:5]}")
    return "refused everywhere but in the mounts"


def health(container: Served) -> str:
    """The image's own health check passes, and so do the endpoints that orchestrators ask."""
    tried = container.store.run("podman", "healthcheck", "run", container.name, check=False)
    require(tried.returncode == 0, f"the health check ended with {tried.returncode}: {tried.stdout}{tried.stderr}")
    for path in ("/health", "/ready", "/metrics"):
        reply = container.call("GET", path)
        require(reply.status == 200, f"{path} should answer 200, answered {reply.status}")
    return "health check 0; /health, /ready, /metrics 200"


def forward_body(tokens: int, adapter: str | None = None) -> bytes:
    """The body of a forward."""
    rows = [[(i % 7 - 3) / 4 for i in range(WIDTH)]] * tokens
    return json.dumps({"hidden_states": rows, "adapter": adapter}).encode()


def forward(container: Served, body: bytes) -> Any:
    """The answer to one forward of layer 0. Raises ``CheckError`` if it is none."""
    reply = container.call("POST", FORWARD, body, timeout_s=DRAIN_S)
    require(reply.status == 200, f"a forward should answer 200, answered {reply.status}: {reply.text[:200]}")
    answer = reply.json()
    sizes = {len(row) for row in answer["hidden_states"]}
    require(sizes == {WIDTH}, f"rows of {WIDTH} numbers should come back, came {sorted(sizes)}")
    return answer


def adapters(container: Served, name: str, folder: str) -> str:
    """An adapter is loaded over HTTP; the very next forward is another than the base's, and says its version."""
    plain, adapted = forward_body(3), forward_body(3, name)
    base = forward(container, plain)["hidden_states"]
    require(any(any(row) for row in base), "the base's output should not be all zeros")
    reply = container.call("PUT", f"/v1/adapters/{name}", json.dumps({"path": folder}).encode())
    require(reply.status == 201, f"loading should answer 201, answered {reply.status}: {reply.text[:200]}")
    answer = forward(container, adapted)
    require(answer["adapter_versions"] == {name: 1}, f"version 1 should answer: {answer['adapter_versions']}")
    require(answer["hidden_states"] != base, "the adapter should change the output")
    require(forward(container, plain)["hidden_states"] == base, "the base's bits should stay as they were")
    return f"{folder} loaded, its output differs"


def drain(container: Served) -> str:
    """On SIGTERM what runs is finished, ``/ready`` says 503 meanwhile, and the process ends with 0."""
    body = forward_body(TOKENS)
    with ThreadPoolExecutor(CALLS) as clients:
        calls = [clients.submit(container.call, "POST", FORWARD, body, DRAIN_S) for _ in range(CALLS)]
        wait_for_calls(container, CALLS // 2)
        began = time.monotonic()
        container.signal("TERM")
        ready = readiness_until_it_ends(container)
        replies = [call.result() for call in calls]
    code = container.exit_code(DRAIN_S)
    took = time.monotonic() - began
    finished = [reply for reply in replies if reply.status == 200]
    require(code == 0, f"the exit code should be 0, is {code}")
    require(503 in ready, f"/ready should say 503 while it drains, said {sorted(ready)}")
    require(len(finished) >= 2, f"what ran should be finished, the answers are {[reply.status for reply in replies]}")
    require({reply.status for reply in replies} <= {200, 503}, "what came later should be refused with 503")
    rows = {len(reply.json()["hidden_states"]) for reply in finished}
    require(rows == {TOKENS}, f"every answer should be whole, {TOKENS} rows, came {sorted(rows)}")
    later = CALLS - len(finished)
    return f"{len(finished)} calls finished, {later} later ones and /ready 503, exit code 0 after {took:.1f} s"


def wait_for_calls(container: Served, count: int) -> None:
    """Wait until the service counts ``count`` calls as in flight. Raises ``CheckError`` if it never does."""
    deadline = time.monotonic() + DRAIN_S
    while time.monotonic() < deadline:
        metrics = container.call("GET", "/metrics").text
        if (found := re.search(r"^moelet_requests_in_flight (\d+)", metrics, re.MULTILINE)) and int(found[1]) >= count:
            return
        time.sleep(0.01)
    raise CheckError(f"{count} calls should be in flight at once, and never were")


def readiness_until_it_ends(container: Served) -> set[int]:
    """The statuses that ``/ready`` answers with, until nobody answers any more."""
    seen: set[int] = set()
    deadline = time.monotonic() + DRAIN_S
    while time.monotonic() < deadline:
        try:
            seen.add(container.call("GET", "/ready").status)
        except OSError:
            break
        time.sleep(0.02)
    return seen
