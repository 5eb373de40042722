"""Trained checkpoints of others, and what they can become. Nothing here loads torch before it is used."""

# What `gva convert` makes of a model with grouped-query attention.
TARGETS = {
    "gva": "one wide group, whose state holds keys and values of all",
    "mla": "the same function as multi-head latent attention without a norm",
    "gva-own-groups": "the source's groups, values as they are, keys guessed from them",
    "gqa": "fewer groups, each the mean of several",
}
