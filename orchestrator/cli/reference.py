"""Reference page of the command line, written from the typer application; a test keeps docs/cli.md current."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from orchestrator.cli.app import EPILOG, command

if TYPE_CHECKING:
    from collections.abc import Iterator

INTRODUCTION = """# Command line

A JOB is an id (`digits-k3f9q2`: its name and six characters), the beginning of one, a name (your newest job of that
name, and the command says which that is), or USER/NAME (the newest of another user). Results are written to standard output, messages to standard error; every
error names the next step.

{exit_codes}
Beyond those: 70 is a bug of orch, 130 Ctrl-C, 141 a closed pipe. With `--json`, errors are problem documents
(RFC 9457) on standard error.

| variable | meaning |
|---|---|
| `ORCH_HOME` | the directory of all state, which also selects the daemon; default `~/.orch` |
| `ORCH_ADDRESS`, `ORCH_TOKEN` | a daemon over TCP (`http://host:port`) and its token, instead of the Unix socket; they take precedence over `orch login` |
| `NO_COLOR`, `FORCE_COLOR` | colour never, colour always; otherwise on a terminal |
| `COLUMNS` | the width of tables |

This page is written by `python -m orchestrator.cli.reference`.
"""


def render_cli_reference() -> str:
    """Return the whole page as Markdown."""
    group = command()
    lines = [INTRODUCTION.format(exit_codes=EPILOG)]
    for section, entries in group.commands.sections().items():
        lines.append(f"## {section}\n")
        for entry in entries:
            lines += _command_lines(f"orch {entry.name}", group.commands[entry.name])
    return "\n".join(lines).rstrip() + "\n"


def _command_lines(path: str, item: Any) -> Iterator[str]:
    children = dict(getattr(item, "commands", {}))
    arguments = [p for p in item.params if p.param_type_name == "argument"]
    options = [p for p in item.params if p.param_type_name == "option" and p.name != "help"]
    usage = [path, "[OPTIONS]" if options else "", *(_metavar(p) for p in arguments)]
    usage.append(f"[{' | '.join(children)}]" if children else "")
    yield f"### `{' '.join(part for part in usage if part)}`\n"
    yield _paragraphs(item.help or "") + "\n"
    rows = [(_metavar(p), p.help or "") for p in arguments] + [(_option(p), _option_help(p)) for p in options]
    if rows:
        yield "| | |\n|---|---|"
        for left, right in rows:
            yield f"| `{left}` | {right.replace('|', chr(92) + '|')} |"
        yield ""
    for name, child in children.items():
        yield from _command_lines(f"{path} {name}", child)


def _paragraphs(text: str) -> str:
    parts = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(part.split()) for part in parts)


def _metavar(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name.upper())
    several = parameter.nargs == -1 and not name.endswith("...")
    name += "..." if several else ""
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:
    flags = ", ".join(sorted(parameter.opts, key=len))
    return flags if parameter.is_flag else f"{flags} {parameter.metavar or 'TEXT'}"


def _option_help(parameter: Any) -> str:
    text = parameter.help or ""
    default = parameter.default
    if parameter.required:
        return f"{text} Required."
    if parameter.is_flag or callable(default) or default in (None, "", ()):
        return text
    return f"{text} Default: {default}."


if __name__ == "__main__":
    import sys

    sys.stdout.write(render_cli_reference())
