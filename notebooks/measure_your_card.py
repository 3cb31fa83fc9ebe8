# ---
# jupyter:
#   accelerator: GPU
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Measure your card
# Our plans predict bytes and seconds. This notebook measures them on the card of this machine, and puts both side by
# side. You get one file. If you give it to us, plans for your card can use your times. Nothing is sent anywhere
# by itself.
#
# *Run all* does all of it: it installs, looks at the machine, measures, and shows the result. If the session ends, run
# all cells again. What `cria bench` has finished is not measured again; the checks of section 1 run again and take
# about a minute. (In Colab this needs `DRIVE`, because the disk is deleted.)

# %% tags=["before-install"]
import torch

GPU = torch.cuda.get_device_name() if torch.cuda.is_available() else None
if GPU:
    print(f"{GPU}: {torch.cuda.get_device_properties(0).total_memory / 2**30:.2f} GiB")
else:
    print("No GPU. In Colab: Runtime -> Change runtime type -> T4 GPU. In Kaggle: Settings -> Accelerator.")
    print("Without one it goes on, and measures a small model on the CPU.")

# %% [markdown]
# What you may set:
#
# - `VERSION`: on a T4 we predict ten minutes for `short` and an hour for `full`. The full version uses longer rows and
#   more steps. On a GPU it also adds a search for the longest row that fits, and a table of prediction
#   errors.
# - `DRIVE` (Colab only): with a tick the result is saved on your Google Drive. Without it Colab deletes the result with
#   the machine, and you start again from zero.
# - `FOLDER`: the folder of the result. Name a new one to measure again.

# %% tags=["before-install"]
VERSION = "short"  # @param ["short", "full"]
DRIVE = False  # @param {type:"boolean"}
FOLDER = "cria-bench"  # @param {type:"string"}

# %% Imports and settings tags=["hide-input"]
import re
import sys
from pathlib import Path

from IPython.display import Markdown, display

from cria_tricks.bench import measured_card, tables
from cria_tricks.course.notebook import cria

COLAB = "google.colab" in sys.modules
WHERE = Path.cwd()
if COLAB and DRIVE:
    from google.colab import drive

    drive.mount("/content/drive")
    WHERE = Path("/content/drive/MyDrive")
CARD = re.sub("[^a-z0-9]+", "-", (GPU or "cpu").lower())  # tomorrow Colab may give you another card
OUT = WHERE / FOLDER / f"{CARD}-{VERSION}"
FILE = OUT / measured_card.NAME
BENCH = ["bench", "--out", OUT]
if VERSION == "short":
    BENCH.append("--short")

# %% [markdown]
# ## 1. Look at the machine
# **What is it?** `cria doctor` names the card, and says which techniques work on it.

# %%
_ = cria("doctor")

# %% [markdown]
# **How fast is it?** `--calibrate` times single operations, such as matrix products and copies. The predictions below
# use these times.

# %%
_ = cria("doctor", "--calibrate")

# %% [markdown]
# ## 2. Measure
# The cell prints one line for each case: the measured peak, the predicted one, the one that a dry
# run counted, and the time of a step. Each case is saved when it is done. So you lose at most one case if you stop the
# cell or the session ends. Run nothing else on this machine meanwhile, because that changes the times.

# %%
_ = cria(*BENCH)

# %% [markdown]
# ## 3. Look at the result
# The tables show, case by case, what was predicted and what was measured.

# %%
display(Markdown(tables.of_card(measured_card.read(FILE))))

# %% [markdown]
# ## 4. Keep it, and give it
# The JSON file is the result. In Colab your browser downloads it. Elsewhere, take it from the folder that is printed
# here.

# %%
print(f"{FILE}: {FILE.stat().st_size / 1024:.0f} KiB")
if COLAB:
    from google.colab import files

    files.download(str(FILE))

# %% [markdown]
# **Can it be used?** `cria bench --check` accepts the file, or says in one line what is wrong with it. For example,
# times that vary too much mean that something else used the machine.

# %%
_ = cria("bench", "--check", FILE)

# %% [markdown]
# If you want to give it, open an issue with the form *I measured it on my card*, and drag the file into it. We check
# it again, and it appears on the page [Measured cards](../docs/measured_cards.md#give-your-result).
