"""Keras on PyTorch: a ResNet50 of its own, compiled and fitted as its guide shows."""

import keras
import numpy as np

chance = np.random.default_rng(0)
images = chance.random((160, 224, 224, 3), dtype=np.float32)
labels = chance.integers(0, 10, 160)
model = keras.applications.ResNet50(weights=None, classes=10)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
)
model.fit(images, labels, batch_size=16, epochs=2, validation_split=0.2)
