"""Memory is given back by a thread of its own, whoever lets go of it; that thread ends when there is no more of it."""

import ctypes
import threading

import pytest

from eventually import eventually
from moelet.service import unmapping
from moelet.service.unmapping import Unmapping


class Libc:
    """Remembers what is unmapped, and on which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def munmap(self, address: int, size: int) -> None:
        self.calls.append((threading.current_thread().name, address, size))


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> Libc:
    found = Libc()
    monkeypatch.setattr(unmapping, "_libc", found)
    return found


def is_there() -> bool:
    return any(thread.name == "moelet-unmap" for thread in threading.enumerate())


def test_another_thread_gives_memory_back_once_it_is_let_go_of(libc: Libc) -> None:
    unmaps = Unmapping()
    gone, kept = unmaps.watched(4096, 10), unmaps.watched(8192, 20)
    assert [(each.address, each.size) for each in (gone, kept)] == [(4096, 10), (8192, 20)]
    del gone
    eventually(lambda: libc.calls)
    assert libc.calls == [("moelet-unmap", 4096, 10)]
    unmaps.close()
    del kept
    eventually(lambda: not is_there())
    assert libc.calls[1:] == [("moelet-unmap", 8192, 20)]


def test_there_is_no_thread_where_nothing_was_mapped(libc: Libc) -> None:
    Unmapping().close()
    assert not is_there()
    assert libc.calls == []


def test_memory_that_is_let_go_of_while_objects_are_made_is_given_back(libc: Libc) -> None:
    """A finalizer may run wherever the interpreter looks for garbage: here many at once, from several threads."""
    unmaps = Unmapping()
    memories = [unmaps.watched(number, 1) for number in range(200)]
    halves = memories[:100], memories[100:]
    memories.clear()
    threads = [threading.Thread(target=half.clear) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    unmaps.close()
    eventually(lambda: not is_there())
    assert sorted(address for _, address, _ in libc.calls) == list(range(200))


def test_the_real_thing_is_gone() -> None:
    size = 1 << 20
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, size, 3, 0x22, -1, 0)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    pages = (ctypes.c_uint8 * (size // 4096))()
    unmaps = Unmapping()
    memory = unmaps.watched(address, size)
    assert libc.mincore(address, size, pages) == 0
    del memory
    eventually(lambda: libc.mincore(address, size, pages) == -1)  # ENOMEM: nothing is mapped there
    unmaps.close()
