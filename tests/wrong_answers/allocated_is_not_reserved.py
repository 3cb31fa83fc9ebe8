# Wrong answers to the exercises of lessons/allocated_is_not_reserved.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: whole segments
reserved_mib = 9 + 13 + 6  # the tensors

# %% 1: a segment of its own
reserved_mib = 12 + 20  # d in the place of a

# %% 1: rounded up
reserved_mib = 12 + 20 + 13

# %% 1: share a segment of 20
reserved_mib = 12 + 9 + 9 + 14

# %% 1: e finds a free block
reserved_mib = 12 + 20 + 14 + 20

# %% 1: draw the segments
reserved_mib = 100

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

# %% 3: pages of 20 MiB
def grow(script):
    return play(script).reserved()

# %% 3: a free block at the end grows
def grow(script):
    in_use, most = {}, 0
    for word in script.split():
        name, _, size = word.strip("-").partition("=")
        most += 0 if word.startswith("-") else 20 * math.ceil(float(size) / 20)
    return most

# %% 3: a free block in the middle
def grow(script):  # only ever the end of the list, where nothing was freed before the last tensor
    blocks, reserved = [], 0
    for word in script.split():
        if word.startswith("-"):
            blocks = [(name, size) for name, size in blocks if name != word[1:]] if blocks[-1][0] == word[1:] else blocks
        else:
            name, size = word.split("=")
            blocks.append((name, float(size)))
        reserved = max(reserved, 20 * math.ceil(sum(size for _, size in blocks) / 20))
    return reserved

# %% 3: the last block is taken only
def grow(script):
    blocks = []
    for word in script.split():
        if word.startswith("-"):
            merged = []
            for size, owner in blocks:
                owner = None if owner == word[1:] else owner
                if owner is None and merged and merged[-1][1] is None:
                    size += merged.pop()[0]
                merged.append((size, owner))
            blocks = merged
            continue
        name, size = word.split("=")[0], float(word.split("=")[1])
        fitting = [(have, b) for b, (have, owner) in enumerate(blocks) if owner is None and have >= size]
        if fitting:
            have, b = min(fitting)
        else:
            have = blocks.pop()[0] if blocks and blocks[-1][1] is None else 0
            have += 20 * max(0, math.ceil((size - have) / 20))
            b = len(blocks)
        rest = [(have - size, None)] if have > size else []
        blocks[b : b + 1] = [(size, name), *rest]
    return sum(size for size, _ in blocks)

# %% 3: a rest of 0.5 MiB
def grow(script):
    blocks = []
    for word in script.split():
        if word.startswith("-"):
            merged = []
            for size, owner in blocks:
                owner = None if owner == word[1:] else owner
                if owner is None and merged and merged[-1][1] is None:
                    size += merged.pop()[0]
                merged.append((size, owner))
            blocks = merged
            continue
        name, size = word.split("=")[0], float(word.split("=")[1])
        fitting = [(have, b) for b, (have, owner) in enumerate(blocks[:-1]) if owner is None and have >= size]
        if fitting:
            have, b = min(fitting)
        else:
            have = blocks.pop()[0] if blocks and blocks[-1][1] is None else 0
            have += 20 * max(0, math.ceil((size - have) / 20))
            b = len(blocks)
        rest = [(have - size, None)] if have > size + 1 else []
        blocks[b : b + 1] = [(size if rest else have, name), *rest]
    return sum(size for size, _ in blocks)

# %% 3: merge free neighbours
def grow(script):
    blocks = []
    for word in script.split():
        if word.startswith("-"):
            blocks = [(size, None if owner == word[1:] else owner) for size, owner in blocks]
            if len(blocks) > 1 and blocks[-2][1] is blocks[-1][1] is None:  # at the end only
                blocks[-2:] = [(blocks[-2][0] + blocks[-1][0], None)]
            continue
        name, size = word.split("=")[0], float(word.split("=")[1])
        fitting = [(have, b) for b, (have, owner) in enumerate(blocks[:-1]) if owner is None and have >= size]
        if fitting:
            have, b = min(fitting)
        else:
            have = blocks.pop()[0] if blocks and blocks[-1][1] is None else 0
            have += 20 * max(0, math.ceil((size - have) / 20))
            b = len(blocks)
        rest = [(have - size, None)] if have > size else []
        blocks[b : b + 1] = [(size, name), *rest]
    return sum(size for size, _ in blocks)
