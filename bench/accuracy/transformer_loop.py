"""A language model trained the way the transformer rows of `jobs.csv` were.

An ordinary script: it knows nothing of memplan. The order of statements, and which names stay
bound, decide the peak, so both follow the description of the measured jobs to the letter.
"""

from __future__ import annotations

import argparse

import torch
from model_configs import is_encoder_decoder, model_config  # type: ignore[import-not-found]
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.optimization import Adafactor

MAX_LENGTH = 128
LONGEST_OF_FOUR = 103
ANY_TOKEN = 5


class Texts(Dataset[torch.Tensor]):
    """Token sequences as a tokenized corpus would give; their lengths are assumed.

    With several texts a batch the longest of each batch is cut at 128 tokens and the others are
    shorter. One text a batch has 1 to 128 tokens, evenly: each has the expected longest of four.
    """

    def __init__(self, count: int, batch_size: int) -> None:
        self.count = count
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.batch_size == 1:
            tokens = LONGEST_OF_FOUR
        else:
            tokens = MAX_LENGTH if index % self.batch_size == 0 else MAX_LENGTH // 2
        return torch.full((tokens,), ANY_TOKEN, dtype=torch.int64)


def collate(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad to the longest of the batch; labels are the inputs."""
    input_ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).to(torch.int64)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": input_ids.clone(),
    }


def build(name: str) -> torch.nn.Module:
    """The model with random weights, in fp32."""
    auto = AutoModelForSeq2SeqLM if is_encoder_decoder(name) else AutoModelForCausalLM
    model: torch.nn.Module = auto.from_config(model_config(name))
    return model


def make_optimizer(name: str, model: torch.nn.Module) -> Optimizer:
    if name == "Adafactor":
        adafactor: Optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False)
        return adafactor
    optimizer: Optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    return optimizer


def train(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    model = build(options.model).to(device)
    model.train()
    optimizer = make_optimizer(options.optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    texts = Texts(options.batch_size * options.iterations, options.batch_size)
    loader = DataLoader(texts, batch_size=options.batch_size, collate_fn=collate)

    for batch in loader:
        if options.zero_grad_mode == 0:
            optimizer.zero_grad()
        batch = {key: value.to(device) for key, value in batch.items()}
        outputs = model(**batch)
        if options.zero_grad_mode == 1:
            optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        if options.zero_grad_mode == 2:
            optimizer.zero_grad()
        scheduler.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a name that model_configs knows")
    parser.add_argument("--optimizer", required=True, help="a class of torch.optim, or Adafactor")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--zero-grad-mode", type=int, choices=(0, 1, 2), default=1)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
