"""`python -m trainwright` is the same program as `trainwright`."""

import sys

from trainwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
