"""Emits exchanges of words between the lanes of a subgroup: subgroup instructions; shared memory and barriers for
profiles without these.

Without subgroups, a workgroup is one "wave" of profile.wave threads, and all of them must have the same control flow
around an exchange.
"""

import functools

from mlc_amd.compiler.codegen.spirv.intrinsics import Intrinsics, name_of
from mlc_amd.compiler.codegen.spirv.opcodes import ACQUIRE_RELEASE, SUBGROUP, WORKGROUP_MEMORY
from mlc_amd.compiler.codegen.spirv.types import Type, Unsupported, parse

REDUCE = 0  # the group operation Reduce: the total, in all lanes
INT32 = "i32"
AT_ONCE = 8  # without subgroups: words that a lane reads between two barriers
# Profiles whose drivers turn every control barrier into one of the workgroup. Their lanes run in lockstep, so a memory
# barrier is enough for a subgroup.
LOCKSTEP = {"lavapipe"}
# A kernel with one of these calls derives thread numbers from lane and subgroup numbers (`Emitter.thread`).
EXCHANGES = {
    "vk.shuffle_xor", "vk.shuffle", "vk.broadcast", "vk.broadcast_first", "vk.reduce_add", "vk.reduce_max",
    "vk.reduce_min", "vk.lane", "vk.any", "vk.wave_barrier", "llvm.amdgcn.readfirstlane", "llvm.amdgcn.readlane",
    "llvm.amdgcn.ds.bpermute", "llvm.amdgcn.mbcnt.lo", "llvm.amdgcn.mbcnt.hi", "tvm_load_matrix_sync",
    "tvm_fill_fragment",
}  # fmt: skip
# exchanges whose result is the same in all lanes
UNIFORM = {
    "vk.broadcast", "vk.broadcast_first", "vk.reduce_add", "vk.reduce_max", "vk.reduce_min", "vk.any",
    "llvm.amdgcn.readfirstlane", "llvm.amdgcn.readlane",
}  # fmt: skip


class Subgroup(Intrinsics):
    """Part of the emitter: exchange between lanes."""

    def vk_lane(self, *_):
        """This lane's number in its subgroup."""
        if self.profile.subgroups:
            self.asm.capabilities.add("GroupNonUniform")
            return self.asm.builtin("SubgroupLocalInvocationId")
        return self.thread("x")

    def vk_broadcast_first(self, e, x):
        # The value is the same in all lanes. Only AMD's GPUs have scalar registers for it.
        if not (self.profile.scalars and self.profile.subgroups):
            return self.value(x)
        return self._exchange("BroadcastFirst", "Ballot", parse(e.ty), self.value(x))

    def vk_broadcast(self, e, x, lane):
        return self._of_lane("Broadcast", "Ballot", parse(e.ty), self.value(x), self.value(lane))

    def vk_shuffle(self, e, x, lane):
        return self._of_lane("Shuffle", "Shuffle", parse(e.ty), self.value(x), self.value(lane))

    def shuffle_bytes(self, e, place, x):
        """LLVM's ds.bpermute. `place` is four times the lane's number."""
        lane = self.asm.op("ShiftRightLogical", INT32, self.value(place), self.int_const(2))
        return self._of_lane("Shuffle", "Shuffle", parse(e.ty), self.value(x), lane)

    def _of_lane(self, op, capability, ty, value, lane):
        """The value of lane number `lane`."""
        if not self.profile.subgroups:
            return self._through_memory(ty, value, lane)
        return self._exchange(op, capability, ty, value, lane)

    def vk_shuffle_xor(self, e, x, mask):
        ty, value, mask = parse(e.ty), self.value(x), int(mask)
        if not 0 < mask < self.profile.wave:
            raise Unsupported(f"an exchange with lanes at distance {mask} in subgroups of {self.profile.wave}")
        if not self.profile.subgroups:
            lane = self.asm.op("BitwiseXor", INT32, self.vk_lane(), self.int_const(mask))
            return self._through_memory(ty, value, lane)
        return self._exchange("ShuffleXor", "Shuffle", ty, value, self.int_const(mask))

    def vk_wave_barrier(self, e):
        if not self.profile.subgroups:
            self.barrier()
            return
        subgroup = self.int_const(SUBGROUP)
        semantics = self.int_const(self.ordering(ACQUIRE_RELEASE | WORKGROUP_MEMORY))
        if self.profile.name.partition(":")[0] in LOCKSTEP:
            self.asm.emit("MemoryBarrier", subgroup, semantics)
        else:
            self.asm.emit("ControlBarrier", subgroup, subgroup, semantics)

    def vk_any(self, e, x):
        asm, value = self.asm, self.value(x)
        if self.profile.subgroups:
            asm.capabilities |= {"GroupNonUniform", "GroupNonUniformVote"}
            return asm.op("GroupNonUniformAny", "bool", self.int_const(SUBGROUP), value, pure=False)
        one = asm.op("Select", INT32, value, self.int_const(1), self.int_const(0))
        return asm.op("INotEqual", "bool", self._reduce("Max", Type("int", 32, 1), one), self.int_const(0))

    def _reduce_lanes(self, e, x):
        return self._reduce(name_of(e).removeprefix("vk.reduce_").capitalize(), parse(e.ty), self.value(x))

    vk_reduce_add = vk_reduce_max = vk_reduce_min = _reduce_lanes

    def _reduce(self, name, ty, value):
        if not self.profile.subgroups:
            return self._reduce_through_memory(name, ty, value)
        sign = {"float": "F", "int": "S", "uint": "U"}[ty.code]
        sign = "I" if name == "Add" and sign != "F" else sign
        self._subgroup("Arithmetic", ty)
        scope = self.int_const(SUBGROUP)
        return self.asm.op(f"GroupNonUniform{sign}{name}", self.register(ty), scope, REDUCE, value, pure=False)

    def _exchange(self, op, capability, ty, *args):
        self._subgroup(capability, ty)
        return self.asm.op(f"GroupNonUniform{op}", self.register(ty), self.int_const(SUBGROUP), *args, pure=False)

    def _subgroup(self, capability, ty):
        if ty.bits != 32 or ty.lanes > 1:
            raise Unsupported(f"an exchange of {ty.code}{ty.bits}x{ty.lanes} between lanes")
        self.asm.capabilities |= {"GroupNonUniform", f"GroupNonUniform{capability}"}

    # ---- without subgroups: every thread stores its word to shared memory, and reads the words of others

    def _through_memory(self, ty, value, lane):
        """The word of lane number `lane`."""
        self._store_word(ty, value)
        found = self._load_word(ty, lane)
        self.barrier()  # before the next exchange overwrites what others still read
        return found

    def _reduce_through_memory(self, name, ty, value):
        """Reduces neighbouring lanes first, up to AT_ONCE at a time. All lanes combine values in the same order, so all
        get the same bits."""
        asm, stride = self.asm, 1
        while stride < self.profile.wave:
            count = min(AT_ONCE, self.profile.wave // stride)
            first = asm.op("BitwiseAnd", INT32, self.vk_lane(), self.int_const(~((count - 1) * stride)))
            lanes = [first, *(asm.op("IAdd", INT32, first, self.int_const(i * stride)) for i in range(1, count))]
            self._store_word(ty, value)
            found = [self._load_word(ty, lane) for lane in lanes]
            self.barrier()
            value = functools.reduce(lambda x, y: self.scalar(name, ty, x, y), found)
            stride *= count
        return value

    def _store_word(self, ty, value):
        if ty.bits != 32 or ty.lanes > 1:
            raise Unsupported(f"an exchange of {ty.code}{ty.bits}x{ty.lanes} between lanes")
        asm = self.asm
        if self.exchange is None:
            self.exchange = asm.variable("Workgroup", asm.array(asm.type(INT32), self.profile.wave))
            self.lds += 4 * self.profile.wave
        word = value if self.register(ty) == INT32 else asm.op("Bitcast", INT32, value)
        asm.emit("Store", self._exchanged(self.vk_lane()), word)
        self.barrier()

    def _load_word(self, ty, lane):
        register, found = self.register(ty), self.asm.op("Load", INT32, self._exchanged(lane), pure=False)
        return found if register == INT32 else self.asm.op("Bitcast", register, found)

    def _exchanged(self, lane):
        asm = self.asm
        return asm.op("AccessChain", asm.pointer("Workgroup", asm.type(INT32)), self.exchange, lane)
