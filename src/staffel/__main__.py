"""The `staffel` command, also as `python -m staffel`."""

import signal


def main() -> None:
    """Entry of the command. Until there is something to clean up, Ctrl-C just ends the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever started it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # wants it ignored
    from staffel.cli import app  # takes a while: a traceback from here helps nobody

    app()


if __name__ == "__main__":
    main()
