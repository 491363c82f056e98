"""pytorch-tabnet: its classifier on a table of numbers, with an evaluation and early stopping."""

import numpy as np
from pytorch_tabnet.tab_model import TabNetClassifier

chance = np.random.default_rng(0)
table = chance.random((20_000, 54), dtype=np.float32)
kinds = chance.integers(0, 7, 20_000)
classifier = TabNetClassifier(n_d=64, n_a=64, n_steps=5, device_name="cuda")
classifier.fit(
    table[:16_000],
    kinds[:16_000],
    eval_set=[(table[16_000:], kinds[16_000:])],
    max_epochs=100,
    patience=10,
    batch_size=4096,
    virtual_batch_size=512,
)
print(classifier.predict(table[16_000:])[:10])
