"""Renders a chat template with Jinja. This is the program of the child process that `chat_template.py` starts.

Opening: {"source": the template, "tokens": {"bos_token": text, ..}} -> {"variables": names of the template's variables}
or {"malformed": why}. Requests: the variables of a rendering -> {"text", "own": spans of the text that the template
wrote itself} or {"failed": why}.

A template is untrusted code. It runs in Jinja's sandbox, which hides Python's internals and limits ranges, and in its
own process, which limits time and memory. The environment is that of Hugging Face transformers
(`chat_template_utils.py`), for which templates are written, with two differences: lists and dicts can be changed, as in
llama.cpp (Kimi K2's template for GGUF files keeps a list of tool calls); and texts are traced, so that texts of the
template, and roles, are distinguished from texts of messages.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from mlc_amd.runtime.text.traced_text import Traced, concatenate, derived

_MAX_CHARACTERS = 1 << 24  # limit of a prompt: several times the largest context of any model
# Texts of messages from which templates make control tokens: Phi-3's template writes '<|' + role + '|>'.
_ROLES = frozenset(("system", "user", "assistant", "tool"))


def open_work(opening: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Returns the answer to the opening, and the function that answers requests."""
    environment = _Environment()
    try:
        template = environment.from_string(opening["source"])
        names = _Names(environment)
        names.visit(environment.parse(opening["source"]))
    except jinja2.TemplateSyntaxError as error:
        return {"malformed": f"line {error.lineno}: {_described(error)}"}, _refused
    except Exception as error:  # errors of Python's compiler, for example for deeply nested blocks
        return {"malformed": _described(error)}, _refused
    tokens = {name: Traced.all_own(text) for name, text in opening["tokens"].items()}

    def render(values: dict[str, Any]) -> dict[str, Any]:
        for message in values["messages"]:
            if message.get("role") in _ROLES:
                message["role"] = Traced.all_own(message["role"])
        try:
            text = template.render({**tokens, **values})
        except Exception as error:  # a template may raise any error of Python's operations
            return {"failed": _described(error)}
        if len(text) > _MAX_CHARACTERS:
            return {"failed": f"it produces a text of {len(text)} characters"}
        return {"text": text, "own": text.spans() if isinstance(text, Traced) else []}

    return {"variables": sorted(names.undeclared_identifiers)}, render


def _refused(_: object) -> dict[str, Any]:
    return {"failed": "it is malformed"}


def _described(error: Exception) -> str:
    return "it takes too much memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"


class _Generator(jinja2.compiler.CodeGenerator):
    """Marks all texts of a template as own, and evaluates nothing at compile time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.optimizer = None  # it would evaluate constants, even unused ones, as plain texts

    def visit_Const(self, node: jinja2.nodes.Const, frame: jinja2.compiler.Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.own({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_child_to_const(self, node: jinja2.nodes.Expr, *rest: Any) -> str:
        if not isinstance(node, jinja2.nodes.Const | jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, *rest)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({''.join(map(str, group))!r})"


class _Names(jinja2.meta.TrackingCodeGenerator, _Generator):
    """Finds the variables of a template, like `jinja2.meta.find_undeclared_variables`."""


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks assistant text in training data. Here, it renders its content."""

    tags = {"generation"}  # noqa: RUF012 (its type in Jinja's class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.SandboxedEnvironment):
    code_generator_class = _Generator
    concat = staticmethod(concatenate)  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.filters |= {"tojson": _tojson, "join": _join, "safe": str}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._constants: dict[str, Traced] = {}

    def own(self, text: str) -> Traced:
        if text not in self._constants:
            self._constants[text] = Traced.all_own(text)
        return self._constants[text]

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        form = super().wrap_str_format(value)
        if form is None or not isinstance(value.__self__, Traced):
            return form
        return lambda *args, **options: derived(form(*args, **options), value.__self__, args, options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)


def _tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators=None, sort_keys: bool = False
) -> str:
    # Jinja's own filter would escape <, >, & and ' for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: object = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    separator = d if isinstance(d, Traced) else Traced(str(d))
    return separator.join(map(str, value))
