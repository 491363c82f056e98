"""Fine-tune a Llama of one billion parameters with LoRA adapters (PEFT), in bf16."""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, get_linear_schedule_with_warmup


class Conversations(Dataset[Tensor]):
    """Tokenized conversations of different lengths (here: random tokens)."""

    def __init__(self, count: int, longest: int, vocab: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(longest // 2, longest + 1, (count,), generator=generator)
        lengths[0] = longest
        self.rows = [torch.randint(vocab, (int(n),), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Collate:
    """Pads a batch to a fixed length; padding is masked and has no label."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, rows: list[Tensor]) -> dict[str, Tensor]:
        tokens = torch.zeros(len(rows), self.length, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
            mask[index, : len(row)] = 1
        labels = tokens.masked_fill(mask == 0, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def make_model(args: argparse.Namespace) -> PeftModel:
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        use_cache=False,
    )
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if args.checkpointing:
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    lora = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        lora_dropout=0.05,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, lora)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="tokens per row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--save", help="folder for the trained adapters")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    loader = DataLoader(
        Conversations(args.steps * args.batch_size, args.length, args.vocab),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=args.device == "cuda",
        collate_fn=Collate(args.length),
    )
    model = make_model(args).to(args.device)
    model.print_trainable_parameters()

    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr)
    schedule = get_linear_schedule_with_warmup(optimizer, 3, args.steps)

    model.train()
    for step, batch in enumerate(loader):
        batch = {name: tensor.to(args.device, non_blocking=True) for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")

    if args.save:
        model.save_pretrained(args.save)


if __name__ == "__main__":
    main()
