"""The ``slm`` command."""


def main() -> None:
    """Run the command line, and exit with 0 (done), 1 (an error), 2 (wrong usage) or 130 (interrupted)."""
    from slm_core.cli.app import app
    from slm_core.cli.terminal import use_utf8_in_pipes

    use_utf8_in_pipes()
    app()
