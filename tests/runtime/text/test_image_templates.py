"""Images in chat templates: parts for templates that know them, marks in the text for others."""

import pytest

from mlc_amd.runtime.text.chat_template import ChatTemplate
from mlc_amd.runtime.text.messages import IMAGE

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen's: texts and lists of parts.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' or 'image_url' in p %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As SmolVLM's: lists of parts alone; with a text before the image, and a line end after it.
PARTS = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:"
    "{% else %}: {% endif %}{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% elif p['type'] == 'image' %}{{ '<image>\n' }}{% endif %}{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
IMAGES = [{"role": "user", "content": f"Look: {IMAGE} What is it?", "images": [b"x"]}]
TEXTS = [{"role": "user", "content": "<image> or <|vision_start|><|image_pad|><|vision_end|>?"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, f"<|im_start|>user\nLook: {IMAGE} What is it?<|im_end|>\n<|im_start|>assistant\n"),
        (QWEN, f"<|im_start|>user\nLook: {IMAGE} What is it?<|im_end|>\n<|im_start|>assistant\n"),
        (PARTS, f"<|im_start|>User: Look: {IMAGE}\n What is it?<end>\nAssistant:"),
        (None, f"User: Look: {IMAGE} What is it?\n\nAssistant:"),
    ],
)
def test_images(source, expected):
    assert ChatTemplate(source, {}).render(IMAGES) == expected


@pytest.mark.parametrize("source", [CHATML, QWEN, PARTS])
def test_what_a_user_writes_is_no_image(source):
    template = ChatTemplate(source, {})
    rendered = template.render([*TEXTS, *IMAGES])
    assert rendered.count(IMAGE) == 1 and TEXTS[0]["content"] in rendered
    assert template.render(TEXTS).count(IMAGE) == 0


def test_several_images_and_turns():
    template = ChatTemplate(PARTS, {})
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{IMAGE}{IMAGE}Which?", "images": [b"a", b"b"]},
        {"role": "assistant", "content": "The first."},
        {"role": "user", "content": f"And {IMAGE}", "images": [b"c"]},
    ]
    assert template.render(messages) == (
        f"<|im_start|>System: Be brief.<end>\nUser:{IMAGE}\n{IMAGE}\nWhich?<end>\nAssistant: The first.<end>\n"
        f"User: And {IMAGE}\n<end>\nAssistant:"
    )


def test_texts_for_a_template_of_parts():
    assert ChatTemplate(PARTS, {}).render([{"role": "user", "content": "Hello"}]) == (
        "<|im_start|>User: Hello<end>\nAssistant:"
    )
