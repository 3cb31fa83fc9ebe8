# Wrong answers to the exercises of lesson 16. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
mib_of_both = 22.0

# %% 2:
def fewest(limit):
    return max((on for on in tables if peak(tables[on]) <= limit), key=lambda on: peak(tables[on]))

# %% 3:
def fair(switches):
    return {field: peak(tables[frozenset()]) - peak(tables[frozenset([field])]) for field in switches}
