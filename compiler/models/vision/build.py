"""Builds the Relax functions of an image encoder, and its entry in the manifest."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from tvm import relax

from mlc_amd.compiler.models.vision.config import NEIGHBOURS, VisionConfig
from mlc_amd.compiler.models.vision.encoder import encoder
from mlc_amd.compiler.models.vision.graph import VisionGraph
from mlc_amd.compiler.models.vision.prepare import BREAK, ON_HOST
from mlc_amd.compiler.ops import shape_of
from mlc_amd.runtime.artifact.io_names import ENCODED, PATCHES
from mlc_amd.runtime.artifact.manifest import IMAGE, Vision
from mlc_amd.runtime.errors import UserError, one_line

SIZES = (1024, 4096, 16384)  # patches of the functions for images of any size; kernels compute live rows only
TILES = 4  # number of images of one size in a function
UNIT = 64  # numbers of tokens are multiples of this


@dataclass(frozen=True)
class ImageSpec:
    """A function for up to `m` patches, from which it computes up to `tokens` tokens."""

    name: str
    m: int
    tokens: int


def image_functions(config: VisionConfig, ctx: int) -> list[ImageSpec]:
    """The functions of an encoder for a decoder with a context of `ctx` tokens: no image has more tokens."""
    each = config.merge**2

    def rows(tokens: int) -> int:
        return (tokens + bool(config.class_row)) * each

    most = rows(max(min(config.most, ctx), config.least))
    wanted = {most, TILES * most} if config.least == config.most else {*(size for size in SIZES if size < most), most}
    sizes = sorted({-(-size // (UNIT * each)) * UNIT * each for size in wanted})
    return [ImageSpec(f"{IMAGE}{m}", m, m // each) for m in sizes]


def build_encoders(bb: relax.BlockBuilder, model, target, functions: Sequence[ImageSpec], ctx: int) -> dict:
    """Emits the functions into the module. Returns {function: [(kind, name)] of its parameters}. Raises UserError for
    tensors of wrong shapes, and for an encoder of another model."""
    parameters, vision = {}, model.vision
    columns = model.config.hidden * (1 + len(vision.config.deepstack))
    for spec in functions:
        with bb.function(spec.name):
            g, wrong = VisionGraph(model, target, cast(Any, spec), ctx, bb), None
            with bb.dataflow():
                try:
                    found = encoder(g)
                except UserError as error:  # raised below, because TVM raises another error for unfinished functions
                    found, wrong = g.scaled(g.patches, 1.0), error
                out = bb.emit_output(found)
            bb.emit_func_output(out, params=[var for var, _ in g.parameters.values()])
        if wrong:
            raise wrong
        if (made := shape_of(found)[1]) != columns:
            raise UserError(
                f"{vision.path}: this encoder makes {made} columns, and the model takes {columns}: they do not belong "
                "together; give the mmproj file of this model, or --no-mmproj"
            )
        if vision.config.breaks:
            g.tensor(BREAK, (columns,))
        vision.check_used(g.used | set(ON_HOST))
        parameters[spec.name] = [(kind, name) for name, (_, kind) in g.parameters.items()]
    return parameters


def described(vision, hidden: int, functions: Sequence[ImageSpec], parameters: dict) -> Vision:
    """The encoder's entry in the manifest. vision: a VisionFile. hidden: columns of the decoder."""
    c: VisionConfig = vision.config
    columns = hidden * (1 + len(c.deepstack))
    used = {name for kind, name in parameters[functions[0].name] if kind == "io"}
    widths = {
        "patches": vision.tensors["v.patch_embd.weight"].shape[-1], "added": c.hidden, "turns": 2 * c.head_dim,
        "segments": 2, "windows": 2, "neighbours": NEIGHBOURS,
    }  # fmt: skip
    turns = {**asdict(c.turns), "span": c.turns.span(c.head_dim)} if c.turns else None
    return {
        "projector": c.projector,
        "file": one_line(vision.path),
        "metadata": vision.kept,
        "columns": columns,
        "deepstack": len(c.deepstack),
        "attention": c.attention,
        "positions": c.positions,
        "buckets": {spec.name: spec.m for spec in functions},
        "io": {name: widths[name] for name in PATCHES if name in used} | {ENCODED: columns},
        "patch": c.patch,
        "merge": c.merge,
        "window": c.window,
        "by_column": c.by_column,
        "nested": c.inner > 0 or c.convolved,
        "class_row": c.class_row,
        "table": cast(Any, c.table),
        "turns": turns,
        "breaks": c.breaks,
    }
