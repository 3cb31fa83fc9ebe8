"""What the lessons share: the course's job with its memory bill, figures, predictions, and the checks of exercises.

A lesson takes all that it needs from here, from ``cria_tricks`` itself, and from the modules of the techniques that it
is about. So every other module can move without a change of the lessons.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from cria_tricks.models import peft_probes

_NAMES = {
    # the machine and the model
    "hardware": "T4 this_device",
    "hardware.attention_kernels": "kernel_for",
    "hardware.cards": "A100_40GB CARDS FLAVORS",
    "hardware.device": "pretend=pretend_device this_cpu",
    "hardware.gpus": "COLAB KAGGLE",
    "hardware.reached": "LINK=LINK_REACHED",
    "hardware.trust": "verdict=verdict_of",
    "load": "losses",
    "load.answering": "in_place=cache_in_place",
    "load.model": "forbid_cpu_repacking load=load_base load_tokenizer quiet_libraries",
    "load.refusals": "refuse=refuse_plan",
    "load.stages": "find_blocks",
    "models.catalogue": "CONFIGS",
    "models.configs": "find_config",
    "models.shape": "facts_of find_shape",
    "recipe": "with_settings",
    "resolve": "resolve",
    "settings": "Train",
    "step_plan": "diff function_at",
    # bytes and seconds, predicted
    "bill": "step_time",
    "bill.bill": "CONTEXT=CUDA_CONTEXT",
    "bill.block": "kept=saved_by_block",
    "bill.calls": "Call ring_share totals=traffic_totals",
    "bill.operation": "TOKENS_PER_CHUNK",
    "bill.moved_bytes": "one_by_one",
    "bill.step_time": "counts=work_of_step ends=ends_of_range run_tokens",
    "predict": "plan_data toggles",
    "predict.allocator": (
        "CachingAllocator DEFAULT=ALLOCATOR LARGE_SEGMENT OWN_SEGMENT OutOfMemory=AllocatorFull ROUND_LARGE "
        "SMALL_SEGMENT Settings=AllocatorSettings"
    ),
    "predict.host": "LIBRARIES host_bill",
    "predict.links": "LINKS compute_seconds step_seconds",
    "predict.memory_trace": "memory_trace replay",
    "predict.per_process": "local=local_part per_process",
    "predict.plan_data": "prices",
    "predict.toggles": "Target longest=longest_row",
    "switches": "folds",
    "switches.folds": "estimate=memory_bill step_of=step_work time_of=time_bill",
    # bytes and seconds, measured
    "bench": "results tables",
    "bench.case": "TRAINED_SHARE",
    "common.figures": "Theme marked panels readable",
    "common.markdown_table": "table",
    "measure.counting": "CountCollectives SavedBytes Traffic attention_kernel flops peak_bytes",
    "measure.memory": "LiveBytes",
    "measure.monitor": "Monitor read=read_monitor summarise=summarise_monitor",
    "measure.utilisation": "hardware_flops model_flops",
    # rows
    "data": "duplicates sources tokens",
    "data.batches": "PadToLongest",
    "data.duplicates": "Guard Repeats",
    "data.prepare": "repetitive train_rows",
    "data.lengths": "row_lengths",
    "data.rows": "Chat check_rows",
    "data.sources": "find=find_rows open_rows",
    "data.table": "mapped=mapped_rows",
    "kwanzaa.augment": "Augment",
    "kwanzaa.prompt": "QARow read_rows",
    "kwanzaa.contract": "plain_reply",
    "kwanzaa.scores": "kind=kind_of_answer",
    "kwanzaa.statements": "labels=citation_labels",
    # a run
    "common.atomic_files": "damage",
    "common.console": "Aside",
    "common.errors": "Lost",
    "launch": "torchrun=launch_torchrun",
    "launch.job": "launch",
    "run.machines": "compare",
    "store.checkpoints": "Checkpoints",
    "trainer.training": "Share",
    # several processes
    "parallel": (
        "STRATEGIES context=context_parallel ddp ddp_tensor fsdp hybrid model=device_map "
        "pipeline=pipeline_parallel ring_collectives tensor=tensor_parallel timetable=timetables"
    ),
    "parallel.ddp_tensor": "average_gradients",
    "parallel.pipeline": "step=pipeline_step",
    "parallel.timetable": "Slot idle_share timetable",
    "parallel.tensor": "add_up_partial split=split_matrix",
    "processes": "world",
    # the course itself
    "": "models parallel",
    "course.drawing": "Sketch capacity figure ladder show",
    "course.notebook": "about check equal ask cria show_table reveal",
    "course.job": "CAPSTONE bill show_bill show_worth so_far",
    "course.measured": "on_a_gpu",
    "course.hybrid_demo": "over_the_cube",
    "course.processes": "Ranks",
}
"""Module -> the names that lessons take from it, ``OWN=HERE`` where this module has another name for it.

A module is imported when its name is first asked for, because all of them together take seconds.
"""
_PLACES = {
    word.rpartition("=")[2]: (f"cria_tricks.{module}".rstrip("."), word.partition("=")[0])
    for module, words in _NAMES.items()
    for word in words.split()
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'cria_tricks.course' has no attribute {name!r}")
    module, own = _PLACES[name]
    found = import_module(module)
    if not hasattr(found, own) and find_spec(f"{module}.{own}"):
        return import_module(f"{module}.{own}")
    return getattr(found, own)


def register_attention() -> None:
    """Register this package's kinds of attention, such as ``sdpa_expanded``, in transformers."""
    import_module("cria_tricks.load.attention")


peft_probes.ignore_unusable()  # because lessons call peft themselves
