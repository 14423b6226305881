import sys

from portable_indexer.cli import main

sys.exit(main())
