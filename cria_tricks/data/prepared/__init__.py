"""Token shards: prepare texts once, on files, and train on them through a memory map."""
