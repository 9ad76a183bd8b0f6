"""The command line, which start.py runs. It finds the verb, calls it through python-fire, and turns every error into
one line.

Results go to stdout; messages, progress and errors go to stderr. Exit codes: 0 done; 1 the user must change something
(`error: ...`); 2 the command line is wrong (`UsageError`); 70 a bug of this program; 130 interrupted with Ctrl-C; 141
the reader of stdout has gone away. `--debug`, at any place, adds the traceback and the package's log.
"""

import errno
import importlib
import importlib.util
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import fire

from mlc_amd.runtime.errors import UsageError, UserError, one_line
from mlc_amd.tools import arguments, bus_error, familiar, interrupts
from mlc_amd.tools.terminal import terminal

# verb -> what it does. A verb is the function `run` of its module, which is imported when it is used.
VERBS = {
    "chat": "talk with a model",
    "generate": "continue a text",
    "embed": "compute vectors of texts, or of a picture",
    "rerank": "score texts by how well they answer a query",
    "serve": "serve models over HTTP, with a chat page",
    "pull": "download a model from huggingface.co",
    "compile": "compile a GGUF file into an artifact",
    "tune": "search for the fastest way to build a model's kernels",
    "bench": "measure prefill and decode speed",
    "perplexity": "measure how well a model predicts a text",
    "tokenize": "show the tokens of a text",
    "inspect": "show what is in a GGUF file, an artifact or GPU code",
    "tune-server": "measure for tuning runs on other machines",
    "deploy": "pack an artifact with all that runs it on another machine",
    "cache": "list or remove compiled models",
    "selftest": "compare every kernel with reference results on this machine's device",
    "doctor": "show what this machine can compile for and run on",
    "completion": "print a script that completes command lines in a shell",
}

_EXIT_USAGE, _EXIT_BUG, _EXIT_INTERRUPTED, _EXIT_BROKEN_PIPE = 2, 70, 130, 141

_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space or choose another place",
    errno.EDQUOT: "the disk quota is used up: free some space or choose another place",
    errno.EROFS: "that file system is read-only: choose another place",
    errno.EACCES: "permission denied: check the permissions or choose another place",
    errno.EPERM: "permission denied: check the permissions or choose another place",
    errno.ENOENT: "no such file or directory",
    errno.EISDIR: "that is a directory, a file is needed",
    errno.ENOTDIR: "that is a file, a directory is needed",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
}


def module_of(verb: str) -> str:
    """The name of the module of a verb: the verb's own, if it is here."""
    return f"mlc_amd.tools.commands.{verb.replace('-', '_')}"


def verbs() -> dict[str, str]:
    """The verbs of this installation. A bundle (tools/commands/deploy.py) has no verbs that compile."""
    return {verb: what for verb, what in VERBS.items() if importlib.util.find_spec(module_of(verb))}


def program() -> str:
    """The command with which the user starts this program: $MLC_AMD_PROGRAM (which bundles set), else mlc-amd."""
    return os.environ.get("MLC_AMD_PROGRAM") or "mlc-amd"


def spoken(text: str) -> str:
    """A text with commands such as `mlc-amd doctor`, in which they begin with this program's name. Commands that this
    installation lacks do not change: they are for another machine."""
    return re.sub(rf"\bmlc-amd(?=\s+(?:COMMAND|{'|'.join(verbs())})\b)", program(), text)


def overview() -> str:
    """The text of `mlc-amd --help`."""
    width, compiles = max(map(len, verbs())) + 2, "compile" in verbs()
    commands = "\n".join(f"  {verb.ljust(width)}{summary}" for verb, summary in verbs().items())
    does = "Compiles GGUF language models with TVM and runs them." if compiles else "Runs compiled language models."
    default = "a small bundled model" if compiles else "the model of this folder"
    ollama = " ollama's run, list, ps, rm and show are understood, too." if compiles else ""
    return spoken(f"""\
usage: mlc-amd COMMAND [arguments] [flags]

{does}

commands:
{commands}

`mlc-amd COMMAND --help` explains a command. `--debug` shows log messages and the traceback of an error; `--version` \
the versions of mlc-amd, TVM and drivers.

Start with `mlc-amd chat`: it runs {default}.{ollama}
""")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; by default, that of the process. Returns the exit code."""
    _open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows the characters that it can
    bus_error.install()
    with terminal.clean_output():
        code = _run(argv)
    if code == _EXIT_INTERRUPTED and argv is None:
        interrupts.end(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    tokens = list(sys.argv[1:] if argv is None else argv)
    # After "--", there are no flags.
    end = tokens.index("--") if "--" in tokens else len(tokens)
    debug = "--debug" in tokens[:end]
    try:
        with warnings.catch_warnings(), _log(debug):
            warnings.showwarning = partial(_warn, warnings.showwarning)
            _dispatch([token for token in tokens[:end] if token != "--debug"], tokens[end:])
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        _report_traceback(debug)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        _report_traceback(debug)
        # Python flushes stdout again at exit, but the pipe is closed: its output goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    except UserError as error:
        return _fail(str(error), debug, _EXIT_USAGE if isinstance(error, UsageError) else 1)
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else "the output"
        return _fail(f"{where}: {_ADVICE.get(error.errno or 0, error.strerror or str(error))}", debug)
    except UnicodeEncodeError as error:  # bytes of the command line that are not UTF-8
        if not any("\udc80" <= char <= "\udcff" for char in error.object):
            return _bug(error, debug)
        return _fail(f"{error.object!r} is not UTF-8: write it otherwise, or rename the file", debug)
    except MemoryError:
        return _fail("not enough memory: use a smaller model, a smaller --ctx, or close other programs", debug)
    except Exception as error:
        return _bug(error, debug)


def _open_closed() -> None:
    """Opens empty files in place of a closed stdin, stdout or stderr (`<&-`). Otherwise files that the process opens
    would get these numbers, and output would be written to them."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for the life of the process)


def _dispatch(tokens: list[str], literal: list[str]) -> None:
    """Runs the verb. tokens: what may contain flags. literal: "--" and what follows it, or nothing."""
    if not tokens or tokens[0] in ("--help", "-h", "help"):
        tokens = [*tokens[1:2], "--help"]
    verb, *rest = (*familiar.COMMANDS.get(tokens[0], tokens[:1]), *tokens[1:])
    if verb == "--help":
        sys.stdout.write(overview())
        return
    if verb == "--version" or "--version" in rest:
        from mlc_amd.tools import version

        sys.stdout.write(version.text())
        return
    if verb not in verbs():
        near = familiar.nearest(verb, (*verbs(), *familiar.COMMANDS, "--version", "--help", "--debug"))
        advice = f"did you mean {near}?" if near else f"choose from {', '.join(verbs())}"
        raise UsageError(f"unknown command {verb!r}: {familiar.ABSENT.get(verb, advice)}")
    module = importlib.import_module(module_of(verb))
    short = getattr(module, "SHORT", {})
    if "--help" in rest or "-h" in rest:
        sys.stdout.write(spoken(arguments.help_page(verb, module.run, short)))
        return
    command = arguments.normalize(module.run, short, rest + literal)
    fire.Fire(arguments.for_fire(module.run), command=command, name=f"{program()} {verb}")


@contextmanager
def _log(everything: bool) -> Iterator[None]:
    """Writes the package's log to stderr. Warnings look like other messages of the program. everything: writes all
    messages, with the seconds since the start and their origin."""
    log = logging.getLogger("mlc_amd")
    handler, before = logging.StreamHandler(), (log.level, log.propagate)
    handler.setFormatter(_Line(everything))
    log.setLevel(logging.DEBUG if everything else logging.WARNING)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before


class _Line(logging.Formatter):
    """A record as a line. where: with its time and origin."""

    def __init__(self, where: bool):
        super().__init__()
        self._where = where

    def format(self, record: logging.LogRecord) -> str:
        place = f" [{record.relativeCreated / 1000:.3f} s, {record.module}]" if self._where else ""
        return f"{record.levelname.lower()}{place}: {spoken(' '.join(record.getMessage().split()))}"


def _warn(show: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Shows this package's warnings as one line, and others, which are for developers, as usual."""
    if category is UserWarning:
        sys.stderr.write(f"warning: {spoken(' '.join(str(message).split()))}\n")
    else:
        show(message, category, *where)


def _fail(message: str, debug: bool, code: int = 1) -> int:
    _report_traceback(debug)
    sys.stderr.write(f"error: {spoken(one_line(message))}\n")
    return code


def _bug(error: Exception, debug: bool) -> int:
    hint = "" if debug else " (run with --debug for the traceback)"
    return _fail(f"this is a bug in mlc-amd: {type(error).__name__}: {error}{hint}", debug, _EXIT_BUG)


def _report_traceback(debug: bool) -> None:
    if debug:
        traceback.print_exc()
