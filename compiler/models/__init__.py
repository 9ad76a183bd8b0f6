"""Models. In: the metadata and the tensors' names of a GGUF file. Out: a description of each layer, the expected
tensors, and Relax functions.

For a new architecture (docs/architectures.md has the steps) read these, in this order:

registry.py       the architectures, and `@architecture`, which registers one
architectures/    one function for each architecture, by family: from metadata to a `ModelConfig`
keys.py           typed access to metadata
config.py         `ModelConfig`: the description of a model, layer by layer
tensors.py        the tensors that a `ModelConfig` implies
transformer.py    the graph of a decoder, layer by layer; decoder_parts.py: its less common parts
graph.py          `Graph`: emits the operators of a Relax function; build.py: all functions of a model

Special parts have modules or folders of their own: mixers with a state (recurrent*.py), experts (mixture.py), sparse
attention (indexers.py, index_keys.py, compressed/), residual streams (residuals/), drafts (drafts/), embedding models
(encoders/), images (vision/, images.py), tensor parallelism (shards.py, exchanges.py).

Only graph.py, build.py and modules that emit operators import TVM; files can be read and checked without it.
"""
