"""The base class of objects that a `with` statement closes."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager. On exit it calls `close`, which derived classes implement."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
