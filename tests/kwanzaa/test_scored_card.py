"""The scores of an evaluation in an adapter's card: the verdict, the table, and what the hub reads of it."""

import json

import pytest
import yaml

from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter.model_card import NOT_SCORED
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput
from cria_tricks.kwanzaa.card import BEGIN, END, scored_card, verdict, write_scores
from tests.test_cli import ROWS

CARD = f"""---
library_name: peft
license: apache-2.0
tags:
- cria_tricks
---
# tiny

Losses.{NOT_SCORED}

## Use

Nothing.
"""


def score(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


@pytest.fixture
def found() -> dict:
    adapter = {"format": score(0.9, 0.8, 0.95), "citations": score(0.5, 0.4, 0.6), "refusal": score(0.7, 0.6, 0.8)}
    base = {"format": score(0.1, 0.0, 0.2), "citations": score(0.6, 0.5, 0.7), "refusal": score(0.7, 0.6, 0.8)}
    kinds = {name: {"rows": 32, "systems": {"adapter": adapter, "base": base}} for name in ("answer", "refusal")}
    return {
        "data": "made rows",
        "rows": 64,
        "systems": {"adapter": adapter, "base": base},
        "kinds": kinds,
        "differences": {
            "format": score(0.8, 0.7, 0.9),
            "citations": score(-0.1, -0.2, -0.01),
            "refusal": score(0, -0.1, 0.1),
        },
    }


def test_the_verdict_tells_better_worse_and_no_difference(found):
    assert verdict(found) == (
        "On 64 rows (made rows) the adapter is better than its base in format compliance; it is worse than its base "
        "in citation accuracy (F1); it shows no difference from its base beyond chance in refusal accuracy."
    )
    plain = {**found, "differences": {"loss": score(-1, -2, -0.5)}}
    assert verdict(plain) == "On 64 rows (made rows) the adapter is better than its base in loss."
    assert "scored without its base" in verdict({**found, "differences": {}})


def test_a_card_gets_its_scores_once_however_often_they_are_written(found):
    once = scored_card(CARD, [found])
    assert scored_card(once, [found]) == once
    assert NOT_SCORED not in once
    assert once.index(verdict(found)) < once.index("| score |") < once.index(END) < once.index("## Use")
    assert once.count(BEGIN) == once.count("## Scores") == 1
    assert "| refusal, 32 | format compliance | 0.900 [0.800, 0.950] | 0.100 [0.000, 0.200] |  |" in once
    about = yaml.safe_load(once.split("---")[1])
    assert about["tags"] == ["cria_tricks"]
    (model,) = about["model-index"]
    (result,) = model["results"]
    assert (model["name"], result["dataset"]["name"]) == ("tiny", "made rows")
    values = {metric["type"]: (metric["value"], metric["args"]) for metric in result["metrics"]}
    assert values["format"] == (0.9, {"low": 0.8, "high": 0.95, "rows": 64})
    assert set(values) == {"format", "citations", "refusal"}
    two = scored_card(once, [found, {**found, "data": "others"}])
    assert len(yaml.safe_load(two.split("---")[1])["model-index"][0]["results"]) == 2


def test_cria_card_writes_into_a_whole_folder_and_refuses_the_evaluation_of_another(run_cria, trained, tmp_path):
    import shutil

    adapter = tmp_path / "adapter"
    shutil.copytree(trained / "adapter", adapter)
    code, _, stderr = run_cria("card", adapter)
    assert (code, stderr) == (2, f"error: {tmp_path}/eval/eval.json: is no evaluation of an adapter; make one: cria "
                                 f"eval {adapter} --with-base\n")  # fmt: skip
    short = ["--data", ROWS, "--limit", 2, "--max-new-tokens", 4, "--with-base"]
    assert run_cria("eval", adapter, *short)[0] == 0
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    code, stdout, stderr = run_cria("card", adapter, "--json")
    assert code == 0, stderr
    said = json.loads(stdout)
    assert said["verdict"] in (adapter / "README.md").read_text()
    assert artifact.verify(adapter)["files"]
    assert (adapter / "adapter_model.safetensors").read_bytes() == weights
    assert run_cria("eval", adapter, *short)[0] == 0, "the card is no part of what made the answers"
    config = adapter / "recipe.toml"
    config.write_text(config.read_text() + "\n")
    (adapter / "manifest.json").unlink()
    atomic_files.write_manifest(adapter)
    with pytest.raises(BadInput, match="is of another adapter"):
        write_scores(adapter)
