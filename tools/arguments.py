"""The command line of one verb: converts its tokens to the arguments that python-fire passes to the verb's `run`
function, and renders its help page.

A verb is a function. Its parameters before `*` are positional arguments, those after it are flags. Annotations are
types, and the Google-style docstring has the help of parameters without an `Option`. A parameter that is a group of
options (runtime/options.py) stands for all of them. Fire alone would read `--prompt 123` as a number, `1e3.gguf` as a
float and `-` as its own separator, and would show its help in a pager. So `normalize` turns every token into
`--name=text`, and `for_fire` tells fire how to read each text.
"""

import inspect
import json
import operator
import os
import shutil
import textwrap
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, reduce

from fire import decorators, docstrings

from mlc_amd.runtime.errors import UsageError
from mlc_amd.runtime.options import MODEL_FLAGS, Option, described, one_of
from mlc_amd.tools import familiar
from mlc_amd.tools.options import Defaults, Without

_BOOLEANS: dict[str, bool] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def _integer(text: str) -> int:
    # "1e3" and "0x10" are also accepted as counts; "1.5" is an error.
    try:
        return int(text, 0)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(text) from None
        return int(number)


# type -> (how its text is read, its name in help, its name in errors)
_READERS: dict[object, tuple[Callable[[str], object], str, str]] = {
    str: (str, "TEXT", "a text"),
    str | os.PathLike[str]: (str, "TEXT", "a text"),
    int | str: (str, "TEXT", "a text"),
    int: (_integer, "N", "a whole number"),
    float: (float, "X", "a number"),
    bool: (lambda text: _BOOLEANS[text.lower()], "true|false", "true or false"),
    tuple[int, ...]: (
        lambda text: tuple(_integer(part) for part in text.split(",")),
        "N,N,...",
        "whole numbers with commas between them",
    ),
    tuple[float, ...]: (
        lambda text: tuple(float(part) for part in text.split(",")),
        "X,X,...",
        "numbers with commas between them",
    ),
    tuple[str, ...]: (lambda text: tuple(json.loads(text)), "TEXT", "a text"),
}
# llama.cpp's flags for a number of layers; and its flags for one half of an option (such as the type of keys).
_LAYERS = ("-ngl", "--n-gpu-layers")
_HALVES = {"-ctk": "keys", "--cache-type-k": "keys", "-ctv": "values", "--cache-type-v": "values"}


# Flags whose values are files or folders; --text is a flag of perplexity.
_PATHS = {
    "api_key_file", "export_kit", "file", "grammar_file", "ids", "import_kit", "json_schema_file", "logits", "output",
    "plans", "ship", "text", "uds",
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """An argument or a flag of a verb. type: without None. group: the parameter of `run` to which it belongs; "" if it
    is a parameter of `run` itself."""

    name: str
    type: typing.Any
    option: Option
    default: object
    positional: bool
    group: str = ""

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def repeats(self) -> bool:
        """Whether it may be given several times."""
        return self.type == tuple[str, ...]

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible values, if they can be listed."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is typing.Literal else ()

    @property
    def spelling(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        return "|".join(self.choices) or ("PATH" if self.name in _PATHS else _READERS[self.type][1])

    @property
    def title(self) -> str:
        """Its name in errors."""
        return self.name.upper() if self.positional else self.spelling

    def read(self, text: str) -> object:
        """The value of a text. Raises UsageError for an invalid one."""
        if text and text == self.option.unset:
            return None
        try:
            if self.option.read:
                return self.option.read(text)
            value = self.choices[self.choices.index(text)] if self.choices else _READERS[self.type][0](text)
        except (ValueError, KeyError, OverflowError):
            what = one_of(self.choices) if self.choices else _READERS[self.type][2]
            raise UsageError(f"{self.title} must be {what}, not {text!r}") from None
        if problem := self.option.problem(self.spelling, value):
            raise UsageError(problem)
        return value


@cache
def parameters(run: Callable) -> dict[str, Parameter]:
    """The arguments and flags of a verb, including those of its groups."""
    documented = docstrings.parse(inspect.getdoc(run)).args or ()
    help_of = {one.name: " ".join(one.description.split()).removesuffix(".") for one in documented}
    found = {}
    for name, parameter in inspect.signature(run).parameters.items():
        hint, metadata = _hints(run)[name]
        if _is_group(hint):
            without = [left for one in metadata if isinstance(one, Without) for left in one.names]
            found |= {one.name: one for one in _members(name, hint) if one.name not in without}
            for other, text in (pair for one in metadata if isinstance(one, Defaults) for pair in one.texts.items()):
                found[other] = replace(found[other], option=replace(found[other].option, default=text))
        else:
            own = (one for one in metadata if isinstance(one, Option))
            option = next(own, None) or Option(help_of[name], also=MODEL_FLAGS if name == "model" else ())
            found[name] = _parameter(parameter, hint, option)
    return found


def _parameter(parameter: inspect.Parameter, hint: object, option: Option, group: str = "") -> Parameter:
    positional = parameter.kind is not parameter.KEYWORD_ONLY
    return Parameter(parameter.name, _plain(hint), option, parameter.default, positional, group)


def _members(group: str, kind: typing.Any) -> Iterator[Parameter]:
    """The options of a group. For a TypedDict they have no defaults: it only has options that are given."""
    declared = {} if typing.is_typeddict(kind) else inspect.signature(kind).parameters
    for name, (hint, option) in described(kind).items():
        if name in declared:
            yield _parameter(declared[name], hint, option, group)
        else:
            yield Parameter(name, _plain(hint), option, None, False, group)


def _hints(run: Callable) -> dict[str, tuple[typing.Any, tuple]]:
    """The type and the metadata of the annotation of each parameter."""
    hints = typing.get_type_hints(run, include_extras=True).items()
    annotated = typing.Annotated
    return {n: (h.__origin__, h.__metadata__) if typing.get_origin(h) is annotated else (h, ()) for n, h in hints}


def _is_group(hint: object) -> bool:
    return is_dataclass(hint) or typing.is_typeddict(hint)


def _plain(hint: object) -> object:
    """`T | None` without the None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return reduce(operator.or_, (part for part in typing.get_args(hint) if part is not type(None)))
    return hint


def for_fire(run: Callable) -> Callable:
    """`run` with a keyword argument for each of `parameters`, and with instructions for fire how to read each text."""
    known = parameters(run)
    kinds = {name: hint for name, (hint, _) in _hints(run).items() if _is_group(hint)}

    def call(**given: object) -> None:
        own: dict[str, object] = {}
        groups: dict[str, dict[str, object]] = {name: {} for name in kinds}
        for name, value in given.items():
            groups.get(known[name].group, own)[name] = value
        run(**own, **{name: kinds[name](**values) for name, values in groups.items()})

    return decorators.SetParseFns(**{name: parameter.read for name, parameter in known.items()})(call)


def normalize(run: Callable, short: Mapping[str, str], tokens: Sequence[str]) -> list[str]:
    """Rewrites what was typed after the verb as one `--name=text` for each of `parameters`. short: one-letter flags to
    parameter names. A flag's value follows `=`, or is the next token; boolean flags have none. `tuple[str, ...]` flags
    and arguments may be repeated. After `--` everything is positional. Raises UsageError for invalid command lines."""
    known = parameters(run)
    flags = {flag: one for one in known.values() for flag in _flags(one, short)}
    values: dict[str, list[str]] = {}
    halves: dict[str, dict[str, str]] = {}
    waiting = list(tokens)
    only_positional = False
    while waiting:
        token = waiting.pop(0)
        if token == "--" and not only_positional:
            only_positional = True
            continue
        if only_positional or token == "-" or not token.startswith("-") or _is_number(token):
            free = [one for one in known.values() if one.positional and (one.name not in values or one.repeats)]
            free += [one for one in known.values() if one.name == "prompt" and one.name not in values]
            if not free:
                raise UsageError(f"unexpected argument {token!r}: see --help (text with spaces needs quotes)")
            values.setdefault(free[0].name, []).append(token)
            continue
        flag, equals, value = token.partition("=")
        parameter = flags.get(flag) or flags.get(flag.replace("_", "-"))
        if parameter is None and flag in familiar.IGNORED and "threads" in known:
            count, note = familiar.ignored(flag, bool(equals), waiting)
            del waiting[:count]
            warnings.warn(note, stacklevel=2)
            continue
        parameter = parameter or _unknown(flag, flags)
        if not equals:
            if parameter.type is bool:
                value = "true"
            elif not waiting or (waiting[0].startswith("--") and waiting[0] != "--"):
                raise UsageError(f"{flag} needs a value (write {flag}=VALUE for one that begins with a dash)")
            else:
                value = waiting.pop(0)
        if flag in _LAYERS and value != "0":
            why = "a GPU takes all layers of a model that fits it (--n-cpu-moe leaves experts in host memory; 0 means"
            warnings.warn(f"{flag} {value} has no effect: {why} --target cpu)", stacklevel=2)
            continue
        if flag in _HALVES:
            if _HALVES[flag] in halves.setdefault(parameter.name, {}):
                raise UsageError(f"{flag} is given twice")
            halves[parameter.name][_HALVES[flag]] = value
            continue
        if parameter.name in values and not parameter.repeats:
            raise UsageError(f"{flag} is given twice")
        values.setdefault(parameter.name, []).append("cpu" if flag in _LAYERS else value)
    for name, given in halves.items():
        if name in values:
            raise UsageError(f"{known[name].spelling} is given twice")
        values[name] = [_whole(known[name], given)]
    for name, one in known.items():
        if one.required and name not in values:
            raise UsageError(f"{one.title} is missing: see --help")
    texts = {name: json.dumps(given) if known[name].repeats else given[0] for name, given in values.items()}
    return [f"--{name}={text}" for name, text in texts.items()]


def _flags(parameter: Parameter, short: Mapping[str, str]) -> list[str]:
    """All spellings of a parameter's flag: its own, its letter, those of other programs."""
    letters = [f"-{letter}" for letter, name in short.items() if name == parameter.name]
    return [parameter.spelling, *letters, *(flag for flag in parameter.option.also if flag[1:] not in short)]


def _whole(parameter: Parameter, halves: Mapping[str, str]) -> str:
    """The value of a parameter whose halves were given by flags of other programs: the halves, with a slash between
    them if they differ. Raises UsageError if it is not a value of the parameter."""
    found = dict.fromkeys(halves[half] for half in ("keys", "values") if half in halves)
    whole = "/".join(found)
    if len(halves) < 2 or (len(found) > 1 and whole not in parameter.choices):
        given = " and ".join(f"{half} {value}" for half, value in halves.items())
        known = ", ".join(parameter.choices)
        raise UsageError(f"{given}: no such type of keys and values; write {parameter.spelling} and one of {known}")
    return whole


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


def _unknown(flag: str, known: Iterable[str]) -> typing.NoReturn:
    """Raises UsageError, which names the most similar flag."""
    near = familiar.nearest(flag, (*known, *_HELP.spellings, *_DEBUG.spellings, "--version"))
    raise UsageError(f"unknown flag {flag}" + (f": did you mean {near}?" if near else ": see --help"))


@dataclass(frozen=True)
class Flag:
    """A flag, for completion. spellings: as typed. value: whether it has a value. choices: possible values, if they can
    be listed."""

    spellings: tuple[str, ...]
    help: str
    value: bool = False
    choices: tuple[str, ...] = ()


_DEBUG = Flag(("--debug",), "show log messages and the traceback of an error")
_HELP = Flag(("--help", "-h"), "explain the command")


def flags(run: Callable, short: Mapping[str, str]) -> list[Flag]:
    """The flags of a verb, including those of all verbs."""
    own = [one for one in parameters(run).values() if not one.positional]
    found = [Flag(tuple(_flags(one, short)), one.option.help, one.type is not bool, one.choices) for one in own]
    return [*found, _DEBUG, _HELP]


def operand_choices(run: Callable) -> tuple[str, ...]:
    """The possible values of a verb's first argument, if they can be listed."""
    return next((one.choices for one in parameters(run).values() if one.positional), ())


def help_page(verb: str, run: Callable, short: Mapping[str, str]) -> str:
    """The text of `mlc-amd VERB --help`, from the docstring and the parameters of `run`."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    doc = docstrings.parse(inspect.getdoc(run))
    usage, rows = [f"mlc-amd {verb}"], {"arguments": [], "flags": []}
    for name, one in parameters(run).items():
        _, *others = _flags(one, short)
        letter = next((flag for flag in others if flag[1:] in short or (len(flag) == 2 and not one.positional)), None)
        more = [flag for flag in others if flag != letter]
        text = one.option.text(one.default)
        text += f"; also {', '.join(more)}" if more else ""
        if one.positional:
            shown = f"{name.upper()} .." if one.repeats else name.upper()
            usage.append(shown if one.required else f"[{shown}]")
            rows["arguments"].append((name.upper(), text))
        else:
            value = "" if one.type is bool else f" {one.metavar}"
            rows["flags"].append(((f"{letter}, " if letter else "    ") + one.spelling + value, text))
    rows["flags"].append((f"    {_DEBUG.spellings[0]}", _DEBUG.help))
    lines = ["usage: " + " ".join([*usage, "[flags]"]), "", *textwrap.wrap(doc.summary, width)]
    for paragraph in (doc.description or "").split("\n\n"):
        lines += ["", *textwrap.wrap(" ".join(paragraph.split()), width)] if paragraph.strip() else []
    column = max(len(left) for kind in rows.values() for left, _ in kind) + 4
    for kind, entries in rows.items():
        lines += ["", kind + ":"] if entries else []
        for left, right in entries:
            first, later = f"  {left}".ljust(column), " " * column
            lines += textwrap.wrap(right, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
    return "\n".join(lines) + "\n"
