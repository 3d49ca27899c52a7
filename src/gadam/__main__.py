"""Run the command line as ``python -m gadam``."""

import sys

from gadam.commands import main

sys.exit(main())
