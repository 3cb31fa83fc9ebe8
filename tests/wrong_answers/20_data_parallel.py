# Wrong answers to the exercises of lesson 20. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1:
bytes_sent = 3 / 4 * 4 * 1_235_814_400

# %% 2:
def deal(window, cards):
    ordered = sorted(window, reverse=True)
    return [ordered[card::cards] for card in range(cards)]

# %% 3:
def seconds(layers, bucket_bytes, start, rate):
    return sum(takes for takes, _ in layers) + start + sum(size for _, size in layers) / rate
