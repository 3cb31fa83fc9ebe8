"""Which card holds which block, as transformers takes it."""


def device_map(layers: int, cards: int) -> dict[str, int]:
    """Which card holds what: an equal share of the blocks each, the embedding and the head beside the first.

    A head that is tied is the embedding; and the labels, which the loss needs, are on the first card.

    Args:
        layers: blocks of the model.
        cards: to spread over.
    """
    blocks = {f"model.layers.{number}": number * cards // layers for number in range(layers)}
    return {"model.embed_tokens": 0, **blocks, "model.norm": cards - 1, "model.rotary_emb": 0, "lm_head": 0}
