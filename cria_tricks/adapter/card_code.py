"""Write the Python code of a model card, which loads the model and asks it."""

import json
from collections.abc import Mapping

from cria_tricks.recipe import Recipe
from cria_tricks.settings import Tricks

HERE = "path/to/this/folder"
"""The path that the card's code gives for the folder; a reader replaces it."""


def load(base: str, note: str, recipe: Recipe) -> str:
    """Return the Python code of the card that loads model and tokenizer."""
    tricks = recipe.tricks
    if tricks.peft == "side_network":
        return f'from cria_tricks.adapter.opening import open_folder\n\nmodel, tokenizer = open_folder("{HERE}")\n'
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")\n'
    if tricks.peft == "none":
        return (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{HERE}")\n{tokenizer}'
        )
    config = chosen = ""
    imports = ["AutoModelForCausalLM", "AutoTokenizer"]
    if tricks.quantization != "none":
        imports.append("BitsAndBytesConfig")
        config = "# It was trained over quantised matrices. Over the base as it was published its loss is another.\n"
        config += f"rounded = BitsAndBytesConfig({_bits(tricks)})\n"
        chosen = ", quantization_config=rounded"
    models = ""
    place = json.dumps(base)
    if base.startswith("random:"):  # only this package can make these weights
        models = "from cria_tricks import models\n"
        place = f'models.find("{base}").path'
    if note:
        config += "# These are not exactly the weights that it was trained over: see above.\n"
    return (
        f"{models}from peft import PeftModel\n"
        f"from transformers import {', '.join(imports)}\n\n{config}"
        f"base = AutoModelForCausalLM.from_pretrained({place}{chosen})\n"
        f'model = PeftModel.from_pretrained(base, "{HERE}")\n{tokenizer}'
    )


def ask(kinds: Mapping[str, int]) -> str:
    """Return the Python code of the card that asks for an answer, in the prompt format of the training rows."""
    if kinds.get("chat"):
        prompt = (
            'messages = [{"role": "user", "content": "Your question"}]\n'
            "prompt = tokenizer.apply_chat_template(\n"
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)'
        )
    else:
        prompt = 'prompt = tokenizer("The text to go on with", return_tensors="pt")'
        if kinds:
            prompt = f"# It was trained on text as it is, without a chat template.\n{prompt}"
    return (
        f"\n{prompt}\n"
        "out = model.generate(**prompt.to(model.device), max_new_tokens=200, do_sample=False)\n"
        'print(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))'
    )


def _bits(tricks: Tricks) -> str:
    """Return the arguments of ``BitsAndBytesConfig``, as code."""
    if tricks.quantization == "int8":
        return "load_in_8bit=True"
    twice = ", bnb_4bit_use_double_quant=True" if tricks.double_quantization else ""
    return f'load_in_4bit=True, bnb_4bit_quant_type="{tricks.quantization}"{twice}'
