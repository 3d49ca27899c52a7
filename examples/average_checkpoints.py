"""Average the checkpoints of a finished Transformers training, from disk.

The checkpoints come from a plain Trainer: nothing was averaged while it ran. The average is read
and written a part of a tensor at a time. `gadam average 'FOLDER/checkpoint-*' --last 50% --out
averaged` does the same. Needs gadam[transformers].

Run: python examples/average_checkpoints.py
"""

import tempfile
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gadam.checkpoints import average

torch.manual_seed(0)
CONFIG = GPT2Config(
    vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)


def sentences(count: int) -> torch.Tensor:
    """Return texts in which a token follows from the one before, three times out of four."""
    tokens = torch.randint(32, (count, 16))
    for i in range(1, 16):
        follows = (5 * tokens[:, i - 1] + 7) % 32
        tokens[:, i] = torch.where(torch.rand(count) < 0.75, follows, tokens[:, i])
    return tokens


def loss(model: GPT2LMHeadModel, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return model(input_ids=tokens, labels=tokens).loss.item()


with tempfile.TemporaryDirectory() as folder:
    Trainer(
        GPT2LMHeadModel(CONFIG),
        TrainingArguments(
            folder,
            max_steps=100,
            learning_rate=0.02,
            lr_scheduler_type="constant",
            per_device_train_batch_size=16,
            save_steps=10,
            save_only_model=True,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in sentences(1000)],
    ).train()

    test = sentences(256)
    started = time.perf_counter()
    result = average(f"{folder}/checkpoint-*", f"{folder}/averaged", last="50%")
    seconds = time.perf_counter() - started

    raw = GPT2LMHeadModel.from_pretrained(result.inputs[-1].path).eval()
    averaged = GPT2LMHeadModel.from_pretrained(f"{folder}/averaged").eval()
    count, test_loss = len(result.inputs), loss(averaged, test)
    print(f"raw weights of the last checkpoint: test loss {loss(raw, test):.4f}")
    print(f"averaged weights of {count} checkpoints: test loss {test_loss:.4f}")
    print(f"averaged {result.averaged} tensors in {seconds:.2f} seconds")
