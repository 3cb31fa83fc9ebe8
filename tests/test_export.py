"""A GGUF file holds the model that it was written from, and a wrong file is found before it gets its name."""

import json
import math
import re
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from cria_tricks.adapter import export as exporting
from cria_tricks.adapter.export import export, modelfile, ollama_template
from cria_tricks.adapter.folder import save, verify
from cria_tricks.common.errors import BadInput
from cria_tricks.data.sources import CONTRACT
from cria_tricks.data.tokens import DATE
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Data
from tests.helpers import prepare

TOKENS, ROWS = 1024, 1032  # SmolLM2's first tokens; eight rows of the embedding have no token
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": ROWS,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # so that the answers of drawn weights are no ties
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 3 writes it: BOS first, and a system turn with the date, which is there without a system message, too.
DATED = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}"
    "<|im_start|>system\nToday: {{ date_string }}\n\n{{ s }}<|im_end|>"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "smollm": {"pre": "smollm"},
    "llama3": {"pre": "llama-bpe", "bos": True, "template": DATED, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-5},
    "untied": {"tie_word_embeddings": False},
    "qwen2": {"kind": "qwen2", "pre": "qwen2"},
}


def small_tokenizer(full: Any, pre: str = "gpt-2", bos: bool = False, template: str | None = CHATML) -> Any:
    """SmolLM2's tokenizer, cut to its first tokens: with all of them, reading a GGUF file takes ten times as long."""
    parts = json.loads(full.backend_tokenizer.to_str())
    model = parts["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < TOKENS}
    model["merges"] = model["merges"][: TOKENS - 252]  # 17 control tokens and 235 bytes come from no merge
    model["ignore_merges"] = pre in exporting.WHOLE_WORDS_FIRST
    parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": exporting.PRE[pre]}
    if bos:
        one = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        about = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
        first = {"Sequence": {"id": "A", "type_id": 0}}
        parts["post_processor"] |= {"single": [one, first], "special_tokens": about}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)),
        bos_token="<|endoftext|>" if bos else "<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=template,
    )


def make(folder: Path, full: Any, kind: str = "llama", **changes: Any) -> Path:
    """Save a small model of drawn weights in bf16, with a tokenizer."""
    words = {name: changes.pop(name) for name in ("pre", "bos", "template") if name in changes}
    shape = SHAPE | {"tie_word_embeddings": True} | changes
    torch.manual_seed(1)
    if kind == "qwen2":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    for weight in model.parameters():  # or norms would be ones and biases zeros
        if weight.dim() == 1:
            weight.data += 0.1 * torch.randn(weight.shape)
    model.to(torch.bfloat16).save_pretrained(folder)
    small_tokenizer(full, **words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory) -> dict[str, Path]:
    """A folder with a model of each variant."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make(folder / name / "model", tokenizer, **changes) for name, changes in VARIANTS.items()}


@pytest.fixture(scope="module")
def exported(folders) -> dict[str, dict[str, Any]]:
    """What the export of each variant said; its files lie in ``gguf`` beside the model."""
    return {name: export(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_type_of_every_architecture_is_proven(name, exported):
    found = exported[name]
    f16, q8 = found["files"]
    assert [file["type"] for file in found["files"]] == ["f16", "q8_0"]
    assert f16["tokens"] == q8["tokens"] > 100
    assert f16["largest_difference"] < 1e-3 < q8["largest_difference"]
    assert f16["kl"] < q8["kl"]
    assert f16["bytes"] > q8["bytes"]
    assert json.loads(Path(found["folder"], "export.json").read_text()) == found
    verify(found["folder"])


def tensors(found: dict[str, Any], kind: str) -> dict[str, Any]:
    reader = gguf.GGUFReader(Path(found["folder"]) / f"model-{kind}.gguf")
    return {tensor.name: tensor for tensor in reader.tensors}


def field(found: dict[str, Any], name: str, kind: str = "f16") -> Any:
    return gguf.GGUFReader(Path(found["folder"]) / f"model-{kind}.gguf").fields[name].contents()


def test_rows_of_queries_and_keys_stand_in_pairs(exported, folders):
    """Held against the order itself: in each head row 0, then the one that transformers rotates it with, and so on."""
    stored = load_file(folders["llama"] / "model.safetensors")
    found = tensors(exported["llama"], "f16")
    order = [0, 16, 1, 17, 2, 18]
    for name, target in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        weight = stored[f"model.layers.1.self_attn.{name}.weight"].float().numpy()
        rows = found[f"blk.1.{target}.weight"].data.astype(np.float32)
        assert np.abs(rows[:6] - weight[order]).max() < 1e-6
        assert np.abs(rows[32:38] - weight[[32 + row for row in order]]).max() < 1e-6
    plain = load_file(folders["qwen2"] / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    rows = tensors(exported["qwen2"], "f16")["blk.1.attn_q.weight"].data.astype(np.float32)
    assert np.abs(rows - plain.float().numpy()).max() < 1e-6, "Qwen2 is rotated as in transformers"


def test_norms_and_biases_stay_in_fp32_and_a_tied_head_is_the_embedding(exported):
    kinds = {name: Kind(tensor.tensor_type) for name, tensor in tensors(exported["untied"], "q8_0").items()}
    assert kinds["token_embd.weight"] == kinds["output.weight"] == Kind.Q8_0
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == Kind.F32
    assert "output.weight" not in tensors(exported["llama"], "q8_0")
    assert Kind(tensors(exported["qwen2"], "q8_0")["blk.0.attn_q.bias"].tensor_type) == Kind.F32
    assert exporting._packing(torch.zeros(8, 33), "q8_0") == Kind.F16, "its rows cannot be cut into blocks of 32"


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1.0, 100.0])
def test_a_weight_of_8_bits_is_off_by_half_a_step_of_its_neighbours(size):
    """Of gguf's own quantiser, on which the proof relies: 32 neighbours share a scale, the largest over 127."""
    weight = size * torch.randn(512, 128, generator=torch.Generator().manual_seed(3))
    again = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), Kind.Q8_0), Kind.Q8_0).copy())
    scale = weight.reshape(-1, 32).abs().amax(-1, keepdim=True) / 127
    scale_is_rounded = 127 * (scale * 2**-11).clamp_min(2**-25)
    limit = 1.001 * (scale / 2 + scale_is_rounded)
    assert ((again - weight).reshape(-1, 32).abs() <= limit).all()


def test_the_factors_of_llama_3_are_those_of_its_paper_code(exported):
    """Long waves are divided by 32, short ones by nothing, those between by something between."""
    found = tensors(exported["llama3"], "q8_0")["rope_freqs.weight"].data
    wanted = []
    for number in range(16):
        wave = 2 * math.pi * 500000 ** (2 * number / 32)
        smooth = min(max((64 / wave - 1) / (4 - 1), 0), 1)
        wanted.append(1 / ((1 - smooth) / 32 + smooth))
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)
    assert found[0] == 1
    assert found[-1] == pytest.approx(32)
    assert "rope_freqs.weight" not in tensors(exported["llama"], "f16")


def test_special_tokens_and_the_way_of_splitting_are_in_the_file(exported):
    found = exported["llama3"]
    assert field(found, "tokenizer.ggml.pre") == "llama-bpe"
    assert field(found, "tokenizer.ggml.bos_token_id") == 0
    assert field(found, "tokenizer.ggml.eos_token_id") == field(found, "tokenizer.ggml.eot_token_id") == 2
    assert field(found, "tokenizer.ggml.add_bos_token") is True
    assert field(found, "tokenizer.chat_template") == DATED
    plain = exported["smollm"]
    assert field(plain, "tokenizer.ggml.pre") == "smollm"
    assert field(plain, "tokenizer.ggml.add_bos_token") is False
    tokens = field(plain, "tokenizer.ggml.tokens")
    kinds = field(plain, "tokenizer.ggml.token_type")
    assert len(tokens) == len(kinds) == ROWS
    assert (tokens[2], kinds[2]) == ("<|im_end|>", gguf.TokenType.CONTROL)
    assert (tokens[TOKENS], kinds[TOKENS]) == ("[PAD1024]", gguf.TokenType.UNUSED)
    assert kinds[100] == gguf.TokenType.NORMAL


def broken(name: str, instead: Any) -> tuple[Any, str, Any]:
    """A method of the writer that calls ``instead`` with the honest one."""
    honest = getattr(gguf.GGUFWriter, name)
    return gguf.GGUFWriter, name, lambda self, *given: instead(honest, self, *given)


UNORDERED = (exporting, "_permuted", lambda weight, name, config: weight)
LOST = (exporting, "_rope_factors", lambda config, width: torch.ones(width // 2))
ROWS_DIFFER = "q_proj.weight read again is not the model's, rounded to"
CUTS = "its tokenizer cuts a prompt into other tokens than the model's"
BASE = broken("add_rope_freq_base", lambda honest, self, base: self.add_float32("llama.rope.freq_base", 9e3))
MERGES = broken("add_token_merges", lambda honest, self, merges: honest(self, merges[:-500]))
SPLIT = broken("add_tokenizer_pre", lambda honest, self, pre: honest(self, "gpt-2"))
TEMPLATE = broken("add_chat_template", lambda honest, self, text: self.add_string("tokenizer.chat_template", "x"))
END = broken("add_uint32", lambda honest, self, key, number: honest(self, key, number + ("eos" in key)))


@pytest.mark.parametrize(
    ("name", "kind", "part", "said"),
    [
        ("llama", "f16", UNORDERED, ROWS_DIFFER),
        ("llama", "q8_0", UNORDERED, ROWS_DIFFER),
        ("llama3", "q8_0", LOST, "its settings are wrong"),
        ("llama", "q8_0", BASE, "its settings are wrong"),  # below the noise of 8 bits
        ("llama", "q8_0", MERGES, CUTS),
        ("smollm", "q8_0", SPLIT, CUTS),
        ("llama", "q8_0", TEMPLATE, "tokenizer.chat_template in it is not the model's"),
        ("llama", "q8_0", END, "tokenizer.ggml.eos_token_id in it is not the model's"),
    ],
)
def test_what_is_broken_is_found_in_one_line_and_nothing_is_left(
    name, kind, part, said, folders, tmp_path, monkeypatch
):
    monkeypatch.setattr(*part)
    with pytest.raises(BadInput, match=said) as caught:
        export(folders[name], kinds=[kind], out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# What cannot be written, and what is said of it.


def changed(folders: dict[str, Path], tmp_path: Path, **fields: Any) -> Path:
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "changed"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "gemma"}, "is of the kind gemma, which is not written as GGUF here"),
        ({"rope_parameters": LINEAR}, "has rope_type=linear"),
        ({"hidden_act": "gelu"}, "has hidden_act=gelu"),
        ({"attention_bias": True}, "has attention_bias=True"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "is quantised already"),
    ],
)  # fmt: skip
def test_another_model_is_refused_with_what_to_do(fields, said, folders, run_cria, tmp_path):
    code, stdout, stderr = run_cria("export", changed(folders, tmp_path, **fields))
    assert (code, stdout) == (2, "")
    assert said in stderr.splitlines()[-1]
    assert "convert_hf_to_gguf.py" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["changed"]


def test_another_tokenizer_is_refused(tokenizer, folders, tmp_path):
    honest = small_tokenizer(tokenizer)
    assert exporting._pre(honest) == "gpt-2"
    for change in (
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    ):
        parts = json.loads(honest.backend_tokenizer.to_str()) | change
        other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(parts)))
        assert exporting._pre(other) == ""
    honest.backend_tokenizer.model.ignore_merges = True
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    honest.save_pretrained(folder)
    with pytest.raises(BadInput, match="has a tokenizer that is no byte-level BPE like gpt-2, smollm.*convert_hf_to"):
        export(folder)
    large = small_tokenizer(tokenizer)
    large.add_tokens([f"<more{number}>" for number in range(ROWS)])
    large.save_pretrained(folder)
    with pytest.raises(BadInput, match="its tokenizer gives token 2055, and its vocabulary has 1032"):
        export(folder)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--type", "q4_0"), "--type q4_0: there are f16 and q8_0; ollama create --quantize makes others of f16"),
        (("--out", "."), "--out .: is there already; name a new folder"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(words, said, folders, run_cria):
    code, stdout, stderr = run_cria("export", folders["llama"], *words)
    assert (code, stdout) == (2, "")
    assert said in stderr.splitlines()[-1]


# An adapter, and the command.


def test_a_merged_model_is_exported_and_an_adapter_is_to_be_merged_first(folders, tokenizer, run_cria, tmp_path):
    """The adapter's numbers are drawn, over the small llama."""
    _, _, loaded = prepare(folders["llama"], "tricks.peft=lora", "lora.r=4")
    draw = torch.Generator().manual_seed(0)
    for name, parameter in loaded.model.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    run, words = tmp_path / "run", small_tokenizer(tokenizer)
    recipe = Recipe(name="drawn", data=Data(contract=True))
    save(run / "adapter", loaded.model, words, str(folders["llama"]), "# card\n", recipe)
    code, stdout, stderr = run_cria("export", run / "adapter")
    assert (code, stdout) == (2, "")
    assert "adapter: is an adapter; cria merge writes a whole model of a LoRA adapter, so export that" in stderr
    assert run_cria("merge", run / "adapter")[0] == 0
    code, stdout, stderr = run_cria("export", run / "merged", "--type", "q8_0", "--type", "Q8_0", "--json")
    assert code == 0, stderr
    found = json.loads(stdout)
    assert [file["file"] for file in found["files"]] == ["model-q8_0.gguf"]
    assert found["model"] == str(run / "merged")
    names = sorted(path.name for path in (run / "gguf").iterdir())
    assert names == ["Modelfile", "export.json", "manifest.json", "model-q8_0.gguf"]
    assert field(found, "general.name", "q8_0") == "run/merged"
    written = (run / "gguf" / "Modelfile").read_text()
    assert f'\nSYSTEM """{CONTRACT}"""\n' in written, "the system message of the training rows"
    code, stdout, stderr = run_cria("export", run / "merged", "--type", "f16", "--out", tmp_path / "again")
    assert code == 0, stderr
    assert re.search(r"^f16 +\d.* 100.0%", stdout, re.M), "one line, with no cell cut at 80 columns"
    assert "writing model-f16.gguf" in stderr


# The Modelfile.


def test_the_modelfile_of_a_chat_template_with_a_default_system_message(exported):
    assert Path(exported["llama"]["folder"], "Modelfile").read_text() == (
        "FROM ./model-q8_0.gguf\n"
        'TEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n<|im_start|>user\n{{ else }}'
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n{{ end }}"
        "{{ range $i, $m := .Messages }}"
        '{{ if eq $m.Role "user" }}{{ $m.Content }}<|im_end|>\n<|im_start|>assistant\n'
        '{{ else if eq $m.Role "assistant" }}{{ $m.Content }}<|im_end|>\n<|im_start|>user\n{{ end }}{{ end }}"""\n'
        'PARAMETER stop "<|im_end|>"\n'
        "PARAMETER temperature 0\n"
    )


def test_the_modelfile_leaves_out_a_bos_token_that_llama_cpp_adds(exported):
    text = Path(exported["llama3"]["folder"], "Modelfile").read_text()
    assert f'TEMPLATE """{{{{ if .System }}}}<|im_start|>system\nToday: {DATE}\n\n{{{{ .System }}}}<|im_end|>' in text
    assert f"{{{{ else }}}}<|im_start|>system\nToday: {DATE}\n\n<|im_end|><|im_start|>user\n\n{{{{ end }}}}" in text
    assert "<|endoftext|>" not in text
    assert "\nSYSTEM" not in text


def ollamas(template: str, messages: list[dict[str, str]]) -> str:
    """Write a conversation as Go's engine does with a template of these signs."""
    system, _, loop = template.partition("{{ range $i, $m := .Messages }}")
    with_system, _, without = system.removeprefix("{{ if .System }}").removesuffix("{{ end }}").partition("{{ else }}")
    user, _, answer = loop.removesuffix("{{ end }}{{ end }}").partition('{{ else if eq $m.Role "assistant" }}')
    turns = {"user": user.removeprefix('{{ if eq $m.Role "user" }}'), "assistant": answer, "system": ""}
    said = next((message["content"] for message in messages if message["role"] == "system"), "")
    text = with_system.replace("{{ .System }}", said) if said else without
    return text + "".join(turns[m["role"]].replace("{{ $m.Content }}", m["content"]) for m in messages)


def test_the_template_writes_what_jinja_writes(tokenizer):
    talk = [
        {"role": "system", "content": "Answer in verse."},
        {"role": "user", "content": "What is ujima?"},
        {"role": "assistant", "content": "Work."},
        {"role": "user", "content": "And?"},
    ]
    for template in (CHATML, DATED, tokenizer.chat_template):
        found = small_tokenizer(tokenizer, template=template)
        for messages in (talk, talk[1:], talk[1:2]):
            wanted = found.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, date_string=DATE)
            assert ollamas(ollama_template(found), messages) == wanted


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}: {{ m['content'] }}\n{% endfor %}",  # no fixed pieces
        "{{ raise_exception('no') }}",
        CHATML.replace("<|im_start|>{{ m", "<|im_start|>{{ '{{' }}{{ m"),  # Ollama would read it as its own sign
    ],
)
def test_a_template_that_is_not_made_of_pieces_is_left_out_with_a_note(template, tokenizer):
    assert ollama_template(small_tokenizer(tokenizer, template=template)) == ""
    text = modelfile("a.gguf", "", ["</s>"])
    assert "TEMPLATE" not in text.replace("write a TEMPLATE by hand", "")
    assert "# The chat template is not made of fixed pieces" in text


# llama.cpp itself, where the package xllamacpp is installed: `pip install --no-deps xllamacpp`.


class Server:
    """llama.cpp's server over one file."""

    def __init__(self, file: Path):
        xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install --no-deps xllamacpp")
        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx = 512
        settings.n_parallel = 1
        settings.cpuparams.n_threads = 1
        settings.warmup = False
        self.server = xllamacpp.Server(settings)

    def ask(self, path: str, **body: Any) -> Any:
        head = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self.server.listening_address + path, json.dumps(body).encode(), head)
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)


NEAR = 0.05
"""How far a log probability of llama.cpp may be from ours: it computes in 16 bits, and 0.02 is what was seen."""


def conversation(name: str, full: Any) -> tuple[Any, list[int]]:
    """The tokenizer of a variant, and a prompt of its chat template."""
    words = {key: value for key, value in VARIANTS[name].items() if key in ("pre", "bos", "template")}
    ours = small_tokenizer(full, **words)
    messages = [{"role": "user", "content": exporting.HARD.strip()}]
    return ours, ours.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, date_string=DATE)


def distance(server: Server, folder: Path, prompt: list[int]) -> tuple[float, int]:
    """Answer 24 tokens greedily, and compare the five most likely tokens of llama.cpp at each with our probabilities.

    Returns:
        The largest difference of a log probability, and at how many tokens llama.cpp would choose another one although
        ours is ahead by more than twice the difference that is allowed.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=2)
    with torch.no_grad():
        ours = model(ids).logits[0].log_softmax(-1)
    largest = 0.0
    others = 0
    compared = 0
    for end in range(len(prompt), ids.shape[1]):
        said = server.ask("/completion", prompt=ids[0, :end].tolist(), n_predict=1, temperature=0, n_probs=5)
        if not said.get("completion_probabilities"):
            continue  # llama.cpp holds back a token that is only a part of a letter, such as one byte of an accent
        compared += 1
        theirs = {token["id"]: token["logprob"] for token in said["completion_probabilities"][0]["top_logprobs"]}
        wanted = ours[end - 1]
        largest = max(largest, *(abs(logprob - wanted[token].item()) for token, logprob in theirs.items()))
        first, second = wanted.topk(2).values.tolist()
        best = max(theirs, key=lambda token: theirs[token])
        others += best != wanted.argmax().item() and first - second > 2 * NEAR
    assert compared >= 8
    return largest, others


@pytest.mark.parametrize("name", VARIANTS)
def test_llama_cpp_reads_the_same_tokens_and_answers_alike(name, exported, folders, tokenizer):
    server = Server(Path(exported[name]["folder"]) / "model-f16.gguf")
    ours, prompt = conversation(name, tokenizer)
    for text in (exporting.HARD, "It's 1966,  and\n 12345 are\tthere."):
        found = server.ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        assert found == ours(text)["input_ids"]
    messages = [{"role": "user", "content": "Say it."}]
    # Without this setting llama.cpp writes today's date, and training wrote another.
    date = {"date_string": DATE}
    written = server.ask("/apply-template", messages=messages, chat_template_kwargs=date)["prompt"]
    wanted = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **date)
    assert written == wanted.removeprefix("<|endoftext|>"), "llama.cpp adds the BOS token itself"
    said = server.ask("/v1/chat/completions", messages=messages, max_tokens=1, chat_template_kwargs=date)
    assert said["usage"]["prompt_tokens"] == len(ours(wanted, add_special_tokens=False)["input_ids"])
    largest, others = distance(server, folders[name], prompt)
    print(f"{name}: log probabilities of llama.cpp differ by up to {largest:.3f}")
    assert largest < NEAR
    assert others == 0


@pytest.mark.parametrize(("name", "part"), [("llama", UNORDERED), ("llama3", LOST)])
def test_llama_cpp_reads_what_the_proof_reads(name, part, folders, tokenizer, tmp_path, monkeypatch):
    """Without the right order of rows, or without the factors, llama.cpp's answers are others as well."""
    monkeypatch.setattr(*part)
    monkeypatch.setattr(exporting, "_prove", lambda *given: {})
    export(folders[name], kinds=["f16"], out=tmp_path / "out")
    _, prompt = conversation(name, tokenizer)
    largest, _ = distance(Server(tmp_path / "out" / "model-f16.gguf"), folders[name], prompt)
    print(f"{name} without {part[1]}: log probabilities of llama.cpp differ by up to {largest:.3f}")
    assert largest > 2 * NEAR
