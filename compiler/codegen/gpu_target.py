"""The base class of the GPU targets: layouts of weights, activations and caches, and the kernels of schedules/gpu.

Subclasses of `GpuTarget` define which archs exist, and compile kernels to code. All archs of an artifact share its plan
and its weights, so they must take activations in the same layouts.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import tvm
from tvm import relax, te

from mlc_amd.compiler import nodes, ops
from mlc_amd.compiler.codegen import kernel_workers
from mlc_amd.compiler.codegen.kernel_workers import ALONE, Kernel, Workers
from mlc_amd.compiler.codegen.relay import relay_code
from mlc_amd.compiler.codegen.shared_code import relaunched, representatives
from mlc_amd.compiler.codegen.target import Target, TensorTypes
from mlc_amd.compiler.functions import FunctionSpec
from mlc_amd.compiler.models.config import AttentionConfig, ExpertsConfig
from mlc_amd.runtime.artifact.manifest import ManifestTarget
from mlc_amd.runtime.cache.kv_types import KV_TYPE
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.exchange_layout import EXCHANGING, LINE, PROBE, RELAY, joint_name
from mlc_amd.schedules.decode import float_weight
from mlc_amd.schedules.formats import Format, lookup
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.attention.attention_step import scratch_shapes
from mlc_amd.schedules.gpu.attention.cache import cache_types
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded, planes
from mlc_amd.schedules.gpu.base.quantize import TOKENS, WIDTH
from mlc_amd.schedules.gpu.base.step import FEW
from mlc_amd.schedules.gpu.exchange.exchange import exchange
from mlc_amd.schedules.gpu.exchange.joint import can_join, planned
from mlc_amd.schedules.gpu.exchange.joint import joint as joint_kernel
from mlc_amd.schedules.gpu.experts.route import scratch_shapes as route_scratch
from mlc_amd.schedules.gpu.linear import norm_place
from mlc_amd.schedules.operators import AllGather, AllReduce, GateUp, HeadLinear, Linear, NormPlace
from mlc_amd.schedules.operators.attention import SLOTS
from mlc_amd.schedules.operators.exchange import MOST_WORDS

# Both tables: key True if `gemm_lanes.py` multiplies the experts' rows (it has tiles of as few as TOKENS tokens, and
# does not stage weights), else False.
# SINGLE_ROWS: the largest number of rows of a step whose slots are computed one by one. In models with 32 or more
# experts, 16 rows use most experts once or twice, so tiles of 16 slots would be almost empty.
# EXPERT_TILES: slots of a tile for steps of up to SOME rows, and for larger steps. Example: with 8 of 128 experts in
# use, a chunk of 512 rows fills tiles of 32 slots to two thirds and tiles of 64 slots to a half. But larger tiles
# decode weights less often: with 64 slots, 10 % faster on an H200.
SINGLE_ROWS, SOME = {False: 16, True: FEW}, 64
EXPERT_TILES = {False: (16, 32), True: (TOKENS, 64)}


class _Exchanges(NamedTuple):
    """operators: the exchanges that have a kernel, by kernel name. capacity: words of a slot of an inbox or outbox
    (runtime/exchange_layout.py)."""

    operators: dict[str, AllReduce | AllGather]
    capacity: int


class GpuTarget(Target):
    """A GPU target. arch: names of GpuArchs or Profiles, separated by commas, or "auto" for this machine's GPU. Raises
    UserError if a name is unknown, or if the archs cannot share an artifact.

    Subclasses define `here` (returns the name of this machine's GPU), `resolve` (returns the arch of a name) and
    `compile_for`.
    """

    query_dtype = "float16"
    layout = "rows"
    encoder_rows = (64, 512, 2048)
    peers = False  # whether GPUs that share a model write to each other's memory themselves, without a relay
    fuses_rope = True
    fuses_route = True
    planes = staticmethod(planes)
    registry = registry
    compiler: Callable[..., Any]  # compiler(kernels, arch): a module of several kernels
    here: Callable[[], str]
    resolve: Callable[[str], Any]

    def __init__(self, arch: str, kv: str = KV_TYPE):
        names = [self.here()] if arch in ("native", "auto") else arch.split(",")
        super().__init__(list(dict.fromkeys(map(self.resolve, names))), kv)
        first, *others = self.archs
        for other in others:
            if (bool(other.matrix), other.lane_blocks) != (bool(first.matrix), first.lane_blocks):
                raise UserError(f"{first.name} and {other.name} need different layouts; compile an artifact for each")

    def attends_in_blocks(self, chunk: bool) -> bool:
        return not (chunk and self.archs[0].matrix)

    def rotates_back(self, rotation: int) -> bool:
        return all(rotation <= arch.wave * WIDTH for arch in self.archs)

    def functions(self, ctx: int) -> list[FunctionSpec]:
        # On an H200, matrix units compute 16 rows in less time than two steps of FEW rows take. If the lanes of
        # matrices are known, time grows with the number of rows, so there are more sizes. LLVM takes several times as
        # long for kernels without dot products, so archs without them have fewer sizes.
        first, dot = self.archs[0], all(arch.dot for arch in self.archs)
        few = [FEW, 16, 32] if first.lane_blocks else [FEW, 16] if first.matrix else [FEW] if dot else []
        steps, chunks = [*few, SLOTS], [64, 128, 512] if self._small_tiles else [64, 512]
        chunks = [m for m in chunks if m <= max(ctx, 64)]
        longest = chunks[-1]
        return [
            FunctionSpec("decode", 1, 1, "all"),
            *(FunctionSpec(f"step_{m}", m, m, "all") for m in steps),
            *(FunctionSpec(f"prefill_{m}", m, 0, "last") for m in chunks),
            FunctionSpec(f"mixed_{longest}", longest, min(SLOTS, longest - 1), f"answers:{SLOTS}"),
            FunctionSpec("score_64", 64, 0, "all"),
        ]

    def act_layout(self, m: int, kind: str) -> str:
        # If the lanes of matrices are known, lanes decode weights directly into the operands of matrix units, so matrix
        # units are used for few rows too.
        return self._layout(kind, m > (1 if self.archs[0].lane_blocks else FEW))

    def expert_layout(self, m: int, formats: list[Format]) -> str:
        return self._layout(formats[0].kind, self.expert_tile(m) > 1)

    def head_layout(self, m: int, kind: str, k: int) -> str:
        # A unit of the layout "lanes" holds columns of one head only.
        return self._layout(kind, m > FEW and k % (BLOCK * max(1, self.archs[0].lane_blocks)) == 0)

    def _layout(self, kind: str, on_matrices: bool) -> str:
        """The layout of activations. on_matrices: whether float16 matrix units multiply, on archs that have them."""
        if on_matrices and self.archs[0].matrix:
            return self.matrix_layout
        return "rows" if kind == "int8" else ""

    @property
    def matrix_layout(self) -> str:
        """The layout of activations for float16 matrix units."""
        blocks = self.archs[0].lane_blocks
        return f"lanes:{blocks}" if blocks else "pairs"

    @property
    def _small_tiles(self) -> bool:
        """Whether all archs have matrices of FEW tokens or less whose lanes are known."""
        return all(arch.lane_matrix and arch.lane_matrix[1] <= FEW for arch in self.archs)

    def expert_tile(self, m: int) -> int:
        small = self._small_tiles
        return 1 if m <= SINGLE_ROWS[small] else EXPERT_TILES[small][m > SOME]

    def cache_types(self, attention: AttentionConfig, ctx: int) -> TensorTypes:
        return cache_types(self.layer(attention, ctx))

    def attention_workspace(self, attention: AttentionConfig, ctx: int, single: int) -> TensorTypes:
        """The memory through which the splits of decode attention are combined. Layers of the same shape share it."""
        if not single:
            return {}
        a = self.layer(attention, ctx)
        shapes = scratch_shapes(a.heads, a.value_d)
        return {f"attention.{a.heads}x{a.kv_heads}x{a.d}.{name.lower()}": of for name, of in shapes.items()}

    def route_workspace(self, experts: ExpertsConfig) -> TensorTypes:
        """The memory through which the workgroups of `norm_route` are combined. Layers with the same number of experts
        share it."""
        return {f"route.{experts.count}.{name.lower()}": of for name, of in route_scratch(experts.count).items()}

    def norm_place(self, before: Linear | AllReduce | None, readers: Sequence[Linear | GateUp]) -> NormPlace:
        places: list[NormPlace] = [norm_place.place(before, tuple(readers), arch) for arch in self.archs]
        return places[0] if len(set(places)) == 1 else "launch"

    def _call(self, bb, call):
        op = ops.operator_of(call)
        if isinstance(op, Linear) and op.m > FEW and op.k % BLOCK:
            return self._product(bb, call, op)
        if isinstance(op, HeadLinear) and op.m > FEW and op.k % BLOCK:
            return self._head_product(bb, call, op)
        return super()._call(bb, call)

    @staticmethod
    def _product(bb, call, op: Linear):
        """A linear of several rows as a generic kernel, for columns that are not whole blocks, which GEMM kernels need.
        Only float weights have such columns: blocks of all other formats have 32 or more columns."""
        if len(op.segments) > 1:
            raise UserError(f"layers of {op.k} columns that share their input are not supported on GPUs")
        ((fmt, n),), m, k = op.weights, op.m, op.k

        def product(x, w, *others):
            def element(i, j):
                column = te.reduce_axis((0, k), "k")
                return te.sum(x[i, column] * float_weight(fmt, w[j, column]), axis=column)

            shape, rest = (m, padded(n)), list(others)
            y: Any = te.compute(shape, element, "product")
            if op.biases[0]:
                bias = rest.pop(0)
                y = te.compute(shape, lambda i, j, y=y: y[i, j] + bias[te.min(j, n - 1)], "biased")
            if rest:
                y = te.compute(shape, lambda i, j, y=y: y[i, j] + rest[0][i, j], "added")
            return y

        _, x, weight, *others = call.args
        return bb.call_te(product, x, bb.emit(relax.TupleGetItem(weight, 0)), *others)

    @staticmethod
    def _head_product(bb, call, op: HeadLinear):
        """Like `_product`, for a linear with one matrix for each head."""
        fmt, heads, n, k = lookup(op.fmt), op.heads, op.n, op.k

        def product(x, w):
            def element(i, j):
                column = te.reduce_axis((0, k), "k")
                return te.sum(x[i, j // n * k + column] * float_weight(fmt, w[j, column]), axis=column)

            return te.compute((op.m, heads * n), element, "product")

        _, x, weight = call.args
        return bb.call_te(product, x, bb.emit(relax.TupleGetItem(weight, 0)))

    @property
    def description(self) -> ManifestTarget:
        names = [arch.name for arch in self.archs]
        bandwidth = {arch.name: arch.bandwidth for arch in self.archs}
        return {"kind": self.kind, "arch": ",".join(names), "archs": names, "bandwidth": bandwidth}

    # ---- compilation

    def own_kernels(self, arch) -> dict[str, tvm.tirx.PrimFunc]:
        """{name: kernel} of the kernels that the device calls, not a function of the model."""
        return {}

    @abstractmethod
    def compile_for(
        self, arch, kernels: dict[str, tvm.tirx.PrimFunc], directory: Path, lowered, workers: Workers
    ) -> tuple[str, dict, dict]:
        """Compiles the kernels of one arch. Returns (name of the file in `directory`, {kernel: `lower.Function`},
        {symbol: further facts of the launch for the manifest, besides symbol, grid, block and args})."""

    def modules(self, arch, groups: list[list[str]], kernels, lowered, workers: Workers) -> Iterator[Any]:
        """The compiled module of each group of kernels, in the order of `groups`; the last groups should be the
        smallest. Other processes compile groups of operators from the front, this process from the back."""

        def report(group: list[str]) -> None:
            for name in group:
                lowered(name)

        def elsewhere(group: list[str]) -> Future | None:
            if not all(name in self.workloads for name in group):
                return None
            operators = [(name, self.workloads[name]) for name in group]
            future = workers.compile(
                self.compiler, arch, [Kernel(name, op, self.plan(op, arch)[0]) for name, op in operators]
            )
            if future:
                future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else report(group))
            return future

        futures, here = [elsewhere(group) for group in groups], {}
        for i, future in reversed([*enumerate(futures)]):
            if future is None or future.cancel():
                here[i] = self.compiler({name: kernels[name] for name in groups[i]}, arch)
                report(groups[i])
        for i, future in enumerate(futures):
            yield here[i] if future is None or i in here else kernel_workers.result(future)

    def joins(self, product: str, total: str) -> bool:
        one, other = self.workloads.get(product), self.workloads.get(total)
        return isinstance(other, AllReduce) and all(can_join(one, other, arch) for arch in self.archs)

    def compile_kernels(
        self, mod: tvm.IRModule, directory: Path, progress, workers: Workers, joint: Sequence[tuple[str, str]] = ()
    ) -> dict:
        """{"libraries": {arch: file}, "launches": {arch: launches}}, see `compile_arch`. For a model that several GPUs
        share by tensor also "exchange", as in the manifest."""
        names = sorted(gv.name_hint for gv, func in nodes.functions(mod).items() if isinstance(func, tvm.tirx.PrimFunc))
        libraries, launches, steps = {}, {}, []

        def step(name: str) -> None:  # counts one step for each kernel, and one for the arch's code
            if name not in own:
                steps.append(name)
            progress("kernels", len(steps), (len(names) + 1) * len(self.archs))

        exchanges = self._exchanges(names)
        pairs = {joint_name(*pair): pair for pair in joint if pair[1] in exchanges.operators}
        for arch in self.archs:
            own = self.own_kernels(arch) | {
                EXCHANGING + name: exchange(op, exchanges.capacity, arch, EXCHANGING + name, self.peers)
                for name, op in exchanges.operators.items()
            }
            for name, pair in pairs.items():
                workloads: Any = self.workloads
                product, total = (workloads[one] for one in pair)
                plan, _ = self.plan(planned(product), arch)
                own[name] = joint_kernel(product, total, exchanges.capacity, arch, name, self.peers, plan)
            kernels = {name: self.kernel(name, arch) for name in names} | own
            libraries[arch.name], launches[arch.name] = self.compile_arch(arch, kernels, directory, step, workers)
            step("")
        made = {"libraries": libraries, "launches": launches}
        if exchanges.operators:
            words = {EXCHANGING + name: op.words for name, op in exchanges.operators.items()}
            words |= {name: exchanges.operators[total].words for name, (_, total) in pairs.items()}
            made["exchange"] = {"capacity": exchanges.capacity, "words": words}
            if not self.peers:
                (directory / RELAY).write_bytes(relay_code())
                made["exchange"]["relay"] = RELAY
        return made

    def _exchanges(self, names: Sequence[str]) -> _Exchanges:
        """Those of the kernels `names` that can exchange parts while they run, and the kernel of the check (PROBE)."""
        found = {name: op for name in names if isinstance(op := self.workloads.get(name), AllReduce | AllGather)}
        able = {name: op for name, op in found.items() if op.words <= MOST_WORDS and op.words % LINE == 0}
        sums = [op for op in able.values() if isinstance(op, AllReduce)]
        if not sums:  # a model of which only the vocabulary is divided
            sums = [AllReduce(n=2 * op.n, parts=op.parts, m=op.m) for op in able.values()]
        if smallest := min(sums, key=lambda op: op.words, default=None):
            able[PROBE.removeprefix(EXCHANGING)] = replace(smallest, residual=True, norm_out="")
        return _Exchanges(able, max((op.words for op in able.values()), default=0))

    def compile_arch(self, arch, kernels, directory, step=lambda name: None, workers=ALONE):
        codes = representatives(kernels)
        compiled = {name: kernel for name, kernel in kernels.items() if codes[name] == name}
        library, made, facts = self.compile_for(arch, compiled, directory, step, workers)
        functions = {name: made[name] for name in compiled}
        for name in sorted(kernels.keys() - compiled.keys()):
            functions[name] = relaunched(made[codes[name]], kernels[name])
            step(name)
        return library, {
            name: {
                "scratch": list(function.scratch),
                "steps": [asdict(launch) | facts.get(launch.symbol, {}) for launch in function.launches],
            }
            for name, function in functions.items()
        }
