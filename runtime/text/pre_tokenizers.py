"""Pre-tokenizers: the regular expressions that split a text into words for a byte-pair vocabulary, by their names in
`tokenizer.ggml.pre`.

Names, regexes and flags are those of llama.cpp's `src/llama-vocab.cpp` (`llm_tokenizer_bpe` and
`llama_vocab::impl::load`, as in llama-cpp-python 0.3.36). llama.cpp's regex engine has no Unicode classes, which
changes the meaning of some regexes: upper-case and lower-case letters are one class (tiny_aya, youtu); only ASCII
letters have case, and combining marks are no part of a word (gpt-4o, tekken); or neither case nor marks matter
(kimi-k2).
Here, classes have the meaning that they have in the model's own tokenizer.
"""

from dataclasses import dataclass

# Limit of consecutive white space characters or digits: a regex may backtrack over all of them, and the library gives
# up after ten million steps.
LONGEST_RUN = 1_000_000
_LONGEST_GROUPED = 20_000


@dataclass(frozen=True)
class PreTokenizer:
    """The split of a text into words before merging. Each regex splits the pieces that the regexes before it made."""

    splits: tuple[str, ...]  # Oniguruma regexes; both the matches and the text between them become pieces
    ignore_merges: bool = False  # a word that is a token as a whole is not merged from parts
    add_bos: bool = False  # without `tokenizer.ggml.add_bos_token` in the file, a beginning-of-sequence token is added
    whole_lines: bool = False  # a run of newlines that is a token as a whole is not merged from parts
    # True: words are merged from bytes, written as printable characters. False: from characters, with "▁" for a space,
    # and tokens such as <0x0A> for the bytes of a character that is no token.
    byte_level: bool = True
    # Limit of consecutive digits. A regex that groups digits from the right looks ahead to the last digit from each
    # one: 20,000 digits take a second, and twice as many digits take four times as long.
    longest_number: int = LONGEST_RUN


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


# Parts that regexes share. Contractions are written in both cases, because (?i:'s) would also match the long s
# (U+017F).
_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_WORD = _PREFIX + r"\p{L}+"
_MARKS_WORD = _PREFIX + r"[\p{L}\p{M}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_TRAILING_SPACE = r"\s+(?!\S)|\s+"
_SPACE = r"\s*[\r\n]+|" + _TRAILING_SPACE
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(number: str, suffix: str = "", symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*", without: str = "") -> str:
    """A regex whose words also end between a lower-case and an upper-case letter. without: which are no letters."""
    upper, lower = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    lower_word, upper_word = f"{_PREFIX}{upper}*{lower}+{suffix}", f"{_PREFIX}{upper}+{lower}*{suffix}"
    return _any(lower_word, upper_word, number, symbols, _SPACE)


_GPT2 = _any(r"'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", _TRAILING_SPACE)
_LLAMA3 = _any(_SUFFIX, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACE)
_QWEN2 = _any(_SUFFIX, _WORD, r"\p{N}", _SYMBOLS, _SPACE)
_GPT4O = _cased(r"\p{N}{1,3}", _SUFFIX + "?")
_LINES = r"[^\n]+|\n+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _code_points(ranges: str) -> str:
    """Ranges of hexadecimal code points, in the form for a regex's class."""
    return "".join(r"\x{" + span.replace("-", r"}-\x{") + "}" for span in ranges.split())


_CJK_KANA = f"[{_code_points('4E00-9FA5 3040-30FF')}]+"
_CJK_HANGUL = f"[{_code_points('800-9FA5 AC00-D7FF')}&&[^\\s]]+"  # some spaces are in this range
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = _any(_ASCII_WORD, _DEEPSEEK3_WORD, r" ?[\p{P}\p{S}]+[\r\n]*", _SPACE)

# The letters with case in an older version of Unicode.
_DEEPSEEK_LETTERS = _code_points(
    """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1
    3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A
    1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4
    1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128
    212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D
    A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F
    104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
    """
)
# Without U+3000, which llama.cpp lists: it handles this character as white space before it tests this class.
_DEEPSEEK_SYMBOLS = _code_points("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3001-3002")

# Between groups of three digits, counted from a number's end, and after a number; but not before it.
_GROUPS_OF_THREE = r"(?<=\p{N})(?:(?!\p{N})|(?=(?:\p{N}{3})+(?!\p{N})))"
_ASIAN = _code_points("E40-EFF 1000-109F 1100-11FF 1780-17FF 2F00-2FDF 3040-30FF 3400-4DBF 4E00-FAFF FF65-FF9F")
_CHAMELEON = (r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2)
_YOUTU = _any(
    *(
        f"[{_code_points(ranges)}]+"
        for ranges in (
            "3131-318E AC00-D7A3",
            "2014 2018 2019 201C 201D 2026 3001-303F FE30-FE4F FF01 FF0C FF1A FF1B",
            "3105-312F",
            "3040-30FF 4E00-9FA5",
        )
    )
)
_KIMI_K2 = _any(r"\p{Han}+", _cased(r"\p{N}{1,3}", _SUFFIX + "?", _SYMBOLS, r"&&[^\p{Han}]"))

_DEEPSEEK_WORDS = rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_SYMBOLS}]+"
_DEEPSEEK = r"[\r\n]", *_DEEPSEEK_WORDS, r"\s+\z", _CJK_HANGUL, r"\p{N}+"
_SPARK = _any(_ASCII_WORD, _DEEPSEEK3_WORD, r" ?[\p{P}\p{S}]+", r"[\r\n]", _TRAILING_SPACE)
_JAIS2 = _any(
    *(_SUFFIX, _WORD, r"\p{N}{1,3}", _SYMBOLS, r"\s*[\r\n]+"),
    *(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")),
    r"\s",
)
_BAILING_SUFFIX = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_BAILING = _any(_BAILING_SUFFIX, _WORD, r"\p{N}", _SYMBOLS, r"\s*[\r\n]", _TRAILING_SPACE)
_EXAONE = _any(
    *(_SUFFIX, _PREFIX + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}"),
    *(r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"\s*[\r\n]", _TRAILING_SPACE),
)

DEFAULT = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_FAMILIES: tuple[tuple[PreTokenizer, str], ...] = (
    (DEFAULT, "default"),
    (
        PreTokenizer((_GPT2,)),
        """gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4 jina-es jina-de jina-v1-en
        jina-v2-es jina-v2-de jina-v2-code modern-bert roberta-bpe""",
    ),
    (PreTokenizer((r"\p{N}", _GPT2)), "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_LLAMA3,), ignore_merges=True), "glm4 glm5"),
    (
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((_JAIS2,)), "jais-2"),
    (PreTokenizer((r"\p{N}{1,3}", _any(_SUFFIX, _WORD, r"\p{N}+", _SYMBOLS, _SPACE)), ignore_merges=True), "minicpm5"),
    (PreTokenizer((_QWEN2,)), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (PreTokenizer((_any(_SUFFIX, _MARKS_WORD, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACE),)), "qwen35"),
    (PreTokenizer((_any(_WORD, r"\p{N}", _SYMBOLS, _SPACE),)), "ufakzeka"),
    (PreTokenizer((_LINES, _QWEN2)), "laguna"),
    (PreTokenizer((_any(_SUFFIX, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACE),)), "seed-coder"),
    (PreTokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer((_EXAONE,)), "exaone-moe"),
    (PreTokenizer(_DEEPSEEK), "deepseek-llm"),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}")), "deepseek-coder"),
    (PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3)), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _SPARK, r"\p{N}")), "spark2_5"),
    (PreTokenizer((_GROUPS_OF_THREE, f"[{_ASIAN}]+", _DEEPSEEK3), longest_number=_LONGEST_GROUPED), "afmoe"),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer((_GPT4O,), ignore_merges=True), "granite-embed-multi-97m"),
    (PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O), longest_number=_LONGEST_GROUPED), "tiny_aya cohere2moe"),
    (PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer((_YOUTU, _cased(r"\p{N}", _SUFFIX + "?")), ignore_merges=True), "youtu"),
    (PreTokenizer((_KIMI_K2,)), "kimi-k2"),
    (PreTokenizer((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    (PreTokenizer(_CHAMELEON, add_bos=True), "chameleon"),
    (PreTokenizer((r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))"), longest_number=_LONGEST_GROUPED), "superbpe"),
    (PreTokenizer((_LINES,), add_bos=True, whole_lines=True, byte_level=False), "gemma4 granite-embed-multi-311m"),
    (PreTokenizer((_LINES,), byte_level=False), "sarvam-moe"),
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for pre, names in _FAMILIES for name in names.split()}
