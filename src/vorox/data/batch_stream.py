"""Batches of consecutive steps, read ahead by threads and handed out in order.

In: a function that makes the batch of any step. Out: an iterator. Threads claim steps in order and the consumer takes
them in order, so neither their number nor the read-ahead changes a batch, and an error surfaces at the step that it
belongs to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from vorox.core.records import Batch

_CLOSE_SECONDS = 5.0
"""How long closing waits for a thread that hangs in a read; it is a daemon and keeps nobody alive."""


class BatchStream:
    """Batches of consecutive steps. Iterate, or leave the context, to close it.

    Args:
        read: Makes the batch of a step; called from several threads.
        num_steps: Steps that can be read by now.
        on_close: Told that nobody takes batches any more, before threads are waited for.
    """

    def __init__(
        self,
        read: Callable[[int], Batch],
        num_steps: Callable[[], int],
        *,
        first_step: int,
        num_threads: int,
        prefetch_batches: int,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._on_close = on_close
        self._read, self._num_steps = read, num_steps
        self._wanted = self._claimed = first_step
        self._prefetch_batches = prefetch_batches
        self._ready: dict[int, Batch | BaseException] = {}
        self._closed = False
        self._changed = threading.Condition()
        self.wait_seconds = 0.0
        """Time that the consumer has spent waiting for batches."""
        self._threads = [
            threading.Thread(target=self._work, name=f"vorox-loader-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queue_depth(self) -> int:
        """Batches that are ready."""
        return len(self._ready)

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            DataError: The plan does not cover the step, or its rows could not be read. The stream is closed then.
        """
        if self._closed:
            raise RuntimeError("the stream of batches is closed")
        began = time.perf_counter()
        try:
            batch = self._take() if self._threads else self._read(self._wanted)
        except BaseException:
            self.close()
            raise
        finally:
            self.wait_seconds += time.perf_counter() - began
        if not self._threads:
            self._wanted += 1
        return batch

    def close(self) -> None:
        """Stop reading ahead. May be called from any thread, and again."""
        if self._on_close is not None:
            self._on_close()
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> Batch:
        with self._changed:
            step = self._wanted
            if step >= self._num_steps():
                self._read(step)  # says why there is none
                raise AssertionError(f"step {step} is not planned, yet it was read")
            self._changed.notify_all()  # the plan may have been extended
            self._changed.wait_for(lambda: self._closed or step in self._ready)
            if self._closed:
                raise RuntimeError("the stream of batches was closed while a batch was waited for")
            result = self._ready.pop(step)
            self._wanted += 1
            self._changed.notify_all()
        if isinstance(result, BaseException):
            raise result
        return result

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_claim())
                if self._closed:
                    return
                step = self._claimed
                self._claimed += 1
            try:
                result: Batch | BaseException = self._read(step)
            except BaseException as error:  # whatever it is, the consumer must see it
                result = error
            with self._changed:
                if not self._closed:
                    self._ready[step] = result
                    self._changed.notify_all()

    def _may_claim(self) -> bool:
        return self._claimed < min(self._wanted + self._prefetch_batches, self._num_steps())
