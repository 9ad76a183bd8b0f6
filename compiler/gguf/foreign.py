"""Recognizes files that are not GGUF by their first bytes. In: these bytes. Out: a message that says what the file is,
and what to do."""

import re

_CONVERT = "convert the folder of its checkpoint with llama.cpp's convert_hf_to_gguf.py"
_TAKE = "`mlc-amd pull OWNER/REPO:QUANT` downloads a GGUF file from huggingface.co"
# (pattern of the first bytes, what the file is, what to do)
_KINDS = (
    (rb"version https://git-lfs", "is a Git LFS pointer, not the file itself", f"run `git lfs pull` there, or {_TAKE}"),
    (
        rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype|html|head|\?xml)",
        "is a web page that was saved in place of the file",
        f"use the page's download link (/resolve/ in place of /blob/), or {_TAKE}",
    ),
    (rb".{7}\x00\{", "is a safetensors file, not GGUF", f"{_CONVERT}, or {_TAKE}"),
    (rb"PK\x03\x04|\x80[\x02-\x05]", "is a PyTorch checkpoint or a zip archive, not GGUF", f"{_CONVERT}, or {_TAKE}"),
    (rb"lmgg|fmgg|tjgg", "is in GGML, the format before GGUF", f"convert the model again, or {_TAKE}"),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ|7z\xbc\xaf|Rar!", "is compressed", "unpack it and give the GGUF file"),
    (rb"\x7fELF", "is a program, not a model", _TAKE),
    (rb"\s*[{\[]", "is JSON, not GGUF", f"give the model's GGUF file; {_TAKE}"),
    (rb"(?i)FROM\s", "is a Modelfile of ollama's", "give the model that its line FROM names"),
    (rb"\x00{4}", "begins with zeros: its download is not complete", "download it again"),
)  # fmt: skip


def problem(beginning: bytes) -> str:
    """What the file is and what to do, as a clause for a message."""
    for pattern, what, advice in _KINDS:
        if re.match(pattern, beginning, re.DOTALL):
            return f"this {what}; {advice}"
    return f"this is not a GGUF file (it starts with {beginning[:4]!r}, not b'GGUF'); give a model in GGUF format"
