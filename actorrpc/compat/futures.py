"""`collect_all` and `wait_all` of `torch.futures` for futures of calls: they end with the first error, as in torch.

torch's own functions look at the part of a future that is in C++, and that has no error: Python can only give it a
value that is raised by `wait`. So they would wait for all the others first.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from actorrpc.runtime.futures import Future

_torchs_collect_all = torch.futures.collect_all


def collect_all(futures: list[Any]) -> Any:
    """Returns a future of a list of futures, which is done when all of them are, or the first has failed."""
    futures = list(futures)
    if not any(isinstance(future, Future) for future in futures):
        return _torchs_collect_all(futures)
    workers = [future._worker for future in futures if isinstance(future, Future) and future._worker is not None]
    whole: Future[list[Any]] = Future._of(workers[0]) if workers else Future()
    _Collector(whole, futures)
    return whole


def wait_all(futures: list[Any]) -> list[Any]:
    """Waits for all of some futures, and returns their results.

    Raises:
        BaseException: what the first that failed has come to; the others are not waited for.
    """
    return [future.wait() for future in collect_all(futures).wait()]


class _Collector:
    """Counts the futures that are not done yet.

    Arguments:
        whole: the future that is completed.
        futures: those that it is the future of.
    """

    def __init__(self, whole: Future[list[Any]], futures: list[Any]) -> None:
        self._whole, self._futures, self._left = whole, futures, len(futures)
        self._door = threading.Lock()
        for future in futures:
            future.add_done_callback(self._one)

    def _one(self, future: Any) -> None:
        error = None
        try:
            future.value()
        except BaseException as e:
            error = e.with_traceback(None)  # its frames hold this one, and all of the futures
        with self._door:
            before = self._left
            self._left = 0 if error is not None else max(0, before - 1)
            last = before > 0 and self._left == 0
        if not last:
            return
        if error is not None:
            self._whole.set_exception(error)
        else:
            self._whole.set_result(self._futures)
