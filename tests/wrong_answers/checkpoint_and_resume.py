# Wrong answers to the exercises of lessons/checkpoint_and_resume.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: gradients are not alive
bytes_of_a_full_checkpoint = 16 * 1_235_814_400

# %% 1: two fp32 numbers for each weight
bytes_of_a_full_checkpoint = 8 * 1_235_814_400

# %% 1: what does AdamW need
bytes_of_a_full_checkpoint = 4 * 1_235_814_400

# %% 1: not in 8 bits
bytes_of_a_full_checkpoint = 6 * 1_235_814_400

# %% 1: number of GB
bytes_of_a_full_checkpoint = 12 * 1_235_814_400 / 1e9

# %% 1: which fp32 numbers
bytes_of_a_full_checkpoint = 12 * 11_272_192

# %% 2: not what they had been.*: .*model, optimizer
def snapshot(run):
    return dict(state(run))

# %% 2: not what they had been.*: .*optimizer
def snapshot(run):  # the weights are copied, the moments are not
    taken = state(run)
    return {**taken, "model": {name: weight.clone() for name, weight in taken["model"].items()}}

# %% 2: not what they had been.*: .*optimizer
def snapshot(run):  # copies of dicts that hold the living tensors
    import copy

    return {part: copy.copy(value) for part, value in state(run).items()}

# %% 2: not all of the seven parts are in it: schedule
def snapshot(run):
    import copy

    return copy.deepcopy({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})

# %% 2: not a dict
def snapshot(run):
    import copy

    return copy.deepcopy(run)

# %% 2: changed the run itself
def snapshot(run):  # draws a random number to see where the generator is
    import copy

    taken = copy.deepcopy(state(run))
    torch.rand(1)
    return taken

# %% 2: not what they had been.*: .*python
def snapshot(run):  # the random state of a fresh run
    import copy

    taken = copy.deepcopy(state(run))
    return {**taken, "python": random.Random(0).getstate()}

# %% 3: a 2 under the root
seconds_of_life = 20_000

# %% 3: its square
seconds_of_life = 2 * 2 / 0.01

# %% 3: both count
seconds_of_life = 10_000

# %% 3: 0.01
seconds_of_life = 2 * 2 / 1**2

# %% 3: if only saves cost time
seconds_of_life = 2 / 0.01

# %% 3: solve it for M
seconds_of_life = 90 * 60
