"""Train and evaluate with accelerate, as nlp_example.py of Hugging Face's accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
x = torch.randn(90, 8)
dataset = TensorDataset(x, (x.sum(1) > 0).long())
train_dataloader = DataLoader(dataset, batch_size=8, shuffle=True)
eval_dataloader = DataLoader(dataset, batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, scheduler
)


def evaluate():
    model.eval()
    right = seen = 0
    for inputs, labels in eval_dataloader:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, labels))
        right += (predictions == references).sum().item()
        seen += len(references)
    return right, seen


for epoch in range(2):
    model.train()
    for inputs, labels in train_dataloader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    right, seen = evaluate()
    accelerator.print(f"epoch {epoch}: {right} of {seen} right, loss {loss.item():.6f}")
accelerator.wait_for_everyone()
accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.bin")
accelerator.end_training()
