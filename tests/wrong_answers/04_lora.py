# Wrong answers to the exercises of lesson 4. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
numbers_at_rank_8 = 1_703_936

# %% 2:
def extract(difference, rank):
    U, found, Vt = torch.linalg.svd(difference)
    return Vt[:rank], U[:, :rank]

# %% 3:
highest_rank = 854
