"""All that knows torch.distributed: uneven shards of ids gathered in place, and what ranks agree on.

Any process group of torch serves: RCCL and NCCL (both are called "nccl") and gloo. No library is looked up
by name, and int32 ids travel as they are. Ranks here are ranks in the group, not in the world.
"""

from portable_indexer.exchange.agreement import agree, self_test
from portable_indexer.exchange.gather import ALGORITHMS, Staging, all_gatherv, chosen_algorithm, staging_bytes
from portable_indexer.exchange.groups import resolve_group
from portable_indexer.exchange.records import ExchangeError, failure_reported, report_failure

__all__ = [
    "ALGORITHMS",
    "ExchangeError",
    "Staging",
    "agree",
    "all_gatherv",
    "chosen_algorithm",
    "failure_reported",
    "report_failure",
    "resolve_group",
    "self_test",
    "staging_bytes",
]
