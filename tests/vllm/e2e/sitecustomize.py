"""Python imports this at start-up, in the engine and in each of its workers, from a folder on PYTHONPATH."""

import os

if os.environ.get("PORTABLE_INDEXER_E2E"):
    import cpu_engine

    cpu_engine.prepare()
