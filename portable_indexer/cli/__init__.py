"""The command ``portable-indexer``: one module a subcommand, imported only when it is asked for."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from portable_indexer._version import __version__

COMMANDS = {
    "doctor": "what is on this node, which backend runs and why the others do not",
    "demo": "run the whole sharded job on several ranks and check it against the replicated answer",
    "replay": "put a request trace through the planner and the cost model",
    "bench": "measure this machine, peers beside it where installed",
    "tune": "measure the numbers of the sharding policy on this node",
}


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="portable-indexer",
        description="Row-sharded sparse-attention indexer for AMD and NVIDIA GPUs.",
        epilog="\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="{" + ",".join(COMMANDS) + "}")
    return parser


def _lacking(command: str, error: ModuleNotFoundError) -> int:
    if error.name is None or error.name.partition(".")[0] == "portable_indexer":
        raise error
    print(f"portable-indexer {command}: needs {error.name}, which this Python does not have", file=sys.stderr)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code is 0 only when what was asked for held."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    name = _overview().parse_args(arguments[:1]).command
    try:
        command = import_module(f"portable_indexer.cli.{name}")
    except ModuleNotFoundError as error:
        return _lacking(name, error)
    parser = argparse.ArgumentParser(prog=f"portable-indexer {name}", description=COMMANDS[name])
    command.add_arguments(parser)
    try:
        code = int(command.run(parser.parse_args(arguments[1:])))
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        return _lacking(name, error)
    except BrokenPipeError:
        # Who reads has closed, `head` for one; what is left in the buffer must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
