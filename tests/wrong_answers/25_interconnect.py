# Wrong answers to the exercises of lesson 25. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
bus_bandwidth = 2**30 / 5.1e-3

# %% 2:
def doubling(x):
    ring(x)
    return x

# %% 3:
break_even_bytes = LINKS['hdr'].hop * LINKS['hdr'].rate
