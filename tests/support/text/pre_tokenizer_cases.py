"""Texts that pre-tokenizers cut differently, and vocabularies whose tokens show where: what test_pre_tokenizers.py and
the generator of its fixture share.

In:  nothing. Out: `LINES`; `byte_level(pre)` and `characters(pre)`, the metadata of a vocabulary; `digest(ids)`.
"""

import hashlib
from itertools import pairwise

# Contractions, numbers, scripts with and without case, marks, symbols, white space, code, and what regexes single out.
LINES = (
    "I'll we'VE they'Re It'S don't 'tis y'all'd o'Clock x's's",
    "Ankara'da 'sabah'tan 'llama 'REDO d'Artagnan",
    "0 12 123 1234 12345 1234567 12345678901 a1b22c333 3.14 1,000,000 x2 2x ½ ² Ⅷ ٣٤٥٦ १२३४५",
    "no  12345\n  67 \t89\n\n1234  abc1234def  5678",
    "HelloWorld helloWorld HTTPServer iPhone XMLHttpRequest MixedCASE ABC aB",
    "été ÉCOLE École ÉcoleÉcole Straße ΑΒγ Ωμέγα привет Привет МИР МирМир",
    "cafe\u0301 n\u0303o e\u0301\u0301x \u0301alone 1\u0301 -\u0301",
    "नमस्ते दुनिया हिन्दी ภาษาไทย สวัสดี العَرَبِيَّة עִבְרִית বাংলা",
    "你好,世界!这是测试。中文abc中文 々 〇 漢字かなカナ ｶﾅ",
    "한국어 텍스트입니다. ㄱㄴㄷ ㅏㅑ ㄅㄆㄇ 日本語テキスト、です。「引用」",
    "“quotes” ‘single’ — dash … ！？：；（）｛｝　全角　空白　",
    "🦙🚀 👨\u200d👩\u200d👧 🇧🇬 ❤️ text🙂text 🙂🙂 \ufffd \ufeff",
    "   leading",
    "trailing   ",
    "a  b   c    d     e      f       g        h         i",
    "\t\ttabs\t\t  mixed \t \t end\t",
    "lines\n\nlines\r\n\r\nlines\r\rlines\n  \n \n  x\n",
    "\n",
    "\n\n\n",
    " \n \n",
    "nbsp\u00a0\u00a0x\u2003y\u3000z \u2028w\u0085v",
    "def f(x, *args):\n    return x[0]['key'] != -1  # note\n\n\tif a&&b||!c { d->e(); }",
    '<html><body class="a">&amp;</body></html> // comment /* x */ path/to/file\n/x/',
    "a_b __init__ $var ${x} @name #tag 50% a+b=c a<b>c ~/x `code` ^| \\n",
    "!!! ??? ... --- === ,,, ;;; ::: ''' \"\"\" (( )) [[ ]] {{ }}",
    "!hello .world ,x $abc \"quoted\" (paren) -dash 'a b'",
    "... \n!\n\n?\r\n/\n//\n",
    "IMGIMGABCZ <sentinel:12> IMGIMGAZIMGIMGZ",
    "e-mail: a.b@c.de, https://x.org/y?z=1&w=2#f +49-123-456",
    "ſ'ſ 'ſ Kelvin K Å ﬁ ǅ ʰ ª º",
    "a\u200bb\u200cc\u00adb\x00\x01\x7f",
    "word1word 1word word1 1 2 3 10,20 (30) [40]",
    "ὈΔΥΣΣΕΎΣ Ὀδυσσεύς ᏣᎳᎩ ꮳꮃꭹ Ⰰⰰ Ꙁꙁ 𐐀𐐨 𝒜𝓑",
    "x\u20ac5 \u20ac5 \u00a35 5\u20ac \u2192 \u2264 \u221e \u00b1\u00d7 \u2605\u2605",
)
# Whole words as tokens that no merges make: only a pre-tokenizer that ignores merges finds them.
WORDS = ("hello", " leading", "Server", "123", "你好", "\n\n\n", "lines")


def _printable() -> dict[int, str]:
    """Byte -> the character that stands for it in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_BYTES = _printable()


def _metadata(model: str, pre: str, tokens: list[str], types: list[int], merges: list[str]) -> dict[str, object]:
    """A vocabulary of these tokens, and one for the beginning of a text."""
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<begin>"],
        "tokenizer.ggml.token_type": [*types, 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens),
    }


def _pairs(texts: list[str]) -> list[tuple[str, str]]:
    """All neighbours, sorted by code points: their ranks do not follow the order of the text."""
    return sorted({pair for text in texts for pair in pairwise(text)}, reverse=True)


def byte_level(pre: str) -> dict[str, object]:
    """Metadata of a vocabulary of all bytes, of all pairs of bytes in LINES, of four and five spaces, and of WORDS."""
    texts = ["".join(_BYTES[byte] for byte in text.encode()) for text in (*LINES, *WORDS)]
    pairs = [*_pairs(texts), ("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "Ġ")]
    tokens = list(dict.fromkeys([*_BYTES.values(), *map("".join, pairs), *texts[len(LINES) :]]))
    return _metadata("gpt2", pre, tokens, [1] * len(tokens), [" ".join(pair) for pair in pairs])


def characters(model: str, pre: str) -> dict[str, object]:
    """The same of characters, with spaces as "▁"; U+0000 and characters from U+3000 on are left to the tokens of
    bytes."""
    texts = [text.replace(" ", "▁") for text in (*LINES, *WORDS)]
    pairs = [(a, b) for a, b in _pairs(texts) if min(a, b) > "\0" and max(a, b) < "\u3000" and "\n" not in a + b]
    lines = [("\n", "\n"), ("\n\n", "\n\n")]  # so a run of three becomes a token only as a whole
    known = {c for text in texts for c in text if "\0" < c < "\u3000"}
    tokens = list(dict.fromkeys([*sorted(known), *map("".join, [*pairs, *lines]), *texts[len(LINES) :]]))
    tokens = [text for text in tokens if text not in ("你好",)]
    merges = [" ".join(pair) for pair in [*pairs, *lines]]
    codes = [f"<0x{byte:02X}>" for byte in range(256)]
    return _metadata(model, pre, [*codes, *tokens], [6] * 256 + [1] * len(tokens), merges)


def digest(ids: list[int]) -> str:
    """Six hexadecimal digits of a checksum of the ids."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:6]
