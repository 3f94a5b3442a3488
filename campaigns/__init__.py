"""Long runs that judge the library, each a command with a short name: `python -m campaigns.NAME`."""

import os
from pathlib import Path

from overweave.hardware.multicast import switch_off

# Whatever a campaign starts on GPUs, these may be others', too: no library of it uses NVLink multicast.
switch_off(os.environ)

# Imports in the code use full names, such as campaigns.exact.gpu_ranks; the short names are for commands.
GROUPS = (
    "exact",
    "rates",
    "waves",
    "host",
    "lint",
    "oracle",
    "oracle/plans",
    "hostile",
    "tables",
    "choices",
    "torch",
    "bits",
    "races",
)
__path__ += [str(Path(__path__[0], group)) for group in GROUPS]
