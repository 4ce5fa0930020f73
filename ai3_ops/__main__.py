"""`python -m ai3_ops`."""

import sys
import warnings

from ai3_ops.cli.main import main

if __name__ == "__main__":
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
    sys.exit(main())
