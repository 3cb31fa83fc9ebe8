"""The first lines of the command ``cria``: signals are handled before anything else is imported."""

from cria_tricks.common import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.listen()
    import sys

    from cria_tricks.common import waiting

    waiting.start(f"running {' '.join(['cria', *sys.argv[1:2]])}", (sys.stdout, sys.stderr))
    try:
        _run()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    interrupts.end(code)


def _run() -> None:
    try:
        from cria_tricks.cli import main as cli  # this imports typer and rich
    except Exception as error:
        from cria_tricks.processes import exit

        exit.leave_for_a_package(error)
        raise
    cli.main()
