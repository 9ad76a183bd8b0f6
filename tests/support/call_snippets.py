"""How chat templates of model families write an assistant's calls: short templates of our own, for tests of formats.

Each renders one message, `message`, with calls whose arguments are objects; `TEMPLATES` maps a family to the template
and to the tokens of its vocabulary that tell its format.
"""

from mlc_amd.runtime.text.chat_template import ChatTemplate

_CALLS = "{% for call in message.tool_calls %}{% set f = call.function %}"
_LIST = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{{ ", " if not loop.last }}{% endfor %}'
_TAGS = (
    "{% for key, value in f.arguments.items() %}"
    "KEY{{ value if value is string else value | tojson }}CLOSING{% endfor %}"
)
_BARE = (
    "{% macro write(value) %}{% if value is string %}QUOTE{{ value }}QUOTE{% elif value is mapping %}"
    "{% raw %}{{% endraw %}"
    "{% for k, v in value | dictsort %}{{ ',' if not loop.first }}{{ k }}:{{ write(v) }}{% endfor %}"
    "{% raw %}}{% endraw %}{% elif value is sequence %}[{% for v in value %}{{ ',' if not loop.first }}{{ write(v) }}"
    "{% endfor %}]{% else %}"
    "{{ value if value is none or value is number and value is not boolean else value | tojson }}"
    "{% endif %}{% endmacro %}"
)
_LLAMA = '{{ ";" if not loop.first }}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}'


_XML = (
    "{% macro xml(value) %}{% if value is mapping %}{% for k, v in value.items() %}"
    "]<]minimax[>[<{{ k }}>{{ xml(v) }}]<]minimax[>[</{{ k }}>{% endfor %}"
    "{% elif value is sequence and value is not string %}{% for v in value %}"
    "]<]minimax[>[<item>{{ xml(v) }}]<]minimax[>[</item>{% endfor %}"
    "{% else %}{{ value if value is string else value | tojson }}{% endif %}{% endmacro %}"
)
_DSML = (
    "<｜DSML｜tool_calls>\n"
    + _CALLS
    + '<｜DSML｜invoke name="{{ f.name }}">\n{% for key, value in f.arguments.items() %}'
    + '<｜DSML｜parameter name="{{ key }}" string="{{ "true" if value is string else "false" }}">'
    + "{{ value if value is string else value | tojson }}</｜DSML｜parameter>\n{% endfor %}"
    + "</｜DSML｜invoke>\n{% endfor %}</｜DSML｜tool_calls>"
)


def _tags(key: str, closing: str) -> str:
    return _TAGS.replace("KEY", key).replace("CLOSING", closing)


def _bare(opening: str, closing: str, quote: str) -> str:
    return (_BARE + _CALLS + opening + "call:{{ f.name }}{{ write(f.arguments) }}" + closing + "{% endfor %}").replace(
        "QUOTE", quote
    )


TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": (
        _CALLS
        + '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>\n{% endfor %}',
        (),
    ),
    "qwen-coder": (
        _CALLS
        + "<tool_call>\n<function={{ f.name }}>\n"
        + _tags("<parameter={{ key }}>\n", "\n</parameter>\n")
        + "</function>\n</tool_call>\n{% endfor %}",
        (),
    ),
    "seed": (
        _CALLS
        + "<seed:tool_call>\n<function={{ f.name }}>\n"
        + _tags("<parameter={{ key }}>", "</parameter>\n").replace("tojson", "string")
        + "</function>\n</seed:tool_call>{% endfor %}",
        (),
    ),
    "minimax": (
        "<minimax:tool_call>\n"
        + _CALLS
        + '<invoke name="{{ f.name }}">\n'
        + _tags('<parameter name="{{ key }}">', "</parameter>\n")
        + "</invoke>\n{% endfor %}</minimax:tool_call>",
        (),
    ),
    "minimax-m3": (
        _XML
        + "]<]minimax[>[<tool_call>\n"
        + _CALLS
        + ']<]minimax[>[<invoke name="{{ f.name }}">{{ xml(f.arguments) }}]<]minimax[>[</invoke>\n{% endfor %}'
        + "]<]minimax[>[</tool_call>",
        (),
    ),
    "muse": (
        "<atem:function_calls>\n"
        + _CALLS
        + '<atem:invoke name="{{ f.name }}">\n'
        + _tags('<atem:parameter name="{{ key }}">', "</atem:parameter>\n")
        + "</atem:invoke>\n{% endfor %}</atem:function_calls>",
        (),
    ),
    "deepseek-v3.2": (_DSML.replace("tool_calls>", "function_calls>"), ()),
    "deepseek-v4": (_DSML, ()),
    "kimi-k3": (
        "<|open|>tools<|sep|>"
        + _CALLS
        + '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
        + "{% for key, value in f.arguments.items() %}"
        + "{% set kind = 'string' if value is string else 'boolean' if value is boolean else 'null' if value is none "
        + "else 'number' if value is number else 'object' if value is mapping else 'array' %}"
        + '<|open|>argument key="{{ key }}" type="{{ kind }}"<|sep|>'
        + "{{ value if value is string else value | tojson }}<|close|>argument<|sep|>{% endfor %}"
        + "<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>",
        ("<|open|>", "<|sep|>", "<|close|>"),
    ),
    "hunyuan-3": (
        "<tool_calls:opensource>\n"
        + _CALLS
        + "<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n"
        + _tags(
            "<arg_key:opensource>{{ key }}</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>\n"
        )
        + "</tool_call:opensource>\n{% endfor %}</tool_calls:opensource>",
        (),
    ),
    "glm": (
        _CALLS
        + "\n<tool_call>{{ f.name }}\n"
        + _tags("<arg_key>{{ key }}</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>{% endfor %}",
        (),
    ),
    "llama": ("{# tools #}" + _CALLS + _LLAMA, ("<|python_tag|>",)),
    "llama-tag": ("{# tools #}<|python_tag|>" + _CALLS + _LLAMA, ("<|python_tag|>",)),
    "mistral-7b": ("[TOOL_CALLS] [" + _CALLS + _LIST + "]", ()),
    "mistral-small": (
        _CALLS + "[TOOL_CALLS]{{ f.name }}[CALL_ID]abcdef012[ARGS]{{ f.arguments | tojson }}{% endfor %}",
        (),
    ),
    "ministral": (_CALLS + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}", ()),
    "kimi": (
        "<|tool_calls_section_begin|>"
        + _CALLS
        + "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        + "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    ),
    "deepseek-r1": (
        "<｜tool▁calls▁begin｜>"
        + _CALLS
        + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
        + "<｜tool▁call▁end｜>{{ '\n' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜>",
        (),
    ),
    "deepseek-v3.1": (
        "<｜tool▁calls▁begin｜>"
        + _CALLS
        + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>"
        + "{% endfor %}<｜tool▁calls▁end｜>",
        (),
    ),
    "command": (
        "<|START_ACTION|>[\n"
        + _CALLS
        + '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
        + '"parameters": {{ f.arguments | tojson }}}'
        + "{{ ',' if not loop.last }}\n{% endfor %}]<|END_ACTION|>",
        (),
    ),
    "granite": ("<|tool_call|>[" + _CALLS + _LIST + "]", ()),
    "phi": ("<|tool_call|>[" + _CALLS + _LIST + "]<|/tool_call|>", ()),
    "nemotron": ("<TOOLCALL>[" + _CALLS + _LIST + "]</TOOLCALL>", ()),
    "jamba": ("<tool_calls>[\n" + _CALLS + _LIST + "\n]</tool_calls>", ()),
    "gemma4": (
        _bare("<|tool_call>", "<tool_call|>", '<|"|>') + "{# <|tool_call>call: #}",
        ("<|tool_call>", "<tool_call|>"),
    ),
    "functiongemma": (
        _bare("<start_function_call>", "<end_function_call>", "<escape>") + "{# <start_function_call>call: #}",
        (),
    ),
    "generic": ("{{ message.content }}", ()),
}
# One message, one call.
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    + _CALLS
    + "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
    + "{{ f.arguments | tojson }}{% endfor %}"
)
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


def written(template: str, calls: list[tuple[str, dict]]) -> str:
    """The calls as the template writes them."""
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    message = {"role": "assistant", "content": "", "tool_calls": made}
    return ChatTemplate(template, {}).render([], message=message)
