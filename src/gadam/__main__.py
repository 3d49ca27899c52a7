"""`python -m gadam`."""

import sys

from gadam.cli import main

sys.exit(main())
