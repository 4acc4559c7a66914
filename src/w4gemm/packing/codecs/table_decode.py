"""A decoder's table of words in shared memory."""

# mypy: ignore-errors
from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from w4gemm.ptx.memory import store_shared


class WordTable:
    """The table's side of a decoder that looks up words."""

    table_rows: ClassVar[int]
    row_stride: ClassVar[int]
    """Words from a row to the next."""

    @cute.jit
    def fill_table(self, table: Int32, thread: Int32, threads: int):
        """All words, by all threads; a barrier must follow."""
        words = self.table_rows * self.row_stride
        for first in cutlass.range_constexpr(0, words, threads):
            index = first + thread
            if index < words:
                row, word = index // self.row_stride, index % self.row_stride
                store_shared(table + index * 4, self.table_word(row, word))

    @abstractmethod
    def table_word(self, row: Int32, word: Int32) -> Int32:
        """A word of a row."""
