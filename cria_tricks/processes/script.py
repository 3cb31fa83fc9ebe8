"""Run a module as a command of its own, started by ``torchrun -m``, with the error messages of ``cria``."""

from collections.abc import Callable
from typing import Any

import typer

from cria_tricks.common.errors import BadInput, Diverged, Lost, Unfinished, is_out_of_memory
from cria_tricks.processes.exit import leave, unforeseen

# click's UsageError. It is not imported from click, because newer versions of typer contain a copy of click instead.
USAGE_ERROR: type[Any] = typer.BadParameter.__base__  # type: ignore[assignment]


def run(function: Callable[..., None]) -> None:
    """Run a function with the arguments of the command line.

    For an expected error, one process prints one line on stderr, and all end with an exit code. The messages assume
    that the function saves no checkpoints.

    Args:
        function: the function; its parameters become those of the command.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(function)
    try:
        app(standalone_mode=False)
    except USAGE_ERROR as error:
        leave(f"error: {error.format_message().rstrip('.')}; see --help", 2)
    except BadInput as error:
        leave(f"error: {error}", 2)
    except (Diverged, Lost) as error:
        leave(f"error: {error}; nothing was saved", 1)
    except Unfinished as error:
        leave(f"error: {error}", 1)
    except KeyboardInterrupt:
        leave("interrupted; nothing was saved", 130)
    except Exception as error:
        if not is_out_of_memory(error):
            unforeseen()
        leave("error: out of memory; nothing was saved", 3)
