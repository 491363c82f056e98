"""sentence-transformers: its trainer with in-batch negatives, mixed precision, an evaluation."""

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)

words = models.Transformer("bert")
model = SentenceTransformer(modules=[words, models.Pooling(768)])
pairs = Dataset.from_dict(
    {
        "anchor": [f"question number {number}" for number in range(400)],
        "positive": [f"an answer to it, {number}" for number in range(400)],
    }
)
arguments = SentenceTransformerTrainingArguments(
    output_dir="out",
    num_train_epochs=1,
    per_device_train_batch_size=16,
    fp16=True,
    eval_strategy="steps",
    eval_steps=10,
)
SentenceTransformerTrainer(
    model=model,
    args=arguments,
    train_dataset=pairs,
    eval_dataset=pairs.select(range(64)),
    loss=losses.MultipleNegativesRankingLoss(model),
).train()
