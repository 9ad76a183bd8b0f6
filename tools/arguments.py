"""The command line of one verb: converts its tokens to the arguments that python-fire passes to the verb's `run`
function, and renders its help page.

A verb is a function: parameters before `*` are positional arguments, those after it are flags, annotations are types,
and the Google-style docstring is the help. Fire alone would read `--prompt 123` as a number, `1e3.gguf` as a float and
`-` as its own separator, and would page its help; so `normalize` turns every token into `--name=text` and
`parse_functions` tells fire how to read each text by its annotation.
"""

import difflib
import inspect
import json
import shutil
import textwrap
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fire import docstrings

from mlc_amd.runtime.errors import UsageError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _integer(text: str) -> int:
    # "1e3" and "0x10" are accepted as counts, too; "1.5" is an error.
    try:
        return int(text, 0)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(text) from None
        return int(number)


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    raise ValueError(text)


# annotation -> (how its text is read, what it is called in help and in errors)
_READERS: dict[object, tuple[Callable[[str], object], str]] = {
    str: (str, "TEXT"),
    int: (_integer, "N"),
    float: (float, "X"),
    bool: (_boolean, "true|false"),
    tuple[int, ...]: (lambda text: tuple(_integer(part) for part in text.split(",")), "N,N,..."),
    tuple[float, ...]: (lambda text: tuple(float(part) for part in text.split(",")), "X,X,..."),
    tuple[str, ...]: (lambda text: tuple(json.loads(text)), "TEXT"),
}


@dataclass(frozen=True)
class Alias:
    """Another program's name for a parameter of ours. read: its value in our words, None for one that has no effect;
    then `note` says why. half: what it says only a half of; both halves must have the same value."""

    parameter: str
    read: Callable[[str], str | None] = str
    note: str = ""
    half: str = ""


_LAYERS = Alias(
    "target",
    lambda text: "cpu" if text == "0" else None,
    "a GPU takes all layers of a model that fits it (--n-cpu-moe leaves experts in host memory; 0 means --target cpu)",
)
_KEYS, _VALUES = (Alias("kv_type", half=half) for half in ("keys", "values"))
# Flags as llama.cpp's programs have them, for each verb that has such a parameter.
ALIASES = {
    "-m": Alias("model"),
    "-c": Alias("ctx"),
    "--ctx-size": Alias("ctx"),
    "-t": Alias("threads"),
    "--temp": Alias("temperature"),
    "--repeat-penalty": Alias("repetition_penalty"),
    "--repeat-last-n": Alias("repetition_window"),
    "--n-predict": Alias("max_tokens"),
    "-md": Alias("draft"),
    "--model-draft": Alias("draft"),
    "-ngl": _LAYERS,
    "--n-gpu-layers": _LAYERS,
    "-ctk": _KEYS,
    "--cache-type-k": _KEYS,
    "-ctv": _VALUES,
    "--cache-type-v": _VALUES,
}


def _aliases(run: Callable) -> dict[str, Alias]:
    """Those that a verb has."""
    parameters = _parameters(run)
    return {flag: alias for flag, alias in ALIASES.items() if alias.parameter in parameters}


# The least value of parameters of these names, in every verb.
_LEAST = {"max_tokens": 1, "ctx": 1, "repetitions": 1, "trials": 1}


def _plain(annotation: object) -> object:
    """`T | None` without the None."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    return annotation


def _reader(annotation: object) -> tuple[Callable[[str], object], str]:
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return lambda text: choices[choices.index(text)], "|".join(choices)
    return _READERS[annotation]


def _parameters(run: Callable) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(run).parameters)


def _spelling(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_functions(run: Callable) -> dict[str, Callable[[str], object]]:
    """For fire's SetParseFns: how the text of each parameter of `run` is read. They raise UsageError on text that does
    not fit."""

    def function(name: str, annotation: object) -> Callable[[str], object]:
        read, what = _reader(annotation)

        def parse(text: str) -> object:
            try:
                value = read(text)
            except (ValueError, OverflowError):
                raise UsageError(f"{_spelling(name)} must be {what}, not {text!r}") from None
            if name in _LEAST and isinstance(value, int) and value < _LEAST[name]:
                raise UsageError(f"{_spelling(name)} is {text}: it must be at least {_LEAST[name]}")
            return value

        return parse

    return {name: function(name, _plain(parameter.annotation)) for name, parameter in _parameters(run).items()}


def normalize(run: Callable, short: dict[str, str], tokens: Sequence[str]) -> list[str]:
    """Rewrites what was typed after the verb as one `--name=text` per parameter of `run`.

    `short` maps one-letter flags to parameter names. Flags take their value after `=` or as the next token; boolean
    flags stand alone; `tuple[str, ...]` flags and arguments may be repeated; after `--` everything is positional.
    Raises UsageError for whatever does not fit.
    """
    parameters, aliases = _parameters(run), _aliases(run)
    positional = [
        name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
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
            free = [name for name in positional if name not in values or _repeats(parameters[name])]
            if not free:
                raise UsageError(f"unexpected argument {token!r}: see --help (text with spaces needs quotes)")
            values.setdefault(free[0], []).append(token)
            continue
        flag, equals, value = token.partition("=")
        alias = aliases.get(flag)
        name = alias.parameter if alias else _named(flag, short, parameters, aliases)
        if not equals:
            if _plain(parameters[name].annotation) is bool:
                value = "true"
            elif not waiting or (waiting[0].startswith("--") and waiting[0] != "--"):
                raise UsageError(f"{flag} needs a value (write {flag}=VALUE for one that begins with a dash)")
            else:
                value = waiting.pop(0)
        if alias:
            meant = alias.read(value)
            if meant is None:
                warnings.warn(f"{flag} {value} has no effect: {alias.note}", stacklevel=2)
                continue
            value = meant
            if alias.half:
                if alias.half in halves.setdefault(name, {}):
                    raise UsageError(f"{flag} is given twice")
                halves[name][alias.half] = value
                continue
        if name in values and not _repeats(parameters[name]):
            raise UsageError(f"{flag} is given twice")
        values.setdefault(name, []).append(value)
    for name, given in halves.items():
        if name in values:
            raise UsageError(f"{_spelling(name)} is given twice")
        values[name] = [_whole(name, given)]
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in values:
            what = name.upper() if name in positional else _spelling(name)
            raise UsageError(f"{what} is missing: see --help")
    texts = {name: json.dumps(v) if _repeats(parameters[name]) else v[0] for name, v in values.items()}
    return [f"--{name}={text}" for name, text in texts.items()]


def _whole(name: str, halves: dict[str, str]) -> str:
    """The value of a parameter of which other programs' flags gave the halves. UsageError unless both are the same."""
    value, *others = halves.values()
    if others != [value]:
        given = " and ".join(f"{half} {value}" for half, value in halves.items())
        raise UsageError(f"{given}: keys and values have the same type; write {_spelling(name)} {value} for both")
    return value


def _repeats(parameter: inspect.Parameter) -> bool:
    """Whether it may be given several times."""
    return _plain(parameter.annotation) == tuple[str, ...]


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


def _named(flag: str, short: dict[str, str], parameters: dict[str, inspect.Parameter], aliases: dict) -> str:
    """The parameter that `flag` (as typed, dashes included) means. UsageError with the nearest flag when there is
    none."""
    if not flag.startswith("--"):
        if flag[1:] in short:
            return short[flag[1:]]
    elif flag[2:].replace("-", "_") in parameters:
        return flag[2:].replace("-", "_")
    known = [_spelling(name) for name in parameters] + ["-" + letter for letter in short] + list(aliases)
    near = difflib.get_close_matches(flag, known, 1)
    raise UsageError(f"unknown flag {flag}" + (f": did you mean {near[0]}?" if near else ": see --help"))


@dataclass(frozen=True)
class Option:
    """A flag, for completion. flags: as typed, all spellings. value: whether it takes one; choices: those that are
    possible, if they can be listed."""

    flags: tuple[str, ...]
    help: str
    value: bool
    choices: tuple[str, ...]


def options(run: Callable, short: dict[str, str]) -> list[Option]:
    """The flags of a verb, those that all verbs have included."""
    letters, described, found = {name: letter for letter, name in short.items()}, _described(run), []
    for name, parameter in _parameters(run).items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            own = (_spelling(name), *((f"-{letters[name]}",) if name in letters else ()))
            flags = (*own, *(flag for flag, alias in _aliases(run).items() if alias.parameter == name))
            value = _plain(parameter.annotation) is not bool
            found.append(Option(flags, described[name], value, _choices(parameter)))
    return [
        *found,
        Option(("--debug",), "show log messages and the traceback of an error", False, ()),
        Option(("--help", "-h"), "explain the command", False, ()),
    ]


def operand_choices(run: Callable) -> tuple[str, ...]:
    """The possible values of a verb's first argument, if they can be listed."""
    first = next(iter(_parameters(run).values()), None)
    return () if first is None or first.kind is inspect.Parameter.KEYWORD_ONLY else _choices(first)


def _choices(parameter: inspect.Parameter) -> tuple[str, ...]:
    annotation = _plain(parameter.annotation)
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


def _described(run: Callable) -> dict[str, str]:
    """What the docstring says of each parameter."""
    found = docstrings.parse(inspect.getdoc(run)).args or ()
    return {argument.name: " ".join(argument.description.split()).removesuffix(".") for argument in found}


def help_page(verb: str, run: Callable, short: dict[str, str]) -> str:
    """The text of `mlc-amd VERB --help`, from the docstring and the signature of `run`."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    doc = docstrings.parse(inspect.getdoc(run))
    described = _described(run)
    letters = {name: letter for letter, name in short.items()}
    others: dict[str, list[str]] = {}
    for flag, alias in _aliases(run).items():
        if len(flag) == 2 and _parameters(run)[alias.parameter].kind is inspect.Parameter.KEYWORD_ONLY:
            letters.setdefault(alias.parameter, flag[1])
        else:
            others.setdefault(alias.parameter, []).append(flag)
    described |= {name: f"{described[name]}; also {', '.join(flags)}" for name, flags in others.items()}
    usage, rows = [f"mlc-amd {verb}"], {"arguments": [], "flags": []}
    for name, parameter in _parameters(run).items():
        annotation = _plain(parameter.annotation)
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            shown = f"{name.upper()} .." if _repeats(parameter) else name.upper()
            usage.append(shown if parameter.default is parameter.empty else f"[{shown}]")
            rows["arguments"].append((name.upper(), described[name]))
            continue
        left = (f"-{letters[name]}, " if name in letters else "    ") + _spelling(name)
        if annotation is not bool:
            left += " " + _reader(annotation)[1]
        shown = parameter.default not in (None, False, (), "", parameter.empty)
        default = ",".join(map(str, parameter.default)) if isinstance(parameter.default, tuple) else parameter.default
        rows["flags"].append((left, described[name] + (f" (default: {default})" if shown else "")))
    rows["flags"].append(("    --debug", "show log messages and the traceback of an error"))
    lines = ["usage: " + " ".join([*usage, "[flags]"]), "", *textwrap.wrap(doc.summary, width)]
    for paragraph in (doc.description or "").split("\n\n"):
        lines += ["", *textwrap.wrap(" ".join(paragraph.split()), width)] if paragraph.strip() else []
    column = max(len(left) for kind in rows.values() for left, _ in kind) + 4
    for kind, entries in rows.items():
        lines += ["", kind + ":"] if entries else []
        for left, right in entries:
            lines += textwrap.wrap(
                right, width, initial_indent=f"  {left}".ljust(column), subsequent_indent=" " * column
            )
    return "\n".join(lines) + "\n"
