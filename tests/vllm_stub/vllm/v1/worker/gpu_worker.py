"""What a worker does around the loading of a model."""

from collections.abc import Iterator
from contextlib import contextmanager


class Worker:
    @contextmanager
    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> Iterator[None]:
        yield
