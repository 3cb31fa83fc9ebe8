# Wrong answers to the exercises of lessons/interconnect.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: what each card sends
bus_bandwidth = 2**30 / 5.1e-3  # the algorithm bandwidth

# %% 1: both phases
bus_bandwidth = 7 / 8 * 2**30 / 5.1e-3

# %% 1: a ring of eight
bus_bandwidth = 2 * 2**30 / 5.1e-3

# %% 1: in bytes
bus_bandwidth = 2 * 7 / 8 * 2**30 / 5.1e-3 / 1e9

# %% 1: a GiB has 2\^30
bus_bandwidth = 2 * 7 / 8 * 1e9 / 5.1e-3

# %% 2: a turn for each bit
def doubling(x):
    N, rank, mine = dist.get_world_size(), dist.get_rank(), x.clone()
    for _ in range(N - 1):  # round the ring, whole tensors
        exchange(mine, (rank + 1) % N, received := torch.empty_like(x), (rank - 1) % N)
        mine, x = received, x + received
    return x

# %% 2: (a turn for each bit|4 processes need 2)
def doubling(x):
    ring(x)
    return x

# %% 2: the sum so far
def doubling(x):
    bit, total = 1, x.clone()
    while bit < dist.get_world_size():
        partner = dist.get_rank() ^ bit
        exchange(x, partner, received := torch.empty_like(x), partner)
        total, bit = total + received, 2 * bit  # sends what it had at first
    return total

# %% 2: how many there are
def doubling(x):
    for bit in (1, 2):  # as if there were always four
        partner = dist.get_rank() ^ bit
        exchange(x, partner, received := torch.empty_like(x), partner)
        x = x + received
    return x

# %% 2: nothing but exchange
def doubling(x):
    dist.all_reduce(x)
    return x

# %% 2: in every process
def doubling(x):
    partner = dist.get_rank() ^ 1
    exchange(x, partner, received := torch.empty_like(x), partner)
    return x + received

# %% 3: set them equal
break_even_bytes = LINKS["hdr"].hop * LINKS["hdr"].rate

# %% 3: turns
break_even_bytes = (63 - 6) * LINKS["hdr"].hop * LINKS["hdr"].rate / (6 - 63 / 64)  # one phase of the ring

# %% 3: bytes sent over the rate
break_even_bytes = (126 - 6) * LINKS["hdr"].hop * LINKS["hdr"].rate / 6  # the ring's own bytes forgotten

# %% 3: bytes sent
break_even_bytes = (126 - 6) * LINKS["hdr"].hop * LINKS["hdr"].rate / (6 - 126)  # the ring sends whole tensors

# %% 3: turns times a hop
break_even_bytes = 126 * LINKS["hdr"].hop * LINKS["hdr"].rate / (6 - 126 / 64)  # doubling's own hops forgotten
