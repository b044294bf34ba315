"""Models as users write them, with the helpers of docs/models.md. Tests copy this file next to a config."""

import torch
from torch import Tensor, nn

from girih.models import DIN, Embeddings
from girih.models.operators import FieldMLP, FieldProjection, Fields, FirstOrder, SecondOrder, VectorCrosses
from girih.schema import Schema


class Bags(nn.Module):
    """Everything that reads bags and first-order weights."""

    def __init__(self, schema: Schema, *, width: int = 8):
        super().__init__()
        self.needs = {feature.name: {"embedding", "first_order"} for feature in schema.sparse}
        self.needs["history"] = {"embedding", "first_order", "sequence"}
        self.wide, self.pairs = FirstOrder(schema, bias=True), SecondOrder(schema, 8)
        self.fields, self.crosses = Fields(schema, 8), VectorCrosses(schema, 2, torch.zeros(1, 25))
        self.deep = FieldMLP(schema, (width,), 1, batch_norm=True)
        self.first = FieldProjection(schema, nn.Linear(16, 1), ["item", "user"], [])
        self.norm, self.top = nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        sums = embeddings["item"] * embeddings.stacked(["user", "history"]).sum(1)
        means = embeddings.stacked().mean(1) + embeddings.concatenated()[:, :8]
        flat = embeddings.concatenated(["item", "user"])
        parts = (self.wide, self.pairs, self.crosses, self.deep, self.first)
        logits = sum(part(numeric, embeddings) for part in parts)
        weights = embeddings.first_order_weights().sum(1, keepdim=True)
        fields = self.fields(numeric, embeddings).flatten(1).sum(1, keepdim=True)
        return logits + weights + fields + self.top(self.norm(flat) + torch.cat([sums, means], dim=1))


class Jagged(nn.Module):
    """Everything that reads sequences as they are, with len() and shape, whichever comes to mind."""

    needs = {"item": {"embedding"}, "history": {"sequence"}}  # noqa: RUF012

    def __init__(self, schema: Schema):
        super().__init__()
        self.places = nn.Embedding(16, 8)
        self.top = nn.Sequential(nn.Linear(48, 8), nn.PReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        item, history = embeddings["item"], embeddings.sequences["history"]
        padded, mask = history.padded(max_length=5)
        number = torch.arange(len(item), device=item.device)
        newest = padded[number, (mask.sum(1) - 1).clamp(min=0)] * mask.any(1, keepdim=True)
        mean = padded.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        most = padded.masked_fill(~mask[..., None], -1e9).amax(1) * mask.any(1, keepdim=True)
        who = history.examples()
        placed = history.values + self.places(history.positions().clamp(max=15))
        total = torch.zeros_like(item).index_add(0, who, placed)
        weights = torch.sigmoid((history.values * item[who]).sum(1, keepdim=True))
        attended = item.new_zeros(item.shape[0], 8).index_add(0, who, weights * history.values)
        read = torch.cat([history.last(), newest, mean, most, total, attended], dim=1)
        return self.top(read.view(len(read), 48))


class Attentive(nn.Module):
    """Networks of torch over a padded sequence."""

    needs = {"item": {"embedding"}, "history": {"sequence"}}  # noqa: RUF012

    def __init__(self, schema: Schema):
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, 8) * 0.1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.norm, self.gru = nn.LayerNorm(8), nn.GRU(8, 8, batch_first=True)
        self.top = nn.Linear(24, 1)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        item = embeddings["item"]
        padded, mask = embeddings.sequences["history"].padded(max_length=5)
        padded = padded + self.places
        hidden = ~mask & mask.any(1, keepdim=True)
        found, _ = self.attention(padded, padded, padded, key_padding_mask=hidden)
        found = self.norm(padded + found) * mask[..., None]
        scores = torch.einsum("bmd,bd->bm", padded, item).masked_fill(~mask, -1e9)
        target = torch.einsum("bm,bmd->bd", scores.softmax(1), padded)
        _, last = self.gru(padded)
        return self.top(torch.cat([found.mean(1), target, last[0]], dim=1))


class Encoded(nn.Module):
    """More networks of torch over a padded sequence."""

    needs = {"history": {"sequence"}}  # noqa: RUF012

    def __init__(self, schema: Schema):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lstm, self.conv = (
            nn.LSTM(8, 4, batch_first=True, bidirectional=True),
            nn.Conv1d(8, 8, 3, padding=1),
        )
        self.top = nn.Linear(24, 1)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        padded, mask = embeddings.sequences["history"].padded(max_length=5)
        hidden = ~mask & mask.any(1, keepdim=True)
        encoded = self.encoder(padded, src_key_padding_mask=hidden)
        states, _ = self.lstm(padded)
        convolved = torch.relu(self.conv(padded.transpose(1, 2)))
        return self.top(torch.cat([encoded[:, 0], states.mean(1), convolved.amax(2)], dim=1))


class OwnDIN(DIN):
    """A model of girih with a loss of one's own; its operators hold an AttendedProjection."""

    def loss(self, outputs, batch):
        plain = nn.functional.binary_cross_entropy_with_logits(outputs, batch.labels, reduction="none")
        return batch.mean((1 - torch.exp(-plain)) ** 2 * plain)


class Unbounded(Jagged):
    """Pads to the longest sequence of the batch."""

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        padded, _ = embeddings.sequences["history"].padded()
        return padded.sum(1)[:, :1]


class Looped(Jagged):
    """Walks through examples by numbers that depend on the data."""

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        history = embeddings.sequences["history"]
        lengths = history.offsets.diff().tolist()
        return torch.stack([each.sum(0) for each in history.values.split(lengths)])[:, :1]
