"""What the parts of the emitter share: the state of one module being written.

Each part is a class of its own on top of those whose methods it uses: values, expressions, memory, intrinsics and
subgroup in this order, matrix next to intrinsics; `Emitter` puts them together.
"""

from typing import Any

import tvm

from mlc_amd.compiler.codegen.spirv.asm import Asm
from mlc_amd.compiler.codegen.spirv.types import Unsupported, kind
from mlc_amd.schedules.gpu.base.profiles import Profile


class Base:
    """The state of an `Emitter`, whose docstring says what the arguments are. TIR nodes are Any here: TVM makes their
    classes at run time."""

    table: bool  # whether arguments come from a table in memory
    by_subgroup: bool  # whether thread numbers are those of lanes and subgroups

    def __init__(self, func: tvm.tirx.PrimFunc, profile: Profile, block: tuple[int, int, int], coherent=()):
        self.func: Any = func
        self.profile, self.block, self.asm = profile, block, Asm()
        self.analyzer = tvm.sym.Analyzer()
        self.environment: dict[Any, Any] = {}  # TIR variable -> id or ids
        self.definitions: dict[Any, Any] = {}  # bound integer variable -> its expression
        self.varying: set[Any] = set()  # variables that differ between the lanes of a subgroup
        self.arrays: dict[Any, Any] = {}  # shared or local buffer -> Array
        self.fragments: dict[Any, dict[int, tuple[int, int]]] = {}  # buffer -> {index: (variable, matrix type)}
        self.roots: dict[Any, Any] = {}  # view of a parameter -> the parameter
        self.parameters: dict[Any, int] = {}  # parameter -> its address
        self.used: set[Any] = set()  # parameters
        self.written: set[Any] = set()
        self.targets: set[Any] = set()  # "loads" whose address alone counts, to write to
        self.coherent = {self.func.params[i] for i in coherent}
        self.indexing: set[Any] = set()  # variables that index local arrays: their loops should be unrolled
        self.bound: dict[Any, Any] = {}  # variable -> the expression that it is bound to
        self.lengths: set[Any] = set()  # variables that are the length of a fragment
        self.pairs: dict[tuple[int, ...], int] = {}  # ids of a word's or a vector's parts -> its id
        self.exchange: int | None = None  # the shared words through which lanes exchange theirs, without subgroups
        self.lds = 0  # bytes
        self.exchanges = self.vulkan_model = False

    def dispatch(self, prefix: str, node) -> Any:
        """Runs the method for a node's class. Unsupported where there is none."""
        method = getattr(self, prefix + kind(node), None)
        if method is None:
            raise Unsupported(kind(node))
        return method(node)
