"""Answer a few evaluation rows at each evaluation (``eval.samples``), to see what the model writes by then."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cria_tricks.data.rows import Chat
from cria_tricks.data.samples import question, with_prompt
from cria_tricks.load.answering import answer_batch, prompt_ids
from cria_tricks.recipe import Recipe


@dataclass(frozen=True)
class Samples:
    """The rows that are answered.

    Attributes:
        tokenizer: the model's tokenizer.
        rows: the number of each row among the evaluation rows, from 0.
        questions: what each of them asks, in one line.
        prompts: the token ids of their prompts.
        max_new_tokens: length limit of an answer [tokens].
    """

    tokenizer: Any
    rows: Sequence[int]
    questions: Sequence[str]
    prompts: Sequence[list[int]]
    max_new_tokens: int

    def answered(self, model: Any, batch_size: int, caches: bool, stop: Callable[[], bool]) -> list[dict[str, Any]]:
        """Answer all rows greedily.

        Args:
            model: in eval mode; everything that is changed in it is put back.
            batch_size: rows that are answered together.
            caches: whether the model can use a KV cache.
            stop: asked after each token; if it returns True, the answers end there.

        Returns:
            For each row ``row``, ``question``, ``answer``, ``tokens`` (of the answer), and ``ended`` (whether the model
            ended it).
        """
        config = model.config
        before = config.use_cache
        config.use_cache = caches  # training has switched it off
        written: list[tuple[str, int, bool]] = []
        try:
            for begin in range(0, len(self.prompts), batch_size):
                batch = self.prompts[begin : begin + batch_size]
                written += answer_batch(model, self.tokenizer, batch, self.max_new_tokens, stop)
        finally:
            config.use_cache = before
        return [
            {"row": row, "question": asked, "answer": text, "tokens": tokens, "ended": ended}
            for row, asked, (text, tokens, ended) in zip(self.rows, self.questions, written, strict=True)
        ]


def of(recipe: Recipe, chats: Sequence[Chat], tokenizer: Any, warn: Callable[[list[str]], None]) -> Samples | None:
    """Choose the first rows with a prompt that is not longer than ``data.max_length``; ``None`` if none is asked for.

    A longer prompt would need more memory than the training rows, by which the run was estimated.

    Args:
        recipe: of the run.
        chats: the evaluation rows.
        tokenizer: the model's tokenizer.
        warn: shows warnings.

    Raises:
        BadInput: if the chat template cannot write a prompt.
    """
    asked = recipe.eval.samples
    rows: list[int] = []
    prompts: list[list[int]] = []
    longer = 0
    for row in with_prompt(chats):
        if len(rows) == asked:
            break
        (ids,) = prompt_ids([chats[row]], tokenizer)
        if len(ids) > recipe.data.max_length:
            longer += 1
            continue
        rows.append(row)
        prompts.append(ids)
    if longer and asked:
        warn([f"eval.samples: {longer} prompts longer than data.max_length={recipe.data.max_length} are not answered"])
    if not rows:
        return None
    return Samples(tokenizer, rows, [question(chats[row]) for row in rows], prompts, recipe.eval.max_new_tokens)
