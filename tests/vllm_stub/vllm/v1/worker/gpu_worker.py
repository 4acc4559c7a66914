"""A worker, which loads a model and has it sleep."""

from collections.abc import Iterator
from contextlib import contextmanager


class Worker:
    @contextmanager
    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> Iterator[None]:
        yield

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass
