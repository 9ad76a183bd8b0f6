"""What users of other programs type: ollama's commands, llama.cpp's flags that have no effect here, and words with
spelling mistakes."""

from collections.abc import Iterable, Sequence

# ollama's command -> the command here
COMMANDS = {
    "run": ("chat",),
    "list": ("cache", "ls"),
    "ls": ("cache", "ls"),
    "ps": ("cache", "ps"),
    "rm": ("cache", "rm"),
    "show": ("inspect",),
    **dict.fromkeys(("version", "-v", "-V"), ("--version",)),
}
# ollama's commands without an equivalent -> what to do instead
ABSENT = {
    "stop": "a model is loaded as long as its command runs: end that with Ctrl-C",
    "create": "there are no Modelfiles: --system and flags such as --temperature do that for one run",
    "cp": "there are no copies of models under other names: `mlc-amd serve NAME=MODEL` names one for clients",
    "push": "models are not published from here",
}

_ALONE, _ONE = (), None  # the values of a flag: none; any one value
_SWITCH = ("on", "off", "auto", "0", "1", "true", "false")
# flags; the values that may follow; why they have no effect
_IGNORED = (
    (("-fa", "--flash-attn", "-mmp"), _SWITCH, "attention and loading have one way"),
    (("-b", "--batch-size", "-ub", "--ubatch-size"), _ONE, "the artifact decides the size of a step"),
    (("-np", "--parallel"), _ONE, "any number of answers share steps; --kv-tokens or --kv-memory makes room for them"),
    (("-tb", "--threads-batch"), _ONE, "--threads is for all steps"),
    (("-sm", "--split-mode", "-mg", "--main-gpu", "-ts", "--tensor-split"), _ONE,
     "--devices names the GPUs, --split tensor divides each layer"),
    (("--numa", "--reasoning-format"), _ONE, "there is one way"),
    (("--mlock", "--no-mmap", "--mmap"), _ALONE, "the device decides how weights are loaded"),
    (("--jinja", "--no-jinja"), _ALONE, "the model's own chat template is always used"),
    (("-cnv", "--conversation", "-no-cnv", "--no-conversation", "-st", "--single-turn", "-i", "--interactive"), _ALONE,
     "`mlc-amd chat` is a conversation, or with --prompt one turn; `mlc-amd generate` continues a text"),
    (("-v", "--verbose", "--log-verbose", "-lv"), _ALONE, "--debug shows log messages"),
    (("-cb", "--cont-batching", "-kvu", "--kv-unified", "--metrics", "--slots", "--props"), _ALONE, "it is always on"),
    (("--no-warmup", "--no-perf", "--perf", "--color", "-co", "--simple-io", "--no-display-prompt", "--log-disable",
      "--no-context-shift", "--context-shift", "--special", "-e", "--escape", "--no-escape"), _ALONE,
     "it has no meaning here"),
)  # fmt: skip
IGNORED = {flag: (values, why) for flags, values, why in _IGNORED for flag in flags}


def ignored(flag: str, given: bool, following: Sequence[str]) -> tuple[int, str]:
    """For a flag of `IGNORED`: (how many of the following words are its value, the message about it). given: whether
    its value follows a "="."""
    values, why = IGNORED[flag]
    takes = not given and bool(following) and (values is _ONE or following[0] in (values or ()))
    return int(takes), f"{flag} has no effect: {why}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant: the one with the fewest edits, if these are fewer than a third of its
    letters; otherwise the only word with this beginning."""
    letters = word.lstrip("-")
    candidates = sorted(set(known))
    found = min(candidates, key=lambda one: _edits(letters, one.lstrip("-")), default=None)
    if found is not None and 3 * _edits(letters, found.lstrip("-")) < len(letters):
        return found
    longer = [one for one in candidates if len(letters) > 2 and one.lstrip("-").startswith(letters)]
    return longer[0] if len(longer) == 1 else None


def _edits(left: str, right: str) -> int:
    """The number of letters to insert, remove, replace or exchange with the next one (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, char in enumerate(left, 1):
        before, last, row = row, before, [i]
        for j, other in enumerate(right, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (char != other)))
            if i > 1 and j > 1 and char == right[j - 2] and left[i - 2] == other:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]
