"""Fine-tune a LoRA adapter with Transformers, and export the averaged adapter.

The model and the data are made up here, so nothing is downloaded. Needs gadam[peft].

Run: python examples/transformers_lora.py
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import gadam
from gadam.integrations.transformers import AveragedTrainer

torch.manual_seed(0)
CONFIG = GPT2Config(
    vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Return texts in which a token follows from the one before, three times out of four."""
    tokens = torch.randint(32, (count, 16))
    for i in range(1, 16):
        follows = (5 * tokens[:, i - 1] + 7) % 32
        tokens[:, i] = torch.where(torch.rand(count) < 0.75, follows, tokens[:, i])
    return [{"input_ids": row, "labels": row} for row in tokens]


lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
with tempfile.TemporaryDirectory() as folder:
    trainer = AveragedTrainer(
        get_peft_model(GPT2LMHeadModel(CONFIG), lora),
        TrainingArguments(
            folder,
            max_steps=300,
            learning_rate=0.03,
            lr_scheduler_type="constant",  # averaging needs a rate that stays high
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=sentences(1000),
        eval_dataset=sentences(256),
        averaging=gadam.Averaging(start=200),
        finish=False,  # keep the raw weights, to compare. The default leaves the average.
    )
    trainer.train()
    assert trainer.average is not None

    print(f"raw weights: test loss {trainer.evaluate()['eval_loss']:.4f}")
    with trainer.average.applied(trainer.model):
        print(f"averaged weights: test loss {trainer.evaluate()['eval_loss']:.4f}")
        trainer.save_model(f"{folder}/adapter")
    print("exported:", *sorted(path.name for path in Path(folder, "adapter").glob("adapter*")))
