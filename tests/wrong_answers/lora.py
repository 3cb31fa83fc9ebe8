# Wrong answers to the exercises of lessons/lora.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: the rank
numbers_at_rank_8 = 1_703_936  # at rank 16

# %% 1: D_in and D_out of both matrices
numbers_at_rank_8 = 16 * 8 * 2 * (2048 + 2048)  # v_proj as wide as q_proj

# %% 1: and all blocks
numbers_at_rank_8 = 8 * ((2048 + 2048) + (2048 + 512))

# %% 1: D_in and D_out
numbers_at_rank_8 = 16 * 8 * 2 * 2048  # A alone

# %% 2: singular values of B A: \[1.0, 1.0, 1.0\]
def extract(difference, rank):
    U, found, Vt = torch.linalg.svd(difference)
    return Vt[:rank], U[:, :rank]

# %% 2: singular values of B A: \[1.0, 0.64, 0.41\], largest of the difference: \[1.0, 0.8, 0.64\]
def extract(difference, rank):  # the sizes on both sides
    U, found, Vt = torch.linalg.svd(difference)
    return found[:rank, None] * Vt[:rank], U[:, :rank] * found[:rank]

# %% 2: not \(rank, D_in\)
def extract(difference, rank):  # B and A
    U, found, Vt = torch.linalg.svd(difference)
    return U[:, :rank] * found[:rank], Vt[:rank]

# %% 2: squared distance
def extract(difference, rank):  # V's columns are taken for its rows
    U, found, Vt = torch.linalg.svd(difference, full_matrices=False)
    return Vt.T[:rank], U[:, :rank] * found[:rank]

# %% 2: singular values of B A
def extract(difference, rank):  # the lesson's scale, 2, divided out
    U, found, Vt = torch.linalg.svd(difference)
    return Vt[:rank], U[:, :rank] * found[:rank] / scale

# %% 2: A has shape \(5, 40\), not
def extract(difference, rank):  # of the transposed matrix
    U, found, Vt = torch.linalg.svd(difference.T)
    return (U[:, :rank] * found[:rank]).T[:, : len(difference)], Vt[:rank].T

# %% 3: which tensors of the adapter are there at the peak
highest_rank = 1754  # as many numbers as the model has weights

# %% 3: rank 1118 needs 32,0
highest_rank = 1118

# %% 3: a rank above 1116 still needs less
highest_rank = 1116

# %% 3: still needs less
highest_rank = 931  # 16 bytes a number, without the outputs of A

# %% 3: which tensors of the adapter
highest_rank = 1237  # 12 bytes a number, without the outputs of A

# %% 3: still needs less
highest_rank = 64
