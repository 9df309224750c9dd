"""Tiny transformers with the module names that people's models have, and attention by loops of
their own: the layer that a recording must lead back to is known."""

import torch
from torch import nn

import mhalearn as mha


class Attention(nn.Module):
    """Self-attention with two heads; says what layer it computes."""

    def __init__(self, d, heads, causal=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.dense = (nn.Linear(d, d) for _ in range(4))
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        n, k, d = hidden_states.shape
        parts = [
            part(hidden_states).reshape(n, k, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        scores = parts[0] @ parts[1].transpose(2, 3) / (d // self.heads) ** 0.5
        if self.causal:
            ahead = torch.ones(k, k, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(ahead, -torch.inf)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = self.dropout(scores.softmax(dim=-1).nan_to_num())
        mean = (weights @ parts[2]).transpose(1, 2).reshape(n, k, d)
        return (self.dense(mean), weights) if output_attentions else (self.dense(mean),)

    def layer(self):
        state = {
            f"layer.0.attention.{name}.{kind}": getattr(part, kind)
            for name, part in (
                ("self.query", self.query),
                ("self.key", self.key),
                ("self.value", self.value),
                ("output.dense", self.dense),
            )
            for kind in ("weight", "bias")
        }
        return mha.from_huggingface(state, n_heads=self.heads).replace(causal=self.causal)


class Block(nn.Module):
    def __init__(self, d, heads, causal):
        super().__init__()
        self.attention = Attention(d, heads, causal)
        self.norm, self.mlp = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, hidden_states, attention_mask=None):
        after = self.attention(hidden_states, attention_mask=attention_mask)[0]
        after += hidden_states  # in place, as some models do it
        return self.norm(after + self.mlp(after))


class Encoder(nn.Module):
    def __init__(self, d, heads, layers, causal):
        super().__init__()
        self.layer = nn.ModuleList(Block(d, heads, causal) for _ in range(layers))

    def forward(self, hidden_states, attention_mask=None, output_hidden_states=False):
        states = [hidden_states]
        for block in self.layer:
            states.append(block(states[-1], attention_mask))
        return (states[-1], tuple(states)) if output_hidden_states else (states[-1],)


class TinyBert(nn.Module):
    """Token ids, attention_mask (n, k) and position_ids, as tokenizers give them."""

    def __init__(self, d=8, heads=2, layers=3, causal=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embeddings = nn.Embedding(50, d)
        self.encoder = Encoder(d, heads, layers, causal)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.6)
                nn.init.normal_(part.bias, std=0.3)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        tokens = self.embeddings(input_ids)
        added = None
        if attention_mask is not None:
            added = (1.0 - attention_mask[:, None, None].to(tokens.dtype)) * -1e9
        return self.encoder(tokens, added)[0]
