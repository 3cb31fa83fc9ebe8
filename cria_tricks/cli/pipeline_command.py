"""Training over a pipeline: ``torchrun --nproc-per-node 2 -m cria_tricks.cli.pipeline_command RECIPE``."""

if __name__ == "__main__":
    from cria_tricks.processes import script
    from cria_tricks.run.pipeline import command

    script.run(command)
