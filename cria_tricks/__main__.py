"""``python -m cria_tricks``: what ``torchrun -m`` needs, as it starts modules and no commands."""

from cria_tricks.cli.main import main

main()
