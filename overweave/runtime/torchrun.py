"""torchrun without the launcher's tracebacks: `python -m overweave.runtime.torchrun OPTIONS -m MODULE ARGUMENTS`.

A rank that failed has printed its own error, and a rank that got a signal needs none. The exit code is that of the
first rank that failed.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    try:
        run.main()
    except SignalException as ended:
        sys.exit(128 + ended.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            print(f"overweave: rank {rank} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


if __name__ == "__main__":
    main()
