"""transformers: its Trainer on pairs of sentences, as in its text classification guide."""

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

pairs = load_dataset("pairs", "mrpc")
tokenizer = AutoTokenizer.from_pretrained("bert")


def tokenize(rows):
    return tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, max_length=128)


def accuracy(evaluated):
    return {"accuracy": (np.argmax(evaluated[0], axis=1) == evaluated[1]).mean().item()}


pairs = pairs.map(tokenize, batched=True)
arguments = TrainingArguments(
    output_dir="out",
    learning_rate=2e-5,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    num_train_epochs=2,
    weight_decay=0.01,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
)
Trainer(
    model=AutoModelForSequenceClassification.from_pretrained("bert", num_labels=2),
    args=arguments,
    train_dataset=pairs["train"],
    eval_dataset=pairs["validation"],
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
    compute_metrics=accuracy,
).train()
