"""Emits one lowered device function as one SPIR-V module: statements, arguments and thread numbers.

Arguments are 64-bit addresses in push constants. If there are more arguments than the profile allows, they are read
from a table in memory, and the only push constant is the table's address.
"""

import math
from typing import Any

import tvm
from tvm import tirx

from mlc_amd.compiler.codegen.lower import buffer_of, walk
from mlc_amd.compiler.codegen.spirv import opcodes
from mlc_amd.compiler.codegen.spirv.asm import DONT_UNROLL, UNROLL
from mlc_amd.compiler.codegen.spirv.intrinsics import name_of
from mlc_amd.compiler.codegen.spirv.matrix import Matrix
from mlc_amd.compiler.codegen.spirv.subgroup import EXCHANGES, UNIFORM, Subgroup
from mlc_amd.compiler.codegen.spirv.types import FRAGMENTS, Unsupported, contains, kind, parse, scope
from mlc_amd.schedules.gpu.base.step import KEPT, ONCE

ADDRESS = 8
AXES = "xyz"
SCANNED = (tirx.DeclBuffer, tirx.AllocBuffer, tirx.Bind, tirx.BufferStore, tvm.ir.TensorLoad, tvm.ir.Call)
# Calls that write through an argument of the form address_of(load): the argument's number
WRITING = {"tvm_store_matrix_sync": 5, "atomic_add": 0, "vk.volatile_store": 1}


class Emitter(Subgroup, Matrix):
    """Writes one module. func: a device function. block: its workgroup (x, y, z). coherent: numbers of the parameters
    through which workgroups of the launch exchange data. After `run`, the results are in the attributes binary,
    local_size, reads and writes (numbers of parameters), table, lds and asm.

    Raises Unsupported for constructs that have no SPIR-V here.
    """

    def run(self):
        """Writes the module."""
        walk(self.func.body, SCANNED, self._scan)
        self._follow_indices()
        threads = math.prod(self.block)
        self.by_subgroup = self.exchanges and self.profile.subgroups
        whole = threads % self.profile.wave == 0 if self.profile.subgroups else threads == self.profile.wave
        if self.exchanges and not whole:
            raise Unsupported(
                f"lanes exchanging values in workgroups of {threads} threads, subgroups of {self.profile.wave}"
            )
        if self.vulkan_model:
            self.asm.capabilities |= {"CooperativeMatrixKHR", "VulkanMemoryModel"}
        self._load_arguments()
        self.dispatch("stmt_", self.func.body)
        if self.lds > self.profile.lds:
            raise Unsupported(
                f"{self.lds} bytes of shared memory; a workgroup of {self.profile.name} has {self.profile.lds}"
            )
        self.local_size = (threads, 1, 1) if self.by_subgroup else self.block
        self.binary = self.asm.binary(self.local_size)
        self.reads, self.writes = (
            tuple(i for i, p in enumerate(self.func.params) if p in params) for params in (self.used, self.written)
        )
        return self

    # ---- before the first instruction

    def _scan(self, node):
        """Collects what must be known before the first instruction: which parameters are read and written, the
        variables in indices of local arrays, and which features are used."""
        name = kind(node)
        if name == "DeclBuffer":
            source = buffer_of(node.data)
            self.roots[node.buffer] = self.roots.get(source, source)
        elif name == "AllocBuffer" and scope(node.buffer) in FRAGMENTS:
            self.vulkan_model = True
        elif name == "Call":
            self._scan_call(node)
        elif name == "Bind":
            self.bound[node.var] = node.value
        elif name in ("BufferStore", "TensorLoad"):
            buffer = node.buffer if name == "BufferStore" else node.source
            if node in self.targets:
                return
            (self.written if name == "BufferStore" else self.used).add(self.roots.get(buffer, buffer))
            if scope(buffer) == "local":
                for index in node.indices:
                    walk(index, tvm.ir.Var, self.indexing.add)

    def _follow_indices(self):
        """Adds to `indexing` the variables from which its variables are computed."""
        pending = list(self.indexing)
        while pending:
            found = set()
            if (value := self.bound.get(pending.pop())) is not None:
                walk(value, tvm.ir.Var, found.add)
            pending += found - self.indexing
            self.indexing |= found

    def _scan_call(self, call):
        name = name_of(call)
        self.exchanges |= name in EXCHANGES
        if name in WRITING:
            target = call.args[WRITING[name]].args[0]
            self.written.add(self.roots.get(target.source, target.source))
            if name != "atomic_add":
                self.targets.add(target)

    def _load_arguments(self):
        asm, params = self.asm, list(self.func.params)
        asm.capabilities.add("PhysicalStorageBufferAddresses")
        for param in params:
            if not isinstance(param.ty, tvm.ir.PointerType):
                raise Unsupported(f"argument {param.name} of type {param.ty}")
        # The first block holds variables. Values for all other blocks come in the second block.
        entry = asm.new()
        asm.emit("Branch", entry)
        asm.begin(entry)
        self.table = len(params) > self.profile.arguments
        count = 1 if self.table else len(params)
        address = asm.type("i64")
        if not params:
            return
        push = asm.variable("PushConstant", asm.block([address] * count, [ADDRESS * i for i in range(count)]))
        pointer = asm.pointer("PushConstant", address)
        pushed = [asm.op("Load", "i64", asm.op("AccessChain", pointer, push, self.int_const(i))) for i in range(count)]
        if not self.table:
            self.parameters = dict(zip(params, pushed, strict=True))
            return
        block = asm.block([asm.array_in_memory(address, ADDRESS, len(params))], [0], "NonWritable")
        table = asm.op("ConvertUToPtr", asm.pointer("PhysicalStorageBuffer", block), pushed[0])
        element = asm.pointer("PhysicalStorageBuffer", address)
        for i, param in enumerate(params):
            place = asm.op("AccessChain", element, table, self.int_const(0), self.int_const(i))
            self.parameters[param] = asm.op("Load", "i64", place, opcodes.ALIGNED, ADDRESS)

    # ---- statements (loads and stores: memory.py)

    def stmt_SeqStmt(self, s):
        for part in s.seq:
            self.dispatch("stmt_", part)

    def stmt_Evaluate(self, s):
        if kind(s.value) == "Call":
            self.value(s.value)

    def stmt_DeclBuffer(self, s):
        if self.roots[s.buffer] not in self.parameters:
            raise Unsupported(f"buffer {s.buffer.name}: a view of something else than a parameter")

    def stmt_AttrStmt(self, s):
        if s.attr_key == "thread_extent":
            self._bind_thread(s.node.var, s.node.thread_tag, int(s.value))
        self.dispatch("stmt_", s.body)

    def stmt_Bind(self, s):
        value, variable = s.value, s.var
        self.environment[variable] = self.value(value)
        ty, called = parse(variable.ty), name_of(value) if kind(value) == "Call" else ""
        if called == "fragment_length":
            self.lengths.add(variable)
        if ty.lanes == 1 and ty.code in ("int", "uint"):  # indices consist of such values
            self._define(variable, value, ty)
            if called not in UNIFORM and self.varies(value):
                self.varying.add(variable)

    def _define(self, variable, value, ty):
        """Tells the analyzer the value or the bounds of an integer variable. A variable that is bound to an expression
        is replaced by it when the analyzer simplifies. This must not happen to expressions whose value depends on when
        they are evaluated, nor to unsigned ones, which are no indices but long chains of bit operations: these get
        bounds only."""
        if ty.code == "int" and self.timeless(value):
            self.definitions[variable] = value
            self.analyzer.bind(variable, value, True)
        else:
            if kind(value) == "Call" and name_of(value) == "vk.broadcast_first":
                (_, value) = value.args  # the value is the same in all lanes, so it has the same bounds
            self.analyzer.update(variable, self.analyzer.const_int_bound(value), True)
            self.analyzer.update(variable, self.analyzer.modular_set(value), True)

    def stmt_For(self, s):
        variable = s.loop_var
        self.analyzer.bind(variable, tvm.ir.Range.from_min_extent(s.min, s.extent), True)
        if self.varies(s.min) or self.varies(s.extent):
            self.varying.add(variable)

        def body(i):
            self.environment[variable] = i
            self.dispatch("stmt_", s.body)

        if ONCE in s.annotations:
            some = self.asm.op("INotEqual", "bool", self.value(s.extent), self.int_const(0))
            self.asm.selection(some, lambda: body(self.value(s.min)))
            return
        by_length = contains(
            s.extent, lambda n: n in self.lengths or (kind(n) == "Call" and name_of(n) == "fragment_length")
        )
        unroll = s.kind == tirx.ForKind.UNROLLED or variable in self.indexing or by_length
        hint = UNROLL if unroll else DONT_UNROLL if KEPT in s.annotations else 0
        self.asm.loop(self.register(parse(variable.ty)), self.value(s.min), self.value(s.extent), body, hint)

    def stmt_While(self, s):
        self.asm.loop_while(lambda: self.value(s.condition), lambda: self.dispatch("stmt_", s.body))

    def stmt_IfThenElse(self, s):
        otherwise = None if s.else_case is None else lambda: self.dispatch("stmt_", s.else_case)
        condition = self.analyzer.simplify(s.condition)
        if not isinstance(condition, tirx.IntImm):
            self.asm.selection(self.value(condition), lambda: self.dispatch("stmt_", s.then_case), otherwise)
        elif int(condition):
            self.dispatch("stmt_", s.then_case)
        elif otherwise:
            otherwise()

    # ---- thread numbers

    def _bind_thread(self, variable, tag, extent):
        where, axis = tag.split(".")
        begin: Any = 0  # Any: TVM converts it to a constant
        self.analyzer.bind(variable, tvm.ir.Range(begin, extent), True)
        if extent == 1:
            self.environment[variable] = self.int_const(0)
        elif where == "blockIdx":
            self.environment[variable] = self._component("WorkgroupId", axis)
        else:
            self.environment[variable] = self.thread(axis)
            if not (self.by_subgroup and axis == "y" and self.block[0] == self.profile.wave):
                self.varying.add(variable)

    def _component(self, builtin, axis):
        vector = self.asm.builtin(builtin, ("vec", "i32", 3))
        return self.asm.op("CompositeExtract", "i32", vector, AXES.index(axis))

    def thread(self, axis):
        """threadIdx of an axis. If lanes exchange values, it is computed from the lane and subgroup numbers that the
        driver reports, as drivers may assign threads to subgroups in any way."""
        if not self.by_subgroup:
            return self._component("LocalInvocationId", axis)
        asm, (x, y, z) = self.asm, self.block
        asm.capabilities.add("GroupNonUniform")
        lane, subgroup = asm.builtin("SubgroupLocalInvocationId"), asm.builtin("SubgroupId")
        if x == self.profile.wave and z == 1 and axis in "xy":
            return lane if axis == "x" else subgroup
        number = asm.op("IAdd", "i32", asm.op("IMul", "i32", subgroup, self.int_const(self.profile.wave)), lane)
        below, count = {"x": (1, x), "y": (x, y), "z": (x * y, z)}[axis]
        if below > 1:
            number = asm.op("UDiv", "i32", number, self.int_const(below))
        return number if below * count == x * y * z else asm.op("UMod", "i32", number, self.int_const(count))
