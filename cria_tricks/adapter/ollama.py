"""Write the Modelfile, which tells Ollama how to use a GGUF file: the prompt format, the system message, the stops.

Ollama does not run the Jinja template of a GGUF file. It recognises some common ones; for others it would give the
model a prompt that it was not trained on, without an error. So the pieces between the messages are read off from a
conversation that the Jinja template writes, are compared with it on other ones, and go into the Modelfile.
"""

from collections.abc import Sequence
from typing import Any

from cria_tricks.data.tokens import DATE

ROLES = {"s": "system", "u": "user", "a": "assistant"}
TRIED = ("u", "su", "uau", "suauau")
"""The conversations on which the pieces are compared with the Jinja template, by the roles of their messages."""


def adds_bos(tokenizer: Any) -> bool:
    """Tell whether the tokenizer puts the BOS token before a text."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def ollama_template(tokenizer: Any) -> str:
    """Return the chat template in Ollama's language, which is that of Go; empty if it is not made of fixed pieces."""
    # llama.cpp puts this token before every prompt, and two of them would be another prompt than in training.
    bos = tokenizer.bos_token if adds_bos(tokenizer) else ""

    def jinja(roles: str, *texts: str) -> str:
        messages = [{"role": ROLES[role], "content": text} for role, text in zip(roles, texts, strict=True)]
        # Some templates write today's date. The Modelfile has the date that was in the training rows.
        written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, date_string=DATE)
        return written.removeprefix(bos)

    try:
        # No template contains these words, so they mark where a message goes.
        before_system, _, rest = jinja("suau", "SYSTEM-7", "USER-7", "ANSWER-7", "LAST-7").partition("SYSTEM-7")
        after_system, _, rest = rest.partition("USER-7")
        after_user, _, rest = rest.partition("ANSWER-7")
        after_answer = rest.partition("LAST-7")[0]
        without_system = jinja("u", "USER-7").partition("USER-7")[0]
        for roles in TRIED:
            texts = [f"Say {number}, please." for number in range(len(roles))]
            found = without_system
            for role, text in zip(roles, texts, strict=True):
                if role == "s":
                    found = before_system + text + after_system
                else:
                    found += text + (after_user if role == "u" else after_answer)
            if found != jinja(roles, *texts):
                return ""
    except Exception:  # a template is a small program, and may refuse these conversations in its own words
        return ""
    pieces = (before_system, after_system, after_user, after_answer, without_system)
    if any("{{" in piece or '"""' in piece for piece in pieces):  # Ollama would read these as its own signs
        return ""
    system = "{{ if .System }}" + before_system + "{{ .System }}" + after_system
    user = '{{ if eq $m.Role "user" }}{{ $m.Content }}' + after_user
    answer = '{{ else if eq $m.Role "assistant" }}{{ $m.Content }}' + after_answer
    # Ollama joins all system messages in .System. They are in .Messages, too, so the loop leaves them out.
    loop = "{{ range $i, $m := .Messages }}" + user + answer + "{{ end }}{{ end }}"
    return system + "{{ else }}" + without_system + "{{ end }}" + loop


def modelfile(file: str, ollamas: str, stops: Sequence[str], system: str | None = None) -> str:
    """Return the text of a Modelfile for a GGUF file beside it; ``system`` is written where the user gives no other."""
    template = "# The chat template is not made of fixed pieces: write a TEMPLATE by hand, or Ollama guesses one."
    if ollamas:
        template = f'TEMPLATE """{ollamas}"""'
    lines = [f"FROM ./{file}", template]
    if system:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    # Greedy decoding, as in ``cria chat``: the same question gets the same answer.
    lines.append("PARAMETER temperature 0")
    return "\n".join(lines) + "\n"
