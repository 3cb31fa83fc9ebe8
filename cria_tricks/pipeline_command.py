"""The command that trains over a pipeline: ``torchrun --nproc-per-node 2 -m cria_tricks.pipeline_command RECIPE``."""

if __name__ == "__main__":
    from cria_tricks.parallel import script
    from cria_tricks.parallel.pipeline_run import command

    script.run(command)
