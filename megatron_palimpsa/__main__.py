"""`python -m megatron_palimpsa` is the command `megatron-palimpsa`."""

import sys

from megatron_palimpsa.cli import main

if __name__ == "__main__":
    sys.exit(main())
