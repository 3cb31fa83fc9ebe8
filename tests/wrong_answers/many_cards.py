# Wrong answers to the exercises of lessons/many_cards.py. A cell is one answer: "# %% EXERCISE: words of the hint it must get".

# %% 1: the peak of all eight cards
share_of_the_peak = 6 * 6.74e9 * 20000 / 312e12

# %% 1: 6 operations a weight
share_of_the_peak = 4 * 6.74e9 * 20000 / (8 * 312e12)

# %% 1: divide by the peak
share_of_the_peak = 6 * 6.74e9 * 20000

# %% 1: 6 operations a weight
share_of_the_peak = 100 * 6 * 6.74e9 * 20000 / (8 * 312e12)  # in per cent

# %% 2: computing is shorter than sending
def least_tokens(flops, sent, rate, link):
    return int(sent / link * rate / flops)

# %% 2: fewer tokens are enough
def least_tokens(flops, sent, rate, link):
    return int(sent / link * rate / flops) + 1

# %% 2: (computing is shorter than sending|fewer tokens are enough)
def least_tokens(flops, sent, rate, link):
    return round(sent * rate / flops)  # without the link

# %% 3: the rate that collectives reach
least_width = 4 * 7 / 8 * 2 * RATE / (18 * 25e9)  # the advertised rate

# %% 3: set experts\(width, rate\) to 1
least_width = 4 * 2 * RATE / (18 * LINK_RATES["InfiniBand HDR"])

# %% 3: set experts\(width, rate\) to 1
least_width = experts(1, LINK_RATES["InfiniBand HDR"])
