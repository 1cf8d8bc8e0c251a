"""Objects that are closed at the end of a `with` block."""

from __future__ import annotations

import abc
from typing import TypeVar

_Self = TypeVar("_Self", bound="Closing")


class Closing(abc.ABC):
    """A context manager that returns itself, and closes itself when the block ends, also with an error."""

    @abc.abstractmethod
    def close(self) -> None:
        """See the class."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
