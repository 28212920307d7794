"""How keys of checkpoints and adapters are matched with the blocks of a base."""
