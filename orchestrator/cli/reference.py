"""Reference page of the command line: the typer application's commands, each with an example. A test keeps docs/cli.md current."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

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

_EXAMPLES: Final = """
orch submit job.yaml --set resources.num_workers=4 --follow
orch run -n 2 --gpu 1 --time 2h -- python train.py --epochs 5
orch status digits
orch show digits --yaml
orch diff digits-k3f9q2 digits-m7w4zx
orch wait digits --timeout 2h
orch logs digits --rank 1 --follow
orch exec digits --rank 1 -- nvidia-smi
orch attach digits --rank 1
orch port-forward digits 6006
orch cancel digits --wait
orch pause --user me --label team=vision --yes
orch resume --user me --label team=vision --yes
orch rerun digits --set env.SEED=2
orch update digits --priority 80
orch events digits --tail 20
orch explain digits
orch queue
orch queue set vision --guaranteed 4 --maximum 8
orch checkpoints digits --verify
orch get digits 'outputs/**' -o results
orch drill digits --kill rank --rank 1
orch profile digits --steps 5
orch stacks digits
orch hold digits
orch release digits
orch matrix sweep --results results
orch estimate digits
orch usage --by user,label:team --since 30d
orch report digits
orch compare digits-k3f9q2 digits-m7w4zx
orch trackio digits
orch up --group research
orch down --stop-jobs
orch serve --ray-address 10.0.0.5:6379
orch doctor
orch demo
orch login http://gpu-box:9470 --token-file token
orch ui
orch nodes
orch nodes cordon node-a
orch nodes drain node-a
orch nodes uncordon node-a
orch nodes label node-a disk=nvme topology.rack=r1
orch nodes reserve node-a --from 20:00 --for 2h --reason "new driver"
orch nodes reservations
orch nodes unreserve node-a r1
orch gpus --job digits
orch top --interval 500ms
orch record --rate 100 --csv -- python train.py
orch replay digits --speed 10
orch bench --model medium --ranks 1,2,4
orch advise job.yaml
orch simulate --synthetic philly --nodes 8x8 --compare fifo
orch dashboards export boards
orch dashboards push --url http://127.0.0.1:3000 --token-file token
orch prune --older-than 30d --dry-run
orch backup /backups --keep 14
orch restore /backups/orch-20261121T031700Z.sqlite3
orch init train.py
orch import torchrun --nproc-per-node 4 train.py
orch schema
orch completion bash
orch help nodes drain
"""


def examples() -> dict[str, str]:
    """Return each command's example; the commands are written without ``orch``."""
    return {" ".join(command_of(line)): line for line in _EXAMPLES.strip().splitlines()}


def command_of(line: str) -> list[str]:
    """Return the words of the line that name its command."""
    words, item, named = line.split()[1:], command(), list[str]()
    while words and words[0] in (children := getattr(item, "commands", {})):
        item = children[words[0]]
        named.append(words.pop(0))
    return named


def render_cli_reference() -> str:
    """Return the whole page as Markdown."""
    group, shown = command(), examples()
    lines = [INTRODUCTION.format(exit_codes=EPILOG)]
    for section, entries in group.commands.sections().items():
        lines.append(f"## {section}\n")
        for entry in entries:
            lines += _command_lines(entry.name, group.commands[entry.name], shown)
    return "\n".join(lines).rstrip() + "\n"


def _command_lines(path: str, item: Any, shown: dict[str, str]) -> Iterator[str]:
    children = dict(getattr(item, "commands", {}))
    arguments = [p for p in item.params if p.param_type_name == "argument"]
    options = [p for p in item.params if p.param_type_name == "option" and p.name != "help"]
    usage = ["orch", path, "[OPTIONS]" if options else "", *(_metavar(p) for p in arguments)]
    usage.append(f"[{' | '.join(children)}]" if children else "")
    yield f"### `{' '.join(part for part in usage if part)}`\n"
    yield _paragraphs(item.help or "") + "\n"
    if path in shown:
        yield f"```sh\n{shown[path]}\n```\n"
    rows = [(_metavar(p), p.help or "") for p in arguments] + [(_option(p), _option_help(p)) for p in options]
    if rows:
        yield "| | |\n|---|---|"
        for left, right in rows:
            yield f"| `{left}` | {right.replace('|', chr(92) + '|')} |"
        yield ""
    for name, child in children.items():
        yield from _command_lines(f"{path} {name}", child, shown)


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
