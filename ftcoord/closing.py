"""Objects that are closed at the end of a `with` block, or when nobody refers to them."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable
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


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The same bound method, for a thread that must not keep its object alive: does nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call_if_there(*arguments: object) -> None:
        if (bound := reference()) is not None:
            bound(*arguments)

    return call_if_there
