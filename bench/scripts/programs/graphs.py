"""torch_geometric: graph classification with three kinds of convolutions."""

import torch
from torch.nn import functional
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dataset = FakeDataset(num_graphs=256, avg_num_nodes=100, num_channels=64)
train_loader = DataLoader(dataset, batch_size=32, shuffle=True)
test_loader = DataLoader(dataset[:64], batch_size=64)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GCNConv(dataset.num_features, 128)
        self.second = GATConv(128, 16, heads=8)
        self.third = SAGEConv(128, 128)
        self.head = torch.nn.Linear(128, dataset.num_classes)

    def forward(self, x, edges, batch):
        x = functional.relu(self.first(x, edges))
        x = functional.elu(self.second(x, edges))
        x = global_mean_pool(self.third(x, edges), batch)
        return self.head(functional.dropout(x, p=0.5, training=self.training))


model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


def train():
    model.train()
    for data in train_loader:
        data = data.to(device)
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.batch)
        functional.cross_entropy(out, data.y).backward()
        optimizer.step()


@torch.no_grad()
def test():
    model.eval()
    correct = 0
    for data in test_loader:
        data = data.to(device)
        predicted = model(data.x, data.edge_index, data.batch).argmax(dim=1)
        correct += int((predicted == data.y).sum())
    return correct / len(test_loader.dataset)


best = 0.0
for epoch in range(200):
    train()
    best = max(best, test())
    print(f"epoch {epoch}, best {best:.4f}")
