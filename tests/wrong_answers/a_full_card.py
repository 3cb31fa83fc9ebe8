# Wrong answers to the exercises of lessons/a_full_card.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: which moment is the highest when both are done
mib_of_both = 22.0

# %% 1: which moment is the highest when both are done
mib_of_both = 188 + 32

# %% 1: and how high
mib_of_both = 32

# %% 1: which moment is the highest when both are done
mib_of_both = 188  # of the logits alone, as if the block did not come next

# %% 2: fewer switches
def fewest(limit):
    return max((on for on in tables if peak(tables[on]) <= limit), key=lambda on: peak(tables[on]))

# %% 2: fewer switches
def fewest(limit):
    return min(tables, key=lambda on: peak(tables[on]))

# %% 2: another set with as few switches
def fewest(limit):
    return min((on for on in tables if peak(tables[on]) <= limit), key=len)

# %% 2: exactly the limit is allowed
def fewest(limit):
    return min((on for on in tables if peak(tables[on]) < limit), key=lambda on: (len(on), peak(tables[on])))

# %% 2: takes more than
def fewest(limit):
    return min(tables, key=lambda on: (len(on), peak(tables[on])))

# %% 2: another set with as few switches|fewer switches
def fewest(limit):
    for n in range(len(fields) + 1):  # the ladder's sets only
        on = frozenset(fields[:n])
        if on in tables and peak(tables[on]) <= limit:
            return on

# %% 3: must add up
def fair(switches):
    return {field: peak(tables[frozenset()]) - peak(tables[frozenset([field])]) for field in switches}

# %% 3: must add up
def fair(switches):
    all_of_it = frozenset(switches)
    return {field: peak(tables[all_of_it - {field}]) - peak(tables[all_of_it]) for field in switches}

# %% 3: is every order in it
def fair(switches):
    shares = {}
    for n, field in enumerate(switches):  # one order
        shares[field] = peak(tables[frozenset(switches[:n])]) - peak(tables[frozenset(switches[: n + 1])])
    return shares

# %% 3: is every order in it
def fair(switches):
    alone = {field: peak(tables[frozenset()]) - peak(tables[frozenset([field])]) for field in switches}
    together = peak(tables[frozenset()]) - peak(tables[frozenset(switches)])
    return {field: together * size / sum(alone.values()) for field, size in alone.items()}

# %% 3: must add up
def fair(switches):
    shares = dict.fromkeys(switches, 0)  # each subset counts the same
    for chosen in itertools.product((False, True), repeat=len(switches)):
        on = frozenset(itertools.compress(switches, chosen))
        for field in set(switches) - on:
            shares[field] += (peak(tables[on]) - peak(tables[on | {field}])) / 2 ** (len(switches) - 1)
    return shares

# %% 3: in bytes
def fair(switches):
    shares = dict.fromkeys(switches, 0)
    orders = list(itertools.permutations(switches))
    for order in orders:
        for n, field in enumerate(order):
            before, after = frozenset(order[:n]), frozenset(order[: n + 1])
            shares[field] += (peak(tables[before]) - peak(tables[after])) / len(orders) / MIB
    return shares
