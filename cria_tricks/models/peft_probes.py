"""Let peft work beside packages that it cannot use, and does not need here.

Whenever peft puts LoRA on a layer that is not quantised by bitsandbytes, it asks whether each other library for
quantised layers is there. For a version that is too old it raises an ImportError. Google Colab brings
such a torchao. So an adapter could be neither made nor opened there, although nothing of torchao was asked for.
"""

import functools
import importlib.util
import sys

PROBES = {"is_torchao_available": "torchao", "is_gptqmodel_available": "gptqmodel"}
"""The functions of ``peft.import_utils`` that may raise, and the package that each looks for."""


@functools.cache
def ignore_unusable() -> None:
    """Make peft take a package that it refuses for one that is not installed.

    It must be called before an adapter is made or opened. Beside packages that peft can use, or none, peft stays as it
    is.
    """
    for name, package in PROBES.items():
        if importlib.util.find_spec(package) is None:
            continue
        from peft import import_utils  # late, because it takes seconds

        asks = getattr(import_utils, name)
        try:
            asks()
        except ImportError:
            # Every module of peft that holds this function gets one that says no.
            for path, module in list(sys.modules.items()):
                if path.split(".")[0] == "peft" and vars(module).get(name) is asks:
                    setattr(module, name, lambda: False)
