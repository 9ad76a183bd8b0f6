"""`mlc-amd completion`: prints a script for a shell's completion of command lines, made from the commands'
signatures."""

import importlib
import shlex
from dataclasses import dataclass
from typing import Literal

from mlc_amd.tools import arguments, cli


def run(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Prints a script for a shell that completes the commands, flags and values of mlc-amd. To install it:

    bash: mlc-amd completion bash > ~/.local/share/bash-completion/completions/mlc-amd

    zsh: mlc-amd completion zsh > ~/.mlc-amd.zsh, and after compinit in ~/.zshrc: source ~/.mlc-amd.zsh

    fish: mlc-amd completion fish > ~/.config/fish/completions/mlc-amd.fish

    Args:
        shell: bash, zsh or fish.
    """
    verbs = []
    for name, summary in cli.verbs().items():
        module = importlib.import_module(cli.module_of(name))
        flags = arguments.flags(module.run, getattr(module, "SHORT", {}))
        verbs.append(_Verb(name, summary, flags, arguments.operand_choices(module.run)))
    print("\n".join(_SHELLS[shell](verbs)))


@dataclass(frozen=True)
class _Verb:
    """choices: the values of the verb's first argument, if they can be listed."""

    name: str
    summary: str
    flags: list[arguments.Flag]
    choices: tuple[str, ...]


def _bash(verbs: list[_Verb]) -> list[str]:
    # bash divides --flag=value at the "=", which becomes a separate word.
    lines = [
        "_mlc_amd() {",
        "    local current=${COMP_WORDS[COMP_CWORD]} index=$((COMP_CWORD - 1)) verb=${COMP_WORDS[1]} words=",
        '    [ "$current" = "=" ] && { current=; index=$COMP_CWORD; }',
        '    [ "${COMP_WORDS[index]}" = "=" ] && index=$((index - 1))',
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f"        words={shlex.quote(' '.join(verb.name for verb in verbs))}",
        "    else",
        '        case "$verb ${COMP_WORDS[index]}" in',
    ]
    for verb in verbs:
        by_choices: dict[tuple[str, ...], list[str]] = {}
        for flag in verb.flags:
            if flag.value:
                by_choices.setdefault(flag.choices, []).extend(flag.spellings)
        for choices, spellings in by_choices.items():
            patterns = "|".join(f'"{verb.name} {spelling}"' for spelling in spellings)
            lines.append(f"        {patterns}) words={shlex.quote(' '.join(choices))} ;;")
    lines += ["        *)", '            case "$verb $current" in']
    for verb in verbs:
        long = " ".join(word for flag in verb.flags for word in flag.spellings if word.startswith("--"))
        lines.append(f'            "{verb.name} -"*) words={shlex.quote(long)} ;;')
        if verb.choices:
            lines.append(f'            "{verb.name} "*) words={shlex.quote(" ".join(verb.choices))} ;;')
    return [
        *lines,
        "            esac ;;",
        "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o bashdefault -o default -F _mlc_amd mlc-amd",  # files, where nothing else fits
    ]


def _fish(verbs: list[_Verb]) -> list[str]:
    def line(condition: str, *words: str) -> str:
        quoted = (word if word.startswith("-") else shlex.quote(word) for word in words)
        return " ".join(["complete -c mlc-amd", "-n", shlex.quote(condition), *quoted])

    lines = []
    for verb in verbs:
        lines.append(line("__fish_use_subcommand", "-f", "-a", verb.name, "-d", verb.summary))
        inside = f"__fish_seen_subcommand_from {verb.name}"
        if verb.choices:
            lines.append(line(inside, "-f", "-a", " ".join(verb.choices)))
        for flag in verb.flags:
            names = [word for spelling in flag.spellings for word in _fish_flag(spelling)]
            value = ["-x", "-a", " ".join(flag.choices)] if flag.choices else ["-r"] if flag.value else []
            lines.append(line(inside, *names, *value, "-d", flag.help))
    return lines


def _fish_flag(flag: str) -> tuple[str, str]:
    """A flag for fish's `complete`, which distinguishes long flags, letters, and words after a single dash."""
    return ("-l", flag[2:]) if flag.startswith("--") else ("-s" if len(flag) == 2 else "-o", flag[1:])


_SHELLS = {
    "bash": _bash,
    "zsh": lambda verbs: ["autoload -U +X bashcompinit && bashcompinit", *_bash(verbs)],
    "fish": _fish,
}
