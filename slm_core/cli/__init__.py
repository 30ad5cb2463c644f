"""The ``slm`` command."""

import atexit
import gc
import sys


def main() -> None:
    """Run the command line, and exit with 0 (done), 1 (an error), 2 (wrong usage) or 130 (interrupted)."""
    atexit.register(gc.freeze)  # the garbage collection at exit would take a quarter of a short command's time
    try:
        from slm_core.cli.terminal import replace_closed_streams, use_utf8_in_pipes

        replace_closed_streams()
        from slm_core.cli.app import app

        use_utf8_in_pipes()
        app()
    except KeyboardInterrupt:  # while modules are imported: ``app`` itself turns it into this exit code
        sys.exit(130)
