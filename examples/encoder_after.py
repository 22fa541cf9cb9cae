"""A small BERT, fine-tuned to classify sequences of tokens; see docs/imperative.md."""

import os

import torch
from pipelines.api import ElasticTrainer
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

NUM_EPOCHS, NUM_TRAINED, NUM_HELD_OUT, NUM_CLASSES = 3, 512, 250, 4
DROPOUT = float(os.environ.get("DROPOUT", "0.1"))


class Sentences(Dataset):
    """6 to 16 random words, of which about half belong to the topic that is the label."""

    def __init__(self, first, num_samples):
        self.first, self.num_samples = first, num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        length = int(torch.randint(6, 17, (), generator=generator))
        words = torch.randint(32, (length,), generator=generator)
        of_topic = index % NUM_CLASSES * 8 + words % 8
        is_of_topic = torch.rand(length, generator=generator) < 0.4
        tokens = torch.where(is_of_topic, of_topic, words) + 1
        return {"input_ids": tokens, "labels": index % NUM_CLASSES}


def padded(samples):
    tokens = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


def losses(model, batch):
    return model(**batch).loss


def accuracy(model, batch):
    return (model(**batch).logits.argmax(1) == batch["labels"]).float().mean()


def evaluate(model, held_out):
    model.eval()
    right = 0.0
    with torch.no_grad():
        for batch in DataLoader(held_out, batch_size=32, collate_fn=padded):
            right += accuracy(model, batch).item() * len(batch["labels"])
    model.train()
    return right / len(held_out)


def main(run):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=33,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=NUM_CLASSES,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    held_out = Sentences(NUM_TRAINED, NUM_HELD_OUT)
    trained = Sentences(0, NUM_TRAINED)
    loader = DataLoader(trained, batch_size=32, shuffle=True, collate_fn=padded)
    num_steps = len(loader)
    scheduler = get_scheduler("linear", optimizer, 5, NUM_EPOCHS * num_steps)
    model.train()
    model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
    run.evaluation(held_out, losses, accuracy=accuracy)
    for _ in run.range(NUM_EPOCHS):
        for batch in loader:
            loss = losses(model, batch)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            run.print(f"loss {loss.item():.6f}")
        run.step.report(held_out_accuracy=run.evaluate()["accuracy"])
    print(f"trained: held-out accuracy {evaluate(model, held_out):.4f}")
    model.save_pretrained("encoder")


if __name__ == "__main__":
    ElasticTrainer(main).fit()
