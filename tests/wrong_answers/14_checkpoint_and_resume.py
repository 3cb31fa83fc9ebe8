# Wrong answers to the exercises of lesson 14. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
bytes_of_a_full_checkpoint = 16 * 1_235_814_400

# %% 2:
def snapshot(run):
    return dict(state(run))

# %% 3:
seconds_of_life = 20_000
