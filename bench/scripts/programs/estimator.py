"""skorch: a network as a scikit-learn classifier, in a pipeline and a cross-validation."""

import numpy as np
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from torch import nn

chance = np.random.default_rng(0)
table = chance.random((4_000, 256), dtype=np.float32)
kinds = chance.integers(0, 2, 4_000)
network = nn.Sequential(
    nn.Linear(256, 2048), nn.ReLU(), nn.Dropout(0.5), nn.Linear(2048, 2048), nn.ReLU(),
    nn.Linear(2048, 2), nn.Softmax(dim=-1),
)  # fmt: skip
classifier = NeuralNetClassifier(
    network, max_epochs=10, lr=0.1, batch_size=256, iterator_train__shuffle=True, device="cuda"
)
pipeline = Pipeline([("scale", StandardScaler()), ("network", classifier)])
print(cross_val_score(pipeline, table, kinds, cv=3, scoring="accuracy"))
