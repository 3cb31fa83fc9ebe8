# Wrong answers to the exercises of lessons/monitoring.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: divide by the peak
share_of_the_peak = 1.0  # what utilisation says

# %% 1: each weight with its own number
share_of_the_peak = 6 * (973e6 + 263e6) * 1060 / 65e12

# %% 1: the blocks' operations and the head's
share_of_the_peak = 6 * 973e6 * 1060 / 65e12

# %% 1: not by 100
share_of_the_peak = 100 * (6 * 973e6 + 4 * 263e6) * 1060 / 65e12

# %% 1: each weight with its own number
share_of_the_peak = 4 * (973e6 + 263e6) * 1060 / 65e12  # as if nothing were repeated

# %% 2: in seconds
def stalls(events):
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("step"))
    return sum(later[0] - earlier[1] for earlier, later in zip(steps, steps[1:]))

# %% 2: from the end of a step
def stalls(events):
    steps = sorted(e["ts"] for e in events if e["name"].startswith("step"))
    return sum(later - earlier for earlier, later in zip(steps, steps[1:])) / 1e6

# %% 2: name begins with step
def stalls(events):
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events)
    return sum(later[0] - earlier[1] for earlier, later in zip(spans, spans[1:])) / 1e6

# %% 2: nobody sorted
def stalls(events):
    steps = [e for e in events if e["name"].startswith("step")]
    return sum(b["ts"] - a["ts"] - a["dur"] for a, b in zip(steps, steps[1:])) / 1e6

# %% 2: not of their names
def stalls(events):
    steps = sorted((e for e in events if e["name"].startswith("step")), key=lambda e: e["name"])
    return sum(b["ts"] - a["ts"] - a["dur"] for a, b in zip(steps, steps[1:])) / 1e6

# %% 2: 0 for fewer than two
def stalls(events):
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("step"))
    busy = sum(end - begin for begin, end in steps)
    return (steps[-1][1] - steps[0][0] - busy) / 1e6

# %% 3: the last step that fits
failing_step = (T4.memory_bytes - CONTEXT - bill.allocated_bytes) // (3 * MIB)

# %% 3: what the context and the bill leave
failing_step = (T4.memory_bytes - bill.allocated_bytes) // (3 * MIB) + 1

# %% 3: what the context and the bill leave
failing_step = (T4.memory_bytes - CONTEXT) // (3 * MIB) + 1

# %% 3: the first that does not
failing_step = (T4.memory_bytes - CONTEXT - bill.allocated_bytes) / (3 * MIB)
