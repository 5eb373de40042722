"""`python -m gva.cli`, for torchrun."""

import sys

from gva.cli import main

sys.exit(main())
