"""Options: each flag has one help, which stands in one place of the sources, and what is made from groups of options
has all of them."""

import ast
import importlib
import inspect
import math
import typing
from collections import defaultdict
from pathlib import Path

import pytest
from fire import docstrings

import mlc_amd
from mlc_amd.runtime.errors import UsageError
from mlc_amd.runtime.options import CompileOptions, CompileRequest, LoadOptions, RunOptions, described
from mlc_amd.tools import arguments, cli
from mlc_amd.tools.commands import chat, serve

REPO = Path(__file__).resolve().parents[2]
# Flags that are something else in each command: what it writes, lists and reads, whose address it is.
OWN = {"output", "list", "host", "image", "text"}


@pytest.fixture(scope="module")
def verbs() -> dict:
    """The functions of all verbs, by name."""
    return {verb: importlib.import_module(cli.module_of(verb)).run for verb in cli.VERBS}


def helps(verbs: dict) -> dict[str, set[str]]:
    """The help texts of all flags of all verbs, by the flag's name."""
    found = defaultdict(set)
    for run in verbs.values():
        for name, parameter in arguments.parameters(run).items():
            if not parameter.positional:
                found[name].add(parameter.option.help)
    return found


def test_a_flag_has_one_help_in_all_commands(verbs):
    assert {name: texts for name, texts in helps(verbs).items() if len(texts) > 1 and name not in OWN} == {}


def test_help_says_what_is_so_for_the_command(verbs):
    """Where commands differ."""

    def text(verb: str, name: str) -> str:
        return arguments.parameters(verbs[verb])[name].option.text(None)

    assert all("default: what the tests need" in text("bench", name) for name in ("ctx", "kv_memory"))
    assert "default: the model's context length" in text("tune", "ctx") and "default: auto" in text(
        "serve", "kv_memory"
    )
    others = [text(verb, name) for verb in ("chat", "serve") for name in ("ctx", "device", "kv_memory")]
    assert not any(word in one for one in others for word in ("bench", "tun"))


def test_a_help_stands_in_one_place(verbs):
    paths = [path for package in ("mlc_amd", "runtime", "tools") for path in (REPO / package).glob("**/*.py")]
    nodes = [node for path in set(paths) for node in ast.walk(ast.parse(path.read_text()))]
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts = [" ".join(text.split()) for text in strings]
    places = {help: sum(text.count(help) for text in texts) for of in helps(verbs).values() for help in of}
    assert len(places) > 80 and {help: count for help, count in places.items() if count != 1} == {}


@pytest.mark.parametrize("verb", cli.VERBS)
def test_a_docstring_describes_what_has_no_option(verbs, verb):
    run = verbs[verb]
    described = [argument.name for argument in docstrings.parse(inspect.getdoc(run)).args or ()]
    hints = inspect.get_annotations(run, eval_str=True)
    own = [name for name in inspect.signature(run).parameters if not hasattr(hints[name], "__metadata__")]
    assert described == [name for name in own if not hasattr(hints[name], "__dataclass_fields__")]


def test_the_python_api_has_the_options_of_loading():
    for function, group in ((mlc_amd.load, LoadOptions), (mlc_amd.compile, CompileRequest)):
        signature, options = inspect.signature(function), described(group)
        declared = inspect.signature(group).parameters
        assert signature.parameters.keys() == options.keys() == group.__dataclass_fields__.keys()
        for name, parameter in signature.parameters.items():
            assert (parameter.annotation, parameter.default) == (options[name][0], declared[name].default)
            assert " ".join(options[name][1].help.split()) in " ".join(function.__doc__.split())
    assert described(LoadOptions).keys() - {"model"} == described(CompileOptions).keys() | described(RunOptions).keys()


def test_commands_take_groups_whole():
    """But for the options that they say they do not have."""
    of_chat, of_serve = (set(arguments.parameters(run)) for run in (chat.run, serve.run))
    assert described(LoadOptions).keys() - of_chat == {"tuned", "kv_tokens"}
    assert described(LoadOptions).keys() - of_serve == {"tuned"}


def test_a_command_gets_its_groups_as_values():
    def run(*, prompt: str = "", load: LoadOptions) -> None:
        """Does nothing.

        Args:
            prompt: a text.
        """
        found.append((prompt, load))

    found = []
    arguments.for_fire(run)(model="x", prompt="y", threads=3)
    assert found == [("y", LoadOptions(model="x", threads=3))]


def test_numbers_out_of_range_are_refused():
    for options, error in (
        ({"threads": 0}, "--threads is 0: it must be at least 1"),
        ({"ctx": -1}, "--ctx is -1: it must be at least 1"),
    ):
        with pytest.raises(UsageError, match=error):
            mlc_amd.load(**options)


def test_every_number_of_every_command_has_a_range(verbs):
    numbers, open_ended = 0, []
    for verb, run in verbs.items():
        for name, one in arguments.parameters(run).items():
            kinds = {one.type, *typing.get_args(one.type)}
            if kinds & {int, float} and not one.choices:
                numbers += 1
                least, most = max(one.option.low, one.option.above), one.option.high
                open_ended += [] if math.isfinite(least) and math.isfinite(most) else [(verb, name)]
                for bad in (least - 1, most + (1 << 20)):
                    assert one.option.problem(one.spelling, bad) and one.option.problem(one.spelling, (bad,))
    assert numbers > 40 and open_ended == []


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["serve", "--port", "99999"], "--port is 99999: it must be at most 65535"),
        (["serve", "--timeout", "-5"], "--timeout is -5.0: it must be at least 0"),
        (["serve", "--idle-unload", "0"], "--idle-unload is 0.0: it must be at least 1"),
        (["serve", "--kv-tokens", "-1"], "--kv-tokens is -1: it must be at least 1"),
        (["chat", "--threads", "100000"], "--threads is 100000: it must be at most 4096"),
        (["inspect", "x", "--n-cpu-moe", "-1"], "--n-cpu-moe is -1: it must be at least 0"),
        (["bench", "-p", "8,-1"], "--n-prompt is -1: it must be at least 0"),
        (["bench", "-np", "65"], "--n-seqs is 65: it must be at most 64"),
        (["bench", "--speculate", "0.5,nan"], "--speculate is nan: it must be at least 0"),
        (["perplexity", "x", "--tokens", "1"], "--tokens is 1: it must be at least 2"),
    ],
    ids=" ".join,
)
def test_a_command_refuses_numbers_out_of_range(command, error, capsys):
    assert cli.main(command) == 2
    assert error in capsys.readouterr().err


def test_an_artifact_is_made_from_resolved_options():
    made = LoadOptions(model="x", ctx=64, threads=2).resolved("cpu", "native")
    assert made == CompileOptions(target="cpu", arch="native", ctx=64, kv_type="f16")
    assert CompileOptions(arch="gfx1100", ctx=64).given == {"arch": "gfx1100", "ctx": 64}
