"""Tables of embeddings, and heads."""

import torch


class VocabParallelEmbedding(torch.nn.Module):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    pass
