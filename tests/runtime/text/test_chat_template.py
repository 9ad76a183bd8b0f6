"""Chat templates rendered exactly, and a plain dialogue where there is none."""

import json

import pytest

from mlc_amd.compiler.tokenizer import export
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi & <b>bye</b> "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Why?\n"},
]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
{% set system, turns = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n', messages[1:] %}
{% else %}
{% set system, turns = '', messages %}
{% endif %}
{% for message in turns %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/...') }}
    {% endif %}
    {% set content = system + message['content'] if loop.first else message['content'] %}
    {%- if message['role'] == 'user' -%}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
    {%- else -%}
        {{- ' ' + content.strip() + ' ' + eos_token -}}
    {%- endif -%}
{% endfor %}"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + "
    "'<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def test_chatml():
    assert ChatTemplate(CHATML, TOKENS).render(CONVERSATION) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n Hi & <b>bye</b> <|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nWhy?\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_generation_prompt():
    prompt = ChatTemplate(CHATML, TOKENS).render(CONVERSATION[2:3], add_generation_prompt=False)
    assert prompt == "<|im_start|>assistant\nHello.<|im_end|>\n"


def test_llama2():
    assert ChatTemplate(LLAMA2, TOKENS).render(CONVERSATION) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi & <b>bye</b> [/INST] Hello. </s><s>[INST] Why? [/INST]"
    )


def test_llama3():
    assert ChatTemplate(LLAMA3, {"bos_token": "<|begin_of_text|>"}).render(CONVERSATION[:2]) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi & <b>bye</b><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize(
    ("source", "variables", "expected"),
    [
        ("{{ tools | tojson }}", {"tools": [{"name": "<a>&'é"}]}, '[{"name": "<a>&\'é"}]'),
        ("{{ tools | tojson(indent=2) }}", {"tools": {"b": 1}}, '{\n  "b": 1\n}'),
        ("{{ tools is none }} {{ documents is none }} {{ enable_thinking is defined }}", {}, "True True False"),
        ("{{ enable_thinking }}", {"enable_thinking": False}, "False"),
        ("{{ bos_token }}", {"bos_token": "<other>"}, "<other>"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", {}, "01"),
        ("{% for i in range(4) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", {}, "013"),
        ("{% generation %}{{ bos_token }}{% endgeneration %}", {}, "<s>"),
        ("{{ strftime_now('%Y') | int > 2000 }}", {}, "True"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            {},
            "4",
        ),
        ("  {% if true %}\na\n  {% endif %}\nb", {}, "a\nb"),
    ],
)
def test_what_templates_expect_of_the_environment(source, variables, expected):
    assert ChatTemplate(source, TOKENS).render(CONVERSATION, **variables) == expected


# What the templates of these models do, in short.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
LLAMA31 = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% if not tools is defined %}{% set tools = none %}{% endif %}Today Date: {{ date_string }}\n"
    "{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('one call') }}{% endif %}{% set call = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", ' }}{{ '\"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}"
    "{% else %}{{ m.role + ': ' + m['content'] | trim }}{% endif %}|{% endfor %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system, turns = messages[0].content, messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}{{ bos_token }}{% for m in turns %}{% if m.role == 'user' %}"
    "[INST] {% if loop.last and system is defined %}{{ system + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
HARMONY = (
    "{% macro effort() %}Reasoning: {{ reasoning_effort }}{% endmacro %}"
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "<|start|>system<|message|>{{ effort() }}<|end|>{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {"zone": "é"}}}]}


@pytest.mark.parametrize(
    ("thinking", "end"), [("auto", "assistant\n"), ("on", "assistant\n"), ("off", "<think>\n\n</think>\n\n")]
)
def test_thinking_is_switched(thinking, end):
    template = ChatTemplate(QWEN3, TOKENS)
    assert template.render(CONVERSATION, **template.switch(thinking)).endswith(end)
    with pytest.raises(UserError, match="thinking cannot be low: with this model's chat template it is auto, on, off"):
        template.switch("low")


def test_the_name_of_the_switch_is_the_templates():
    assert ChatTemplate("{{ thinking }}", TOKENS).switch("off") == {"thinking": False}
    assert ChatTemplate("{{ m.thinking }}", TOKENS).switch("auto") == {}


def test_effort_of_thinking():
    template = ChatTemplate(HARMONY, TOKENS)
    assert "Reasoning: high<" in template.render(CONVERSATION, **template.switch("high"))
    assert "<|channel|>final<|message|>Hello.<|end|>" in template.render(CONVERSATION)
    with pytest.raises(UserError, match="it is auto, low, medium, high"):
        template.switch("off")


def test_tools_and_calls():
    messages = [{"role": "user", "content": "When?"}, CALL, {"role": "tool", "content": "now"}]
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    shown = ChatTemplate(LLAMA31, TOKENS).render(messages, tools=tools, date_string="1 May 2026")
    assert shown.startswith('Today Date: 1 May 2026\n{\n    "type": "function",\n    "function": {')
    assert shown.endswith('}\nuser: When?|{"name": "now", "parameters": {"zone": "é"}}|tool: now|')


def test_a_system_message_where_the_template_puts_it():
    assert ChatTemplate(MISTRAL, TOKENS).render(CONVERSATION) == (
        "<s>[INST]  Hi & <b>bye</b> [/INST]Hello.</s>[INST] Be brief.\n\nWhy?\n[/INST]"
    )


IGNORANT = GEMMA2.replace("raise_exception('System role not supported')", "''").replace(
    "in messages %}", "in messages if m.role != 'system' %}"
)


@pytest.mark.parametrize("source", [GEMMA2, IGNORANT])
def test_a_system_message_that_the_template_rejects_begins_the_first_user_message(source):
    prompt = ChatTemplate(source, {"bos_token": "<bos>"}).render(CONVERSATION)
    assert prompt.startswith(
        "<bos><start_of_turn>user\nBe brief.\n\n Hi & <b>bye</b><end_of_turn>\n<start_of_turn>model\n"
    )


def test_fallback():
    template = ChatTemplate(None, TOKENS)
    assert template.is_fallback
    prompt = template.render(CONVERSATION[:2])
    assert prompt == "System: Be brief.\n\nUser:  Hi & <b>bye</b> \n\nAssistant:"
    # What a model would write next after its answer is a stop string, so the turn ends there.
    assert f"\n{template.render(CONVERSATION[1:2], add_generation_prompt=False)}".startswith(template.stop_strings())
    assert not ChatTemplate(CHATML, TOKENS).is_fallback
    assert ChatTemplate(CHATML, TOKENS).stop_strings() == ()


def test_lists_of_a_template():
    """As Kimi K2's: tool calls wait in a list for their results. What the caller passed stays as it is."""
    source = (
        "{% set waiting = namespace(ids=[]) %}{% for message in messages %}{% for call in message.calls or [] %}"
        "{% set _ = waiting.ids.append(call) %}{% endfor %}"
        "{% if message.role == 'tool' %}{{ waiting.ids.pop(0) }}: {{ message.content }}.{% endif %}{% endfor %}"
        "{% set _ = messages[0].calls.clear() %}{% set _ = messages.pop() %}"
    )
    results = [{"role": "tool", "content": text} for text in "xy"]
    messages = [{"role": "assistant", "calls": ["a", "b"]}, *results]
    template = ChatTemplate(source, TOKENS)
    assert template.render(messages) == template.render(messages) == "a: x.b: y."
    assert len(messages) == 3 and messages[0]["calls"] == ["a", "b"]


def test_roles_that_the_template_rejects():
    with pytest.raises(UserError, match="Roles must alternate"):
        ChatTemplate(LLAMA2, TOKENS).render(CONVERSATION[2:])


@pytest.fixture
def model(tmp_path):
    """A folder with a vocabulary of ASCII characters and ChatML's tokens, and two templates."""
    tokens = [*(chr(c) for c in range(0x21, 0x7F)), "Ġ", "Ċ", "<|im_start|>", "<|im_end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 96 + [3, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 97,
        "tokenizer.chat_template": CHATML,
        "tokenizer.chat_template.tool_use": "{{ bos_token }}|{{ eos_token }}|{{ tools[0] }}",
    }
    export(metadata, tmp_path)
    return tmp_path


def test_load(model):
    assert (
        ChatTemplate.load(model).render(CONVERSATION[2:3])
        == "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate.load(model, "tool_use").render([], tools=["search"]) == "|<|im_end|>|search"
    with pytest.raises(UserError, match="'rag': it has tool_use"):
        ChatTemplate.load(model, "rag")


def test_load_without_a_template(model):
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": None}))
    assert ChatTemplate.load(model).is_fallback


def test_load_without_files(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)
