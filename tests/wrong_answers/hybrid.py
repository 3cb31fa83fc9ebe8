# Wrong answers to the exercises of lessons/hybrid.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: first dimension
data_group_of_27 = [24, 25, 26, 27]  # the tensor group

# %% 1: how many ranks further
data_group_of_27 = [19, 23, 27, 31]  # the stage group

# %% 1: begins at coordinate 0
data_group_of_27 = [27, 43, 59, 75]

# %% 1: holds 27
data_group_of_27 = [11, 43, 59]

# %% 1: a list of four ranks
data_group_of_27 = 16

# %% 2: only pieces go
def two_levels(tensor, inside, across):
    dist.all_reduce(tensor, group=inside)
    dist.all_reduce(tensor, group=across)
    return tensor

# %% 2: a machine's processes share the tensor
def two_levels(tensor, inside, across):  # the groups have changed places
    piece = tensor.new_empty(len(tensor) // dist.get_world_size(across))
    dist.reduce_scatter_tensor(piece, tensor, group=across)
    dist.all_reduce(piece, group=inside)
    dist.all_gather_into_tensor(tensor, piece, group=across)
    return tensor

# %% 2: not all of it
def two_levels(tensor, inside, across):
    piece = tensor.new_empty(len(tensor) // dist.get_world_size(inside))
    dist.reduce_scatter_tensor(piece, tensor, group=inside)
    dist.all_reduce(piece, group=across)
    return piece

# %% 2: not the sum over all four
def two_levels(tensor, inside, across):
    piece = tensor.new_empty(len(tensor) // dist.get_world_size(inside))
    dist.reduce_scatter_tensor(piece, tensor, group=inside)
    dist.all_gather_into_tensor(tensor, piece, group=inside)
    return tensor

# %% 2: a piece has
def two_levels(tensor, inside, across):
    dist.all_reduce(tensor)
    return tensor

# %% 2: not the sum over all four
def two_levels(tensor, inside, across):  # the mean
    piece = tensor.new_empty(len(tensor) // dist.get_world_size(inside))
    dist.reduce_scatter_tensor(piece, tensor, group=inside)
    dist.all_reduce(piece, group=across)
    dist.all_gather_into_tensor(tensor, piece, group=inside)
    return tensor / dist.get_world_size()

# %% 3: fit in 21\.96 GiB
best_grid = (8, 1, 1)

# %% 3: the fastest of those
best_grid = (2, 2, 2)

# %% 3: which link
best_grid = (1, 1, 8)

# %% 3: three whole numbers
best_grid = 8
