"""From settings to a service that is ready to answer: checkpoint, engine, adapters, in that order."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..graphs.packed import PackedAdapter, Packer
from ..layer.adapter import Adapter
from ..layer.adapter_files import AdapterFolder
from ..layer.adapter_loading import load_adapter
from ..layer.adapter_version import check_name
from ..layer.checkpoint import Checkpoint, open_checkpoint
from ..layer.demo import NAME, write_demo
from ..layer.errors import AdapterError, ConfigurationError, MoeletError
from ..layer.spec import ModelSpec, ranges
from .adapter_reading import AdapterReader
from .adapter_roots import AdapterRoots
from .engine_thread import EngineThread
from .engines import choose_device, open_engine
from .limits import MIB, Limits
from .progress import shown, steps
from .reading_process import ReadingProcess
from .service import MoeService
from .settings import Settings, unknown_variables

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """What is read: the checkpoint, the adapters loaded at start, and where clients may load from."""

    checkpoint: Path
    adapters: tuple[tuple[str, Path], ...]
    roots: tuple[Path, ...]


def cache_folder() -> Path:
    """``MOELET_CACHE_DIR``, by default ``~/.cache/moelet``. Raises ``ConfigurationError`` without a home."""
    try:
        return Path(os.environ.get("MOELET_CACHE_DIR") or "~/.cache/moelet").expanduser()
    except RuntimeError:
        raise ConfigurationError("there is no home folder to write the demo into: set MOELET_CACHE_DIR") from None


def sources(settings: Settings) -> Sources:
    """What ``settings`` name, looked for before layers are loaded, which may take minutes.

    Raises ``MoeletError`` for an adapter that is not there, or more of them than may be loaded.
    """
    found = named(settings)  # first: an adapter may be one of the demo that this writes
    for name, path in settings.adapter:
        check_name(name, "adapter")
        with told_at_start(name, path):
            AdapterFolder(path).read_config()
    if (wanted := len(found.adapters)) > settings.max_cpu_loras:
        raise ConfigurationError(
            f"--max-cpu-loras {settings.max_cpu_loras} is too few: {wanted} adapters load at start"
        )
    return found


def named(settings: Settings) -> Sources:
    """What ``settings`` name; with ``--demo`` the demo is written first, and its adapters come before others."""
    if not settings.demo:
        assert settings.checkpoint is not None
        return Sources(settings.checkpoint, settings.adapter, settings.adapter_root)
    cache = cache_folder()
    try:
        demo = write_demo(cache / NAME)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} with MOELET_CACHE_DIR") from None
    adapters = {**demo.adapters, **dict(settings.adapter)}
    return Sources(demo.checkpoint, tuple(adapters.items()), (cache, *settings.adapter_root))


def open_service(settings: Settings, beside: Callable[..., ReadingProcess | None] | None = None) -> MoeService:
    """Load everything that ``settings`` name; adapters by what ``beside`` makes of those that read them, where clients
    may load any. It is called before there are other threads, and before a GPU is in use.

    Raises ``MoeletError``: one sentence for who started it.
    """
    if unknown := unknown_variables():
        log.warning("these variables of the environment are not known and do nothing: %s", ", ".join(unknown))
    found = sources(settings)
    roots = AdapterRoots(found.roots)
    checkpoint = open_base(settings, found.checkpoint)
    model = checkpoint.model
    readers = readers_of(settings, model)
    reading = beside(*readers, roots=roots) if beside is not None and found.roots else None
    device = choose_device(settings.device)
    if device == "cpu" and settings.changed_gpu_options:
        log.warning("serving on the CPU, where %s does nothing", " and ".join(settings.changed_gpu_options))
    way = int(device != "cpu")  # known only now: to ask for a GPU is to use it, and what was forked may not find it so
    if reading is not None:
        reading.way = way
    with shown() as report:
        engine = EngineThread(partial(open_engine, settings, device, checkpoint, report))
        service = MoeService(
            engine,
            roots,
            readers[way],
            beside=reading,
            max_cpu_loras=settings.max_cpu_loras,
            limits=limits_of(settings),
        )
        try:
            for name, path in steps(found.adapters, "loading adapters", report):
                with told_at_start(name, path):
                    service.adapters.load_at_start(name, path)
        except BaseException:
            service.close()
            raise
    log.info("layers %s of %s on %s", ranges(model.layers), model.name, device)
    return service


def open_base(settings: Settings, path: Path) -> Checkpoint:
    """The checkpoint at ``path``, its headers read, and no weights yet. Raises ``MoeletError``."""
    try:
        checkpoint = open_checkpoint(path, layers=settings.layers, name=settings.served_model_name)
    except MoeletError:
        choose_device(settings.device)  # a device that cannot be used is told of first
        raise
    for note in checkpoint.notes:
        log.info("checkpoint: %s", note)
    return checkpoint


def readers_of(settings: Settings, model: ModelSpec) -> tuple[AdapterReader, AdapterReader]:
    """What reads an adapter as the CPU keeps it, and what packs it besides, as a GPU does."""
    packer = Packer.of(model, max_loras=settings.max_loras, max_lora_rank=settings.max_lora_rank)

    def read(folder: Path, root: Path) -> Adapter:
        return load_adapter(folder, model, max_rank=settings.max_lora_rank, root=root)

    def read_packed(folder: Path, root: Path) -> PackedAdapter:
        return packer.pack(read(folder, root))

    return read, read_packed


def limits_of(settings: Settings) -> Limits:
    """What bounds forwards."""
    return Limits(
        max_batch_tokens=settings.max_batch_tokens,
        max_queue=settings.max_queue,
        max_queue_bytes=int(settings.max_queue_mb * MIB),
        queue_delay_s=settings.max_queue_delay_us * 1e-6,
        request_timeout_s=settings.request_timeout_s,
    )


@contextmanager
def told_at_start(name: str, path: Path) -> Iterator[None]:
    """Raise ``ConfigurationError`` where the adapter ``name`` of the command line cannot be loaded from ``path``."""
    try:
        yield
    except (AdapterError, OSError) as error:
        raise ConfigurationError(f"the adapter {name} cannot be loaded from {path}: {error}") from error
