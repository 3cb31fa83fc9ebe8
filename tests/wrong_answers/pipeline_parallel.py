# Wrong answers to the exercises of lessons/pipeline_parallel.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: both ways
mib_across = 32 * 4096 * 8192 * 2 / 2**20

# %% 1: the bytes of each
mib_across = 2 * 32 * 4096 * 8192 * 4 / 2**20  # fp32

# %% 1: the micro-batches
mib_across = 2 * 4096 * 8192 * 2 / 2**20

# %% 1: a MiB has 2\^20 bytes
mib_across = 2 * 32 * 4096 * 8192 * 2 / 1e6

# %% 1: the numbers of a micro-batch
mib_across = 7 * 2 * 32 * 4096 * 8192 * 2 / 2**20  # all seven borders

# %% 2: only the slowest
def cut(seconds, S):
    return [len(seconds) * (s + 1) // S - len(seconds) * s // S for s in range(S)]

# %% 2: how many layers each stage gets
def cut(seconds, S):
    edges = ((0, *places, len(seconds)) for places in itertools.combinations(range(1, len(seconds)), S - 1))
    best = min(edges, key=lambda at: max(sum(seconds[a:b]) for a, b in itertools.pairwise(at)))
    return list(best[1:])  # where each stage ends

# %% 2: how many layers each stage gets
def cut(seconds, S):
    edges = ((0, *places, len(seconds)) for places in itertools.combinations(range(1, len(seconds)), S - 1))
    best = min(edges, key=lambda at: max(sum(seconds[a:b]) for a, b in itertools.pairwise(at)))
    return [sum(seconds[a:b]) for a, b in itertools.pairwise(best)]

# %% 2: (stages, not|only the slowest)
def cut(seconds, S):
    sizes, took = [0], 0.0
    for layer in seconds:  # a stage is full when it has its share of the time
        if took + layer > sum(seconds) / S and sizes[-1] and len(sizes) < S:
            sizes.append(0)
            took = 0.0
        sizes[-1] += 1
        took += layer
    return sizes + [0] * (S - len(sizes)) if len(sizes) < S else sizes

# %% 2: only the slowest
def cut(seconds, S):
    edges = ((0, *places, len(seconds)) for places in itertools.combinations(range(1, len(seconds)), S - 1))
    def spread(at):
        took = [sum(seconds[a:b]) for a, b in itertools.pairwise(at)]
        return max(took) - min(took)
    best = min(edges, key=spread)
    return [b - a for a, b in itertools.pairwise(best)]

# %% 2: only the slowest
def cut(seconds, S):
    edges = ((0, *places, len(seconds)) for places in itertools.combinations(range(1, len(seconds)), S - 1))
    best = min(edges, key=lambda at: sum(sum(seconds[a:b]) ** 2 for a, b in itertools.pairwise(at)))
    return [b - a for a, b in itertools.pairwise(best)]

# %% 2: (stages, not|how many layers each)
def cut(seconds, S):
    edges = ((0, *places, 8) for places in itertools.combinations(range(1, 8), S - 1))  # there are always eight
    best = min(edges, key=lambda at: max(sum(seconds[a:b]) for a, b in itertools.pairwise(at)))
    return [b - a for a, b in itertools.pairwise(best)]

# %% 2: only the slowest
def cut(seconds, S):
    stages = [[] for _ in range(S)]
    for layer in sorted(seconds, reverse=True):  # the longest first, to the stage that has least; the order is lost
        min(stages, key=sum).append(layer)
    return [len(stage) for stage in stages]

# %% 3: n - 1 borders
pieces_and_borders = (4, 4)

# %% 3: less than a tenth
pieces_and_borders = (3, 11 / 3)

# %% 3: the second number is a ratio
pieces_and_borders = (4, 15)

# %% 3: a pair
pieces_and_borders = 4
