"""Any text as one word of a shell command, one value of a YAML file, one argument of a launcher."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

__all__ = ["for_kubernetes", "for_torchrun", "shell_command", "shell_word", "yaml_text"]

_BASH = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}


def shell_word(text: str) -> str:
    """``text`` as one word of bash, on one line: nothing in it is expanded or ends it."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_bash_escape, text)) + "'"


def _bash_escape(letter: str) -> str:
    if letter in _BASH:
        return _BASH[letter]
    if letter.isprintable():
        return letter
    # bytes: what bash makes of \u depends on the locale, and in C that is the six letters again
    return "".join(f"\\x{byte:02x}" for byte in letter.encode())


def shell_command(words: Sequence[str], indent: str) -> str:
    """Words of a command, each quoted, an option with its value on a line, lines joined by ``\\``."""
    lines: list[list[str]] = []
    for word in words:
        value = lines and lines[-1][-1].startswith("--") and len(lines[-1]) == 1
        if value and "=" not in lines[-1][-1] and not word.startswith("--"):
            lines[-1].append(word)
        else:
            lines.append([word])
    return f" \\\n{indent}".join(" ".join(map(shell_word, line)) for line in lines)


def yaml_text(text: str) -> str:
    """``text`` as a double-quoted YAML scalar on one line, whatever it holds (YAML 1.1 and 1.2)."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(
        r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda m: f"\\u{ord(m[0]):04x}", quoted
    )


def for_kubernetes(text: str) -> str:
    """``text`` so that Kubernetes gives the container just that.

    It replaces ``$(NAME)`` in command, args and env by a variable's value, and ``$$`` by ``$``.
    """
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def for_torchrun(text: str) -> str:
    """``text`` so that torchrun gives the script just that.

    It replaces ``${local_rank}`` in arguments by the number, and, as ``string.Template`` does, ``$$`` by
    ``$``.
    """
    return text.replace("$", "$$") if "$$" in text or "local_rank" in text else text
