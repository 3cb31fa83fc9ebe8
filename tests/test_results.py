"""Results: one schema, files that hold what the code makes of them, and their tables."""

import json
from pathlib import Path

import pytest

from cria_tricks.bench import results, tables
from cria_tricks.bench.results import Case
from cria_tricks.common.errors import BadInput

ROOT = Path(__file__).parents[1]
COMMITTED = results.read(results.COMMITTED)


def case(**changes) -> Case:
    values = {
        "bench": "nf4", "name": "on", "against": "off", "status": "ok", "settings": ["tricks.quantization=nf4"],
        "model": "random:tiny", "rows": 1, "tokens_per_row": 64, "tokens": 64, "trained_tokens": 47,
        "seconds": [0.5, 0.25, 1.0], "peak_allocated_bytes": 2**20, "estimated_bytes": 2**20 + 2**18,
        "attention_kernel": "flash", "date": "2026-11-21T00:00:00+00:00", "device": "NVIDIA H200 as T4", "kind": "cuda",
        "versions": {"torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.2", "bitsandbytes": "0.50.2"},
    }  # fmt: skip
    return Case(**values | changes)


OFF = case(name="off", against="", settings=[], seconds=[0.25], peak_allocated_bytes=2**22)


def test_a_case_is_the_same_after_its_file(tmp_path):
    path = results.write(case(), tmp_path)
    assert path == tmp_path / "h200-as-t4" / "nf4.on.json"
    assert results.read(tmp_path) == [case()]
    found = json.loads(path.read_text())
    assert (found["median_seconds"], found["tokens_per_second"], found["trained_tokens_per_second"]) == (0.5, 128, 94)


def test_any_cpu_has_one_folder_and_a_card_its_own():
    assert results.folder_of("cpu", "Intel Xeon, 2 cores") == "cpu"
    assert results.folder_of("cuda", "Tesla T4") == "tesla-t4"
    assert results.folder_of("cuda", "NVIDIA H200") == "h200"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds no cases of ours"),
        ('{"benchmarks": []}', "holds no cases of ours"),
        ('{"cria_tricks": [3]}', "case 1: the file: Input should be a valid dictionary"),
        ('{"cria_tricks": [{"bench": "nf4"}]}', "case 1: name: Field required"),
    ],
)
def test_a_file_that_is_no_run_is_told_in_one_line(tmp_path, text, says):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=says):
        results.read_cases(path)


def test_a_study_is_no_case(tmp_path):
    results.write(case(), tmp_path)
    for name in ("gpu_error_llama-3.1-8b", "ladder"):
        (tmp_path / "h200-as-t4" / f"{name}.json").write_text('{"cases": {}}')
    assert results.read(tmp_path) == [case()]
    assert results.study("ladder", tmp_path) == {"cases": {}}
    assert results.study("frontier", tmp_path) is None


def test_the_table_of_learning_rates_marks_the_best_of_each_rank():
    runs = [(0, 1e-4, 0.4), (0, 2e-4, 0.3), (16, 2e-4, 0.6), (16, 2e-3, 0.5)]
    made = [{"rank": rank, "rate": rate, "eval_loss_after": loss} for rank, rate, loss in runs]
    assert tables.rates(made).splitlines() == [
        "| trained | 0.0001 | 0.0002 | 0.002 |",
        "|---|---|---|---|",
        "| full fine-tuning | 0.400 | **0.300** |  |",
        "| LoRA, r = 16 |  | 0.600 | **0.500** |",
    ]


def test_a_case_without_a_baseline_comes_first_and_the_others_name_theirs():
    text = tables.tricks([case(), case(name="off", against="")])
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines() if "nf4" in line]
    assert [(name, than) for name, _, than in cells] == [("`nf4` off", ""), ("`nf4` on", "off")]


def test_a_field_that_nobody_knows_is_refused(tmp_path):
    path = results.write(case(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"speed": 3}))
    with pytest.raises(BadInput, match=r"nf4\.on\.json: speed: Extra inputs"):
        results.read(tmp_path)


def test_what_was_refused_or_ran_out_has_its_row():
    text = tables.tricks([case(status="refused", why="tricks.attention: no flash-attn", seconds=[], tokens=None)])
    assert "| `nf4` on | refused: tricks.attention: no flash-attn |" in text


@pytest.mark.skipif(not COMMITTED, reason="no case is committed")
def test_a_committed_trick_and_its_baseline_trained_the_same_tokens():
    for one, other in tables.against(COMMITTED):
        assert (one.trained_tokens, one.rows, one.model) == (other.trained_tokens, other.rows, other.model), one.name
        assert one.settings != other.settings or one.bench in ("flash_decoding", "peers"), one.name
