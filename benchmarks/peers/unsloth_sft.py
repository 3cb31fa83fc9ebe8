"""Unsloth on the same job, in a process of its own: importing it changes transformers, peft and TRL for good.

    python -m benchmarks.peers.unsloth_sft JOB.json     # what bench_peers.py runs where Unsloth is installed

JOB.json holds the folder of the base model, rows of token ids and labels, LoRA's and the trainer's settings. Standard
output gets one JSON document: seconds of each step but the first, tokens seen, and peak bytes of CUDA's allocator.
Switches are Unsloth's own best: 4 bits, its checkpointing, 8-bit AdamW. No machine of ours could run it yet.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def installed() -> bool:
    """Whether there is an Unsloth to measure, and a card for it."""
    return importlib.util.find_spec("unsloth") is not None and torch.cuda.is_available()


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in a new process.

    Raises:
        RuntimeError: with the last line of what it said, if it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.peers.unsloth_sft", str(path)],
            capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"Unsloth: {(done.stderr.strip().splitlines() or ['said nothing'])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train, in this process."""
    from unsloth import FastLanguageModel  # first: it changes what the next two give

    from datasets import Dataset  # isort: skip
    from transformers import TrainerCallback  # isort: skip
    from trl import SFTConfig, SFTTrainer  # isort: skip

    class Clock(TrainerCallback):
        ends: list[float] = []  # noqa: RUF012 (one clock)

        def on_step_end(self, args, state, control, **kwargs):
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=job["model"], max_seq_length=job["tokens"], load_in_4bit=True
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=job["lora"]["r"],
        lora_alpha=job["lora"]["alpha"],
        lora_dropout=job["lora"]["dropout"],
        target_modules=job["lora"]["target_modules"],
        use_gradient_checkpointing="unsloth",
        random_state=job["seed"],
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(job["rows"]),
            callbacks=[Clock()],
            args=SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=job["batch_size"],
                gradient_accumulation_steps=job["accumulation"],
                max_steps=job["steps"],
                learning_rate=job["learning_rate"],
                bf16=job["bf16"],  # TRL's default is true, on a T4 too
                fp16=not job["bf16"],
                optim="adamw_8bit",
                max_length=job["tokens"],
                packing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                seed=job["seed"],
            ),
        )
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    return {
        "seconds": [after - before for before, after in zip(Clock.ends, Clock.ends[1:], strict=False)],
        "tokens": trainer.state.log_history[-2]["num_tokens"],  # the last entry sums the run up
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


if __name__ == "__main__":
    print(json.dumps(train(json.loads(Path(sys.argv[1]).read_text()))))
