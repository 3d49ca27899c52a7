"""Average the checkpoints of a finished Transformers training, from disk.

The checkpoints come from a plain Trainer: nothing was averaged while it ran. One copy of the model
and one average are in memory, however many checkpoints there are. Needs gadam[transformers].

Run: python examples/average_checkpoints.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gadam

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
    checkpoints = sorted(Path(folder).glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    model = GPT2LMHeadModel(CONFIG).eval()
    # No step is ever taken: the optimizer only says which parameters to average.
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    average = gadam.IterateAverage(sgd, gadam.Averaging(every=None))
    for checkpoint in checkpoints[len(checkpoints) // 2 :]:
        model.load_state_dict(GPT2LMHeadModel.from_pretrained(checkpoint).state_dict())
        average.update()

    print(f"raw weights of the last checkpoint: test loss {loss(model, test):.4f}")
    average.copy_to(model)
    print(f"averaged weights of {average.count} checkpoints: test loss {loss(model, test):.4f}")
    model.save_pretrained(f"{folder}/averaged")
