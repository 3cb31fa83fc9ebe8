"""Write an Ollama Modelfile: the chat template in Ollama's language, the system message, and the stop tokens.

Ollama does not run the Jinja template of a GGUF file. It recognises some common ones; for others it would give the
model a prompt that it was not trained on, without an error. So the Modelfile says how a conversation is written. The
pieces between the messages are read off from conversations that the Jinja template writes itself, and the result is
compared with it on other conversations. A template that is not made of such pieces is left out, with a note.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cria_tricks.data.tokens import DATE

SYSTEM, USER, ANSWER, LAST = "SYSTEM-7", "USER-7", "ANSWER-7", "LAST-7"
"""Messages that no template contains. They mark where a message goes."""
TRIED: tuple[tuple[str, ...], ...] = (("u",), ("s", "u"), ("u", "a", "u"), ("s", "u", "a", "u", "a", "u"))
"""The conversations on which the pieces are compared with the Jinja template."""
ROLES = {"s": "system", "u": "user", "a": "assistant"}


@dataclass(frozen=True)
class Pieces:
    """What a chat template writes around messages.

    Attributes:
        system: before and after the system message.
        user: before and after a user's message.
        assistant: before and after an assistant's message; the part before it also ends the prompt.
        default: the system message that the template writes if the conversation has none.
        always: whether the part around the system message is written even if that message is empty.
    """

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    default: str
    always: bool

    def write(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Write a conversation as the Modelfile's template does, up to the assistant's next turn."""
        system = self.default
        turns = ""
        for message in messages:
            content = message["content"]
            if message["role"] == "system":
                system = content
            elif message["role"] == "user":
                turns += content.join(self.user)
            else:
                turns += content.join(self.assistant)
        start = ""
        if system or self.always:
            start = system.join(self.system)
        return start + turns + self.assistant[0]


def pieces(tokenizer: Any, bos: bool) -> Pieces | None:
    """Read off what a chat template writes around messages.

    Args:
        tokenizer: transformers' tokenizer.
        bos: whether llama.cpp puts the BOS token before every prompt; then it is left out of the template, because
            two of them would be another prompt than in training.

    Returns:
        The pieces; ``None`` if there is no chat template, or it cannot be put together from such pieces.
    """
    if tokenizer.chat_template is None:
        return None
    start = ""
    if bos:
        start = tokenizer.bos_token

    def jinja(*messages: Mapping[str, str], prompt: bool = True) -> str:
        # Some templates write today's date. The Modelfile has the date that was in the training rows.
        written = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, date_string=DATE
        )
        return written.removeprefix(start)

    try:
        found = _read_off(jinja)
        fits = all(_same(jinja, found, conversation) for conversation in TRIED)
    except Exception:  # a template is a small program, and may refuse these conversations in its own words
        return None
    text = "".join((*found.system, *found.user, *found.assistant, found.default))
    # Ollama would read these as its own signs.
    if not fits or "{{" in text or '"""' in text:
        return None
    return found


def _read_off(jinja: Callable[..., str]) -> Pieces:
    """Cut conversations of marked messages at their marks; ``partition`` leaves an empty piece where a mark is lost."""
    system = {"role": "system", "content": SYSTEM}
    user = {"role": "user", "content": USER}
    answer = {"role": "assistant", "content": ANSWER}
    last = {"role": "user", "content": LAST}
    whole = jinja(system, user, answer, last)
    before, _, rest = whole.partition(SYSTEM)
    system_to_user, _, rest = rest.partition(USER)
    _, _, rest = rest.partition(ANSWER)
    answer_to_user, _, user_to_answer = rest.partition(LAST)
    # Without the assistant's next turn, what follows the last message belongs to that message alone.
    after_user = jinja(system, user, prompt=False).partition(USER)[2]
    after_answer = jinja(system, user, answer, prompt=False).partition(ANSWER)[2]
    before_answer = user_to_answer.removeprefix(after_user)
    before_user = answer_to_user.removeprefix(after_answer)
    after_system = system_to_user.removesuffix(before_user)
    # What stands before the user's first message, if the conversation has no system message.
    unasked = jinja(user).partition(USER)[0].removesuffix(before_user)
    default = unasked.removeprefix(before).removesuffix(after_system)
    return Pieces(
        system=(before, after_system),
        user=(before_user, after_user),
        assistant=(before_answer, after_answer),
        default=default,
        always=bool(unasked) and not default,
    )


def _same(jinja: Callable[..., str], found: Pieces, conversation: Sequence[str]) -> bool:
    """Compare the pieces with the chat template on one conversation, which is given by its roles."""
    messages = []
    for number, role in enumerate(conversation):
        messages.append({"role": ROLES[role], "content": f"Say {number}, please."})
    return found.write(messages) == jinja(*messages)


def write(file: str, found: Pieces | None, stops: Sequence[str], chats: bool, system: str | None = None) -> str:
    """Return the text of a Modelfile.

    Args:
        file: the name of the GGUF file beside it.
        found: what the chat template writes; ``None`` if it could not be read off.
        stops: the tokens that end an answer.
        chats: whether the tokenizer has a chat template.
        system: the system message that every training row had; ``None`` for the template's own.
    """
    lines = [f"FROM ./{file}"]
    if found:
        lines.append(f'TEMPLATE """{template(found)}"""')
        message = system or found.default
        if message:
            lines.append(f'SYSTEM """{message}"""')
    elif chats:
        lines.append(
            "# The chat template is not made of fixed pieces: write a TEMPLATE by hand, or Ollama guesses one."
        )
    else:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    # Greedy decoding, as in ``cria chat``: the same question gets the same answer.
    lines.append("PARAMETER temperature 0")
    return "\n".join(lines) + "\n"


def template(found: Pieces) -> str:
    """Return the template in Ollama's language, which is that of Go; no blank or line is added between the pieces."""
    system = "{{ .System }}".join(found.system)
    if not found.always:
        system = "{{ if .System }}" + system + "{{ end }}"
    # Ollama joins all system messages in .System. They are in .Messages, too, so the loop leaves them out.
    user = "{{ $m.Content }}".join(found.user)
    answer = "{{ $m.Content }}".join(found.assistant)
    turns = '{{ if eq $m.Role "user" }}' + user + '{{ else if eq $m.Role "assistant" }}' + answer + "{{ end }}"
    return system + "{{ range $i, $m := .Messages }}" + turns + "{{ end }}" + found.assistant[0]
