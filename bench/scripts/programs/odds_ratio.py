"""trl: ORPO, preference without a reference model."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen2-0.5B")
ORPOTrainer(
    model=model,
    args=ORPOConfig(
        output_dir="out", per_device_train_batch_size=2, max_length=512, bf16=True,
        gradient_checkpointing=True,
    ),
    train_dataset=load_dataset("data", split="train"),
    processing_class=AutoTokenizer.from_pretrained("Qwen2-0.5B"),
).train()  # fmt: skip
