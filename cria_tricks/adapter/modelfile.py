"""Write an Ollama Modelfile: the chat template in Ollama's language, the system message, and the stop tokens.

Ollama does not run the Jinja template of a GGUF file. It recognises some common ones; for others it would give the
model a prompt that it was not trained on, without an error. So the pieces between the messages are read off from
conversations that the Jinja template writes, and are compared with it on other ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cria_tricks.data.tokens import DATE

PLAIN = "{{ .Prompt }}"
"""The template of a model that gets each text as it is."""
SYSTEM, USER, ANSWER, LAST = "SYSTEM-7", "USER-7", "ANSWER-7", "LAST-7"
"""Messages that no template contains. They mark where a message goes."""
ROLES = {"s": "system", "u": "user", "a": "assistant"}
TRIED = ("u", "su", "uau", "suauau")
"""The conversations on which the pieces are compared with the Jinja template, by the roles of their messages."""


def template(tokenizer: Any, bos: bool) -> str:
    """Return the chat template in Ollama's language, which is that of Go.

    Args:
        tokenizer: transformers' tokenizer, with a chat template.
        bos: whether llama.cpp puts the BOS token before every prompt; then it is left out of the template, because
            two of them would be another prompt than in training.

    Returns:
        The template; empty if the Jinja template is not made of fixed pieces.
    """

    def jinja(messages: Sequence[Mapping[str, str]]) -> str:
        # Some templates write today's date. The Modelfile has the date that was in the training rows.
        written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, date_string=DATE)
        return written.removeprefix(tokenizer.bos_token) if bos else written

    marks = zip("suau", (SYSTEM, USER, ANSWER, LAST), strict=True)
    whole = [{"role": ROLES[role], "content": mark} for role, mark in marks]
    try:
        before_system, _, rest = jinja(whole).partition(SYSTEM)
        after_system, _, rest = rest.partition(USER)
        after_user, _, rest = rest.partition(ANSWER)
        after_answer = rest.partition(LAST)[0]
        without_system = jinja(whole[1:2]).partition(USER)[0]
        for roles in TRIED:
            messages = [{"role": ROLES[role], "content": f"Say {n}, please."} for n, role in enumerate(roles)]
            text = without_system
            for message in messages:
                content = message["content"]
                if message["role"] == "system":
                    text = before_system + content + after_system
                else:
                    text += content + (after_user if message["role"] == "user" else after_answer)
            if text != jinja(messages):
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


def write(file: str, ollamas: str, stops: Sequence[str], system: str | None = None) -> str:
    """Return the text of a Modelfile.

    Args:
        file: the name of the GGUF file beside it.
        ollamas: the template in Ollama's language; empty if there is none.
        stops: the tokens that end an answer.
        system: the system message that every training row had, if the template is to write it by default.
    """
    lines = [f"FROM ./{file}"]
    if ollamas:
        lines.append(f'TEMPLATE """{ollamas}"""')
    else:
        lines.append(
            "# The chat template is not made of fixed pieces: write a TEMPLATE by hand, or Ollama guesses one."
        )
    if system:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    # Greedy decoding, as in ``cria chat``: the same question gets the same answer.
    lines.append("PARAMETER temperature 0")
    return "\n".join(lines) + "\n"
