# TVM's builder is made of overloads that its annotations do not cover: to type checkers its names are Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
