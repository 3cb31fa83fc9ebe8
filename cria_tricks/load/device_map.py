"""Make the device map with which transformers spreads the blocks of a model over several GPUs."""


def device_map(layers: int, cards: int) -> dict[str, int]:
    """Assign modules to GPUs: an equal share of the blocks to each, the embedding and the head to the first one.

    The head is on the first GPU for two reasons: a tied head is the embedding, and the labels for the loss are there.

    Args:
        layers: number of blocks of the model.
        cards: number of GPUs.
    """
    blocks = {f"model.layers.{number}": number * cards // layers for number in range(layers)}
    return {"model.embed_tokens": 0, **blocks, "model.norm": cards - 1, "model.rotary_emb": 0, "lm_head": 0}
