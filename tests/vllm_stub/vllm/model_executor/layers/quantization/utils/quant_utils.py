"""Groups that share a scale."""

from typing import ClassVar, NamedTuple


class _GroupShape(NamedTuple):
    row: int
    col: int


class GroupShape(_GroupShape):
    PER_TOKEN: ClassVar["GroupShape"]


GroupShape.PER_TOKEN = GroupShape(1, -1)
