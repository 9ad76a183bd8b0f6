"""The options of compiling and loading a model. Name, type, default and help of each option are in one place.

A group of options is a dataclass whose annotations have an `Option`; or a TypedDict, if only the options that were
given matter. Functions take a group as one value. These are made from groups: the flags of commands, their help and
completion (tools/arguments.py), and the signatures of `mlc_amd.load` and `mlc_amd.compile` (`keywords`).
"""

import inspect
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, wraps
from numbers import Real
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

from mlc_amd.runtime.cache.kv_types import KV_TYPE, KvType
from mlc_amd.runtime.errors import UsageError, shorten
from mlc_amd.runtime.quantities import BYTES, number

P = ParamSpec("P")
Group = TypeVar("Group")
Result = TypeVar("Result")

MODEL_FLAGS = ("-m", "-hf", "-hfr", "--hf-repo", "-mu", "--model-url")  # llama.cpp's flags for a model
MANY = (1 << 31) - 1  # an upper limit for counts


@dataclass(frozen=True)
class Option:
    """The help, the unit and the valid values of an option. A number must be from `low`, and greater than `above`, to
    `high`."""

    help: str  # what the option does
    unit: str = ""  # unit of its value
    default: str = ""  # what None, as the default, means
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf  # the value must be greater than this
    read: Callable[[str], object] | None = None  # parses the value, if the option's type does not determine how
    also: tuple[str, ...] = ()  # other names of the flag: those of llama.cpp
    unset: str = ""  # the text that means None; "": there is none

    def text(self, default: object) -> str:
        """The help with the unit and the default value."""
        if default in (None, False, (), "", inspect.Parameter.empty):
            default = self.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        notes = [f"in {self.unit}"] * bool(self.unit) + [f"default: {shown}"] * (shown != "")
        return f"{self.help} ({'; '.join(notes)})" if notes else self.help

    def problem(self, name: str, value: object) -> str | None:
        """What is wrong with a value, or with the first wrong value of a tuple: a number that is out of range. None
        otherwise. name: for the message."""
        if isinstance(value, tuple):
            return next(filter(None, (self.problem(name, one) for one in value)), None)
        if not isinstance(value, Real):
            return None
        number = cast(float, value)
        if not number >= self.low or number <= self.above:
            limit = f"at least {self.low}" if math.isinf(self.above) else f"greater than {self.above}"
        elif number > self.high:
            limit = f"at most {self.high}"
        else:
            return None
        return f"{name} is {shorten(value)}: it must be {limit}"


def one_of(choices: Sequence[object]) -> str:
    """The possible values as text: "a, b or c"."""
    *before, last = map(str, choices)
    return f"{', '.join(before)} or {last}" if before else last


@cache
def described(group: Any) -> dict[str, tuple[Any, Option]]:
    """The options of a group: name to (type, Option)."""
    hints = get_type_hints(group, include_extras=True)
    annotated = {name: hint for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in annotated.items()}


def option_of(group: Any, name: str) -> Option:
    """An option of a group, for a function that has this option but not the whole group."""
    return described(group)[name][1]


def keywords(group: Callable[P, Group]) -> Callable[[Callable[[Group], Result]], Callable[P, Result]]:
    """A decorator: it turns a function of a group into a function whose keyword arguments are the group's options, with
    their types, defaults and help."""
    options = described(group)
    signature = inspect.signature(group)
    parameters = [one.replace(annotation=options[name][0]) for name, one in signature.parameters.items()]

    def decorate(function: Callable[[Group], Result]) -> Callable[P, Result]:
        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> Result:
            return function(group(*args, **options))

        lines = [f"{one.name}: {options[one.name][1].text(one.default)}" for one in parameters]
        wrap = textwrap.TextWrapper(110, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
        call.__doc__ = "\n".join((f"{inspect.getdoc(function)}\n\nArgs:", *map(wrap.fill, lines)))
        result = inspect.signature(function).return_annotation
        vars(call)["__signature__"] = signature.replace(parameters=parameters, return_annotation=result)
        return call

    return decorate


class Checked:
    """A group that checks its values when it is made. Raises UsageError for a number out of range or unknown name."""

    def __post_init__(self) -> None:
        for name, (kind, option) in described(type(self)).items():
            flag, value = f"--{name.replace('_', '-')}", getattr(self, name)
            if problem := option.problem(flag, value):
                raise UsageError(problem)
            known = [one for part in (kind, *get_args(kind)) if get_origin(part) is Literal for one in get_args(part)]
            if known and value is not None and value not in known:
                raise UsageError(f"{flag} must be {one_of(known)}, not {value!r}")


_OTHER_TARGETS = {"cuda": "vulkan", "hip": "rocm"}  # names of targets in other programs


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Checked):
    """The hardware that kernels are compiled for."""

    target: Annotated[Literal["auto", "cpu", "rocm", "vulkan"], Option(
        "what a GGUF file is compiled for; auto: rocm if AMD's HIP runtime works, else vulkan on a GPU, else cpu",
        read=str, also=("-ngl", "--n-gpu-layers"))] = "auto"  # fmt: skip
    arch: Annotated[str, Option(
        "CPU, GPU or Vulkan profile that a GGUF file is compiled for: native (this machine) or a name, see `mlc-amd "
        "compile --help`")] = "native"  # fmt: skip
    ctx: Annotated[int | None, Option(
        "KV cache size, for a GGUF file",
        default="the model's context length, at most 4096",
        unit="tokens", low=1, high=MANY, also=("-c", "--ctx-size"))] = None  # fmt: skip

    def __post_init__(self) -> None:
        if other := _OTHER_TARGETS.get(self.target):
            raise UsageError(f"there is no --target {self.target}: such GPUs run with --target {other}")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class RopeOptions(Checked):
    """Changes to the RoPE (rotary positions) of the GGUF file, for a longer context. Of an artifact, only the tables
    depend on them."""

    rope_scaling: Annotated[Literal["none", "linear", "yarn"] | None, Option(
        "how RoPE is scaled for a longer context, for a GGUF file",
        default="as the file says; linear with a factor alone")] = None  # fmt: skip
    rope_scale: Annotated[float | None, Option(
        "RoPE's context scaling factor: the context becomes so many times as long", default="that of the file",
        above=0.0, high=1e6)] = None  # fmt: skip
    rope_freq_base: Annotated[float | None, Option(
        "RoPE's frequency base", default="that of the file", above=1.0, high=1e15)] = None  # fmt: skip
    rope_freq_scale: Annotated[float | None, Option(
        "1 / --rope-scale", default="that of the file", low=1e-6, high=1e6)] = None  # fmt: skip
    yarn_orig_ctx: Annotated[int | None, Option(
        "tokens of the context that the model was trained for, of YaRN", default="that of the file",
        low=1, high=MANY)] = None  # fmt: skip
    yarn_ext_factor: Annotated[float | None, Option(
        "YaRN's extrapolation mix factor, 0: all pairs are interpolated", default="1 with YaRN", low=0.0,
        high=100.0)] = None  # fmt: skip
    yarn_attn_factor: Annotated[float | None, Option(
        "factor on the magnitude where YaRN's mix factor is 0", default="1", above=0.0, high=100.0)] = None  # fmt: skip
    yarn_beta_slow: Annotated[float | None, Option(
        "YaRN: pairs that turn less often are interpolated", default="that of the file, or 1", above=0.0,
        high=1e6)] = None  # fmt: skip
    yarn_beta_fast: Annotated[float | None, Option(
        "YaRN: pairs that turn more often keep their angles", default="that of the file, or 32", above=0.0,
        high=1e6)] = None  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_scale is not None and self.rope_freq_scale is not None:
            raise UsageError("--rope-scale and --rope-freq-scale say the same: give one of them")

    @property
    def rope_changes(self) -> dict[str, Any]:
        """The options that were given."""
        values = {field.name: getattr(self, field.name) for field in fields(RopeOptions)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class CompileOptions(RopeOptions, TargetOptions):
    """What a GGUF file is compiled for. The compiler takes `resolved` options."""

    kv_type: Annotated[KvType | None, Option(
        "type of the KV cache, for a GGUF file: of keys and values, or keys/values; q8_0 takes half of the memory of "
        "f16, q4_0 28 %",
        default=KV_TYPE, also=("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"))] = None  # fmt: skip
    tuned: Annotated[Literal["none", "shipped", "user", "auto"], Option(
        "tuned plans that kernels are built with: those of `mlc-amd tune` on this machine (user), those that come "
        "with mlc-amd (shipped), user before shipped (auto), or none")] = "auto"  # fmt: skip

    split: Annotated[Literal["layer", "tensor"], Option(
        "how several GPUs share a GGUF file: layer, each has some layers and computes after the others; tensor, each "
        "has a part of every layer and all compute at once, which is compiled for a number of GPUs",
        also=("-sm", "--split-mode"))] = "layer"  # fmt: skip
    gpus: Annotated[int | None, Option(
        "number of GPUs that --split tensor divides a GGUF file between", default="as many as --devices names",
        low=1, high=8)] = None  # fmt: skip

    pooling: Annotated[Literal["auto", "none", "mean", "cls", "last", "rank"], Option(
        "how an embedding model makes one vector of a text's tokens, for a GGUF file: their mean, the first or the "
        "last one, none (a vector for each token), or rank, which scores pairs of texts; auto: as the file says. Any "
        "other than auto makes a model that generates text one of embeddings")] = "auto"  # fmt: skip
    override_kv: Annotated[tuple[str, ...], Option(
        "metadata in place of a GGUF file's, KEY=TYPE:VALUE, such as qwen3.rope.freq_base=float:1e6; types are int, "
        "float, bool and str; may be repeated")] = ()  # fmt: skip
    mmproj: Annotated[str | os.PathLike[str] | None, Option(
        "GGUF file of the model's image encoder, compiled into the same artifact",
        default="the one in the GGUF file's folder or repository", also=("-mm",))] = None  # fmt: skip
    drafter: Annotated[str | os.PathLike[str] | None, Option(
        "GGUF file of an eagle3, dflash or gemma4-assistant draft of the model, compiled into the same artifact, which "
        "`--draft mtp` then uses; with a GGUF file --draft FILE is enough")] = None  # fmt: skip
    no_mmproj: Annotated[bool, Option("leave out the model's image encoder, its mmproj file")] = False

    @property
    def cache_type(self) -> KvType:
        return self.kv_type or KV_TYPE

    @property
    def parts(self) -> int:
        """The number of GPUs that each tensor is divided between; 1 with --split layer. UsageError if it is missing."""
        if self.split == "layer":
            if self.gpus is not None:
                raise UsageError("--gpus is for --split tensor; --devices says which GPUs share a model by layers")
            return 1
        if self.gpus is None:
            raise UsageError("--split tensor: say for how many GPUs with --gpus, or which ones with --devices 0,1")
        return self.gpus

    @property
    def given(self) -> dict[str, Any]:
        """The options whose values are not the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(CompileOptions)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def resolved(self, target: str, arch: str) -> "CompileOptions":
        """These options with a target and an arch that are not "auto" (chosen by tools/target.py)."""
        changed: dict[str, Any] = {"target": target, "arch": arch, "kv_type": self.cache_type}
        return CompileOptions(**self.given | changed)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Checked):
    """The options of running an artifact."""

    threads: Annotated[int | None, Option(
        "number of CPU threads", default="all cores", low=1, high=4096, also=("-t",))] = None  # fmt: skip
    device: Annotated[str | None, Option(
        "GPU for targets rocm and vulkan: its number in `mlc-amd doctor`, or part of its name",
        default="$MLC_AMD_DEVICE, else the best one")] = None  # fmt: skip
    devices: Annotated[tuple[int, ...], Option(
        "GPUs that share the model out by layers, by their numbers in `mlc-amd doctor`",
        default="one, or as many as hold the model", low=0, high=255)] = ()  # fmt: skip
    tensor_split: Annotated[tuple[float, ...], Option(
        "how much of the model each of several GPUs has, such as 3,1", default="by their free memory",
        low=0, high=1e9, also=("-ts",))] = ()  # fmt: skip
    verify: Annotated[bool, Option("also verify the checksum of the weights, which reads all of them")] = False
    n_cpu_moe: Annotated[int, Option(
        "keep the experts of the first N layers in host memory, where the GPU reads them across the bus: for "
        "mixtures of experts that do not fit its memory (`mlc-amd inspect` says which N is enough)",
        low=0, high=MANY)] = 0  # fmt: skip
    kv_tokens: Annotated[int | None, Option(
        "tokens that the KV cache holds, of all sequences together; --kv-memory says it in bytes",
        low=1, high=MANY)] = None  # fmt: skip
    kv_memory: Annotated[int | str | None, Option(
        "memory that the KV cache takes: bytes, a size such as 4G or 512M, or auto, which is all that the device has "
        "left, or half of the available memory of the host",
        default="one sequence of full length",
        low=1, high=1 << 60)] = None  # fmt: skip
    cache_disk: Annotated[int | str | None, Option(
        "also keep the KV cache on disk, in the user's cache folder, so that prompts are not computed again after a "
        "restart or when the memory was needed for others: bytes that it takes at most, or a size such as 20G, of all "
        "models together", default="not kept", low=1, high=1 << 60)] = None  # fmt: skip
    draft: Annotated[str | os.PathLike[str] | None, Option(
        "decode several tokens a step, guessed by a smaller model with the same vocabulary (named as a model is), by "
        "a draft of this model alone (the GGUF file of an eagle3, dflash or gemma4-assistant one), "
        'or, for "lookup", taken from the text so far, or, for "mtp", by the model\'s own layer for that, if it has '
        "one. Answers are the same, and the number of guesses adapts to how many are right",
        also=("-md", "--model-draft"))] = None  # fmt: skip

    @property
    def disk_bytes(self) -> int | None:
        """The bytes of `cache_disk`. Raises UsageError for a text that is not a size."""
        given = self.cache_disk
        return int(number(given, "--cache-disk", BYTES, "20G")) if isinstance(given, str) else given


@dataclass(frozen=True)
class LoadOptions(RunOptions, CompileOptions):
    """A model, the options for compiling it if it is a GGUF file, and the options for running it."""

    model: Annotated[str | os.PathLike[str] | None, Option(
        "artifact folder, GGUF file, or OWNER/REPO:QUANT of huggingface.co (compiled on first use)",
        default="the bundled demo model", also=MODEL_FLAGS)] = None  # fmt: skip

    def resolved(self, target: str, arch: str) -> CompileOptions:
        """`CompileOptions.resolved`. With --split tensor and no --gpus, the number of GPUs is that of --devices."""
        found = super().resolved(target, arch)
        by_devices = self.split == "tensor" and self.gpus is None and self.devices
        return replace(found, gpus=len(self.devices)) if by_devices else found


@dataclass(frozen=True)
class CompileRequest(CompileOptions):
    """A GGUF file to compile, and the folder to write."""

    model: Annotated[str | os.PathLike[str], Option(
        "GGUF file, any part of a split model, or OWNER/REPO:QUANT of huggingface.co", also=MODEL_FLAGS)]  # fmt: skip
    output: Annotated[str | os.PathLike[str], Option(
        "folder to write: an artifact already there is replaced, no other folder is")]  # fmt: skip
