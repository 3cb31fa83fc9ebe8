# Wrong answers to the exercises of lessons/data_parallel.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: twice: to add up, and to hand out
bytes_sent = 3 / 4 * 4 * 1_235_814_400

# %% 1: N - 1 of N pieces
bytes_sent = 2 * 4 * 1_235_814_400

# %% 1: 4 bytes a number
bytes_sent = 2 * 3 / 4 * 1_235_814_400

# %% 1: N - 1 of N pieces
bytes_sent = 4 * 1_235_814_400

# %% 2: from the longest on
def deal(window, cards):
    ordered = sorted(window, reverse=True)
    return [ordered[card::cards] for card in range(cards)]

# %% 2: from the longest on
def deal(window, cards):
    return [window[card::cards] for card in range(cards)]

# %% 2: from the longest on
def deal(window, cards):
    dealt = [[] for _ in range(cards)]
    for row in sorted(window):
        min((one for one in dealt if len(one) < -(-len(window) // cards)), key=sum).append(row)
    return dealt

# %% 2: 2 for a card at most
def deal(window, cards):
    dealt = [[] for _ in range(cards)]
    for row in sorted(window, reverse=True):
        min(dealt, key=sum).append(row)  # asks no card whether it has room
    return dealt

# %% 2: every row of a window once
def deal(window, cards):
    room = len(window) // cards
    dealt = [[] for _ in range(cards)]
    for row in sorted(window, reverse=True)[: room * cards]:
        min((one for one in dealt if len(one) < room), key=sum).append(row)
    return dealt

# %% 2: a list for each of 4 cards
def deal(window, cards):
    dealt = [[], []]
    for row in sorted(window, reverse=True):
        min((one for one in dealt if len(one) < -(-len(window) // 2)), key=sum).append(row)
    return dealt

# %% 3: too late: .* travels while the layers below are computed
def seconds(layers, bucket_bytes, start, rate):
    return sum(takes for takes, _ in layers) + start + sum(size for _, size in layers) / rate

# %% 3: too (early: a bucket waits|late: a bucket leaves as soon as it has bucket_bytes)
def seconds(layers, bucket_bytes, start, rate):
    now = free = waiting = 0
    for number, (takes, size) in enumerate(layers):
        now, waiting = now + takes, waiting + size
        if waiting > bucket_bytes or number == len(layers) - 1:
            free, waiting = max(now, free) + start + waiting / rate, 0
    return free

# %% 3: too early: .* or the layers end
def seconds(layers, bucket_bytes, start, rate):
    now = free = waiting = 0
    for takes, size in layers:
        now, waiting = now + takes, waiting + size
        if waiting >= bucket_bytes:
            free, waiting = max(now, free) + start + waiting / rate, 0
    return max(now, free)

# %% 3: too early: .* the bucket before has come
def seconds(layers, bucket_bytes, start, rate):
    now = free = waiting = 0
    for number, (takes, size) in enumerate(layers):
        now, waiting = now + takes, waiting + size
        if waiting >= bucket_bytes or number == len(layers) - 1:
            free, waiting = now + start + waiting / rate, 0
    return free

# %% 3: too early: .* each pays its start
def seconds(layers, bucket_bytes, start, rate):
    now = free = waiting = 0
    for number, (takes, size) in enumerate(layers):
        now, waiting = now + takes, waiting + size
        if waiting >= bucket_bytes or number == len(layers) - 1:
            free, waiting = max(now, free) + waiting / rate, 0
    return free + start

# %% 3: too early: a bucket waits until it is full
def seconds(layers, bucket_bytes, start, rate):
    now = free = 0
    for takes, size in layers:  # each layer by itself
        now += takes
        free = max(now, free) + start + size / rate
    return free
