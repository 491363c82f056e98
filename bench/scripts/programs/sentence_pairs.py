"""sentence-transformers: its trainer with in-batch negatives, mixed precision, an evaluation."""

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)

words = models.Transformer("bert")
model = SentenceTransformer(modules=[words, models.Pooling(768)])
pairs = load_dataset("pairs").select_columns(["sentence1", "sentence2"])
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
    train_dataset=pairs["train"],
    eval_dataset=pairs["validation"],
    loss=losses.MultipleNegativesRankingLoss(model),
).train()
