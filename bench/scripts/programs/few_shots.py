"""setfit: sentence embeddings tuned on pairs of labelled texts, then a head on them."""

from datasets import Dataset
from sentence_transformers import SentenceTransformer, models
from setfit import SetFitHead, SetFitModel, Trainer, TrainingArguments

body = SentenceTransformer(modules=[models.Transformer("bert"), models.Pooling(768)])
model = SetFitModel(model_body=body, model_head=SetFitHead(in_features=768, out_features=2))
shots = Dataset.from_dict(
    {"text": [f"sentence number {n}" for n in range(32)], "label": [n % 2 for n in range(32)]}
)
arguments = TrainingArguments(
    output_dir="out", batch_size=16, num_epochs=(1, 4), end_to_end=True, use_amp=True
)
trainer = Trainer(model=model, args=arguments, train_dataset=shots, eval_dataset=shots)
trainer.train()
print(trainer.evaluate())
