"""`portable-indexer bench WHAT`: one module a benchmark, imported only when it is asked for."""

from __future__ import annotations

import argparse
from importlib import import_module

BENCHES = {
    "scoring": "fp8_mqa_logits, beside DeepGEMM and aiter's Triton kernel where found",
    "selection": "top_k_per_row and index_topk, beside vLLM's top-k where found",
    "metadata": "the token-to-request map and a step's whole metadata",
    "sharding": "one layer's indexer, replicated against sharded, on several GPUs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each benchmark."""
    parser.epilog = "peers are taken from the Python path, or from the folder that PORTABLE_INDEXER_PEERS names"
    chosen = parser.add_subparsers(dest="what", required=True, metavar="{" + ",".join(BENCHES) + "}")
    for name, text in BENCHES.items():
        module = import_module(f"portable_indexer.cli.bench_{name}")
        module.add_arguments(chosen.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark; exit code 0 only where its answers were right."""
    return int(import_module(f"portable_indexer.cli.bench_{args.what}").run(args))
