"""The backends of portable_indexer; importable under the name ``portable_indexer.backends`` only."""

# A second import name would give a second copy of every class, and registry look-ups would then miss.
if __name__ != "portable_indexer.backends":
    raise ImportError(f"import this package as 'portable_indexer.backends', not as {__name__!r}")
