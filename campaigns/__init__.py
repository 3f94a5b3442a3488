"""Long runs that judge the library, each a command with a short name: `python -m campaigns.NAME`."""

from pathlib import Path

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
)
__path__ += [str(Path(__path__[0], group)) for group in GROUPS]
