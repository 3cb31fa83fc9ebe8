# Wrong answers to the exercises of lessons/a_full_card.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: which moment is the highest when both are done
mib_of_both = 22.0

# %% 1: which moment is the highest when both are done
mib_of_both = 188 + 32

# %% 1: and how high
mib_of_both = 32

# %% 1: which moment is the highest when both are done
mib_of_both = 188  # of the logits alone, as if the block did not come next

# %% 2: can be given back
def stuck(segments):
    return sum(size for segment in segments for size, name in segment if name is None)

# %% 2: all free blocks are stuck
def stuck(segments):
    return sum(size for segment in segments for size, name in segment[1:] if name is None)

# %% 2: all free blocks are stuck
def stuck(segments):
    return max((size for segment in segments if len(segment) > 1 for size, name in segment if name is None), default=0)

# %% 2: can be given back
def stuck(segments):
    return sum(size for segment in segments if len(segment) < 2 for size, name in segment if name is None) + sum(
        size for segment in segments if len(segment) > 1 for size, name in segment if name is None
    )

# %% 3: must add up
def fair(switches):
    return {switch: peak_with([]) - peak_with([switch]) for switch in switches}

# %% 3: must add up
def fair(switches):
    saved = {}
    for switch in switches:
        others = [other for other in switches if other != switch]
        saved[switch] = peak_with(others) - peak_with(switches)
    return saved

# %% 3: is every order in it
def fair(switches):
    shares = {}
    for n, switch in enumerate(switches):  # one order
        shares[switch] = peak_with(switches[:n]) - peak_with(switches[: n + 1])
    return shares

# %% 3: is every order in it
def fair(switches):
    alone = {switch: peak_with([]) - peak_with([switch]) for switch in switches}
    together = peak_with([]) - peak_with(switches)
    return {switch: together * size / sum(alone.values()) for switch, size in alone.items()}

# %% 3: must add up
def fair(switches):
    shares = dict.fromkeys(switches, 0)  # each subset counts the same
    for chosen in itertools.product((False, True), repeat=len(switches)):
        on = list(itertools.compress(switches, chosen))
        for switch in set(switches) - set(on):
            shares[switch] += (peak_with(on) - peak_with([*on, switch])) / 2 ** (len(switches) - 1)
    return shares

# %% 3: in MiB
def fair(switches):
    shares = dict.fromkeys(switches, 0)
    orders = list(itertools.permutations(switches))
    for order in orders:
        for n, switch in enumerate(order):
            shares[switch] += (peak_with(order[:n]) - peak_with(order[: n + 1])) / len(orders) * 2**20
    return shares

# %% 3: a key of the dict
def fair(switches):
    return {}
