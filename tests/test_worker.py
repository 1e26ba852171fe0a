"""The worker thread: what it is given is done in order, what it is asked comes back, and closing waits."""

import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from moelet.service.worker import Worker


def test_what_is_given_is_done_in_order_on_one_thread() -> None:
    worker, done = Worker("tried"), []
    for number in range(50):
        worker.give(lambda number=number: done.append((number, threading.current_thread().name)))
    worker.close()
    assert done == [(number, "tried") for number in range(50)]
    assert "tried" not in {thread.name for thread in threading.enumerate()}


def test_what_is_asked_comes_back_and_so_do_errors() -> None:
    def fail() -> None:
        raise KeyError("x")

    worker = Worker("tried")
    assert worker.submit(lambda: 7).result(10) == 7
    with pytest.raises(KeyError):
        worker.submit(fail).result(10)
    assert worker.submit(threading.current_thread).result(10).name == "tried"
    worker.close()


def test_an_error_is_told_and_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker("tried")
    worker.give(lambda: 1 // 0)
    assert worker.submit(lambda: 7).result(10) == 7
    worker.close()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_what_was_cancelled_before_its_turn_is_left_out() -> None:
    worker, turn, done = Worker("tried"), threading.Event(), []
    worker.give(lambda: done.append(turn.wait(10)))
    future = worker.submit(lambda: done.append("cancelled"))
    assert future.cancel()
    turn.set()
    worker.close()
    assert done == [True]
    with pytest.raises(CancelledError):
        future.result(0)


def test_an_idle_worker_holds_nothing() -> None:
    class Held:
        def __call__(self) -> None:
            pass

    worker, held = Worker("tried"), Held()
    gone = weakref.ref(held)
    worker.give(held)
    del held
    worker.submit(lambda: None).result(10)
    worker.submit(lambda: None).result(10)
    assert gone() is None
    worker.close()
